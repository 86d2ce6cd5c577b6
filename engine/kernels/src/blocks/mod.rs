//! The blocks of GGUF files, multiplied without repacking.
//!
//! A row is a whole number of blocks, one after the other; a block is 32 to 256 weights with the
//! scales they share. Each format is one file: its block, byte for byte as ggml defines it; the
//! reference that takes it apart ([`Format::group`]); and how vectors of any instruction set unpack
//! it ([`Format::unpack`] and the scales beside it), in the operations of [`Vector`].
//!
//! # The products
//!
//! A weight of group `g`, the 32 weights from `32 g` on, is
//!
//! ```text
//! (scale × step) × q − minimum × step'    scale, minimum: f32, one for each group
//!                                         step, step': integers, one for each half of a group, 1 in most
//!                                         formats
//!                                         q: an integer of at most 8 bits
//! ```
//!
//! A product follows the chain rule (see the crate's documentation): the sum over both halves of
//! `step × Σ q·x` is an exact integer of less than 2²⁴, so it does not matter in which order an
//! instruction set adds. It is added to the chain with the factor `scale × activation scale`, then
//! the minimum times the sum of the group's activations is taken from the chain. Of minimums with steps
//! the sum over both halves of `step' × Σ x` is added with the factor `−minimum × activation scale`.

#![allow(unsafe_code)]

mod codebooks;
mod format;
mod iq1_m;
mod iq1_s;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod q1_0;
mod q2_0;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod six_bits;
mod tq1_0;
mod tq2_0;
mod vector;

use crate::groups::{CHUNK, CHUNK_GROUPS, GROUP, HALF};

pub use format::Block;
pub(crate) use vector::Vector;

/// Evaluates the call with `$format` standing for the stored block of a format.
macro_rules! with_block {
    ($block:expr, $format:ident => $call:expr) => {
        $crate::blocks::with_block!(
            @ $block, $format => $call;
            Q4_0 BlockQ4_0, Q4_1 BlockQ4_1, Q5_0 BlockQ5_0, Q5_1 BlockQ5_1, Q8_0 BlockQ8_0,
            Q2K BlockQ2K, Q3K BlockQ3K, Q4K BlockQ4K, Q5K BlockQ5K, Q6K BlockQ6K,
            Iq2Xxs BlockIq2Xxs, Iq2Xs BlockIq2Xs, Iq3Xxs BlockIq3Xxs, Iq1S BlockIq1S, Iq4Nl BlockIq4Nl,
            Iq3S BlockIq3S, Iq2S BlockIq2S, Iq4Xs BlockIq4Xs, Iq1M BlockIq1M, Tq1_0 BlockTq1_0,
            Tq2_0 BlockTq2_0, Mxfp4 BlockMxfp4, Q1_0 BlockQ1_0, Q2_0 BlockQ2_0
        )
    };
    (@ $block:expr, $format:ident => $call:expr; $($name:ident $stored:ident),*) => {
        match $block {
            $($crate::Block::$name => {
                type $format = $crate::blocks::$stored;
                $call
            })*
        }
    };
}

/// Evaluates the call with `$like` standing for the format whose panels those of the format are like; see
/// [`Format::LIKE`].
macro_rules! with_like {
    ($block:expr, $like:ident => $call:expr) => {
        $crate::blocks::with_like!(
            @ $block, $like => $call;
            Q4_0 BlockQ4_0, Q4_1 BlockQ4_1, Q5_0 BlockQ5_0, Q5_1 BlockQ5_1, Q8_0 BlockQ8_0,
            Q2K BlockQ2K, Q3K BlockQ3K, Q6K BlockQ6K, Iq2Xs BlockIq2Xs, Mxfp4 BlockMxfp4
        )
    };
    (@ $block:expr, $like:ident => $call:expr; $($name:ident $stored:ident),*) => {
        match $crate::blocks::with_block!($block, F => <F as $crate::blocks::Format>::LIKE) {
            $($crate::Block::$name => {
                type $like = $crate::blocks::$stored;
                $call
            })*
            _ => unreachable!("no format is like one that is like another"),
        }
    };
}

pub(crate) use iq1_m::BlockIq1M;
pub(crate) use iq1_s::BlockIq1S;
pub(crate) use iq2_s::BlockIq2S;
pub(crate) use iq2_xs::BlockIq2Xs;
pub(crate) use iq2_xxs::BlockIq2Xxs;
pub(crate) use iq3_s::BlockIq3S;
pub(crate) use iq3_xxs::BlockIq3Xxs;
pub(crate) use iq4_nl::BlockIq4Nl;
pub(crate) use iq4_xs::BlockIq4Xs;
pub(crate) use mxfp4::BlockMxfp4;
pub(crate) use q1_0::BlockQ1_0;
pub(crate) use q2_0::BlockQ2_0;
pub(crate) use q2_k::BlockQ2K;
pub(crate) use q3_k::BlockQ3K;
pub(crate) use q4_0::BlockQ4_0;
pub(crate) use q4_1::BlockQ4_1;
pub(crate) use q4_k::BlockQ4K;
pub(crate) use q5_0::BlockQ5_0;
pub(crate) use q5_1::BlockQ5_1;
pub(crate) use q5_k::BlockQ5K;
pub(crate) use q6_k::BlockQ6K;
pub(crate) use q8_0::BlockQ8_0;
pub(crate) use tq1_0::BlockTq1_0;
pub(crate) use tq2_0::BlockTq2_0;
pub(crate) use with_block;
pub(crate) use with_like;

/// Decodes a row of blocks, to the bits of llama.cpp's and the `gguf` package's decoders.
///
/// # Panics
/// If `row` is not the blocks of `out.len()` weights.
pub fn decode_blocks(format: Block, row: &[u8], out: &mut [f32]) {
    let expected = format.row_bytes(out.len());
    assert!(
        row.len() == expected,
        "a {} row of {} weights takes {expected} bytes, got {}",
        format.name(),
        out.len(),
        row.len()
    );
    with_block!(format, F => {
        let blocks = bytemuck::cast_slice::<u8, F>(row);
        for (block, out) in blocks.iter().zip(out.chunks_exact_mut(F::ELEMENTS)) {
            for (g, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
                block.group(g).decode(out);
            }
        }
    });
}

/// Group `g` of a row of blocks.
///
/// # Panics
/// If the row has no such group.
pub fn block_group(format: Block, row: &[u8], g: usize) -> Group {
    with_block!(format, F => {
        let of_block = F::ELEMENTS / GROUP;
        let at = g / of_block * size_of::<F>();
        bytemuck::from_bytes::<F>(&row[at..at + size_of::<F>()]).group(g % of_block)
    })
}

/// 32 consecutive weights of a row as products see them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// What is multiplied by the activations.
    pub quants: [i8; GROUP],
    /// The factor of both halves.
    pub scale: f32,
    /// A further factor of each half.
    pub steps: [i8; 2],
    /// What is taken from every weight.
    pub minimum: f32,
    /// A further factor of what is taken from each half.
    pub min_steps: [i8; 2],
}

impl Group {
    /// Without further factors and minimums; the rest is to be filled in.
    const PLAIN: Group = Group {
        quants: [0; GROUP],
        scale: 0.0,
        steps: [1; 2],
        minimum: 0.0,
        min_steps: [1; 2],
    };

    /// Its weights.
    pub fn decode(&self, out: &mut [f32; GROUP]) {
        let halves = out.as_chunks_mut::<HALF>().0.iter_mut();
        let quants = self.quants.as_chunks::<HALF>().0;
        let steps = self.steps.into_iter().zip(self.min_steps);
        for ((out, quants), (step, min_step)) in halves.zip(quants).zip(steps) {
            let scale = self.scale * f32::from(step);
            let minimum = self.minimum * f32::from(min_step);
            for (out, &q) in out.iter_mut().zip(quants) {
                *out = scale * f32::from(q) - minimum;
            }
        }
    }
}

/// A block as it is stored, and how to take it apart. Blocks are bytes without alignment.
pub(crate) trait Format: bytemuck::Pod {
    /// Its name among the formats.
    const BLOCK: Block;
    /// The format that panels of many rows are multiplied as: its weights are integers of the same kind, and it has
    /// the same factors, so one product serves both.
    const LIKE: Block = Self::BLOCK;
    /// Weights of a block.
    const ELEMENTS: usize;
    /// Whether a weight is a float of four bits, unpacked as twice its value.
    const FLOATS: bool = false;
    /// Whether unpacked weights are signed bytes; otherwise unsigned ones.
    const SIGNED: bool;
    /// Largest magnitude of an unpacked weight.
    const MOST: u8;
    /// What is to be taken from each unpacked weight: a multiple of 8 in formats without steps, and 0 if
    /// weights are signed.
    const RAISED: u8;
    /// Whether a minimum is taken from all weights of a group.
    const MINS: bool;
    /// Whether each half of a group has a further factor; the sum of a group's products with steps is below 2²⁴.
    const STEPS: bool;
    /// Whether each half of a group has a further factor of the minimum.
    const MIN_STEPS: bool = false;

    /// The reference: group `g` of the block.
    fn group(&self, g: usize) -> Group;

    /// Half `half` of as many groups as a vector has lanes, from group `first` of the chunk on, one
    /// group in each lane.
    ///
    /// # Safety
    /// The CPU has the instruction set of `V`. `first` is a multiple of the lanes.
    unsafe fn unpack<V: Vector>(chunk: Blocks<'_, Self>, first: usize, half: usize) -> V::Bytes;

    /// The scale of each group.
    ///
    /// # Safety
    /// The CPU has the instruction set of `V`.
    unsafe fn scales<V: Vector>(chunk: Blocks<'_, Self>) -> V::Values;

    /// The scale and the minimum of each group, of a format with minimums; minimums with steps are negated.
    ///
    /// # Safety
    /// The CPU has the instruction set of `V`.
    #[inline(always)]
    unsafe fn factors<V: Vector>(chunk: Blocks<'_, Self>) -> [V::Values; 2] {
        // SAFETY: passed on from the caller.
        let scales = unsafe { Self::scales::<V>(chunk) };
        [scales; 2]
    }

    /// The further factors of a format that has them, two for each group.
    #[inline(always)]
    fn steps(_chunk: Blocks<'_, Self>) -> [i8; 2 * CHUNK_GROUPS] {
        [1; 2 * CHUNK_GROUPS]
    }

    /// The further factors of the minimums of a format that has them, two for each group.
    #[inline(always)]
    fn min_steps(_chunk: Blocks<'_, Self>) -> [i8; 2 * CHUNK_GROUPS] {
        [1; 2 * CHUNK_GROUPS]
    }
}

/// The blocks of 512 weights, those of a chunk of activations.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a, F>(&'a [F]);

impl<'a, F: Format> Blocks<'a, F> {
    /// Blocks of a chunk.
    pub(crate) const COUNT: usize = CHUNK / F::ELEMENTS;
    /// Their bytes.
    pub(crate) const BYTES: usize = Self::COUNT * size_of::<F>();

    /// The blocks in so many bytes.
    #[inline(always)]
    pub(crate) fn of(bytes: &'a [u8]) -> Blocks<'a, F> {
        assert!(bytes.len() == Self::BYTES);
        Blocks(bytemuck::cast_slice(bytes))
    }

    /// Block `i`, which is below [`COUNT`](Self::COUNT).
    #[inline(always)]
    pub(crate) fn at(self, i: usize) -> &'a F {
        debug_assert!(i < Self::COUNT && self.0.len() == Self::COUNT);
        // SAFETY: constructors check the length, and `COUNT` is a power of two.
        unsafe { self.0.get_unchecked(i % Self::COUNT) }
    }

    /// The block that holds group `g` of the chunk, and the group's place in it.
    #[inline(always)]
    pub(crate) fn of_group(self, g: usize) -> (&'a F, usize) {
        let groups = const { F::ELEMENTS / GROUP };
        (self.at(g / groups), g % groups)
    }

    /// What `of` says of the block of each group.
    #[inline(always)]
    pub(crate) fn each<T>(self, of: impl Fn(&F) -> T) -> [T; CHUNK_GROUPS] {
        std::array::from_fn(|g| of(self.of_group(g).0))
    }

    /// What `of` says of each group, from its block and its place in it.
    #[inline(always)]
    pub(crate) fn each_group<T>(self, of: impl Fn(&F, usize) -> T) -> [T; CHUNK_GROUPS] {
        std::array::from_fn(|g| {
            let (block, g) = self.of_group(g);
            of(block, g)
        })
    }

    /// What `of` says of the 16 halves of groups of a block of 256 weights, for both blocks of the chunk.
    #[inline(always)]
    pub(crate) fn each_half<T: Copy>(
        self,
        of: impl Fn(&F) -> [T; CHUNK_GROUPS],
    ) -> [T; 2 * CHUNK_GROUPS] {
        const { assert!(Self::COUNT == 2) };
        let (first, second) = (of(self.at(0)), of(self.at(1)));
        let mut all = [first[0]; 2 * CHUNK_GROUPS];
        all[..CHUNK_GROUPS].copy_from_slice(&first);
        all[CHUNK_GROUPS..].copy_from_slice(&second);
        all
    }
}

/// Bytes of the largest chunk.
pub(crate) const MAX_CHUNK_BYTES: usize = Blocks::<BlockQ8_0>::BYTES;

#[cfg(test)]
mod tests {
    use super::*;

    /// What a product of packed panels depends on.
    fn facts(block: Block) -> (bool, u8, [bool; 3], bool) {
        with_block!(block, F => {
            (F::SIGNED, F::RAISED, [F::MINS, F::STEPS, F::MIN_STEPS], F::FLOATS)
        })
    }

    #[test]
    fn blocks_have_the_sizes_of_gguf() {
        for block in Block::ALL {
            let (elements, bytes) = with_block!(block, F => (F::ELEMENTS, size_of::<F>()));
            assert_eq!((block.elements(), block.bytes()), (elements, bytes));
            assert_eq!(with_block!(block, F => F::BLOCK), block);
            assert!(CHUNK / elements * bytes <= MAX_CHUNK_BYTES);
            let like = with_block!(block, F => F::LIKE);
            assert_eq!(facts(block), facts(like), "{}", block.name());
            assert_eq!(with_like!(block, L => L::BLOCK), like);
            assert!(with_block!(block, F => F::MOST) <= with_block!(like, F => F::MOST));
        }
    }
}
