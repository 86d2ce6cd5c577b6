//! Residual streams of the text's windows between two layers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use emberflow_kernels::{Cpu, DType, QuantizeError, Row, quantize_row};
use emberflow_models::Checkpoint;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use xxhash_rust::xxh3::xxh3_64;

use crate::pack::options::PackOptions;
use crate::{Failure, atomic};

/// Input of the next layer.
pub struct Stream {
    /// Elements of a row, over all residual streams.
    pub width: usize,
    /// Rows per window.
    pub windows: Vec<usize>,
    /// `[rows × width]`, window after window.
    pub x: Vec<f32>,
    /// Index into [`vocabulary`] per row.
    pub tokens: Vec<u32>,
    /// The text's tokens, one per row.
    pub text: Vec<u32>,
    /// Keys and values that later layers share, by layer, `[rows × kv_heads·head_dim]`.
    pub stored: BTreeMap<u32, [Vec<f32>; 2]>,
    /// Layers whose keys and values are shared, and elements of a row of them.
    sharing: BTreeMap<u32, usize>,
}

/// Whether layers read rows by token: inputs, or the experts of a token.
fn reads_tokens(c: &ModelConfig) -> bool {
    let by_token = c.mixture.as_ref().is_some_and(|m| !m.by_token.is_empty());
    by_token || c.form.inputs_by_layer().is_some()
}

/// The distinct tokens of the text if layers have rows per token, otherwise a single one.
pub fn vocabulary(c: &ModelConfig, windows: &[Vec<u32>]) -> Vec<u32> {
    if reads_tokens(c) {
        let distinct: BTreeSet<u32> = windows.iter().flatten().copied().collect();
        distinct.into_iter().collect()
    } else {
        vec![0]
    }
}

/// Rounds a row to the values that `dtype` can store.
pub fn round(dtype: DType, row: &mut [f32]) -> Result<(), QuantizeError> {
    let mut stored = vec![0; dtype.row_bytes(row.len())];
    let (quants, scales) = stored.split_at_mut(dtype.quants_bytes(row.len()));
    quantize_row(dtype, row, quants, scales)?;
    Cpu::detect().dequantize(Row::inline(dtype, row.len(), &stored), row);
    Ok(())
}

/// An embedding table, read with the rounding of its storage format.
struct EmbeddingTable<'a> {
    source: &'a dyn Checkpoint,
    id: TensorId,
    dtype: DType,
}

impl<'a> EmbeddingTable<'a> {
    fn new(source: &'a dyn Checkpoint, options: &PackOptions, role: Role) -> Self {
        let id = TensorId::global(role);
        let dtype = options.dtype_of(id);
        Self { source, id, dtype }
    }

    fn read(&self, number: usize, row: &mut [f32]) -> Result<(), Failure> {
        let (id, dtype) = (self.id, self.dtype);
        self.source.read_rows(id, number, 1, row)?;
        round(dtype, row).map_err(|e| {
            Failure::Fault(format!(
                "{}: tensor {id} cannot be stored as {}: {e}",
                self.source.path().display(),
                dtype.name()
            ))
        })
    }
}

impl Stream {
    /// Input of the first layer: token embeddings, plus position embeddings if the model has them, rounded to their
    /// storage format, and equal in all streams of hyper-connections. Other residual streams are computed from the
    /// tokens by the first layer, and are zeros here.
    ///
    /// # Errors
    /// An embedding cannot be read or stored in its format.
    pub fn embed(
        source: &dyn Checkpoint,
        options: &PackOptions,
        windows: &[Vec<u32>],
        vocabulary: &[u32],
    ) -> Result<Self, Failure> {
        let c = source.config();
        let count = windows.iter().map(Vec::len).sum::<usize>();
        let streams = c.form.streams.map(|streams| streams.count);
        let hyper = c.form.hyper.map(|hyper| hyper.count);
        let width = c.d_model as usize * streams.or(hyper).unwrap_or(1) as usize;
        let number = |&token: &u32| vocabulary.partition_point(|&known| known < token) as u32;
        let shared = (0..c.layers).filter(|&layer| c.kv_layer(layer) != layer);
        let mut stream = Self {
            width,
            windows: windows.iter().map(Vec::len).collect(),
            x: vec![0.0; count * width],
            tokens: windows.iter().flatten().map(number).collect(),
            text: windows.iter().flatten().copied().collect(),
            stored: BTreeMap::new(),
            sharing: (shared.map(|layer| c.kv_layer(layer)))
                .map(|owner| (owner, c.heads_of(owner).stored()))
                .collect(),
        };
        if !reads_tokens(c) {
            stream.tokens.fill(0);
        }
        if streams.is_none() {
            stream.set_embedding(source, options, windows)?;
        }
        Ok(stream)
    }

    fn set_embedding(
        &mut self,
        source: &dyn Checkpoint,
        options: &PackOptions,
        windows: &[Vec<u32>],
    ) -> Result<(), Failure> {
        let (c, width) = (source.config(), self.width);
        let d = c.d_model as usize;
        let tokens = EmbeddingTable::new(source, options, Role::Embed);
        for (&token, row) in windows.iter().flatten().zip(self.x.chunks_exact_mut(width)) {
            tokens.read(token as usize, &mut row[..d])?;
        }
        if c.form.embedding_scale != 1.0 {
            (self.x.iter_mut()).for_each(|x| *x *= c.form.embedding_scale);
        }
        if let Some(before) = c.form.learned_positions {
            let positions = EmbeddingTable::new(source, options, Role::Positions);
            let numbers = windows.iter().flat_map(|window| 0..window.len());
            let mut vector = vec![0.0; d];
            for (number, row) in numbers.zip(self.x.chunks_exact_mut(width)) {
                positions.read(before as usize + number, &mut vector)?;
                row.iter_mut().zip(&vector).for_each(|(x, v)| *x += v);
            }
        }
        for row in self.x.chunks_exact_mut(width) {
            let (first, others) = row.split_at_mut(d);
            (others.chunks_exact_mut(d)).for_each(|stream| stream.copy_from_slice(first));
        }
        Ok(())
    }

    /// Whether the keys and values of a layer are stored for later layers.
    pub fn keeps(&self, layer: u32) -> bool {
        self.sharing.contains_key(&layer)
    }

    /// Saves the input of layer `layer`, from which an interrupted run resumes.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save(&self, path: &Path, layer: u32) -> Result<(), Failure> {
        let stored = self.stored.values().flatten().flatten();
        let values = self.x.iter().chain(stored);
        let mut bytes = Vec::with_capacity(4 * self.x.len() + 12);
        bytes.extend(values.flat_map(|x| x.to_le_bytes()));
        bytes.extend(layer.to_le_bytes());
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        atomic::write(path, &bytes)
    }

    /// Loads a saved stream if it is intact, and returns the layer that it is the input of.
    pub fn load(&mut self, path: &Path) -> Option<u32> {
        let bytes = std::fs::read(path).ok()?;
        let (body, sum) = bytes.split_last_chunk()?;
        if xxh3_64(body) != u64::from_le_bytes(*sum) {
            return None;
        }
        let (values, layer) = body.split_last_chunk()?;
        let layer = u32::from_le_bytes(*layer);
        let (values, _) = values.as_chunks();
        let mut values = values.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let count = self.tokens.len();
        let owners = self.sharing.range(..layer);
        let owners: Vec<(u32, usize)> = owners
            .map(|(&owner, width)| (owner, count * width))
            .collect();
        let stored: usize = owners.iter().map(|(_, each)| 2 * each).sum();
        if values.len() != self.x.len() + stored {
            return None;
        }
        self.x
            .iter_mut()
            .zip(&mut values)
            .for_each(|(x, value)| *x = value);
        let mut part = |each| values.by_ref().take(each).collect();
        self.stored = (owners.into_iter())
            .map(|(owner, each)| (owner, [part(each), part(each)]))
            .collect();
        Some(layer)
    }
}
