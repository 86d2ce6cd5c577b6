//! The residual stream of the text's windows between two layers.

use std::path::Path;

use emberflow_kernels::{Cpu, DType, Row, quantize_row};
use emberflow_models::Checkpoint;
use emberflow_models::names::{Role, TensorId};
use xxhash_rust::xxh3::xxh3_64;

use crate::pack::options::PackOptions;
use crate::{Failure, atomic};

/// What goes into the next layer.
pub struct Stream {
    /// Elements of a row.
    pub d: usize,
    /// Rows of each window.
    pub windows: Vec<usize>,
    /// `[rows × d]`, window after window.
    pub x: Vec<f32>,
}

/// A table of vectors, read as they will be stored.
struct Table<'a> {
    source: &'a dyn Checkpoint,
    id: TensorId,
    dtype: DType,
    stored: Vec<u8>,
}

impl<'a> Table<'a> {
    fn new(source: &'a dyn Checkpoint, options: &PackOptions, role: Role) -> Self {
        let id = TensorId::global(role);
        let dtype = options.dtype_of(id);
        let stored = vec![0; dtype.row_bytes(source.config().d_model as usize)];
        Self {
            source,
            id,
            dtype,
            stored,
        }
    }

    fn read(&mut self, number: usize, row: &mut [f32]) -> Result<(), Failure> {
        let (id, dtype) = (self.id, self.dtype);
        self.source.read_rows(id, number, 1, row)?;
        let (quants, scales) = self.stored.split_at_mut(dtype.quants_bytes(row.len()));
        quantize_row(dtype, row, quants, scales).map_err(|e| {
            Failure::Fault(format!(
                "{}: tensor {id} cannot be stored as {}: {e}",
                self.source.path().display(),
                dtype.name()
            ))
        })?;
        let stored = Row::inline(dtype, row.len(), &self.stored);
        Cpu::detect().dequantize(stored, row);
        Ok(())
    }
}

impl Stream {
    /// What goes into the first layer: the tokens' embedding, and that of positions where there is
    /// one, as they will be stored.
    ///
    /// # Errors
    /// Where an embedding cannot be read, or stored in its format.
    pub fn embed(
        source: &dyn Checkpoint,
        options: &PackOptions,
        windows: &[Vec<u32>],
    ) -> Result<Self, Failure> {
        let c = source.config();
        let d = c.d_model as usize;
        let mut x = vec![0.0; windows.iter().map(Vec::len).sum::<usize>() * d];
        let mut tokens = Table::new(source, options, Role::Embed);
        for (&token, row) in windows.iter().flatten().zip(x.chunks_exact_mut(d)) {
            tokens.read(token as usize, row)?;
        }
        if c.form.embedding_scale != 1.0 {
            x.iter_mut().for_each(|x| *x *= c.form.embedding_scale);
        }
        if let Some(before) = c.form.learned_positions {
            let mut positions = Table::new(source, options, Role::Positions);
            let numbers = windows.iter().flat_map(|window| 0..window.len());
            let mut vector = vec![0.0; d];
            for (number, row) in numbers.zip(x.chunks_exact_mut(d)) {
                positions.read(before as usize + number, &mut vector)?;
                row.iter_mut().zip(&vector).for_each(|(x, v)| *x += v);
            }
        }
        Ok(Self {
            d,
            windows: windows.iter().map(Vec::len).collect(),
            x,
        })
    }

    /// Keeps it, as what goes into layer `layer`, for a run that is stopped.
    ///
    /// # Errors
    /// The system's.
    pub fn save(&self, path: &Path, layer: u32) -> Result<(), Failure> {
        let mut bytes = Vec::with_capacity(4 * self.x.len() + 12);
        bytes.extend(self.x.iter().flat_map(|x| x.to_le_bytes()));
        bytes.extend(layer.to_le_bytes());
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        atomic::write(path, &bytes)
    }

    /// Takes up what was kept, if it is whole, and returns the layer that it goes into.
    pub fn load(&mut self, path: &Path) -> Option<u32> {
        let bytes = std::fs::read(path).ok()?;
        let (body, sum) = bytes.split_last_chunk()?;
        if xxh3_64(body) != u64::from_le_bytes(*sum) {
            return None;
        }
        let (values, layer) = body.split_last_chunk()?;
        let (values, _) = values.as_chunks();
        if values.len() != self.x.len() {
            return None;
        }
        for (x, bytes) in self.x.iter_mut().zip(values) {
            *x = f32::from_le_bytes(*bytes);
        }
        Some(u32::from_le_bytes(*layer))
    }
}
