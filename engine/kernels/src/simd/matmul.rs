//! Several rows times several tokens.
//!
//! Rows are dequantised once into scratch memory. Then a tile of `ROWS × TOKENS` results
//! is computed together, so that each loaded register serves several of them. A tile
//! follows the lane rule of a single dot product: it takes one register of lanes at a
//! time, over the whole length, and leaves its 64 lanes in memory for the final tree.

use super::{lanes::Lanes, lanes::Register, walk};
use crate::{LANES, columns::Columns, dtype::GROUP, matrix::Matrix};

/// `y.row(t)[r] = row r · token t`.
///
/// # Safety
/// The CPU has the instruction set of `L`; `xs` holds `y.rows()` tokens of `m.n()`
/// elements, `m` has `y.width()` rows, and `scratch` has room for one row at least.
#[inline(always)]
pub(super) unsafe fn matmul<L: Lanes, const ROWS: usize, const TOKENS: usize>(
    m: Matrix<'_>,
    xs: &[f32],
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    let (n, rows) = (m.n(), m.rows());
    let room = scratch.len().checked_div(n).unwrap_or(ROWS);
    let mut r = 0;
    while r < rows {
        let block = if room >= ROWS && rows - r >= ROWS {
            ROWS
        } else {
            1
        };
        for k in 0..block {
            // SAFETY: the output is as long as the row; the caller guarantees the ISA.
            unsafe { walk::dequantize::<L>(m.row(r + k), &mut scratch[k * n..(k + 1) * n]) }
        }
        let weights = &scratch[..block * n];
        // SAFETY: `weights` holds `block` rows; the rest is passed on from the caller.
        unsafe {
            if block == ROWS {
                token_tiles::<L, ROWS, TOKENS>(weights, n, xs, y, r);
            } else {
                token_tiles::<L, 1, TOKENS>(weights, n, xs, y, r);
            }
        }
        r += block;
    }
}

/// Goes through all tokens for rows `r..r + ROWS`.
#[inline(always)]
unsafe fn token_tiles<L: Lanes, const ROWS: usize, const TOKENS: usize>(
    weights: &[f32],
    n: usize,
    xs: &[f32],
    y: &mut Columns<'_, f32>,
    r: usize,
) {
    let tokens = y.rows();
    let mut t = 0;
    while t < tokens {
        // SAFETY: rows and tokens of the tile are in bounds; ISA passed on.
        unsafe {
            if tokens - t >= TOKENS {
                tile::<L, ROWS, TOKENS>(weights, n, &xs[t * n..(t + TOKENS) * n], y, r, t);
                t += TOKENS;
            } else {
                tile::<L, ROWS, 1>(weights, n, &xs[t * n..(t + 1) * n], y, r, t);
                t += 1;
            }
        }
    }
}

/// Computes one tile. `weights` is `ROWS × n`, `xs` is `TOKENS × n`.
#[inline(always)]
unsafe fn tile<L: Lanes, const ROWS: usize, const TOKENS: usize>(
    weights: &[f32],
    n: usize,
    xs: &[f32],
    y: &mut Columns<'_, f32>,
    r: usize,
    t: usize,
) {
    let full = n / LANES * LANES;
    let rest = n - full;
    let mut padded_weights = [[0.0f32; LANES]; ROWS];
    let mut padded_xs = [[0.0f32; LANES]; TOKENS];
    if rest > 0 {
        for (padded, row) in padded_weights.iter_mut().zip(weights.chunks_exact(n)) {
            padded[..rest].copy_from_slice(&row[full..]);
        }
        for (padded, x) in padded_xs.iter_mut().zip(xs.chunks_exact(n)) {
            padded[..rest].copy_from_slice(&x[full..]);
        }
    }
    let mut sums = [[[0.0f32; LANES]; TOKENS]; ROWS];
    // SAFETY: all offsets are below `ROWS * n` and `TOKENS * n`, or inside the padded
    // chunks; the caller guarantees the ISA.
    unsafe {
        let (w, x) = (weights.as_ptr(), xs.as_ptr());
        let mut lane = 0;
        while lane < LANES {
            let mut sum = [[L::Register::zero(); TOKENS]; ROWS];
            let mut k = lane;
            while k < full {
                add_products(&mut sum, w.add(k), x.add(k), n);
                k += LANES;
            }
            if rest > 0 {
                let (w, x) = (padded_weights.as_ptr(), padded_xs.as_ptr());
                add_products(
                    &mut sum,
                    w.cast::<f32>().add(lane),
                    x.cast::<f32>().add(lane),
                    LANES,
                );
            }
            for (sums, sum) in sums.iter_mut().zip(sum) {
                for (sums, sum) in sums.iter_mut().zip(sum) {
                    sum.store(sums.as_mut_ptr().add(lane));
                }
            }
            lane += L::Register::WIDTH;
        }
    }
    for j in 0..TOKENS {
        let out = &mut y.row_mut(t + j)[r..r + ROWS];
        for (out, sums) in out.iter_mut().zip(&sums) {
            let lanes = sums[j].as_ptr().cast::<u8>();
            // SAFETY: `lanes` is 64 f32 long.
            *out = unsafe { L::reduce(L::load_f32(lanes), L::load_f32(lanes.add(4 * GROUP))) };
        }
    }
}

/// `sum[i][j] = fma(w[i], x[j], sum[i][j])` for one register of lanes; rows of `w` and
/// tokens of `x` lie `stride` elements apart.
#[inline(always)]
unsafe fn add_products<R: Register, const ROWS: usize, const TOKENS: usize>(
    sum: &mut [[R; TOKENS]; ROWS],
    w: *const f32,
    x: *const f32,
    stride: usize,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut weights = [R::zero(); ROWS];
        for (i, weight) in weights.iter_mut().enumerate() {
            *weight = R::load(w.add(i * stride));
        }
        for j in 0..TOKENS {
            let x = R::load(x.add(j * stride));
            for i in 0..ROWS {
                sum[i][j] = weights[i].mul_add(x, sum[i][j]);
            }
        }
    }
}
