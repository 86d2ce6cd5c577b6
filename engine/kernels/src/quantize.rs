//! Quantises f32 rows, and bounds the error.
//!
//! Scalar on purpose: it runs when a model is packed, and determines the bytes in the file.
//! Rounding is half away from zero (`f32::round`).

use half::{bf16, f16};

use crate::{
    channel,
    dtype::{DType, E2M1_DOUBLED, GROUP, SUPER_BYTES, SUPER_GROUPS},
    error::QuantizeError,
    q4k::{self, best_super_block},
};

/// Stores a row of `src.len()` elements as `dtype`.
///
/// - q8: scale = f16(max |w| / 127), q = round(w / scale) in −127..=127
/// - q4: scale = f16(w* / −8) where w* is the element of largest magnitude with its sign,
///   nibble = round(w / scale) + 8 in 0..=15; another scale if all 32 are exact with it, so that
///   Q4_0 of GGUF files is stored without loss
/// - q4k: see [`best_super_block`], all elements weighing the same
/// - q8c: as q8 with one scale, an f32, for the row
/// - q4c: the elements of largest magnitude are the outliers, see [`crate::quantize_q4c`]
/// - mxfp4: the element of largest magnitude gets the largest nibble with which all 32 are exact;
///   nothing is rounded
///
/// q8 and q4 divide by the scale as rounded to f16. A group whose scale rounds to zero becomes zero.
/// Padding of the last group is zero.
///
/// # Errors
/// If an element is not finite or beyond the format's range, or not exact in mxfp4; the contents of
/// `quants` and `scales` are then unspecified.
///
/// # Panics
/// If the length of `quants` or `scales` is not that of a `dtype` row, or if it is blocks.
pub fn quantize_row(
    dtype: DType,
    src: &[f32],
    quants: &mut [u8],
    scales: &mut [u8],
) -> Result<(), QuantizeError> {
    let n = src.len();
    dtype.assert_lens(n, quants.len(), scales.len());
    if let Some(index) = src.iter().position(|value| !value.is_finite()) {
        return Err(QuantizeError::NotFinite {
            index,
            value: src[index],
        });
    }
    match dtype {
        DType::F32 => {
            for (value, bytes) in src.iter().zip(quants.chunks_exact_mut(4)) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
        DType::F16 => {
            for (index, (value, bytes)) in src.iter().zip(quants.chunks_exact_mut(2)).enumerate() {
                let half = finite(f16::from_f32(*value), dtype, index, *value)?;
                bytes.copy_from_slice(&half.to_le_bytes());
            }
        }
        DType::BF16 => {
            for (index, (value, bytes)) in src.iter().zip(quants.chunks_exact_mut(2)).enumerate() {
                let half = bf16::from_f32(*value);
                if !half.is_finite() {
                    return Err(QuantizeError::OutOfRange {
                        index,
                        value: *value,
                        dtype,
                    });
                }
                bytes.copy_from_slice(&half.to_le_bytes());
            }
        }
        DType::Q8 | DType::Q4 => {
            let group_bytes = dtype.quants_bytes(GROUP);
            let groups = src.chunks(GROUP).zip(quants.chunks_exact_mut(group_bytes));
            for (g, ((group, quants), scale)) in groups.zip(scales.chunks_exact_mut(2)).enumerate()
            {
                let largest = index_of_largest(group);
                let value = group[largest];
                let half = if dtype == DType::Q8 {
                    f16::from_f32(value.abs() / 127.0)
                } else {
                    exact_q4_scale(group, value).unwrap_or(f16::from_f32(value / -8.0))
                };
                let half = finite(half, dtype, g * GROUP + largest, value)?;
                scale.copy_from_slice(&half.to_le_bytes());
                if dtype == DType::Q8 {
                    quantize_q8(group, half.to_f32(), quants);
                } else {
                    quantize_q4(group, half.to_f32(), quants);
                }
            }
        }
        DType::Q4k => return store_q4k(src, quants, scales),
        DType::Q8c => return channel::quantize_q8c(src, quants, scales),
        DType::Q4c => return channel::quantize_alone(src, quants, scales),
        DType::Mxfp4 => return store_mxfp4(src, quants, scales),
        DType::Block(_) => panic!("rows of {dtype} are not written"),
    }
    Ok(())
}

/// [`quantize_row`] for q4k, of a finite row.
fn store_q4k(src: &[f32], quants: &mut [u8], scales: &mut [u8]) -> Result<(), QuantizeError> {
    const SUPER: usize = SUPER_GROUPS * GROUP;
    let mut nibbles = [0u8; SUPER];
    let parts = quants
        .chunks_mut(SUPER / 2)
        .zip(scales.chunks_mut(SUPER_BYTES));
    for (s, (xs, (quants, scales))) in src.chunks(SUPER).zip(parts).enumerate() {
        let block = best_super_block(xs, &[1.0; SUPER][..xs.len()]).ok_or_else(|| {
            let index = index_of_largest(xs);
            QuantizeError::OutOfRange {
                index: s * SUPER + index,
                value: xs[index],
                dtype: DType::Q4k,
            }
        })?;
        let nibbles = &mut nibbles[..xs.len()];
        q4k::round(xs, &block, nibbles);
        let bound = error_bound(DType::Q4k, xs[index_of_largest(xs)]);
        if q4k::largest_error(xs, &block, nibbles) > bound
            && let Some(plain) = q4k::plain_super_block(xs)
        {
            q4k::round(xs, &plain, nibbles);
            q4k::store(nibbles, &plain, quants, scales);
        } else {
            q4k::store(nibbles, &block, quants, scales);
        }
    }
    Ok(())
}

/// [`quantize_row`] for mxfp4, of a finite row.
fn store_mxfp4(src: &[f32], quants: &mut [u8], scales: &mut [u8]) -> Result<(), QuantizeError> {
    let groups = src.chunks(GROUP).zip(quants.chunks_exact_mut(GROUP / 2));
    for (g, ((group, quants), scale)) in groups.zip(scales).enumerate() {
        let (index, dtype) = (g * GROUP, DType::Mxfp4);
        let (e, nibbles) = mxfp4_group(group).ok_or(QuantizeError::NotExact { index, dtype })?;
        *scale = e;
        for (j, byte) in quants.iter_mut().enumerate() {
            *byte = nibbles[j] | nibbles[j + GROUP / 2] << 4;
        }
    }
    Ok(())
}

/// The exponent and the nibbles of up to 32 values in mxfp4, where all of them are exact; the
/// exponent of zeros is 127.
pub fn mxfp4_group(values: &[f32]) -> Option<(u8, [u8; GROUP])> {
    let most = values
        .iter()
        .fold(0.0f64, |most, v| most.max(f64::from(v.abs())));
    let doubled = |nibble: usize| f64::from(E2M1_DOUBLED[nibble]);
    // the factor of a doubled nibble, 2^(e − 128), from which the largest is nibble `top`
    let units = (1..8).rev().map(|top| most / doubled(top));
    let mut units = units.filter_map(|unit| {
        let e = i32::try_from(unit.to_bits() >> 52).ok()? - 1023 + 128;
        let is_power = unit.to_bits() << 12 == 0;
        Some((unit, u8::try_from(e).ok().filter(|e| is_power && *e < 255)?))
    });
    if most == 0.0 {
        let mut nibbles = [0; GROUP];
        for (nibble, value) in nibbles.iter_mut().zip(values) {
            *nibble = u8::from(value.is_sign_negative()) << 3;
        }
        return Some((127, nibbles));
    }
    units.find_map(|(unit, e)| {
        let mut nibbles = [0; GROUP];
        for (nibble, &value) in nibbles.iter_mut().zip(values) {
            let steps = f64::from(value.abs()) / unit;
            let place = (0..8).position(|nibble| doubled(nibble) == steps)?;
            *nibble = place as u8 | u8::from(value.is_sign_negative()) << 3;
        }
        Some((e, nibbles))
    })
}

fn finite(half: f16, dtype: DType, index: usize, value: f32) -> Result<f16, QuantizeError> {
    if half.is_finite() {
        Ok(half)
    } else {
        Err(QuantizeError::OutOfRange {
            index,
            value,
            dtype,
        })
    }
}

/// The first element of largest magnitude; `group` is not empty.
fn index_of_largest(group: &[f32]) -> usize {
    let mut largest = 0;
    for (i, value) in group.iter().enumerate() {
        if value.abs() > group[largest].abs() {
            largest = i;
        }
    }
    largest
}

/// `round(value / scale)`, 0 for a zero scale, clamped to `low..=high`.
fn steps(value: f32, scale: f32, low: f32, high: f32) -> i8 {
    if scale == 0.0 {
        0
    } else {
        (value / scale).round().clamp(low, high) as i8
    }
}

fn quantize_q8(group: &[f32], scale: f32, quants: &mut [u8]) {
    quants.fill(0);
    for (value, quant) in group.iter().zip(quants) {
        *quant = steps(*value, scale, -127.0, 127.0) as u8;
    }
}

fn quantize_q4(group: &[f32], scale: f32, quants: &mut [u8]) {
    let nibble = |i: usize| {
        let value = group.get(i).copied().unwrap_or(0.0);
        (steps(value, scale, -8.0, 7.0) + 8) as u8
    };
    for (j, byte) in quants.iter_mut().enumerate() {
        *byte = nibble(j) | nibble(j + GROUP / 2) << 4;
    }
}

/// The scale with which every value of a group is exact in q4; `largest` is the one of largest magnitude.
fn exact_q4_scale(group: &[f32], largest: f32) -> Option<f16> {
    // −8 has no opposite; of the others the sign is that of the scale.
    let steps_of_largest = [-8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0];
    let mut scales = steps_of_largest
        .map(|k| f16::from_f32(largest / k))
        .into_iter();
    scales.find(|scale| {
        let scale = scale.to_f32();
        let exact = |v: &f32| f32::from(steps(*v, scale, -8.0, 7.0)) * scale == *v;
        group.iter().all(exact)
    })
}

/// Stores a q4 row that the caller has rounded: a quant of 0 to 15 per element, for the value
/// `(quant − 8) × scale`, and the bits of an f16 scale per group. Scales follow the quants.
///
/// # Panics
/// If a length is wrong: `out` needs [`DType::row_bytes`], `scales` one entry per group.
pub fn store_q4_row(quants: &[u8], scales: &[u16], out: &mut [u8]) {
    let n = quants.len();
    assert!(
        out.len() == DType::Q4.row_bytes(n) && scales.len() == n.div_ceil(GROUP),
        "{} bytes and {} scales for {n} elements",
        out.len(),
        scales.len()
    );
    let (to, scales_to) = out.split_at_mut(DType::Q4.quants_bytes(n));
    for (group, to) in quants.chunks(GROUP).zip(to.chunks_exact_mut(GROUP / 2)) {
        let nibble = |i: usize| group.get(i).map_or(8, |quant| quant & 15);
        for (j, byte) in to.iter_mut().enumerate() {
            *byte = nibble(j) | nibble(j + GROUP / 2) << 4;
        }
    }
    for (bytes, scale) in scales_to.chunks_exact_mut(2).zip(scales) {
        bytes.copy_from_slice(&scale.to_le_bytes());
    }
}

/// Relative error of rounding to f16, and half of its smallest step.
const F16_ROUNDING: f32 = 1.0 / 2048.0;
const F16_HALF_STEP: f32 = 1.0 / 33_554_432.0; // 2^-25
/// Relative error of rounding to bf16.
const BF16_ROUNDING: f32 = 1.0 / 256.0;
/// Allowance for the f32 arithmetic in quantising and in this bound itself.
const SLACK: f32 = 1.0 + 1.0 / 8192.0;

/// An upper bound of `|w − w'|`, where `w'` is the stored form of `w`, for every `w` of
/// [`DType::span`] elements (or of a row: the bound grows with `max_abs`) whose largest magnitude
/// is `max_abs`.
///
/// - f16, bf16: half a step at `max_abs`
/// - q8: half a scale, plus the effect of rounding the scale down to f16 at ±127 steps
/// - q4: one scale, because the end opposite to the largest element is clamped at 7 of 8 steps,
///   plus the effect of rounding the scale
/// - q8c: half a scale; q4c: what the search may clip
/// - q4k: as much, which leaves room for a search that takes larger errors of a few elements; where
///   it would take more, the ends of each group are kept
pub fn error_bound(dtype: DType, max_abs: f32) -> f32 {
    let max_abs = max_abs.abs();
    let bound = match dtype {
        DType::F32 | DType::Mxfp4 | DType::Block(_) => return 0.0,
        DType::F16 => max_abs * F16_ROUNDING + F16_HALF_STEP,
        DType::BF16 => max_abs * BF16_ROUNDING + f32::MIN_POSITIVE / 256.0,
        DType::Q8 => {
            let scale = max_abs / 127.0 * (1.0 + F16_ROUNDING) + F16_HALF_STEP;
            let cut_off = 127.0 * F16_HALF_STEP;
            SLACK * (0.5 * scale) + cut_off
        }
        DType::Q4 => {
            let cut_off = 7.0 * (max_abs / 8.0 * F16_ROUNDING + F16_HALF_STEP);
            SLACK * (max_abs / 8.0 + cut_off)
        }
        DType::Q8c | DType::Q4c => SLACK * channel::bound(dtype, max_abs),
        // 15 nibbles and one minimum of at most 63 units each
        DType::Q4k => return SLACK * (max_abs / 8.0) + 16.0 * 63.0 * F16_HALF_STEP,
    };
    // Zero is always representable, so no error exceeds the value itself.
    bound.min(max_abs)
}
