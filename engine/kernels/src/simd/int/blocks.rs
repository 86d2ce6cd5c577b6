//! Rows of blocks of GGUF files times quantised activations: one token or a few by rows, as in `dot`,
//! many by panels, as in `gemm`.

use std::marker::PhantomData;

use super::{
    dot::{self, further},
    form::Of,
    gemm::{self, Pack, Panel, Tile},
    unit::{Chunks, Unit},
};
use crate::{
    ActivationsRef, Chunk, DType, Row,
    activations::{CHUNK, CHUNK_GROUPS, HALF},
    blocks::{Blocks, Format, MAX_CHUNK_BYTES, Vector, with_block},
    columns::Columns,
    dtype::GROUP,
    matrix::{Matrix, Rows},
};

/// Tokens that meet a row's blocks as they are unpacked.
const TILE: usize = 3;

/// What an instruction set provides to the products of blocks.
pub(super) trait BlockUnit: Unit + Vector<Values = <Self as Unit>::Chains> {
    /// Exact sums of the groups of a chunk times the activations of each of `T` tokens, with steps.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`; the chunks of `T` tokens are valid for reads.
    unsafe fn blocks<B: Format, const T: usize>(
        chunk: Blocks<'_, B>,
        xs: Chunks<T>,
    ) -> [Self::Sums; T];
}

/// What it provides to those with many tokens.
pub(super) trait BlockTile: Tile + Unit {
    /// What computes products with a few tokens.
    type Few: BlockUnit;

    /// Tokens from which packing pays off.
    const FROM: usize;

    /// [`Tile::pack`] of rows of blocks.
    ///
    /// # Safety
    /// As for [`Tile::pack`] with [`Of<B>`], or that of the format it is like.
    unsafe fn pack_blocks<B: Format>(rows: &[Row<'_>], panel: Panel);
}

/// Packs rows of the formats that are like `L` by [`BlockTile::pack_blocks`].
struct Whole<L>(PhantomData<L>);

impl<K: BlockTile, L: Format> Pack<K> for Whole<L> {
    #[inline(always)]
    unsafe fn pack(rows: &[Row<'_>], panel: Panel) {
        let DType::Block(format) = rows[0].dtype() else {
            return;
        };
        with_block!(format, B => {
            if const { B::LIKE as u8 == L::BLOCK as u8 } {
                // SAFETY: passed on from the caller.
                unsafe { K::pack_blocks::<B>(rows, panel) }
            }
        })
    }
}

/// `y[r] = row r · x`, of rows in the format `B`.
///
/// # Safety
/// The CPU has the instruction set of `U`; `x` has a chunk for every 512 elements of a row, and `y` an
/// element for each row.
#[inline(always)]
pub(super) unsafe fn dots<U: BlockUnit, B: Format>(m: Matrix<'_>, x: &[Chunk], y: &mut [f32]) {
    if y.is_empty() {
        return;
    }
    let distance = dot::begin::<U, _>(m);
    let last = m.count() - 1;
    for (r, y) in y.iter_mut().enumerate() {
        let ahead = m.at((r + distance).min(last));
        // SAFETY: passed on from the caller; there is one token.
        [*y] = unsafe { tile::<U, B, 1>(m.at(r), [x.as_ptr()], Some(ahead)) };
    }
}

/// `y.row(t)[r] = row r · token t`, of rows in a format that is like `L` and at least [`BlockTile::FROM`] tokens.
///
/// # Safety
/// As for [`dots`] and each token; `y` has a row for each token and a column for each row of the matrix;
/// `scratch` has at least [`gemm::scratch_len`] elements.
#[inline(always)]
pub(super) unsafe fn many<K: BlockTile, L: Format>(
    m: Matrix<'_>,
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    if m.count() > 0 {
        // SAFETY: passed on from the caller.
        unsafe { gemm::matmul_as::<K, _, Of<L>, Whole<L>>(m, xs, y, scratch) }
    }
}

/// `y.row(t)[r] = row r · token t`, of rows in the format `B` and less than [`BlockTile::FROM`] tokens.
///
/// # Safety
/// As for [`dots`] and each token; `y` has a row for each token and a column for each row of the matrix.
#[inline(always)]
pub(super) unsafe fn few<K: BlockTile, B: Format>(
    m: Matrix<'_>,
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
) {
    if m.count() == 0 {
        return;
    }
    let (first, stride) = (xs.chunks().as_ptr(), xs.n().div_ceil(CHUNK));
    let distance = dot::begin::<K::Few, _>(m);
    let last = m.count() - 1;
    for r in 0..m.count() {
        let mut ahead = Some(m.at((r + distance).min(last)));
        for t in (0..xs.tokens()).step_by(TILE) {
            let x = |i: usize| first.wrapping_add((t + i) * stride);
            let (row, ahead) = (m.at(r), ahead.take());
            let mut sums = [0.0; TILE];
            let width = TILE.min(xs.tokens() - t);
            // SAFETY: the tokens from `t` to `t + width` exist.
            unsafe {
                match width {
                    2 if K::FROM > 2 => {
                        [sums[0], sums[1]] = tile::<K::Few, B, 2>(row, [x(0), x(1)], ahead);
                    }
                    3 if K::FROM > 3 => {
                        sums = tile::<K::Few, B, TILE>(row, [x(0), x(1), x(2)], ahead);
                    }
                    _ => [sums[0]] = tile::<K::Few, B, 1>(row, [x(0)], ahead),
                }
            }
            for (i, &sum) in sums[..width].iter().enumerate() {
                y.row_mut(t + i)[r] = sum;
            }
        }
    }
}

/// The products of a row and `T` tokens; prefetches the row `ahead`.
///
/// # Safety
/// As for [`dots`] and each of `T` tokens.
#[inline(always)]
unsafe fn tile<U: BlockUnit, B: Format, const T: usize>(
    row: Row<'_>,
    xs: Chunks<T>,
    ahead: Option<Row<'_>>,
) -> [f32; T] {
    let bytes = const { Blocks::<B>::BYTES };
    let mut chunks = row.quants().chunks_exact(bytes);
    // SAFETY: each token has a chunk for every 512 elements of the row.
    unsafe {
        let mut chains = [U::zero(); T];
        let mut k = 0;
        for chunk in &mut chunks {
            if let Some(ahead) = ahead {
                for line in (0..bytes).step_by(dot::CACHE_LINE) {
                    U::prefetch(ahead.quants().as_ptr().wrapping_add(k * bytes + line));
                }
            }
            step::<U, B, T>(&mut chains, Blocks::of(chunk), further(xs, k));
            k += 1;
        }
        let rest = chunks.remainder();
        if !rest.is_empty() {
            let mut filled = [0; MAX_CHUNK_BYTES];
            filled[..rest.len()].copy_from_slice(rest);
            step::<U, B, T>(&mut chains, Blocks::of(&filled[..bytes]), further(xs, k));
        }
        let mut sums = [0.0; T];
        for t in 0..T {
            sums[t] = U::fold(chains[t]);
        }
        sums
    }
}

/// Adds a chunk of blocks and of each token's activations. Blocks of zeros beyond the end of a row add
/// zeros: the activations there are zero, and the scales finite.
///
/// # Safety
/// The CPU has the instruction set of `U`; the chunks of `T` tokens are valid for reads.
#[inline(always)]
unsafe fn step<U: BlockUnit, B: Format, const T: usize>(
    chains: &mut [<U as Unit>::Chains; T],
    chunk: Blocks<'_, B>,
    xs: Chunks<T>,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        let sums = U::blocks::<B, T>(chunk, xs);
        if B::MIN_STEPS {
            let [scales, mins] = B::factors::<U>(chunk);
            let steps = B::min_steps(chunk);
            for t in 0..T {
                chains[t] = U::add(chains[t], sums[t], scales, &*xs[t]);
                chains[t] = U::add(chains[t], of_halves::<U>(&steps, &*xs[t]), mins, &*xs[t]);
            }
        } else if B::MINS {
            let [scales, mins] = B::factors::<U>(chunk);
            for t in 0..T {
                chains[t] = U::add(chains[t], sums[t], scales, &*xs[t]);
                chains[t] = U::less(chains[t], mins, &*xs[t]);
            }
        } else {
            let scales = B::scales::<U>(chunk);
            for t in 0..T {
                chains[t] = U::add(chains[t], sums[t], scales, &*xs[t]);
            }
        }
    }
}

/// The sums of the activations of both halves of each group, each times its step.
#[inline(always)]
fn of_halves<U: BlockUnit>(steps: &[i8; 2 * CHUNK_GROUPS], x: &Chunk) -> U::Sums {
    const { assert!(size_of::<U::Sums>() == size_of::<[i32; CHUNK_GROUPS]>()) };
    let product = |i: usize| i32::from(steps[i]) * i32::from(x.halves[i]);
    let sums: [i32; CHUNK_GROUPS] = std::array::from_fn(|g| product(2 * g) + product(2 * g + 1));
    // SAFETY: sums are an i32 for each group.
    unsafe { std::mem::transmute_copy(&sums) }
}

/// Room for the last chunk of each row of a panel.
pub(super) type Filled<const ROWS: usize> = [[u8; MAX_CHUNK_BYTES]; ROWS];

/// Chunk `k` of the rows of a panel; the last one, if it is short, is filled up with zeros in `filled`,
/// which is zero before.
#[inline(always)]
pub(super) fn chunk_of<'a, B: Format, const ROWS: usize>(
    rows: &'a [Row<'_>],
    k: usize,
    filled: &'a mut Filled<ROWS>,
) -> [Blocks<'a, B>; ROWS] {
    let bytes = const { Blocks::<B>::BYTES };
    for (row, filled) in rows.iter().zip(&mut *filled) {
        let rest = &row.quants()[k * bytes..];
        if rest.len() < bytes {
            filled[..rest.len()].copy_from_slice(rest);
        }
    }
    std::array::from_fn(|r| {
        let rest = &rows[r].quants()[k * bytes..];
        Blocks::of(rest.get(..bytes).unwrap_or(&filled[r][..bytes]))
    })
}

/// [`BlockTile::pack_blocks`] as [`gemm::pack`] orders weights: `STEP` consecutive elements of every
/// row, then the next ones, as signed numbers; steps as i32.
///
/// # Safety
/// As for [`BlockTile::pack_blocks`]; the number of rows is `ROWS`.
#[inline(always)]
pub(super) unsafe fn pack<U: BlockUnit, B: Format, const STEP: usize, const ROWS: usize>(
    rows: &[Row<'_>],
    panel: Panel,
) {
    const {
        assert!(size_of::<U::Bytes>() == HALF && U::LANES == 1);
        assert!(size_of::<U::Values>() == size_of::<[f32; CHUNK_GROUPS]>());
    }
    let groups = rows[0].len().div_ceil(GROUP);
    let mut filled = [[0; MAX_CHUNK_BYTES]; ROWS];
    for (k, first) in (0..groups).step_by(CHUNK_GROUPS).enumerate() {
        let count = CHUNK_GROUPS.min(groups - first);
        let chunks = chunk_of::<B, ROWS>(rows, k, &mut filled);
        for (r, &chunk) in chunks.iter().enumerate() {
            // SAFETY: the caller guarantees the instruction set; vectors are bytes or floats. The groups
            // are as large as all rows and their factors, and aligned.
            unsafe {
                let [scales, mins] = B::factors::<U>(chunk);
                let scales: [f32; CHUNK_GROUPS] = std::mem::transmute_copy(&scales);
                let mins: [f32; CHUNK_GROUPS] = std::mem::transmute_copy(&mins);
                let (steps, min_steps) = (B::steps(chunk), B::min_steps(chunk));
                for g in 0..count {
                    let group = panel.group(first + g);
                    let mut quants = [0u8; GROUP];
                    for half in 0..2 {
                        let bytes = B::unpack::<U>(chunk, g, half);
                        let bytes: [u8; HALF] = std::mem::transmute_copy(&bytes);
                        for (to, byte) in quants[half * HALF..].iter_mut().zip(bytes) {
                            *to = byte.wrapping_sub(B::RAISED);
                        }
                    }
                    for (step, quants) in quants.as_chunks::<STEP>().0.iter().enumerate() {
                        let to = group.add((step * ROWS + r) * STEP);
                        to.cast::<[u8; STEP]>().write(*quants);
                    }
                    let to = group.add(ROWS * GROUP).cast::<f32>();
                    to.add(r).write(scales[g]);
                    if B::STEPS {
                        for half in 0..2 {
                            let to = to.add((gemm::STEPS_AT + half) * ROWS + r).cast::<i32>();
                            to.write(i32::from(steps[2 * g + half]));
                        }
                    }
                    if B::MINS {
                        to.add(gemm::mins_at::<Of<B>>() * ROWS + r).write(mins[g]);
                    }
                    if B::MIN_STEPS {
                        let these = [min_steps[2 * g], min_steps[2 * g + 1]].map(i16::from);
                        let to = to.add(gemm::min_steps_at::<Of<B>>() * ROWS + r);
                        to.cast::<[i16; 2]>().write(these);
                    }
                }
            }
        }
    }
}
