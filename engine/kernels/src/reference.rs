//! The kernels in plain scalar Rust, one element at a time. They define what every
//! other kernel must return bit for bit, and they are the path of a CPU without any
//! supported vector unit. They stay naive: an optimised oracle proves nothing.

use half::{bf16, f16};

use crate::{
    LANES,
    columns::Columns,
    dtype::{DType, GROUP},
    matrix::Matrix,
    row::Row,
};

/// Element `i` of a row as f32.
pub(crate) fn value(row: Row<'_>, i: usize) -> f32 {
    let quants = row.quants();
    let half_bits = |at: usize| u16::from_le_bytes([quants[at], quants[at + 1]]);
    match row.dtype() {
        DType::F32 => {
            let at = 4 * i;
            f32::from_le_bytes([quants[at], quants[at + 1], quants[at + 2], quants[at + 3]])
        }
        DType::F16 => f16::from_bits(half_bits(2 * i)).to_f32(),
        DType::BF16 => bf16::from_bits(half_bits(2 * i)).to_f32(),
        DType::Q8 => f32::from(quants[i] as i8) * scale(row, i / GROUP),
        DType::Q4 => {
            let (group, lane) = (i / GROUP, i % GROUP);
            let byte = quants[group * (GROUP / 2) + lane % (GROUP / 2)];
            let nibble = if lane < GROUP / 2 {
                byte & 15
            } else {
                byte >> 4
            };
            f32::from(nibble as i8 - 8) * scale(row, group)
        }
    }
}

fn scale(row: Row<'_>, group: usize) -> f32 {
    let scales = row.scales();
    f16::from_le_bytes([scales[2 * group], scales[2 * group + 1]]).to_f32()
}

/// The fixed binary tree that folds the lanes into one sum.
pub(crate) fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            lanes[j] += lanes[j + width];
        }
        width /= 2;
    }
    lanes[0]
}

pub(crate) fn dot(row: Row<'_>, x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for i in 0..row.len().next_multiple_of(LANES) {
        let (w, x) = if i < row.len() {
            (value(row, i), x[i])
        } else {
            (0.0, 0.0)
        };
        lanes[i % LANES] = w.mul_add(x, lanes[i % LANES]);
    }
    reduce(lanes)
}

pub(crate) fn axpy(a: f32, row: Row<'_>, y: &mut [f32]) {
    for (i, y) in y.iter_mut().enumerate() {
        *y = a.mul_add(value(row, i), *y);
    }
}

pub(crate) fn dequantize(row: Row<'_>, out: &mut [f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = value(row, i);
    }
}

pub(crate) fn matvec(m: Matrix<'_>, x: &[f32], y: &mut [f32]) {
    for (r, y) in y.iter_mut().enumerate() {
        *y = dot(m.row(r), x);
    }
}

pub(crate) fn matmul(m: Matrix<'_>, xs: &[f32], y: &mut Columns<'_, f32>, scratch: &mut [f32]) {
    let n = m.n();
    let weights = &mut scratch[..n];
    for r in 0..m.rows() {
        dequantize(m.row(r), weights);
        for t in 0..y.rows() {
            y.row_mut(t)[r] = dot(Row::f32(weights), &xs[t * n..(t + 1) * n]);
        }
    }
}

pub(crate) fn f32_to_f16_bytes(src: &[f32], dst: &mut [u8]) {
    for (value, bytes) in src.iter().zip(dst.chunks_exact_mut(2)) {
        bytes.copy_from_slice(&f16::from_f32(*value).to_le_bytes());
    }
}
