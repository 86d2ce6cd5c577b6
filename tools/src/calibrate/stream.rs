//! The residual stream of the text's windows between two layers.

use std::path::Path;

use emberflow_kernels::{DType, Row, quantize_row};
use emberflow_models::Checkpoint;
use emberflow_models::names::{Role, TensorId};
use xxhash_rust::xxh3::xxh3_64;

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

impl Stream {
    /// What goes into the first layer: the tokens' embedding as it will be stored.
    ///
    /// # Errors
    /// Where the embedding cannot be read, or stored in its format.
    pub fn embed(
        source: &dyn Checkpoint,
        dtype: DType,
        windows: &[Vec<u32>],
    ) -> Result<Self, Failure> {
        let d = source.config().d_model as usize;
        let cpu = emberflow_kernels::Cpu::detect();
        let mut x = vec![0.0; windows.iter().map(Vec::len).sum::<usize>() * d];
        let mut stored = vec![0; dtype.row_bytes(d)];
        let id = TensorId::global(Role::Embed);
        for (&token, row) in windows.iter().flatten().zip(x.chunks_exact_mut(d)) {
            source.read_rows(id, token as usize, 1, row)?;
            let (quants, scales) = stored.split_at_mut(dtype.quants_bytes(d));
            quantize_row(dtype, row, quants, scales).map_err(|e| {
                Failure::Fault(format!(
                    "{}: tensor {id} cannot be stored as {}: {e}",
                    source.path().display(),
                    dtype.name()
                ))
            })?;
            cpu.dequantize(Row::inline(dtype, d, &stored), row);
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
