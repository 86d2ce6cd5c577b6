//! Outlier activations of tokens with one scale: shadow outlier execution (llm.npu, §3.3).
//!
//! A few channels of a token are tens of times as large as the others. A scale set by the largest of them leaves the others
//! few of the 127 steps and raises perplexity by 2 to 6 % (`benches/token_scales.py`). The scale therefore ignores the
//! [`EXCESSES`] largest elements. They are clipped, and what clipping removes is stored as their *excess*:
//!
//! ```text
//! a = max(fifth largest |x|, largest |x| / 2¹⁶, 2⁻¹⁰⁰) / 127      q = round(x / a)
//! row · x = row · clip(q) · a + Σ w[j] · (q − clip(q))[j] · a      clip to −127 … 127
//! ```
//!
//! Any device may compute the first product, in integers. The CPU computes the second, in f32, largest magnitude first.
//!
//! Where outliers are pruned ([`Cpu::pruning`](crate::Cpu::pruning)), there is no second product. The
//! scale is then that of the largest element: clipping without the excess multiplies SmolLM2's perplexity by a thousand,
//! where this adds 1.7 %.

use crate::{
    blocks::block_group,
    channel::{Outliers, scale_of},
    dtype::{DType, E2M1_DOUBLED, GROUP, MXFP4_SCALES, SUPER_BYTES, SUPER_GROUPS},
    math::f16_to_f32,
    q4k::{nibble, super_blocks},
    row::Row,
};

/// A group or token whose magnitudes are all smaller becomes zero: its part of a sum is far below the sum's rounding, and
/// the inverse of its scale might be infinite.
pub(crate) const SMALLEST: f32 = f32::from_bits((127 - 100) << 23); // 2^-100

/// Elements of a token that the scale ignores. With four, SmolLM2-135M loses 0.1 % of perplexity in place of 1.8, Gemma 3
/// 270M nothing in place of 6.3 (`benches/NOTEBOOK.md`, "One scale per row").
pub(crate) const EXCESSES: usize = 4;

/// Bound on the largest element, in limits. All steps are then exact in f32: 127 · 2¹⁶ < 2²⁴.
const MOST_TIMES: f32 = 65536.0;

/// The part of an element that clipping removes; zero for an element within the scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Excess {
    /// The element.
    pub element: u32,
    /// Steps beyond ±127.
    pub steps: i32,
}

/// The largest elements of a token: the bits of their magnitudes, in descending order, and their indices.
pub(crate) struct Largest {
    magnitudes: [u32; EXCESSES + 1],
    elements: [u32; EXCESSES + 1],
}

impl Largest {
    pub(crate) const NONE: Largest = Largest {
        magnitudes: [0; EXCESSES + 1],
        elements: [0; EXCESSES + 1],
    };

    /// The smallest of them: a magnitude must exceed it to enter.
    #[inline(always)]
    pub(crate) fn least(&self) -> u32 {
        self.magnitudes[EXCESSES]
    }

    /// Inserts an element. Of equal magnitudes the first stays in front.
    #[inline]
    pub(crate) fn add(&mut self, magnitude: u32, element: usize) {
        if magnitude <= self.least() {
            return;
        }
        let mut at = EXCESSES;
        while at > 0 && self.magnitudes[at - 1] < magnitude {
            self.magnitudes[at] = self.magnitudes[at - 1];
            self.elements[at] = self.elements[at - 1];
            at -= 1;
        }
        (self.magnitudes[at], self.elements[at]) = (magnitude, element as u32);
    }

    /// The largest magnitude, and the limit: the magnitude of 127 steps.
    pub(crate) fn limits(&self) -> (f32, f32) {
        let largest = f32::from_bits(self.magnitudes[0]);
        let fifth = f32::from_bits(self.least());
        (largest, fifth.max(largest / MOST_TIMES).max(SMALLEST))
    }

    /// The excess of the elements of `x` over `limit`.
    pub(crate) fn excess(&self, x: &[f32], limit: f32) -> [Excess; EXCESSES] {
        std::array::from_fn(|i| {
            let value = x.get(self.elements[i] as usize).copied().unwrap_or(0.0);
            if f32::from_bits(self.magnitudes[i]) <= limit {
                return Excess::default();
            }
            let steps = (value * (127.0 / limit)).round_ties_even() as i32;
            Excess {
                element: self.elements[i],
                steps: steps - steps.clamp(-127, 127),
            }
        })
    }
}

/// Element `i` of a row of integers, as [`Cpu::dequantize`](crate::Cpu::dequantize) has it.
#[inline(always)]
pub(crate) fn element(row: Row<'_>, i: usize) -> f32 {
    let (quants, scales, group) = (row.quants(), row.scales(), i / GROUP);
    let half = |at: usize| f16_to_f32(u16::from_le_bytes([scales[at], scales[at + 1]]));
    let nibble = |i| nibble(quants, i);
    match row.dtype() {
        DType::Q8 => f32::from(quants[i] as i8) * half(2 * group),
        DType::Q4 => f32::from(nibble(i) as i8 - 8) * half(2 * group),
        DType::Q4k => {
            let (block, groups) = (group / SUPER_GROUPS, row.len().div_ceil(GROUP));
            let bytes = &scales[block * SUPER_BYTES..];
            let block = super_blocks(bytes, groups - block * SUPER_GROUPS).next();
            let (by, less) = block.unwrap_or_default().factors(group % SUPER_GROUPS);
            f32::from(nibble(i)).mul_add(by, -less)
        }
        DType::Mxfp4 => {
            f32::from(E2M1_DOUBLED[usize::from(nibble(i))])
                * MXFP4_SCALES[usize::from(scales[group])]
        }
        DType::Q8c => f32::from(quants[i] as i8) * scale_of(row),
        DType::Q4c => {
            let dense = f32::from(nibble(i) as i8 - 8) * scale_of(row);
            let its = Outliers::of(row);
            let here = its.each().filter(|&(_, at)| at == i);
            here.fold(dense, |sum, (quant, _)| sum + f32::from(quant) * its.scale)
        }
        DType::Block(block) => {
            let group = block_group(block, quants, group);
            let mut weights = [0.0; GROUP];
            group.decode(&mut weights);
            weights[i % GROUP]
        }
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("rows of floats take floats"),
    }
}
