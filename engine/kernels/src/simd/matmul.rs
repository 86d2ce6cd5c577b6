//! Several rows times several tokens.
//!
//! `ROWS` rows are dequantised into scratch memory and multiplied with `SPAN` tokens at a time. The
//! 64 lane accumulators of each of these dot products are kept in memory, so the length can be
//! split into blocks that fit in the L1 cache; a tile of `ROWS × TOKENS` accumulators is in
//! registers while it processes a block. Every lane adds its products in the order of a single dot
//! product.

use super::{
    lanes::{Lanes, Register},
    walk,
};
use crate::{LANES, columns::Columns, dtype::GROUP, matrix::Matrix};

/// Tokens whose lane accumulators are kept at once: 16 KiB for four rows.
const SPAN: usize = 16;

/// Chunks of 64 elements per block: 4 KiB of each row and token.
const BLOCK: usize = 16;

/// Lane accumulators of `ROWS × SPAN` dot products.
type Sums<const ROWS: usize> = [[[f32; LANES]; SPAN]; ROWS];

/// Equally long vectors that start `stride` elements apart.
#[derive(Clone, Copy)]
struct Vectors {
    base: *const f32,
    stride: usize,
}

impl Vectors {
    /// The same vectors from element `k` of vector `first` on.
    ///
    /// # Safety
    /// That element lies in the allocation of the vectors, or is its end.
    #[inline(always)]
    unsafe fn from(self, first: usize, k: usize) -> Vectors {
        // SAFETY: the caller stays in bounds.
        let base = unsafe { self.base.add(first * self.stride + k) };
        Vectors { base, ..self }
    }
}

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
        let mut t = 0;
        while t < y.rows() {
            let span = SPAN.min(y.rows() - t);
            let xs = &xs[t * n..(t + span) * n];
            // SAFETY: `weights` holds `block` rows and `xs` holds `span` tokens.
            unsafe {
                if block == ROWS {
                    products::<L, ROWS, TOKENS>(weights, xs, n, span, y, r, t);
                } else {
                    products::<L, 1, TOKENS>(weights, xs, n, span, y, r, t);
                }
            }
            t += span;
        }
        r += block;
    }
}

/// All products of the rows in `weights` and the `span` tokens in `xs`, written from row
/// `r` and token `t` of the result on.
///
/// # Safety
/// The CPU has the instruction set of `L`; `span <= SPAN`, `weights` is `ROWS × n`, and `xs`
/// is `span × n`.
#[inline(always)]
unsafe fn products<L: Lanes, const ROWS: usize, const TOKENS: usize>(
    weights: &[f32],
    xs: &[f32],
    n: usize,
    span: usize,
    y: &mut Columns<'_, f32>,
    r: usize,
    t: usize,
) {
    let mut sums: Sums<ROWS> = [[[0.0; LANES]; SPAN]; ROWS];
    let chunks = n / LANES;
    let w = Vectors {
        base: weights.as_ptr(),
        stride: n,
    };
    let x = Vectors {
        base: xs.as_ptr(),
        stride: n,
    };
    let mut done = 0;
    while done < chunks {
        let block = BLOCK.min(chunks - done);
        // SAFETY: all rows and tokens have the elements of these chunks.
        unsafe {
            let (w, x) = (w.from(0, done * LANES), x.from(0, done * LANES));
            tiles::<L, ROWS, TOKENS>(&mut sums, w, x, span, block);
        }
        done += block;
    }
    let rest = n % LANES;
    if rest > 0 {
        let mut last_w = [[0.0f32; LANES]; ROWS];
        let mut last_x = [[0.0f32; LANES]; SPAN];
        for (last, row) in last_w.iter_mut().zip(weights.chunks_exact(n)) {
            last[..rest].copy_from_slice(&row[n - rest..]);
        }
        for (last, x) in last_x.iter_mut().zip(xs.chunks_exact(n)) {
            last[..rest].copy_from_slice(&x[n - rest..]);
        }
        let w = Vectors {
            base: last_w.as_ptr().cast(),
            stride: LANES,
        };
        let x = Vectors {
            base: last_x.as_ptr().cast(),
            stride: LANES,
        };
        // SAFETY: the padded copies hold one chunk of every row and token.
        unsafe { tiles::<L, ROWS, TOKENS>(&mut sums, w, x, span, 1) }
    }
    for j in 0..span {
        let out = &mut y.row_mut(t + j)[r..r + ROWS];
        for (out, sums) in out.iter_mut().zip(&sums) {
            let lanes = sums[j].as_ptr().cast::<u8>();
            // SAFETY: `lanes` is two groups of f32 long.
            *out = unsafe { L::reduce(L::load_f32(lanes), L::load_f32(lanes.add(4 * GROUP))) };
        }
    }
}

/// Adds the products of `chunks` chunks to the sums of all rows and `span` tokens.
///
/// # Safety
/// The CPU has the instruction set of `L`; `w` leads to `ROWS` vectors and `x` to `span`,
/// all valid for reads of `64 * chunks` elements.
#[inline(always)]
unsafe fn tiles<L: Lanes, const ROWS: usize, const TOKENS: usize>(
    sums: &mut Sums<ROWS>,
    w: Vectors,
    x: Vectors,
    span: usize,
    chunks: usize,
) {
    let mut j = 0;
    // SAFETY: the tokens of each tile are below `span`; the rest is the caller's.
    unsafe {
        while j + TOKENS <= span {
            tile::<L::Register, ROWS, TOKENS>(sums, j, w, x.from(j, 0), chunks);
            j += TOKENS;
        }
        while j < span {
            tile::<L::Register, ROWS, 1>(sums, j, w, x.from(j, 0), chunks);
            j += 1;
        }
    }
}

/// Adds the products of `chunks` chunks to the sums of all rows and `TOKENS` tokens from
/// `first` on, one register of lanes after the other.
///
/// # Safety
/// The CPU has the instruction set of `R`; `w` leads to `ROWS` vectors and `x` to `TOKENS`,
/// all valid for reads of `64 * chunks` elements.
#[inline(always)]
unsafe fn tile<R: Register, const ROWS: usize, const TOKENS: usize>(
    sums: &mut Sums<ROWS>,
    first: usize,
    w: Vectors,
    x: Vectors,
    chunks: usize,
) {
    for lane in (0..LANES).step_by(R::WIDTH) {
        // SAFETY: `lane + WIDTH <= 64`, so all accesses stay in a chunk; the caller
        // guarantees the chunks, the tokens and the ISA.
        unsafe {
            let mut sum = [[R::zero(); TOKENS]; ROWS];
            for (sum, sums) in sum.iter_mut().zip(sums.iter()) {
                for (sum, sums) in sum.iter_mut().zip(&sums[first..first + TOKENS]) {
                    *sum = R::load(sums.as_ptr().add(lane));
                }
            }
            for chunk in 0..chunks {
                let k = chunk * LANES + lane;
                let mut weights = [R::zero(); ROWS];
                for (i, weight) in weights.iter_mut().enumerate() {
                    *weight = R::load(w.from(i, k).base);
                }
                for j in 0..TOKENS {
                    let x = R::load(x.from(j, k).base);
                    for (sum, weight) in sum.iter_mut().zip(weights) {
                        sum[j] = weight.mul_add(x, sum[j]);
                    }
                }
            }
            for (sums, sum) in sums.iter_mut().zip(sum) {
                for (sums, sum) in sums[first..first + TOKENS].iter_mut().zip(sum) {
                    sum.store(sums.as_mut_ptr().add(lane));
                }
            }
        }
    }
}
