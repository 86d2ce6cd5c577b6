//! Parts of a file: its input, values of metadata, formats of tensors.

use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::gguf_vocab::GgufVocab;
use crate::names::TensorId;
use emberflow_kernels::Block;

/// Storage format of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// 4 bytes each.
    F32,
    /// 2 bytes each.
    F16,
    /// 32 weights in 18 bytes: an f16 scale `d` and nibbles `q`; a weight is
    /// `d · (q − 8)`, byte j holds weights j (low) and j + 16.
    Q4_0,
    /// 32 weights in 34 bytes: an f16 scale and 32 signed bytes.
    Q8_0,
    /// 32 weights in 17 bytes: the biased exponent of a power of two (bias 127), and four-bit floats
    /// (e2m1); byte j holds weights j (low) and j + 16. For gpt-oss's experts, with other matrices
    /// in Q8_0.
    Mxfp4,
}

impl Encoding {
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Q4_0 => DType::Block(Block::Q4_0),
            Self::Q8_0 => DType::Block(Block::Q8_0),
            Self::Mxfp4 => DType::Block(Block::Mxfp4),
        }
    }

    /// The format of the matrices outside the experts.
    pub(super) fn beside_experts(self) -> Self {
        match self {
            Self::Mxfp4 => Self::Q8_0,
            other => other,
        }
    }

    /// The format's number for this tensor type.
    pub(super) fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::Mxfp4 => 39,
        }
    }

    /// `general.file_type`: the type of most matrices.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 7,
            Self::Mxfp4 => 38,
        }
    }

    /// Bytes of a row of `cols` numbers; `None` if it is not a whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        self.dtype().row_bytes(cols)
    }
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// A 32-bit number.
    U32(u32),
    /// A 64-bit number.
    U64(u64),
    /// A 32-bit float.
    F32(f32),
    /// True or false.
    Bool(bool),
    /// A string.
    Text(String),
    /// A list of 32-bit integers.
    I32s(Vec<i32>),
    /// A list of 32-bit floats.
    F32s(Vec<f32>),
    /// A list of true or false.
    Bools(Vec<bool>),
    /// A list of strings.
    Texts(Vec<String>),
}

impl GgufValue {
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let list = |out: &mut Vec<u8>, kind: u32, len: usize| {
            out.extend(9u32.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((len as u64).to_le_bytes());
        };
        let scalar = |out: &mut Vec<u8>, kind: u32, bytes: &[u8]| {
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        };
        match self {
            Self::U32(value) => scalar(out, 4, &value.to_le_bytes()),
            Self::F32(value) => scalar(out, 6, &value.to_le_bytes()),
            Self::Bool(value) => scalar(out, 7, &[u8::from(*value)]),
            Self::U64(value) => scalar(out, 10, &value.to_le_bytes()),
            Self::Text(value) => {
                out.extend(8u32.to_le_bytes());
                write_text(out, value);
            }
            Self::I32s(values) => {
                list(out, 5, values.len());
                out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            }
            Self::F32s(values) => {
                list(out, 6, values.len());
                out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            }
            Self::Bools(values) => {
                list(out, 7, values.len());
                out.extend(values.iter().map(|&value| u8::from(value)));
            }
            Self::Texts(values) => {
                list(out, 8, values.len());
                values.iter().for_each(|text| write_text(out, text));
            }
        }
    }
}

pub(super) fn write_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Input of [`GgufWriter::create`](super::GgufWriter::create), besides the weights.
pub struct GgufFile<'a> {
    /// The configuration; its family determines `general.architecture`, which is one that llama.cpp
    /// knows (`bamboo` and `mistral` become `llama`).
    pub config: &'a ModelConfig,
    /// The vocabulary.
    pub vocab: &'a GgufVocab,
    /// Storage format of matrices; vectors are f32.
    pub encoding: Encoding,
    /// Matrices stored in Q4_K instead, if their rows are whole blocks.
    pub q4_k: &'a dyn Fn(TensorId) -> bool,
    /// Additional keys.
    pub extra: Vec<(String, GgufValue)>,
}
