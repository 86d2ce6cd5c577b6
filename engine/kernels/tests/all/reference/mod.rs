//! The row kernels one element at a time: the oracle. It uses nothing of the crate but
//! the bytes of a row, and stays naive: an optimised oracle proves nothing.

// Each test binary uses its own part.

use emberflow_kernels::{DType, GROUP, LANES, Row};
use half::{bf16, f16};

/// Element `i` of a row.
pub fn value(row: Row<'_>, i: usize) -> f32 {
    let quants = row.quants();
    let half_bits = |at: usize| u16::from_le_bytes([quants[at], quants[at + 1]]);
    match row.dtype() {
        DType::F32 => f32::from_le_bytes(quants[4 * i..4 * i + 4].try_into().unwrap()),
        DType::F16 => f16::from_bits(half_bits(2 * i)).to_f32_const(),
        DType::BF16 => bf16::from_bits(half_bits(2 * i)).to_f32_const(),
        DType::Q8 | DType::Q4 | DType::Mxfp4 => quant(row, i) * scale(row, i / GROUP),
        DType::Q4k => {
            let (scale, min) = six_bits(row, i / GROUP);
            quant(row, i).mul_add(scale, -min)
        }
        DType::Q8c => quant(row, i) * float(row, 0),
        DType::Q4c => {
            let its = outliers(row).into_iter().filter(|&(_, at)| at == i);
            its.fold(quant(row, i) * float(row, 0), |sum, (p, _)| {
                sum + p as f32 * float(row, 4)
            })
        }
        DType::Block(_) => unreachable!("blocks have their own oracle"),
    }
}

/// An f32 among the scales.
fn float(row: Row<'_>, at: usize) -> f32 {
    match row.is_empty() {
        true => 0.0,
        false => f32::from_le_bytes(row.scales()[at..at + 4].try_into().unwrap()),
    }
}

/// Quants and elements of the outliers of a q4c row.
pub fn outliers(row: Row<'_>) -> Vec<(i32, usize)> {
    let count = row.len().div_ceil(64).min(1024);
    let (quants, elements) = row.scales()[8..].split_at(count);
    let element = |i: usize| u16::from_le_bytes([elements[2 * i], elements[2 * i + 1]]);
    (0..count)
        .map(|i| (i32::from(quants[i] as i8), usize::from(element(i))))
        .collect()
}

/// Element `i` of a quantised row before it is scaled.
pub fn quant(row: Row<'_>, i: usize) -> f32 {
    if matches!(row.dtype(), DType::Q8 | DType::Q8c) {
        return f32::from(row.quants()[i] as i8);
    }
    let (group, lane) = (i / GROUP, i % GROUP);
    let byte = row.quants()[group * (GROUP / 2) + lane % (GROUP / 2)];
    let nibble = if lane < GROUP / 2 {
        byte & 15
    } else {
        byte >> 4
    };
    if row.dtype() == DType::Mxfp4 {
        // sign, exponent and mantissa, doubled
        let (exponent, mantissa) = (nibble >> 1 & 3, f32::from(nibble & 1));
        let magnitude = match exponent {
            0 => mantissa,
            _ => (2.0 + mantissa) * f32::from(1u8 << (exponent - 1)),
        };
        return if nibble & 8 != 0 && magnitude > 0.0 {
            -magnitude
        } else {
            magnitude
        };
    }
    if row.dtype() == DType::Q4k {
        return f32::from(nibble);
    }
    f32::from(nibble as i8 - 8)
}

/// The scale and the minimum of a group of q4k, bit by bit.
fn six_bits(row: Row<'_>, group: usize) -> (f32, f32) {
    let block = &row.scales()[group / 8 * 16..];
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32_const();
    let number = |first: usize| {
        let bit = |i: usize| block[4 + i / 8] >> (i % 8) & 1;
        (0..6).fold(0.0, |sum, i| sum + f32::from(bit(first + i) << i))
    };
    let first = 12 * (group % 8);
    (half(0) * number(first), half(2) * number(first + 6))
}

fn scale(row: Row<'_>, group: usize) -> f32 {
    let scales = row.scales();
    if row.dtype() == DType::Mxfp4 {
        return match scales[group] {
            255 => f32::NAN,
            e => 2f64.powi(i32::from(e) - 128) as f32,
        };
    }
    f16::from_le_bytes([scales[2 * group], scales[2 * group + 1]]).to_f32_const()
}

/// The fixed binary tree that folds the lanes.
pub fn reduce(mut lanes: [f32; LANES]) -> f32 {
    for width in [32, 16, 8, 4, 2, 1] {
        for j in 0..width {
            lanes[j] += lanes[j + width];
        }
    }
    lanes[0]
}

pub fn dot(row: Row<'_>, x: &[f32]) -> f32 {
    let n = x.len();
    let mut lanes = [0.0f32; LANES];
    for i in 0..n.next_multiple_of(LANES) {
        let (w, x) = if i < n {
            (value(row, i), x[i])
        } else {
            (0.0, 0.0)
        };
        lanes[i % LANES] = w.mul_add(x, lanes[i % LANES]);
    }
    reduce(lanes)
}

pub fn axpy(a: f32, row: Row<'_>, y: &mut [f32]) {
    for (i, y) in y.iter_mut().enumerate() {
        *y = a.mul_add(value(row, i), *y);
    }
}

/// `axpy` with the scale taken into the factor, as the sums of several rows do.
pub fn axpy_scaled(a: f32, row: Row<'_>, y: &mut [f32]) {
    for (i, y) in y.iter_mut().enumerate() {
        let (a, quant) = match row.dtype() {
            DType::Q8 | DType::Q4 | DType::Mxfp4 => (a * scale(row, i / GROUP), quant(row, i)),
            DType::Q8c => (a * float(row, 0), quant(row, i)),
            _ => (a, value(row, i)),
        };
        *y = a.mul_add(quant, *y);
    }
}

pub fn dequantize(row: Row<'_>) -> Vec<f32> {
    (0..row.len()).map(|i| value(row, i)).collect()
}

pub fn f16_bytes(src: &[f32]) -> Vec<u8> {
    src.iter()
        .flat_map(|&value| f16::from_f32_const(value).to_le_bytes())
        .collect()
}

/// Sum of all elements by the lane rule.
pub fn lane_sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (i, value) in x.iter().enumerate() {
        lanes[i % LANES] += value;
    }
    reduce(lanes)
}

pub fn rmsnorm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let scale = 1.0 / (dot(Row::f32(x), x) / x.len() as f32 + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

pub fn layernorm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32) -> Vec<f32> {
    let mean = lane_sum(x) / x.len() as f32;
    let centred: Vec<f32> = x.iter().map(|x| x - mean).collect();
    let scale = 1.0 / (dot(Row::f32(&centred), &centred) / x.len() as f32 + eps).sqrt();
    let scaled = centred.iter().map(|c| c * scale);
    (scaled.zip(weight).zip(bias))
        .map(|((c, w), b)| c.mul_add(*w, *b))
        .collect()
}

pub fn softmax(x: &[f32]) -> Vec<f32> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f32> = x
        .iter()
        .map(|x| emberflow_kernels::math::exp(x - max))
        .collect();
    let scale = 1.0 / lane_sum(&e);
    e.iter().map(|e| e * scale).collect()
}

pub fn rope_rotate_half(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for i in 0..half {
        let (a, b) = (x[i], x[i + half]);
        x[i] = a.mul_add(cos[i], -(b * sin[i]));
        x[i + half] = b.mul_add(cos[i], a * sin[i]);
    }
}

/// Chains of an integer dot product.
pub const CHAINS: usize = 16;

/// One token of activations as integers: a quant for each element, a scale for each group.
pub struct Quantised {
    pub quants: Vec<i32>,
    pub scales: Vec<f32>,
    /// Elements beyond ±127, and by how much.
    pub excess: Vec<(usize, i32)>,
}

impl Quantised {
    /// With one scale for all groups if `per_token`, that of the largest element if `pruned`.
    pub fn new(x: &[f32], per_token: bool, pruned: bool) -> Quantised {
        let (mut quants, mut scales) = (Vec::new(), Vec::new());
        let mut order: Vec<usize> = (0..x.len()).collect();
        order.sort_by(|&a, &b| x[b].abs().total_cmp(&x[a].abs()));
        for group in x.chunks(GROUP) {
            let all = group;
            let group = if per_token { x } else { group };
            let mut largest = group.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            if per_token && !pruned && largest >= 2f32.powi(-100) {
                let fifth = order.get(4).map_or(0.0, |&i| x[i].abs());
                largest = fifth.max(largest / 65536.0).max(2f32.powi(-100));
            }
            if group.iter().any(|x| !x.is_finite()) {
                scales.push(f32::NAN);
                quants.extend(all.iter().map(|_| 0));
            } else if largest < 2f32.powi(-100) {
                scales.push(0.0);
                quants.extend(all.iter().map(|_| 0));
            } else {
                scales.push(largest / 127.0);
                let inverse = 127.0 / largest;
                quants.extend(all.iter().map(|x| (x * inverse).round_ties_even() as i32));
            }
        }
        let first = order.into_iter().take(4);
        let excess = first.map(|i| (i, quants[i] - quants[i].clamp(-127, 127)));
        let excess: Vec<_> = excess.filter(|&(_, steps)| steps != 0).collect();
        for quant in &mut quants {
            *quant = (*quant).clamp(-127, 127);
        }
        Quantised {
            quants,
            scales,
            excess,
        }
    }
}

/// The integers of a row with one scale: of all elements, and of its outliers.
pub fn channel_sums(row: Row<'_>, x: &Quantised) -> [i32; 2] {
    let all = (0..row.len()).map(|i| quant(row, i) as i32 * x.quants[i]);
    let of_outliers = match row.dtype() {
        DType::Q4c => outliers(row),
        _ => Vec::new(),
    };
    let of_outliers = of_outliers.into_iter();
    let more = of_outliers.map(|(p, i)| p * x.quants.get(i).unwrap_or(&0));
    [all.sum(), more.sum()]
}

/// Sum of `row · x` by the rule of the row's format.
pub fn dot_q(row: Row<'_>, x: &Quantised) -> f32 {
    let product = clipped(row, x);
    if x.excess.is_empty() {
        return product;
    }
    let by = x.scales[0];
    let more = x.excess.iter().fold(0.0, |sum, &(i, steps)| {
        sum + value(row, i) * (steps as f32 * by)
    });
    product + more
}

/// The part of [`dot_q`] without excess.
fn clipped(row: Row<'_>, x: &Quantised) -> f32 {
    if row.dtype().is_per_channel() {
        let token = x.scales.first().copied().unwrap_or(0.0);
        let [all, more] = channel_sums(row, x);
        let product = all as f32 * (float(row, 0) * token);
        return match row.dtype() {
            DType::Q4c => product + more as f32 * (float(row, 4) * token),
            _ => product,
        };
    }
    let mut chains = [0.0f32; CHAINS];
    for g in 0..row.len().div_ceil(GROUP) {
        let elements = g * GROUP..((g + 1) * GROUP).min(row.len());
        let sum: i32 = elements.map(|i| quant(row, i) as i32 * x.quants[i]).sum();
        let (scale, min) = match row.dtype() {
            DType::Q4k => six_bits(row, g),
            _ => (scale(row, g), 0.0),
        };
        let chain = &mut chains[g % CHAINS];
        *chain = (sum as f32).mul_add(scale * x.scales[g], *chain);
        if row.dtype() == DType::Q4k {
            let group = &x.quants[g * GROUP..((g + 1) * GROUP).min(row.len())];
            let all = group.iter().sum::<i32>() as f32 * x.scales[g];
            *chain = (-min).mul_add(all, *chain);
        }
    }
    for width in [8, 4, 2, 1] {
        for j in 0..width {
            chains[j] += chains[j + width];
        }
    }
    chains[0]
}

/// Makes the random scales of a row some that a test can use: without infinities and NaN if `finite`,
/// outliers at any elements, of which some are beyond the row.
pub fn tame(dtype: DType, n: usize, finite: bool, scales: &mut [u8]) {
    let (width, scales) = match dtype {
        DType::Mxfp4 => (1, scales),
        DType::Q8c => (4, scales),
        DType::Q4c => {
            let (floats, rest) = scales.split_at_mut(8);
            let count = n.div_ceil(64).min(1024);
            for element in rest[count..].chunks_exact_mut(2) {
                let any = usize::from(u16::from_le_bytes([element[0], element[1]]));
                element.copy_from_slice(&((any % (n + n / 8 + 1)) as u16).to_le_bytes());
            }
            (4, floats)
        }
        _ => (2, scales),
    };
    if finite {
        let scales = scales.chunks_exact_mut(width);
        scales.for_each(|scale| scale[width - 1] &= 0xbf);
    }
}
