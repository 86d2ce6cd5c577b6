//! Element types of stored tensors and their decoding to f32.

use half::{bf16, f16};

use crate::dequant;

/// Storage format of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    Q2K,
    Q3K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
    /// MXFP4 in the order of safetensors, with exponents stored separately.
    Mxfp4Pairs,
    /// Powers of two, the scales of blocks.
    E8M0,
    /// Integers.
    I64,
    I32,
    /// Eight-bit floats, with scales stored separately.
    F8E4M3,
}

impl DType {
    /// The name in messages and in [`crate::TensorInfo::source_dtype`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 | Self::Mxfp4Pairs => "MXFP4",
            Self::F8E4M3 => "F8_E4M3",
            Self::E8M0 => "F8_E8M0",
            Self::I64 => "I64",
            Self::I32 => "I32",
        }
    }

    /// The format in which rows are multiplied as they lie; `None` if there are no products for it, or its
    /// scales lie elsewhere.
    pub(crate) fn multiplied(self) -> Option<emberflow_kernels::DType> {
        use emberflow_kernels::{Block, DType as Format};
        Some(match self {
            Self::F32 => Format::F32,
            Self::F16 => Format::F16,
            Self::Bf16 => Format::BF16,
            Self::Q4_0 => Format::Block(Block::Q4_0),
            Self::Q4_1 => Format::Block(Block::Q4_1),
            Self::Q5_0 => Format::Block(Block::Q5_0),
            Self::Q5_1 => Format::Block(Block::Q5_1),
            Self::Q8_0 => Format::Block(Block::Q8_0),
            Self::Q3K => Format::Block(Block::Q3K),
            Self::Q4K => Format::Block(Block::Q4K),
            Self::Q5K => Format::Block(Block::Q5K),
            Self::Q6K => Format::Block(Block::Q6K),
            Self::Iq4Nl => Format::Block(Block::Iq4Nl),
            Self::Iq4Xs => Format::Block(Block::Iq4Xs),
            Self::Mxfp4 => Format::Block(Block::Mxfp4),
            Self::Q2K
            | Self::Mxfp4Pairs
            | Self::E8M0
            | Self::I64
            | Self::I32
            | Self::F8E4M3 => return None,
        })
    }

    /// Elements and bytes of one block. A row is a whole number of blocks.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::F8E4M3 => (1, 1),
            Self::E8M0 => (1, 1),
            Self::I64 => (1, 8),
            Self::I32 => (1, 4),
            Self::Q4_0 => (32, dequant::Q4_0_BYTES),
            Self::Q4_1 => (32, dequant::Q4_1_BYTES),
            Self::Q5_0 => (32, dequant::Q5_0_BYTES),
            Self::Q5_1 => (32, dequant::Q5_1_BYTES),
            Self::Q8_0 => (32, dequant::Q8_0_BYTES),
            Self::Q4K => (256, dequant::Q4_K_BYTES),
            Self::Q5K => (256, dequant::Q5_K_BYTES),
            Self::Q6K => (256, dequant::Q6_K_BYTES),
            Self::Q2K => (256, dequant::Q2_K_BYTES),
            Self::Q3K => (256, dequant::Q3_K_BYTES),
            Self::Iq4Nl => (32, dequant::IQ4_NL_BYTES),
            Self::Iq4Xs => (256, dequant::IQ4_XS_BYTES),
            Self::Mxfp4 => (32, dequant::MXFP4_BYTES),
            Self::Mxfp4Pairs => (32, dequant::MXFP4_BYTES - 1),
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
            Self::Q4_0 => dequant::blocks(raw, out, dequant::q4_0),
            Self::Q4_1 => dequant::blocks(raw, out, dequant::q4_1),
            Self::Q5_0 => dequant::blocks(raw, out, dequant::q5_0),
            Self::Q5_1 => dequant::blocks(raw, out, dequant::q5_1),
            Self::Q8_0 => dequant::blocks(raw, out, dequant::q8_0),
            Self::Q4K => dequant::blocks(raw, out, dequant::q4_k),
            Self::Q5K => dequant::blocks(raw, out, dequant::q5_k),
            Self::Q6K => dequant::blocks(raw, out, dequant::q6_k),
            Self::Q2K => dequant::blocks(raw, out, dequant::q2_k),
            Self::Q3K => dequant::blocks(raw, out, dequant::q3_k),
            Self::Iq4Nl => dequant::blocks(raw, out, dequant::iq4_nl),
            Self::Iq4Xs => dequant::blocks(raw, out, dequant::iq4_xs),
            Self::Mxfp4 => dequant::blocks(raw, out, dequant::mxfp4),
            Self::F8E4M3 => decode_scalars(raw, out, |[byte]| dequant::e4m3(byte)),
            Self::E8M0 => decode_scalars(raw, out, |[byte]| dequant::e8m0(byte)),
            Self::I64 => decode_scalars(raw, out, |b| i64::from_le_bytes(b) as f32),
            Self::I32 => decode_scalars(raw, out, |b| i32::from_le_bytes(b) as f32),
            // without its exponents
            Self::Mxfp4Pairs => out.fill(f32::NAN),
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
        assert_eq!(DType::Q4_0.row_bytes(64), Some(36));
        assert_eq!(DType::Q4_0.row_bytes(48), None);
        assert_eq!(DType::Q6K.bytes(3, 512), Some(3 * 2 * 210));
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
    }
}
