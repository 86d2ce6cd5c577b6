//! Rows with one scale: what lies behind their quants, the outliers of q4c, and how rows are rounded
//! to these formats.
//!
//! NPUs multiply integers of a whole row by those of a whole token and know one scale for each. At
//! four bits a few weights are too large or too important for that: they are left out of the
//! nibbles (nibble 8 stands for zero) and stored in 8 bits with a scale of their own (PowerInfer-2
//! §7.6). In a matrix they are the same input channels in every row, so that they are a small dense
//! product on an NPU.
//!
//! ```text
//! CHANNEL RULE    y = s·a · Σ q·x                     q8c
//!                 y = s·a · Σ q·x + o·a · Σ p·x       q4c, p and x of the outliers
//!
//! s, o  scales of the row        a  scale of the token        q, p, x  integers
//! ```
//!
//! The sums are exact integers of 32 bits, so any order gives them: |Σ q·x| ≤ 128 · 127 · n < 2³¹ for
//! rows of up to [`LONGEST`] elements. A sum as f32, rounded, is multiplied by the rounded product of
//! both scales; the two products of q4c are added.

use crate::{
    dtype::{CHANNEL_SCALE, DType, GROUP, LONGEST, outliers},
    error::QuantizeError,
    row::Row,
};

/// An f32 in little-endian bytes; 0 if there is none, as in a row without elements.
#[inline(always)]
fn float(bytes: &[u8], at: usize) -> f32 {
    match bytes.get(at..at + CHANNEL_SCALE) {
        Some(&[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        _ => 0.0,
    }
}

/// The scale of a row of q8c, or of the nibbles of one of q4c.
#[inline(always)]
pub(crate) fn scale_of(row: Row<'_>) -> f32 {
    float(row.scales(), 0)
}

/// The outliers of a q4c row. A place that is not used has the quant 0.
#[derive(Clone, Copy, Debug)]
pub struct Outliers<'a> {
    /// What a quant is multiplied by.
    pub scale: f32,
    /// Integers of 8 bits.
    pub quants: &'a [u8],
    /// The elements that they stand for, as many, in little-endian order.
    pub channels: &'a [[u8; 2]],
}

impl<'a> Outliers<'a> {
    /// Those of a row; none in other formats.
    #[inline(always)]
    pub fn of(row: Row<'a>) -> Outliers<'a> {
        let (count, scales) = match row.dtype() {
            DType::Q4c => (outliers(row.len()), row.scales()),
            _ => (0, &[][..]),
        };
        let rest = scales.get(2 * CHANNEL_SCALE..).unwrap_or_default();
        let (quants, channels) = rest.split_at(count);
        Outliers {
            scale: float(scales, CHANNEL_SCALE),
            quants,
            channels: channels.as_chunks().0,
        }
    }

    /// Quants and elements. Elements beyond the row stand in no row that was packed.
    #[inline(always)]
    pub fn each(self) -> impl Iterator<Item = (i8, usize)> {
        let channels = self.channels.iter();
        let channels = channels.map(|&channel| usize::from(u16::from_le_bytes(channel)));
        self.quants.iter().map(|&quant| quant as i8).zip(channels)
    }

    /// Adds them to the decoded elements of the row from `first` on.
    #[inline(always)]
    pub(crate) fn patch(self, first: usize, weights: &mut [f32]) {
        for (quant, channel) in self.each() {
            let place = channel.checked_sub(first);
            if let Some(weight) = place.and_then(|place| weights.get_mut(place)) {
                *weight += f32::from(quant) * self.scale;
            }
        }
    }
}

/// The elements of largest `importance`, as many as a q4c row of that length has outliers, in ascending
/// order.
pub fn outlier_channels(importance: &[f32]) -> Vec<u16> {
    let n = importance.len().min(1 << 16);
    let mut order: Vec<u16> = (0..n).map(|i| i as u16).collect();
    order.sort_by(|&a, &b| {
        let of = |i: u16| importance[usize::from(i)];
        of(b).total_cmp(&of(a)).then(a.cmp(&b))
    });
    order.truncate(outliers(importance.len()));
    order.sort_unstable();
    order
}

/// Stores a row in q4c with its outliers at these elements, which ascend.
///
/// The scale of the nibbles is the one with the least squared error of `CANDIDATES`; that of the
/// outliers is their largest magnitude / 127.
///
/// # Errors
/// An element is not finite, or the row is longer than [`LONGEST`].
///
/// # Panics
/// If there are more channels than [`outliers`] of the row, one is beyond it, or the length of `quants`
/// or `scales` is not that of such a row.
pub fn quantize_q4c(
    src: &[f32],
    channels: &[u16],
    quants: &mut [u8],
    scales: &mut [u8],
) -> Result<(), QuantizeError> {
    let (dtype, n) = (DType::Q4c, src.len());
    dtype.assert_lens(n, quants.len(), scales.len());
    assert!(
        channels.len() <= outliers(n) && channels.iter().all(|&c| usize::from(c) < n),
        "{} outliers in {n} elements",
        channels.len()
    );
    check(src, dtype)?;
    let mut dense = src.to_vec();
    let taken: Vec<f32> = channels
        .iter()
        .map(|&channel| std::mem::take(&mut dense[usize::from(channel)]))
        .collect();
    let scale = best_scale(&dense);
    let of_outliers = largest(&taken) / 127.0;
    let row = ChannelRow {
        codes: &dense
            .iter()
            .map(|&w| steps(w, scale, -8.0, 7.0))
            .collect::<Vec<_>>(),
        scale,
        outliers: &(taken.iter())
            .map(|&w| steps(w, of_outliers, -127.0, 127.0))
            .collect::<Vec<_>>(),
        outlier_scale: of_outliers,
        channels,
    };
    row.store(quants, scales);
    Ok(())
}

/// A q4c row that the caller has rounded.
#[derive(Clone, Copy, Debug)]
pub struct ChannelRow<'a> {
    /// What nibbles stand for, −8 to 7; 0 at outliers.
    pub codes: &'a [i8],
    /// What they are multiplied by.
    pub scale: f32,
    /// The quants of the outliers.
    pub outliers: &'a [i8],
    /// What these are multiplied by.
    pub outlier_scale: f32,
    /// The elements that they stand for, ascending.
    pub channels: &'a [u16],
}

impl ChannelRow<'_> {
    /// Stores the row. Places for outliers that are not used become 0.
    ///
    /// # Panics
    /// If the length of `quants` or `scales` is not that of such a row.
    pub fn store(&self, quants: &mut [u8], scales: &mut [u8]) {
        let n = self.codes.len();
        DType::Q4c.assert_lens(n, quants.len(), scales.len());
        for (group, to) in (self.codes.chunks(GROUP)).zip(quants.chunks_exact_mut(GROUP / 2)) {
            let nibble = |i: usize| {
                group
                    .get(i)
                    .map_or(8, |code| code.wrapping_add(8) as u8 & 15)
            };
            for (j, byte) in to.iter_mut().enumerate() {
                *byte = nibble(j) | nibble(j + GROUP / 2) << 4;
            }
        }
        scales.fill(0);
        let (floats, rest) = scales.split_at_mut(2 * CHANNEL_SCALE);
        floats[..CHANNEL_SCALE].copy_from_slice(&self.scale.to_le_bytes());
        floats[CHANNEL_SCALE..].copy_from_slice(&self.outlier_scale.to_le_bytes());
        let (to, channels_to) = rest.split_at_mut(outliers(n));
        for (to, &quant) in to.iter_mut().zip(self.outliers) {
            *to = quant as u8;
        }
        for (to, channel) in channels_to.as_chunks_mut().0.iter_mut().zip(self.channels) {
            *to = channel.to_le_bytes();
        }
    }
}

/// [`crate::quantize_row`] for q4c: the elements of largest magnitude are the outliers.
pub(crate) fn quantize_alone(
    src: &[f32],
    quants: &mut [u8],
    scales: &mut [u8],
) -> Result<(), QuantizeError> {
    let magnitudes: Vec<f32> = src.iter().map(|w| w.abs()).collect();
    quantize_q4c(src, &outlier_channels(&magnitudes), quants, scales)
}

/// [`crate::quantize_row`] for q8c, of a finite row: scale = max |w| / 127.
pub(crate) fn quantize_q8c(
    src: &[f32],
    quants: &mut [u8],
    scales: &mut [u8],
) -> Result<(), QuantizeError> {
    check(src, DType::Q8c)?;
    let scale = largest(src) / 127.0;
    scales.copy_from_slice(&scale.to_le_bytes());
    quants.fill(0);
    for (quant, &w) in quants.iter_mut().zip(src) {
        *quant = steps(w, scale, -127.0, 127.0) as u8;
    }
    Ok(())
}

/// Whether a row can be stored with one scale.
fn check(src: &[f32], dtype: DType) -> Result<(), QuantizeError> {
    if src.len() > LONGEST {
        return Err(QuantizeError::TooLong {
            len: src.len(),
            dtype,
        });
    }
    match src.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(QuantizeError::NotFinite {
            index,
            value: src[index],
        }),
        None => Ok(()),
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, w| most.max(w.abs()))
}

/// `round(value / scale)`, 0 for a zero scale, clamped to `low..=high`.
fn steps(value: f32, scale: f32, low: f32, high: f32) -> i8 {
    match scale == 0.0 {
        true => 0,
        false => (value / scale).round().clamp(low, high) as i8,
    }
}

/// Steps of the element of largest magnitude, as candidates of the search: −8 has no opposite, so a
/// scale has a sign, and more steps clip that element.
const CANDIDATES: [f32; 8] = [-8.0, -8.8, -9.6, -10.4, 7.0, 7.7, 8.4, 9.1];

/// The scale of nibbles with the least squared error among [`CANDIDATES`].
fn best_scale(dense: &[f32]) -> f32 {
    let most = dense
        .iter()
        .fold(0.0f32, |most, &w| match w.abs() > most.abs() {
            true => w,
            false => most,
        });
    let error = |scale: f32| {
        let errors = dense.iter().map(|&w| {
            let error = f32::from(steps(w, scale, -8.0, 7.0)) * scale - w;
            f64::from(error * error)
        });
        errors.sum::<f64>()
    };
    let scales = CANDIDATES.map(|steps| most / steps);
    let best = scales.into_iter().map(|scale| (error(scale), scale));
    best.min_by(|a, b| a.0.total_cmp(&b.0))
        .map_or(0.0, |best| best.1)
}

/// An upper bound of the error of an element, as [`crate::error_bound`] says.
pub(crate) fn bound(dtype: DType, max_abs: f32) -> f32 {
    // a scale below the smallest normal number has few bits
    const TINY: f32 = 127.0 * f32::MIN_POSITIVE / 256.0;
    match dtype {
        DType::Q8c => max_abs / 254.0 + TINY,
        // clipped from 10.4 steps to 7, if the element of largest magnitude has the other sign
        _ => max_abs * (3.4 / 10.4) + TINY,
    }
}
