//! The tensors of one matrix, and what a format makes of them.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::dtype::DType;
use crate::error::Error;
use crate::file::DataFile;
use crate::hf::safetensors::{Raw, element_bytes};
use crate::store::{Elements, Parts, Table, shape_text};

/// The key of all formats but MLX's.
pub(super) const KEY: &str = "quantization_config";
/// Its prefix in errors.
pub(super) const PREFIX: &str = "quantization_config.";
/// The end of a matrix' name in a folder of plain numbers.
pub(super) const WEIGHT: &str = ".weight";
/// Types of scales and biases.
pub(super) const FLOATS: &[&str] = &["F32", "F16", "BF16"];

/// One format of packed matrices.
pub(in crate::hf) trait Method {
    /// The module whose codes a tensor holds.
    fn module<'a>(&self, raw: &'a Raw) -> Option<&'a str>;

    /// Ends of the names of a module's other tensors.
    fn ends(&self) -> &'static [&'static str];

    /// Ends of the names of tensors that describe activations, which are not quantized here.
    fn unread(&self) -> &'static [&'static str] {
        &[]
    }

    /// The matrix of a module.
    ///
    /// # Errors
    /// Tensors that are missing or have other shapes or types than the format says.
    fn matrix(&self, module: &mut Module) -> Result<Matrix, Error>;

    /// The type of the matrices, and their bits per weight in eighths, where one description is of all.
    fn usual(&self) -> (DType, u64);
}

/// A matrix of a module.
pub(in crate::hf) enum Matrix {
    /// One matrix.
    Packed(Parts),
    /// The matrices of all experts, of so many rows each: their names follow from the module's.
    Experts(Parts, usize),
    /// Four-bit floats with a power of two for each 32: rows and columns, and the powers.
    Mxfp4([usize; 2], (usize, u64)),
}

/// The tensors of a module.
pub(in crate::hf) struct Module<'a> {
    pub(super) name: String,
    pub(super) shards: &'a [(DataFile, Vec<Raw>)],
    pub(super) codes: (usize, Raw),
    pub(super) others: HashMap<&'static str, (usize, Raw)>,
}

impl Module<'_> {
    /// The type and shape of the codes.
    pub(super) fn codes(&self) -> (&str, &[usize]) {
        (&self.codes.1.dtype, &self.codes.1.shape)
    }

    /// The codes as a table.
    pub(super) fn code_table(&self, shape: [usize; 2], elements: Elements) -> Table {
        Table {
            file: self.codes.0,
            offset: self.codes.1.offset,
            shape,
            elements,
        }
    }

    /// The dimensions of codes of this type.
    pub(super) fn matrix_of_codes(&self, dtype: &str) -> Result<[usize; 2], Error> {
        let raw = &self.codes.1;
        match raw.shape[..] {
            [rows, cols] if rows > 0 && cols > 0 && raw.dtype == dtype => Ok([rows, cols]),
            _ => Err(self.wrong(
                &self.codes,
                &format!("{dtype} [rows above 0, columns above 0]"),
            )),
        }
    }

    /// Whether there is a tensor with this end.
    pub(super) fn has(&self, end: &str) -> bool {
        self.others.contains_key(end)
    }

    /// Takes the tensor with this end.
    pub(super) fn take(&mut self, end: &str) -> Option<(usize, Raw)> {
        self.others.remove(end)
    }

    /// Takes the tensor with this end, which has one of these types.
    pub(super) fn need(&mut self, end: &str, dtypes: &[&str]) -> Result<(usize, Raw), Error> {
        let Some(found) = self.take(end) else {
            return Err(Error::MissingTensor {
                path: self.path(self.codes.0),
                tensor: format!("{}{end}", self.name),
                expected: format!("of its codes {}", shape_text(&self.codes.1.shape)),
            });
        };
        match dtypes.contains(&&*found.1.dtype) {
            true => Ok(found),
            false => Err(Error::WrongDtype {
                path: self.path(found.0),
                tensor: found.1.name,
                found: found.1.dtype,
                supported: dtypes.join(", "),
            }),
        }
    }

    /// Takes the tensor with this end as a table of plain numbers.
    pub(super) fn numbers(
        &mut self,
        end: &str,
        dtypes: &[&str],
        shape: [usize; 2],
    ) -> Result<Table, Error> {
        let found = self.need(end, dtypes)?;
        self.table(found, shape)
    }

    /// A tensor of plain numbers as a table of this shape, which may lack dimensions of 1.
    pub(super) fn table(&self, found: (usize, Raw), shape: [usize; 2]) -> Result<Table, Error> {
        let dims = |shape: &[usize]| -> Vec<usize> {
            let above = shape.iter().copied().filter(|&size| size != 1);
            above.collect()
        };
        let raw = &found.1;
        let (true, Some(dtype)) = (dims(&raw.shape) == dims(&shape), plain(&raw.dtype)) else {
            return Err(self.wrong(&found, &shape_text(&shape)));
        };
        Ok(Table {
            file: found.0,
            offset: raw.offset,
            shape,
            elements: Elements::Plain(dtype),
        })
    }

    /// Takes the tensor with this end as a table of codes of `shape`, in I32 of `stored`.
    pub(super) fn packed(
        &mut self,
        end: &str,
        stored: [usize; 2],
        shape: [usize; 2],
        elements: Elements,
    ) -> Result<Table, Error> {
        let found = self.need(end, &["I32", "U32"])?;
        if found.1.shape != stored {
            return Err(self.wrong(&found, &shape_text(&stored)));
        }
        Ok(Table {
            file: found.0,
            offset: found.1.offset,
            shape,
            elements,
        })
    }

    /// The shape of the scales, which are a matrix, or a vector of one column.
    pub(super) fn shape_of(&self, end: &str) -> Result<[usize; 2], Error> {
        let Some(of) = self.others.get(end) else {
            return Err(Error::MissingTensor {
                path: self.path(self.codes.0),
                tensor: format!("{}{end}", self.name),
                expected: format!("of its codes {}", shape_text(&self.codes.1.shape)),
            });
        };
        match of.1.shape[..] {
            [] => Ok([1, 1]),
            [rows] if rows > 0 => Ok([rows, 1]),
            [rows, cols] if rows > 0 && cols > 0 => Ok([rows, cols]),
            _ => Err(self.wrong(of, "[rows above 0, groups above 0]")),
        }
    }

    /// Bytes of the codes and of `others`.
    pub(super) fn bytes(&self, others: &[&str]) -> u64 {
        let others = others.iter().filter_map(|end| self.others.get(end));
        let all = others.chain([&self.codes]).map(|(_, raw)| {
            let elements = raw.shape.iter().map(|&size| size as u64);
            elements.product::<u64>() * element_bytes(&raw.dtype).unwrap_or(1)
        });
        all.sum()
    }

    /// Two integers of a tensor, as a shape.
    pub(super) fn stored_shape(&mut self, end: &str) -> Result<Option<[usize; 2]>, Error> {
        let Some(found) = self.take(end) else {
            return Ok(None);
        };
        let size = match &*found.1.dtype {
            "I64" => 8,
            "I32" => 4,
            _ => return Err(self.wrong(&found, "I64 [2]")),
        };
        if found.1.shape != [2] {
            return Err(self.wrong(&found, "I64 [2]"));
        }
        let mut bytes = vec![0; 2 * size];
        let file = &self.shards[found.0].0;
        file.read_at(&mut bytes, found.1.offset, &|| {
            format!("tensor {}", found.1.name)
        })?;
        let dim = |n: usize| {
            let bytes = &bytes[n * size..][..size];
            let number = bytes
                .iter()
                .rev()
                .fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
            usize::try_from(number).unwrap_or(usize::MAX)
        };
        Ok(Some([dim(0), dim(1)]))
    }

    pub(super) fn path(&self, file: usize) -> PathBuf {
        self.shards[file].0.path.clone()
    }

    /// The error for a tensor of another shape or type.
    pub(super) fn wrong(&self, (file, raw): &(usize, Raw), expected: &str) -> Error {
        Error::WrongShape {
            path: self.path(*file),
            tensor: raw.name.clone(),
            found: format!("{} {}", raw.dtype, shape_text(&raw.shape)),
            expected: expected.into(),
        }
    }

    /// The error for codes that do not fit.
    pub(super) fn wrong_codes(&self, expected: &str) -> Error {
        self.wrong(&self.codes, expected)
    }
}

/// A type of plain numbers, by its name in safetensors.
fn plain(name: &str) -> Option<DType> {
    match name {
        "F32" => Some(DType::F32),
        "F16" => Some(DType::F16),
        "BF16" => Some(DType::Bf16),
        "F8_E4M3" => Some(DType::F8E4M3),
        "F8_E8M0" | "U8" => Some(DType::E8M0),
        "I32" => Some(DType::I32),
        "I8" => Some(DType::I8),
        _ => None,
    }
}
