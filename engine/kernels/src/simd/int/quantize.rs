//! Quantises f32 activations to chunks of integers.

use crate::{
    Chunk,
    activations::{CHUNK, CHUNK_GROUPS, HALF, SECOND_HALF, first_half},
    dtype::GROUP,
    excess::{EXCESSES, Excess, Largest, SMALLEST},
};

/// Largest quant. −128 is not used, so that a quant can be negated.
const QUANT_MAX: f32 = 127.0;
/// Adding it leaves the nearest integer (half to even) of a small number in the lowest bits, in
/// two's complement.
const ROUND: f32 = 12_582_912.0; // 1.5 × 2^23

/// All bits of an f32 except its sign.
pub(super) const MAGNITUDE: u32 = 0x7fff_ffff;

/// The two passes over a group, implemented per vector unit.
pub(super) trait Quantize {
    /// The bits of the largest magnitude. Magnitudes compare like their bits, and NaN is
    /// the largest: a maximum of integers is the same on every machine.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    #[inline(always)]
    unsafe fn largest(group: &[f32; GROUP]) -> u32 {
        group
            .iter()
            .fold(0, |max, x| max.max(x.to_bits() & MAGNITUDE))
    }

    /// `x * inverse` rounded half to even, and the sum of the results, for products of at
    /// most 127.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    #[inline(always)]
    unsafe fn quants(group: &[f32; GROUP], inverse: f32) -> ([i8; GROUP], i32) {
        let quants = group.map(|x| (x * inverse + ROUND).to_bits() as i8);
        (quants, quants.iter().map(|&quant| i32::from(quant)).sum())
    }
}

/// Quantises one token with a scale for each group; see [`crate::Cpu::quantize_activations`].
///
/// # Safety
/// The CPU has the instruction set of `Q`.
#[inline(always)]
pub(super) unsafe fn quantize_token<Q: Quantize>(x: &[f32], chunks: &mut [Chunk]) {
    debug_assert_eq!(chunks.len(), x.len().div_ceil(CHUNK));
    for (x, chunk) in x.chunks(CHUNK).zip(chunks) {
        // SAFETY: passed on from the caller.
        unsafe {
            quantize_part::<Q>(x, None, chunk);
        }
    }
}

/// Quantises one token with one scale: that of its largest element, or the one that ignores the elements with an excess,
/// which it finds.
///
/// # Safety
/// The CPU has the instruction set of `Q`.
#[inline(always)]
pub(super) unsafe fn quantize_whole_token<Q: Quantize>(
    x: &[f32],
    chunks: &mut [Chunk],
    excess: Option<&mut [Excess; EXCESSES]>,
) {
    debug_assert_eq!(chunks.len(), x.len().div_ceil(CHUNK));
    let Some(excess) = excess else {
        // SAFETY: passed on from the caller.
        let largest = unsafe { largest_magnitude::<Q>(x) };
        for (x, chunk) in x.chunks(CHUNK).zip(chunks) {
            // SAFETY: as above.
            unsafe { quantize_part::<Q>(x, Some(largest), chunk) };
        }
        return;
    };
    // SAFETY: passed on from the caller.
    let found = unsafe { largest_of_token::<Q>(x) };
    let (largest, mut limit) = found.limits();
    *excess = Default::default();
    if !largest.is_finite() || largest < SMALLEST {
        limit = largest;
    } else {
        *excess = found.excess(x, limit);
    }
    for (x, chunk) in x.chunks(CHUNK).zip(chunks) {
        let mut clipped = [0.0; CHUNK];
        for (to, &x) in clipped.iter_mut().zip(x) {
            *to = x.max(-limit).min(limit);
        }
        // SAFETY: passed on from the caller.
        unsafe { quantize_chunk::<Q>(&clipped, Some(limit.to_bits()), chunk) };
    }
}

/// The bits of the largest magnitude.
///
/// # Safety
/// The CPU has the instruction set of `Q`.
#[inline(always)]
unsafe fn largest_magnitude<Q: Quantize>(x: &[f32]) -> u32 {
    let (groups, rest) = x.as_chunks::<GROUP>();
    let mut last = [0.0; GROUP];
    last[..rest.len()].copy_from_slice(rest);
    let mut most = 0;
    for group in groups.iter().chain([&last]) {
        // SAFETY: passed on from the caller.
        most = most.max(unsafe { Q::largest(group) });
    }
    most
}

/// The elements of largest magnitude.
///
/// # Safety
/// The CPU has the instruction set of `Q`.
#[inline(always)]
unsafe fn largest_of_token<Q: Quantize>(x: &[f32]) -> Largest {
    let (groups, rest) = x.as_chunks::<GROUP>();
    let mut last = [0.0; GROUP];
    last[..rest.len()].copy_from_slice(rest);
    let mut found = Largest::NONE;
    for (g, group) in groups.iter().chain([&last]).enumerate() {
        // SAFETY: passed on from the caller.
        if unsafe { Q::largest(group) } > found.least() {
            for (i, x) in group.iter().enumerate() {
                found.add(x.to_bits() & MAGNITUDE, g * GROUP + i);
            }
        }
    }
    found
}

/// Quantises up to 512 activations, as [`quantize_chunk`]; those beyond are zero.
///
/// # Safety
/// The CPU has the instruction set of `Q`.
#[inline(always)]
unsafe fn quantize_part<Q: Quantize>(x: &[f32], all: Option<u32>, chunk: &mut Chunk) {
    // SAFETY: passed on from the caller.
    unsafe {
        if let Ok(x) = x.try_into() {
            quantize_chunk::<Q>(x, all, chunk);
        } else {
            let mut padded = [0.0; CHUNK];
            padded[..x.len()].copy_from_slice(x);
            quantize_chunk::<Q>(&padded, all, chunk);
        }
    }
}

/// Quantises 512 activations, by the largest of each group or by `all`, the bits of the token's limit.
///
/// # Safety
/// The CPU has the instruction set of `Q`.
#[inline(always)]
unsafe fn quantize_chunk<Q: Quantize>(x: &[f32; CHUNK], all: Option<u32>, chunk: &mut Chunk) {
    let (groups, _) = x.as_chunks::<GROUP>();
    let mut largest = [0u32; CHUNK_GROUPS];
    for (largest, group) in largest.iter_mut().zip(groups) {
        // SAFETY: passed on from the caller.
        *largest = all.unwrap_or_else(|| unsafe { Q::largest(group) });
    }
    let mut inverse = [0.0f32; CHUNK_GROUPS];
    for g in 0..CHUNK_GROUPS {
        let max = f32::from_bits(largest[g]);
        // Computed for every group, so that the divisions vectorise.
        (inverse[g], chunk.scales[g]) = (QUANT_MAX / max, max / QUANT_MAX);
    }
    for (g, group) in groups.iter().enumerate() {
        let (quants, sum) = if f32::from_bits(largest[g]) < SMALLEST {
            chunk.scales[g] = 0.0;
            ([0; GROUP], 0)
        } else if largest[g] >= f32::INFINITY.to_bits() {
            chunk.scales[g] = f32::NAN;
            ([0; GROUP], 0)
        } else {
            // SAFETY: passed on from the caller.
            unsafe { Q::quants(group, inverse[g]) }
        };
        let at = first_half(g);
        chunk.quants[at..at + HALF].copy_from_slice(&quants[..HALF]);
        chunk.quants[at + SECOND_HALF..][..HALF].copy_from_slice(&quants[HALF..]);
        let first: i16 = quants[..HALF].iter().map(|&quant| i16::from(quant)).sum();
        (chunk.halves[2 * g], chunk.halves[2 * g + 1]) = (first, sum as i16 - first);
        chunk.by_8[g] = -8 * sum;
        chunk.sums[g] = sum as f32 * chunk.scales[g];
    }
}
