//! Reads resident tensors from a container and verifies their shapes.

use std::sync::Arc;

use emberflow_kernels::{Cpu, DType};
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::container::{Container, TensorEntry};

use crate::error::Error;
use crate::matrix::{Matrix, MatrixStream};
use crate::store::region;

/// Container name of a tensor.
pub(crate) fn name_of(role: Role, layer: u32) -> String {
    let expert = 0;
    TensorId {
        role,
        layer,
        expert,
    }
    .to_string()
}

/// Finds tensors and validates their shapes.
pub(crate) struct Loader<'a> {
    pub container: &'a Container,
    /// Reads the matrices that stay on disk.
    pub stream: Option<&'a Arc<MatrixStream>>,
}

impl<'a> Loader<'a> {
    /// For a container of which everything that is read becomes resident.
    pub fn of(container: &'a Container) -> Self {
        Self {
            container,
            stream: None,
        }
    }

    /// The entry of a `[rows × cols]` matrix, and its block format.
    pub fn entry(
        &self,
        id: TensorId,
        rows: usize,
        cols: usize,
    ) -> Result<(&'a TensorEntry, DType), Error> {
        let (entry, dtype) = self.table(id, rows, cols)?;
        let row_len = dtype.row_bytes(cols);
        if entry.row_stride(rows as u64, row_len) != Some(row_len) {
            return Err(Error::Tensor {
                path: self.container.path().to_path_buf(),
                name: id.to_string(),
                reason: "has a checksum after each row, which only row tables may have".into(),
            });
        }
        Ok((entry, dtype))
    }

    /// The same for a table, whose rows may have checksums.
    pub fn table(
        &self,
        id: TensorId,
        rows: usize,
        cols: usize,
    ) -> Result<(&'a TensorEntry, DType), Error> {
        let name = id.to_string();
        let bad = |reason: String| Error::Tensor {
            path: self.container.path().to_path_buf(),
            name: name.clone(),
            reason,
        };
        let entry = self
            .container
            .tensor(&name)
            .ok_or_else(|| bad("is missing".into()))?;
        if entry.dims() != [rows as u64, cols as u64] {
            return Err(bad(format!(
                "has shape {:?}, expected [{rows}, {cols}]",
                entry.dims()
            )));
        }
        let dtype = DType::from_code(entry.dtype)
            .ok_or_else(|| bad(format!("has unknown block format {}", entry.dtype)))?;
        let row_len = dtype.row_bytes(cols);
        if entry.row_stride(rows as u64, row_len).is_none() {
            return Err(bad(format!(
                "has {} bytes, expected {:?} for {rows} rows of {cols} {}",
                entry.len,
                (rows as u64).checked_mul(row_len as u64),
                dtype.name()
            )));
        }
        Ok((entry, dtype))
    }

    /// A matrix.
    pub fn matrix(
        &self,
        role: Role,
        layer: u32,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, Error> {
        let id = TensorId::layer(role, layer);
        self.entry(id, rows, cols)?;
        let streamed = self
            .stream
            .and_then(|stream| Matrix::streamed(stream, &id.to_string()));
        streamed.map_or_else(|| self.read(id, rows, cols), Ok)
    }

    /// One of several matrices of a role outside the layers.
    pub fn numbered(
        &self,
        role: Role,
        number: u32,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, Error> {
        self.read(TensorId::numbered(role, number), rows, cols)
    }

    /// A matrix of a dense FFN, or of an expert.
    pub fn of_bank(&self, id: TensorId, rows: usize, cols: usize) -> Result<Matrix, Error> {
        self.read(id, rows, cols)
    }

    fn read(&self, id: TensorId, rows: usize, cols: usize) -> Result<Matrix, Error> {
        let (entry, dtype) = self.entry(id, rows, cols)?;
        let mut bytes = region(entry.len as usize)?;
        self.container.read_tensor(entry, bytes.as_mut_slice())?;
        Ok(Matrix::new(dtype, rows, cols, Arc::new(bytes)))
    }

    /// A vector.
    pub fn vector(&self, role: Role, layer: u32, n: usize) -> Result<Vec<f32>, Error> {
        self.rows(role, layer, 1, n)
    }

    /// The numbers of a matrix, row by row.
    pub fn rows(&self, role: Role, layer: u32, rows: usize, n: usize) -> Result<Vec<f32>, Error> {
        let m = self.read(TensorId::layer(role, layer), rows, n)?;
        let (cpu, mut out) = (Cpu::detect(), vec![0.0; rows * n]);
        for (r, out) in out.chunks_exact_mut(n).enumerate() {
            cpu.dequantize(m.row(r), out);
        }
        Ok(out)
    }
}
