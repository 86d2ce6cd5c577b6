//! The names, numbers and sizes of the block formats.

/// A block format of GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Block {
    /// 4-bit integers less 8, a scale for 32.
    Q4_0,
    /// 4-bit integers, a scale and a minimum for 32.
    Q4_1,
    /// 5-bit integers less 16, a scale for 32.
    Q5_0,
    /// 5-bit integers, a scale and a minimum for 32.
    Q5_1,
    /// 8-bit integers, a scale for 32.
    Q8_0,
    /// 2-bit integers; scales and minimums in four bits for 16, in units of two for 256.
    Q2K,
    /// 3-bit integers less 4; scales in six bits for 16, in units of one for 256.
    Q3K,
    /// 4-bit integers; scales and minimums in six bits for 32, in units of two for 256.
    Q4K,
    /// 5-bit integers, otherwise as [`Q4K`](Block::Q4K).
    Q5K,
    /// 6-bit integers less 32; scales in eight bits for 16, in units of one for 256.
    Q6K,
    /// Eight magnitudes by an index of eight bits, signs; scales in four bits for 32, in units of one for 256.
    Iq2Xxs,
    /// Eight magnitudes by an index of nine bits, signs; scales in four bits for 16, in units of one for 256.
    Iq2Xs,
    /// Four magnitudes by an index of eight bits, signs; scales in four bits for 32, in units of one for 256.
    Iq3Xxs,
    /// Eight of −1, 0 and 1 by an index of eleven bits, moved by an eighth; scales in three bits for 32, in units
    /// of one for 256.
    Iq1S,
    /// 16 values that are denser near zero, a scale for 32.
    Iq4Nl,
    /// Four magnitudes by an index of nine bits, signs; scales in four bits for 32, in units of one for 256.
    Iq3S,
    /// Eight magnitudes by an index of ten bits, signs; scales in four bits for 16, in units of one for 256.
    Iq2S,
    /// The values of [`Iq4Nl`](Block::Iq4Nl); scales in six bits for 32, in units of one for 256.
    Iq4Xs,
    /// As [`Iq1S`](Block::Iq1S), moved eight by eight, with scales for 16.
    Iq1M,
    /// −1, 0 and 1, five in a byte; a scale for 256.
    Tq1_0,
    /// −1, 0 and 1 in two bits; a scale for 256.
    Tq2_0,
    /// 4-bit floats, a power of two for 32.
    Mxfp4,
    /// Signs; a scale for 128.
    Q1_0,
    /// 2-bit integers less 1; a scale for 64.
    Q2_0,
}

impl Block {
    /// Every format.
    pub const ALL: [Block; 24] = [
        Block::Q4_0,
        Block::Q4_1,
        Block::Q5_0,
        Block::Q5_1,
        Block::Q8_0,
        Block::Q2K,
        Block::Q3K,
        Block::Q4K,
        Block::Q5K,
        Block::Q6K,
        Block::Iq2Xxs,
        Block::Iq2Xs,
        Block::Iq3Xxs,
        Block::Iq1S,
        Block::Iq4Nl,
        Block::Iq3S,
        Block::Iq2S,
        Block::Iq4Xs,
        Block::Iq1M,
        Block::Tq1_0,
        Block::Tq2_0,
        Block::Mxfp4,
        Block::Q1_0,
        Block::Q2_0,
    ];

    /// The name in GGUF's own documents.
    pub const fn name(self) -> &'static str {
        match self {
            Block::Q4_0 => "Q4_0",
            Block::Q4_1 => "Q4_1",
            Block::Q5_0 => "Q5_0",
            Block::Q5_1 => "Q5_1",
            Block::Q8_0 => "Q8_0",
            Block::Q2K => "Q2_K",
            Block::Q3K => "Q3_K",
            Block::Q4K => "Q4_K",
            Block::Q5K => "Q5_K",
            Block::Q6K => "Q6_K",
            Block::Iq4Nl => "IQ4_NL",
            Block::Iq4Xs => "IQ4_XS",
            Block::Mxfp4 => "MXFP4",
            Block::Iq2Xxs => "IQ2_XXS",
            Block::Iq2Xs => "IQ2_XS",
            Block::Iq3Xxs => "IQ3_XXS",
            Block::Iq1S => "IQ1_S",
            Block::Iq3S => "IQ3_S",
            Block::Iq2S => "IQ2_S",
            Block::Iq1M => "IQ1_M",
            Block::Tq1_0 => "TQ1_0",
            Block::Tq2_0 => "TQ2_0",
            Block::Q1_0 => "Q1_0",
            Block::Q2_0 => "Q2_0",
        }
    }

    /// The number of the type in GGUF files.
    pub const fn gguf(self) -> u32 {
        match self {
            Block::Q4_0 => 2,
            Block::Q4_1 => 3,
            Block::Q5_0 => 6,
            Block::Q5_1 => 7,
            Block::Q8_0 => 8,
            Block::Q2K => 10,
            Block::Q3K => 11,
            Block::Q4K => 12,
            Block::Q5K => 13,
            Block::Q6K => 14,
            Block::Iq4Nl => 20,
            Block::Iq4Xs => 23,
            Block::Mxfp4 => 39,
            Block::Iq2Xxs => 16,
            Block::Iq2Xs => 17,
            Block::Iq3Xxs => 18,
            Block::Iq1S => 19,
            Block::Iq3S => 21,
            Block::Iq2S => 22,
            Block::Iq1M => 29,
            Block::Tq1_0 => 34,
            Block::Tq2_0 => 35,
            Block::Q1_0 => 41,
            Block::Q2_0 => 42,
        }
    }

    /// The format with this number in GGUF files, `None` if there are no products for it.
    pub fn from_gguf(number: u32) -> Option<Block> {
        Block::ALL.into_iter().find(|block| block.gguf() == number)
    }

    /// Weights of a block.
    pub const fn elements(self) -> usize {
        match self {
            Block::Q4_0 | Block::Q4_1 | Block::Q5_0 | Block::Q5_1 | Block::Q8_0 => 32,
            Block::Iq4Nl | Block::Mxfp4 => 32,
            Block::Q2K | Block::Q3K | Block::Q4K | Block::Q5K | Block::Q6K => 256,
            Block::Q1_0 => 128,
            Block::Q2_0 => 64,
            Block::Iq2Xxs | Block::Iq2Xs | Block::Iq3Xxs | Block::Iq1S | Block::Iq3S => 256,
            Block::Iq2S | Block::Iq4Xs | Block::Iq1M | Block::Tq1_0 | Block::Tq2_0 => 256,
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Block::Q4_0 => 18,
            Block::Q4_1 => 20,
            Block::Q5_0 => 22,
            Block::Q5_1 => 24,
            Block::Q8_0 => 34,
            Block::Q2K => 84,
            Block::Q3K => 110,
            Block::Q4K => 144,
            Block::Q5K => 176,
            Block::Q6K => 210,
            Block::Iq4Nl => 18,
            Block::Iq4Xs => 136,
            Block::Mxfp4 => 17,
            Block::Iq2Xxs => 66,
            Block::Iq2Xs => 74,
            Block::Iq3Xxs => 98,
            Block::Iq1S => 50,
            Block::Iq3S => 110,
            Block::Iq2S => 82,
            Block::Iq1M => 56,
            Block::Tq1_0 => 54,
            Block::Tq2_0 => 66,
            Block::Q1_0 => 18,
            Block::Q2_0 => 18,
        }
    }

    /// Bytes of a row of `n` weights, saturating; `usize::MAX`, which no slice reaches, if they are
    /// not a whole number of blocks.
    #[inline]
    pub const fn row_bytes(self, n: usize) -> usize {
        if n.is_multiple_of(self.elements()) {
            (n / self.elements()).saturating_mul(self.bytes())
        } else {
            usize::MAX
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_gguf_name_the_formats() {
        for block in Block::ALL {
            assert_eq!(Block::from_gguf(block.gguf()), Some(block));
        }
        assert_eq!(Block::from_gguf(0), None);
    }

    #[test]
    fn a_row_is_whole_blocks() {
        assert_eq!(Block::Q6K.row_bytes(512), 420);
        assert_eq!(Block::Q6K.row_bytes(500), usize::MAX);
        assert_eq!(Block::Q4_0.row_bytes(0), 0);
        assert_eq!(Block::Q8_0.row_bytes(usize::MAX / 32 * 32), usize::MAX);
    }
}
