//! The formats of weights that meet quantised activations, as types.

use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use crate::dtype::E2M1_DOUBLED;
use crate::{blocks::Format, dtype::DType};

/// A grouped format.
pub(super) trait Form {
    /// Its name among the formats.
    const DTYPE: DType;
    /// Whether a weight is a nibble, and no byte.
    const NIBBLES: bool;
    /// Whether a nibble stands for a number that is 8 less.
    const CENTRED: bool;
    /// Whether a nibble stands for a float of four bits, whose double is an integer, and scales are
    /// exponents.
    const FLOATS: bool;
    /// Whether a minimum is taken from all weights of a group, by the chain rule's second step.
    const MINS: bool;
    /// Whether a row has one scale, so that its product follows the channel rule instead.
    const CHANNEL: bool;
    /// Whether each half of a group has a further factor, an integer.
    const STEPS: bool = false;
    /// Whether each half of a group has a further factor of the minimum, an integer.
    const MIN_STEPS: bool = false;
    #[cfg(target_arch = "x86_64")]
    /// Whether packed weights are signed where the instruction set takes such.
    const SIGNED: bool = !Self::NIBBLES || Self::FLOATS;
    #[cfg(target_arch = "x86_64")]
    /// What packed weights with steps are too large by where the instruction set takes unsigned ones.
    const RAISED: u8 = 0;
    #[cfg(target_arch = "x86_64")]
    /// How often eight is to be taken from weights that are packed unsigned.
    const EIGHTS: usize = Self::CENTRED as usize;
    #[cfg(target_arch = "x86_64")]
    /// Of the eight times four weights of a group, how many times four have products that add up in 16
    /// bits.
    const RUN: usize = if Self::NIBBLES { 8 } else { 1 };
}

/// Bytes times a scale.
pub(super) struct Q8;
/// Nibbles less 8, times a scale.
pub(super) struct Q4;
/// Nibbles times a scale, less a minimum.
pub(super) struct Q4k;
/// Floats of four bits times a power of two.
pub(super) struct Mxfp4;
/// Bytes times the row's scale.
pub(super) struct Q8c;
/// Nibbles less 8, times the row's scale; its outliers are added elsewhere.
pub(super) struct Q4c;

impl Form for Q8 {
    const DTYPE: DType = DType::Q8;
    const NIBBLES: bool = false;
    const CENTRED: bool = false;
    const FLOATS: bool = false;
    const MINS: bool = false;
    const CHANNEL: bool = false;
}

impl Form for Q4 {
    const DTYPE: DType = DType::Q4;
    const NIBBLES: bool = true;
    const CENTRED: bool = true;
    const FLOATS: bool = false;
    const MINS: bool = false;
    const CHANNEL: bool = false;
}

impl Form for Q4k {
    const DTYPE: DType = DType::Q4k;
    const NIBBLES: bool = true;
    const CENTRED: bool = false;
    const FLOATS: bool = false;
    const MINS: bool = true;
    const CHANNEL: bool = false;
}

impl Form for Mxfp4 {
    const DTYPE: DType = DType::Mxfp4;
    const NIBBLES: bool = true;
    const CENTRED: bool = false;
    const FLOATS: bool = true;
    const MINS: bool = false;
    const CHANNEL: bool = false;
}

impl Form for Q8c {
    const DTYPE: DType = DType::Q8c;
    const NIBBLES: bool = false;
    const CENTRED: bool = false;
    const FLOATS: bool = false;
    const MINS: bool = false;
    const CHANNEL: bool = true;
}

impl Form for Q4c {
    const DTYPE: DType = DType::Q4c;
    const NIBBLES: bool = true;
    const CENTRED: bool = true;
    const FLOATS: bool = false;
    const MINS: bool = false;
    const CHANNEL: bool = true;
}

/// Blocks of GGUF files.
pub(super) struct Of<B>(PhantomData<B>);

impl<B: Format> Form for Of<B> {
    const DTYPE: DType = DType::Block(B::BLOCK);
    const NIBBLES: bool = B::MOST <= 15 && !B::STEPS && (!B::SIGNED || Self::FLOATS);
    const CENTRED: bool = B::RAISED == 8;
    const FLOATS: bool = B::FLOATS;
    const MINS: bool = B::MINS;
    const CHANNEL: bool = false;
    const STEPS: bool = B::STEPS;
    const MIN_STEPS: bool = B::MIN_STEPS;
    #[cfg(target_arch = "x86_64")]
    const SIGNED: bool = B::SIGNED || (B::STEPS && B::RAISED > 0);
    #[cfg(target_arch = "x86_64")]
    const RAISED: u8 = if B::SIGNED { 128 } else { B::RAISED };
    #[cfg(target_arch = "x86_64")]
    const EIGHTS: usize = B::RAISED as usize / 8;
    #[cfg(target_arch = "x86_64")]
    // Sums of two products are at most 2 × 15 × 127, 2 × 32 × 127 and 2 × 64 × 127: eight, four and two
    // of them fit in 16 bits. Those with one step are at most half of a group.
    const RUN: usize = match B::MOST {
        most if B::STEPS => match most - B::RAISED {
            0..=32 => 4,
            33..=64 => 2,
            _ => 1,
        },
        0..=15 => 8,
        16..=32 => 4,
        33..=64 => 2,
        _ => 1,
    };
}

/// What [`E2M1_RAISED`] adds: twice what [`Chunk::by_8`](crate::Chunk) takes away.
#[cfg(target_arch = "x86_64")]
pub(super) const RAISED_BY: i8 = 16;

/// [`E2M1_DOUBLED`] as unsigned numbers, for instructions that take such weights.
#[cfg(target_arch = "x86_64")]
pub(super) static E2M1_RAISED: [i8; 16] = {
    let mut raised = E2M1_DOUBLED;
    let mut i = 0;
    while i < raised.len() {
        raised[i] += RAISED_BY;
        i += 1;
    }
    raised
};

/// Evaluates the call with `$form` standing for the type of a grouped format.
macro_rules! with_form {
    ($dtype:expr, $form:ident => $call:expr) => {
        match $dtype {
            $crate::DType::Q4 => {
                type $form = $crate::simd::int::form::Q4;
                $call
            }
            $crate::DType::Q4k => {
                type $form = $crate::simd::int::form::Q4k;
                $call
            }
            $crate::DType::Mxfp4 => {
                type $form = $crate::simd::int::form::Mxfp4;
                $call
            }
            $crate::DType::Q8c => {
                type $form = $crate::simd::int::form::Q8c;
                $call
            }
            $crate::DType::Q4c => {
                type $form = $crate::simd::int::form::Q4c;
                $call
            }
            _ => {
                type $form = $crate::simd::int::form::Q8;
                $call
            }
        }
    };
}
pub(super) use with_form;
