//! The interface for reading a checkpoint's matrices without changing their bytes.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use emberflow_kernels::DType;

use crate::error::Error;
use crate::names::TensorId;

/// A tensor and the format of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredTensor {
    /// Which tensor.
    pub id: TensorId,
    /// Rows; of Down `d_model`, as all other matrices have the rows that are multiplied.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Format of a row.
    pub dtype: DType,
    /// Whether rows are the file's bytes; otherwise they are converted when they are read.
    pub verbatim: bool,
}

impl StoredTensor {
    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        (self.dtype.row_bytes(self.cols) as u64).saturating_mul(self.rows as u64)
    }
}

/// How many rows of a packed matrix that is stored transposed (GPTQ, AWQ) are decoded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bands {
    /// 4 MiB of them: while a model runs.
    Small,
    /// 256 MiB: to read each tensor once.
    Large,
}

/// The tensors of a checkpoint, without its configuration and texts.
pub trait StoredTensors: std::fmt::Debug + Send + Sync {
    /// All tensors, in the order of [`Checkpoint::tensors`](crate::Checkpoint::tensors).
    fn tensors(&self) -> &[StoredTensor];

    /// Fills `out` with the rows of tensor number `tensor` from row `first` on.
    ///
    /// # Errors
    /// [`Error::RowRange`] if `out` is not whole rows of the tensor, [`Error::Truncated`] or [`Error::Io`] if the file
    /// cannot be read, [`Error::Changed`] if it has changed since it was opened, [`Error::NotFinite`] for a number that is NaN or infinite,
    /// of what is converted.
    fn read(&self, tensor: usize, first: usize, out: &mut [u8]) -> Result<(), Error>;

    /// Number of the file, and first byte in it, of a tensor whose rows are stored one after another as they are multiplied.
    fn place(&self, tensor: usize) -> Option<(usize, u64)>;

    /// The files, in the order of their numbers.
    fn files(&self) -> Vec<(&Path, &Arc<File>)>;

    /// Fails if a file has been written or cut since it was opened.
    ///
    /// # Errors
    /// [`Error::Changed`], which names it.
    fn check_unchanged(&self) -> Result<(), Error>;
}
