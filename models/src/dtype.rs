//! Element types of stored tensors and their decoding to f32.

use emberflow_kernels::{Block, decode_blocks};
use half::{bf16, f16};

use crate::dequant;

/// Storage format of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DType {
    F32,
    F16,
    Bf16,
    /// Blocks that products read without repacking.
    Block(Block),
    /// MXFP4 in the order of safetensors, with exponents stored separately.
    Mxfp4Pairs,
    /// Powers of two, the scales of blocks.
    E8M0,
    /// Integers.
    I64,
    I32,
    /// Eight-bit floats, with scales stored separately.
    F8E4M3,
    /// Integers of eight bits, with scales stored separately.
    I8,
    /// Codes of so many bits with a scale for each group, and a zero point or a bias.
    Affine(u8),
    /// Codes of four bits less 8 with a scale for each group of a multiple of 32 columns.
    Int4,
    /// Four-bit floats with an eight-bit float for each 16.
    Nvfp4,
}

impl DType {
    /// The name in messages and in [`crate::TensorInfo::source_dtype`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Block(block) => block.name(),
            Self::Mxfp4Pairs => "MXFP4",
            Self::F8E4M3 => "F8_E4M3",
            Self::E8M0 => "F8_E8M0",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I8 => "INT8",
            Self::Affine(bits) => match bits {
                2 => "AFFINE2",
                3 => "AFFINE3",
                4 => "AFFINE4",
                5 => "AFFINE5",
                6 => "AFFINE6",
                _ => "AFFINE8",
            },
            Self::Int4 => "INT4",
            Self::Nvfp4 => "NVFP4",
        }
    }

    /// The format in which rows are multiplied without conversion; `None` if there are no products for it, or its
    /// scales lie elsewhere.
    pub(crate) fn multiplied(self) -> Option<emberflow_kernels::DType> {
        use emberflow_kernels::DType as Format;
        Some(match self {
            Self::F32 => Format::F32,
            Self::F16 => Format::F16,
            Self::Bf16 => Format::BF16,
            Self::Block(block) => Format::Block(block),
            Self::Mxfp4Pairs
            | Self::E8M0
            | Self::I64
            | Self::I32
            | Self::F8E4M3
            | Self::I8
            | Self::Affine(_)
            | Self::Int4
            | Self::Nvfp4 => return None,
        })
    }

    /// Elements and bytes of one block. A row is a whole number of blocks.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::F8E4M3 => (1, 1),
            Self::E8M0 | Self::I8 => (1, 1),
            // 8 codes
            Self::Affine(bits) => (8, usize::from(bits)),
            Self::Int4 | Self::Nvfp4 => (2, 1),
            Self::I64 => (1, 8),
            Self::I32 => (1, 4),
            Self::Block(block) => (block.elements(), block.bytes()),
            Self::Mxfp4Pairs => (32, 16),
        }
    }

    /// Bytes of a row of `cols` elements; `None` if `cols` is not a whole number of blocks, or the
    /// size overflows.
    pub(crate) fn row_bytes(self, cols: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        cols.is_multiple_of(elements)
            .then_some(cols / elements)?
            .checked_mul(bytes)
    }

    /// Bytes of `rows` such rows.
    pub(crate) fn bytes(self, rows: usize, cols: usize) -> Option<u64> {
        let row = u64::try_from(self.row_bytes(cols)?).ok()?;
        row.checked_mul(u64::try_from(rows).ok()?)
    }

    /// Decodes whole blocks: `raw` holds exactly as many blocks as `out` needs.
    pub(crate) fn decode(self, raw: &[u8], out: &mut [f32]) {
        debug_assert_eq!(self.row_bytes(out.len()), Some(raw.len()));
        match self {
            Self::F32 => decode_scalars(raw, out, f32::from_le_bytes),
            Self::F16 => decode_scalars(raw, out, |b| f16::from_le_bytes(b).to_f32()),
            Self::Bf16 => decode_scalars(raw, out, |b| bf16::from_le_bytes(b).to_f32()),
            Self::Block(block) => decode_blocks(block, raw, out),
            Self::F8E4M3 => decode_scalars(raw, out, |[byte]| dequant::e4m3(byte)),
            Self::E8M0 => decode_scalars(raw, out, |[byte]| dequant::e8m0(byte)),
            Self::I64 => decode_scalars(raw, out, |b| i64::from_le_bytes(b) as f32),
            Self::I32 => decode_scalars(raw, out, |b| i32::from_le_bytes(b) as f32),
            Self::I8 => decode_scalars(raw, out, |b| f32::from(i8::from_le_bytes(b))),
            // without its scales
            Self::Mxfp4Pairs | Self::Affine(_) | Self::Int4 | Self::Nvfp4 => out.fill(f32::NAN),
        }
    }
}

fn decode_scalars<const N: usize>(raw: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    let (elements, _) = raw.as_chunks::<N>();
    for (value, bytes) in out.iter_mut().zip(elements) {
        *value = decode(*bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes as in PyTorch's `float8_e4m3fn`.
    #[test]
    fn eight_bit_floats_are_exact() {
        for (code, value) in [
            (0x00, 0.0f32),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7e, 448.0),
            (0xb8, -1.0),
            (0x80, -0.0),
        ] {
            let found = dequant::e4m3(code);
            assert_eq!(found.to_bits(), value.to_bits(), "{code:#x}");
        }
        let nans: Vec<u8> = (0..=255)
            .filter(|&code| dequant::e4m3(code).is_nan())
            .collect();
        assert_eq!(nans, [0x7f, 0xff]);
        let ascends = |code: u8| dequant::e4m3(code) < dequant::e4m3(code + 1);
        assert!((0..0x7e).all(ascends));
    }

    #[test]
    fn scalars_decode_little_endian() {
        let mut out = [0.0; 2];
        DType::F32.decode(&[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        DType::F16.decode(&[0x00, 0x3c, 0x00, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        DType::Bf16.decode(&[0x80, 0x3f, 0x00, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(DType::Block(Block::Q4_0).row_bytes(64), Some(36));
        assert_eq!(DType::Block(Block::Q4_0).row_bytes(48), None);
        assert_eq!(DType::Block(Block::Q6K).bytes(3, 512), Some(3 * 2 * 210));
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
    }
}
