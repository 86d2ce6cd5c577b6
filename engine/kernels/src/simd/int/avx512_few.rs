//! A few tokens with AVX-512 VNNI, by transposition: lane `g` of a register holds four elements of
//! group `g` of a chunk, for weights and activations alike. The accumulator of a product then has the sum
//! of group `g` in lane `g`, and no horizontal additions are left. Weights are transposed once for all
//! tokens of a tile, activations once a call.

use std::arch::x86_64::*;

use super::{
    avx512::{Avx512, load, load_up_to, numbers},
    dot,
    form::Form,
    gemm::Line,
    unit::Unit,
};
use crate::{
    ActivationsRef, Chunk, Row,
    activations::{CHUNK, CHUNK_GROUPS, SECOND_HALF},
    columns::Columns,
    dtype::{DType, GROUP},
    matrix::Rows,
};

/// Tokens of the largest tile.
const TOKENS: usize = 8;
/// Activations that stay in the first-level cache while rows pass.
const CACHED: usize = 16 << 10;
/// Rows that meet one tile of tokens before the next.
const BLOCK: usize = 16;
/// Registers of four elements of each group of a chunk.
const STEPS: usize = GROUP / 4;

/// Bytes of scratch for `tokens` tokens of `n` activations, saturating.
pub(super) const fn scratch_bytes(n: usize, tokens: usize) -> usize {
    n.div_ceil(CHUNK)
        .saturating_mul(CHUNK)
        .saturating_mul(tokens)
}

/// `y.row(t)[r] = row r · token t` by the chain rule, for rows of nibbles.
///
/// # Safety
/// The CPU has AVX-512 VNNI; there is at least one row, the rows have the format `F`, which is in
/// nibbles, and are as long as the activations; `y` has a row for each token and a column for
/// each weight row; and `scratch` has [`scratch_bytes`] beyond its first cache line.
#[inline(always)]
pub(super) unsafe fn matmul<R: Rows, F: Form>(
    rows: R,
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    // SAFETY: bytes may be anything.
    let (_, scratch, _) = unsafe { scratch.align_to_mut::<Line>() };
    debug_assert!(scratch_bytes(xs.n(), xs.tokens()) <= size_of_val(scratch));
    let quants = scratch.as_mut_ptr().cast::<u8>();
    for (i, chunk) in xs.chunks().iter().enumerate() {
        // SAFETY: the scratch memory has room for the quants of every chunk.
        unsafe { transpose_activations(chunk, quants.add(i * CHUNK)) }
    }
    let per_token = xs.n().div_ceil(CHUNK);
    let width = (CACHED / (per_token * CHUNK).max(1)).clamp(2, TOKENS);
    let distance = dot::begin::<Avx512, R>(rows);
    let last = rows.count() - 1;
    for first in (0..rows.count()).step_by(BLOCK) {
        for t in (0..xs.tokens()).step_by(width) {
            let width = width.min(xs.tokens() - t);
            let x = Transposed {
                quants: quants.wrapping_add(t * per_token * CHUNK),
                chunks: xs.range(t, width).chunks(),
                per_token,
            };
            for r in first..rows.count().min(first + BLOCK) {
                let ahead = (t == 0).then(|| rows.at((r + distance).min(last)));
                // SAFETY: passed on from the caller; the tokens are transposed.
                let sums = unsafe { upto::<F>(rows.at(r), x, width, ahead) };
                for (i, &sum) in sums[..width].iter().enumerate() {
                    y.row_mut(t + i)[r] = sum;
                }
            }
        }
    }
}

/// Transposed tokens.
#[derive(Clone, Copy)]
struct Transposed<'a> {
    /// [`CHUNK`] bytes for each chunk of each token, aligned to cache lines.
    quants: *const u8,
    chunks: &'a [Chunk],
    per_token: usize,
}

/// [`tile`] of 1 to [`TOKENS`] tokens; the other sums are zero.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn upto<F: Form>(
    row: Row<'_>,
    x: Transposed<'_>,
    tokens: usize,
    ahead: Option<Row<'_>>,
) -> [f32; TOKENS] {
    let mut sums = [0.0; TOKENS];
    macro_rules! tiles {
        ($($n:literal)*) => {
            match tokens {
                // SAFETY: passed on from the caller.
                $($n => sums[..$n].copy_from_slice(&unsafe { tile::<F, $n>(row, x, ahead) }),)*
                _ => {}
            }
        };
    }
    tiles!(1 2 3 4 5 6 7 8);
    sums
}

/// The products of a row and `T` tokens; prefetches the row `ahead`.
///
/// # Safety
/// The CPU has AVX-512 VNNI. The row has the format `F`, in nibbles; there are `T` tokens, with a
/// chunk for every 512 elements of the row. `ahead` is not read.
#[inline(always)]
unsafe fn tile<F: Form, const T: usize>(
    row: Row<'_>,
    x: Transposed<'_>,
    ahead: Option<Row<'_>>,
) -> [f32; T] {
    let bytes = const { F::DTYPE.quants_bytes(CHUNK) };
    let scales_bytes = const { F::DTYPE.scales_bytes(CHUNK) };
    let groups = row.len().div_ceil(GROUP);
    // SAFETY: chunk `k` of the row has `count` groups, and every token has as many chunks.
    unsafe {
        let mut chains = [Avx512::zero(); T];
        for k in 0..x.per_token {
            let count = CHUNK_GROUPS.min(groups - k * CHUNK_GROUPS);
            if let Some(ahead) = ahead {
                dot::prefetch_chunk::<Avx512, F>(ahead, k);
            }
            let quants = row.quants().as_ptr().add(k * bytes);
            let scales = row.scales().as_ptr().add(k * scales_bytes);
            let factors = dot::factors_of::<Avx512, F>(scales, count, None);
            let weights = transpose_weights::<F>(quants, count);
            let chunks = x.chunks.as_ptr().wrapping_add(k);
            let mut sums = [_mm512_setzero_si512(); T];
            if F::CENTRED || F::FLOATS {
                for t in 0..T {
                    let start = load((*chunks.add(t * x.per_token)).by_8.as_ptr().cast());
                    sums[t] = match F::FLOATS {
                        true => _mm512_add_epi32(start, start),
                        false => start,
                    };
                }
            }
            for step in 0..STEPS {
                for t in 0..T {
                    let at = (t * x.per_token + k) * CHUNK + 64 * step;
                    let x = _mm512_load_si512(x.quants.add(at).cast());
                    sums[t] = _mm512_dpbusd_epi32(sums[t], weights[step], x);
                }
            }
            for t in 0..T {
                chains[t] = Avx512::add(
                    chains[t],
                    sums[t],
                    factors.scales,
                    &*chunks.add(t * x.per_token),
                );
                if let Some(mins) = factors.mins {
                    chains[t] = Avx512::less(chains[t], mins, &*chunks.add(t * x.per_token));
                }
            }
        }
        let mut sums = [0.0; T];
        for t in 0..T {
            sums[t] = Avx512::fold(chains[t]);
        }
        sums
    }
}

/// What the nibbles of up to 16 groups stand for: register `s` holds elements `4s..4s + 4` of
/// every group.
///
/// # Safety
/// The CPU has AVX-512, and `quants` is valid for reads of `16 * groups` bytes.
#[inline(always)]
unsafe fn transpose_weights<F: Form>(quants: *const u8, groups: usize) -> [__m512i; STEPS] {
    // SAFETY: the caller guarantees AVX-512 and the bytes.
    unsafe {
        let end = groups * DType::Q4.quants_bytes(GROUP);
        let mask = _mm512_set1_epi8(15);
        let mut quads = [_mm512_setzero_si512(); 4];
        for i in 0..4 {
            quads[i] = load_up_to(quants, 64 * i, end);
        }
        let bytes = transpose_groups(quads);
        let mut steps = [_mm512_setzero_si512(); STEPS];
        for s in 0..4 {
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes[s]), mask);
            steps[s] = numbers::<F>(_mm512_and_si512(bytes[s], mask));
            steps[s + 4] = numbers::<F>(high);
        }
        steps
    }
}

/// The quants of a chunk in the order of [`transpose_weights`].
///
/// # Safety
/// The CPU has AVX-512, and `to` is aligned to cache lines and valid for writes of [`CHUNK`] bytes.
#[inline(always)]
unsafe fn transpose_activations(chunk: &Chunk, to: *mut u8) {
    let quants = chunk.quants.as_ptr().cast::<u8>();
    // SAFETY: the halves of all groups lie in the chunk, the steps in the memory of the caller.
    unsafe {
        for half in 0..2 {
            let mut quads = [_mm512_setzero_si512(); 4];
            for i in 0..4 {
                quads[i] = load(quants.add(128 * i + half * SECOND_HALF));
            }
            let steps = transpose_groups(quads);
            for s in 0..4 {
                _mm512_store_si512(to.add(64 * (4 * half + s)).cast(), steps[s]);
            }
        }
    }
}

/// Quarter `l` of register `i` holds four dwords of group `4i + l`; register `d` of the result holds
/// dword `d` of every group, in order.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn transpose_groups(quads: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: the caller guarantees AVX-512.
    unsafe {
        let [a, b, c, d] = quads;
        let first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        let second = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
        let ab = [
            _mm512_permutex2var_epi32(a, first, b),
            _mm512_permutex2var_epi32(a, second, b),
        ];
        let cd = [
            _mm512_permutex2var_epi32(c, first, d),
            _mm512_permutex2var_epi32(c, second, d),
        ];
        [
            _mm512_shuffle_i64x2::<0b01_00_01_00>(ab[0], cd[0]),
            _mm512_shuffle_i64x2::<0b11_10_11_10>(ab[0], cd[0]),
            _mm512_shuffle_i64x2::<0b01_00_01_00>(ab[1], cd[1]),
            _mm512_shuffle_i64x2::<0b11_10_11_10>(ab[1], cd[1]),
        ]
    }
}
