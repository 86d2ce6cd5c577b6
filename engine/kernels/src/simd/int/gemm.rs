//! Many rows times many tokens: the prefill case, compute-bound.
//!
//! A panel of rows is interleaved into scratch memory so that one register holds a few consecutive
//! elements of each row, one row per lane. A tile of tokens is then multiplied with the panel. The
//! groups are visited chain by chain, so the accumulators of a chain stay in registers; a finished
//! chain is folded at once with its partner in the tree.

use std::marker::PhantomData;

use super::{
    channel, dot,
    form::{Form, with_form},
    unit::Unit,
};
use crate::{
    ActivationsRef, Chunk, Row,
    activations::{CHUNK, CHUNK_GROUPS, HALF},
    channel::scale_of,
    columns::Columns,
    dtype::{E2M1_DOUBLED, GROUP, MXFP4_SCALES},
    math::f16_to_f32,
    matrix::Rows,
    q4k,
};

/// Rows of the largest panel.
pub(super) const MAX_ROWS: usize = 16;
/// Most tokens that are ever multiplied without packing rows.
pub(super) const MAX_FEW: usize = 16;
/// Bytes that every panel is aligned to, for loads that do not cross cache lines.
const ALIGN: usize = 64;
/// Levels of the tree that folds the chains.
const ROUNDS: usize = CHUNK_GROUPS.ilog2() as usize;

/// Which of a packed group's factors are the steps of the first halves; those of the second ones follow.
pub(super) const STEPS_AT: usize = 1;

/// Which of a packed group's factors are the minimums, if there are any.
pub(super) const fn mins_at<F: Form>() -> usize {
    STEPS_AT + 2 * F::STEPS as usize
}

/// Which of a packed group's factors are the steps of the minimums, if there are any.
pub(super) const fn min_steps_at<F: Form>() -> usize {
    mins_at::<F>() + 1
}

/// Bytes of a packed group of `rows` rows: signed or offset bytes, then the factors, four bytes for each
/// row: f32 scales; the steps of the first and of the second halves; f32 minimums; the steps of the
/// minimums, of both halves two i16.
const fn group_bytes<F: Form>(rows: usize) -> usize {
    let factors = mins_at::<F>() + F::MINS as usize + F::MIN_STEPS as usize;
    rows * (GROUP + factors * size_of::<f32>())
}

/// Most bytes of a packed group.
const MAX_GROUP_BYTES: usize = MAX_ROWS * (GROUP + 5 * size_of::<f32>());

/// f32 elements of scratch for two panels or the quants of [`MAX_FEW`] tokens, whatever the
/// instruction set, saturating.
pub(crate) const fn scratch_len(n: usize) -> usize {
    let panels = (n.div_ceil(GROUP)).saturating_mul(2 * MAX_GROUP_BYTES);
    let tokens = (n.div_ceil(CHUNK)).saturating_mul(CHUNK * MAX_FEW);
    let bytes = if panels > tokens { panels } else { tokens };
    bytes.saturating_add(ALIGN) / size_of::<f32>()
}

/// The groups of a packed panel: those of chain 0, then of chain 1, …
#[derive(Clone, Copy)]
pub(super) struct Panel {
    // Valid for reads and writes of `groups` groups, aligned to `ALIGN`; while the panel is
    // in use nothing else refers to this memory.
    base: *mut u8,
    pub(super) groups: usize,
    pub(super) group_bytes: usize,
}

impl Panel {
    /// Groups of chain `m`.
    #[inline(always)]
    pub(super) fn chain_len(self, m: usize) -> usize {
        (self.groups + CHUNK_GROUPS - 1 - m) / CHUNK_GROUPS
    }

    /// The packed group `g`.
    ///
    /// # Safety
    /// `g < groups`.
    #[inline(always)]
    pub(super) unsafe fn group(self, g: usize) -> *mut u8 {
        let (chain, place) = (g % CHUNK_GROUPS, g / CHUNK_GROUPS);
        let (full, rest) = (self.groups / CHUNK_GROUPS, self.groups % CHUNK_GROUPS);
        let before = chain * full + chain.min(rest) + place;
        // SAFETY: `before < groups`, and the panel has memory for them all.
        unsafe { self.base.add(before * self.group_bytes) }
    }

    pub(super) fn bytes(self) -> usize {
        self.groups * self.group_bytes
    }
}

/// The same chunk of consecutive tokens.
#[derive(Clone, Copy)]
pub(super) struct Tokens {
    pub first: *const Chunk,
    /// Chunks from one token to the next.
    pub stride: usize,
}

impl Tokens {
    /// The chunk of token `t`.
    ///
    /// # Safety
    /// `t` is below the number of tokens.
    #[inline(always)]
    pub(super) unsafe fn chunk(self, t: usize) -> *const Chunk {
        // SAFETY: the caller stays below the number of tokens.
        unsafe { self.first.add(t * self.stride) }
    }

    /// Byte `offset` of the chunk of token `t`.
    ///
    /// # Safety
    /// `t` is below the number of tokens, and `offset` below the size of a chunk.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) unsafe fn byte(self, t: usize, offset: usize) -> *const u8 {
        // SAFETY: as for `chunk`; the offset lies in the chunk.
        unsafe { self.chunk(t).cast::<u8>().add(offset) }
    }
}

/// A packed group and the tokens that meet it.
#[derive(Clone, Copy)]
pub(super) struct Step {
    /// The group of the first panel.
    pub group: *const u8,
    /// Bytes from there to that of the next panel.
    pub apart: usize,
    pub x: Tokens,
    /// Place of the group in its chunk.
    pub m: usize,
}

/// What a vector unit has to offer to a product of matrices; see [`Unit`].
pub(super) trait Tile {
    /// One i32 for each row of a panel, and nothing else: any bits are such sums.
    type Sums: Copy;
    /// One f32 for each row of a panel.
    type Floats: Copy;

    /// Rows of a panel, at most [`MAX_ROWS`].
    const ROWS: usize;
    /// Number of tokens from which packing rows of nibbles and of bytes pays off, at most
    /// [`MAX_FEW`] + 1; for less, use [`few`](Tile::few).
    const PACK_FROM: [usize; 2];
    /// Tokens of the largest tile of one panel: 12 or 4.
    const TOKENS: usize;
    /// Tokens of the largest tile of two panels: 6, or 0 if two do not fit.
    const PAIR_TOKENS: usize;

    /// `y.row(t)[r] = row r · token t` by the chain rule for tokens that packing does not pay off for:
    /// the dot product of every row.
    ///
    /// # Safety
    /// As for [`matmul`], with at least one row, all in the format `F`.
    #[inline(always)]
    unsafe fn few<R: Rows, F: Form>(
        rows: R,
        xs: ActivationsRef<'_>,
        y: &mut Columns<'_, f32>,
        _scratch: &mut [f32],
    ) where
        Self: Unit + Sized,
    {
        // SAFETY: passed on from the caller.
        unsafe { dot::dots_tokens::<Self, R, F>(rows, xs, y) }
    }

    /// Interleaves `ROWS` rows of equal format and length, with their scales.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`. There are `ROWS` rows of one length, in the format
    /// `F`; `panel` is one of `ROWS` rows with as many groups as each of them.
    unsafe fn pack<F: Form>(rows: &[Row<'_>], panel: Panel);

    /// For each of `P` panels and each of `T` tokens, the exact sums of one packed group.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`. [`pack`](Tile::pack) has written each of the
    /// packed groups with the same `F`; there are `T` tokens, which are valid for reads; `m < 16`.
    unsafe fn sums<F: Form, const P: usize, const T: usize>(at: Step) -> [[Self::Sums; T]; P];

    /// The sums of a token's two halves of a group, each times the row's step: `ROWS` pairs of steps.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `steps` is valid for reads of `ROWS` pairs.
    #[inline(always)]
    unsafe fn of_halves(steps: *const [i16; 2], sums: [i16; 2]) -> Self::Sums {
        const { assert!(size_of::<Self::Sums>() == Self::ROWS * size_of::<i32>()) };
        let mut all = [0; MAX_ROWS];
        // SAFETY: the caller guarantees the steps; sums are an i32 for each row.
        unsafe {
            for (r, all) in all[..Self::ROWS].iter_mut().enumerate() {
                let [first, second] = *steps.add(r);
                *all =
                    i32::from(first) * i32::from(sums[0]) + i32::from(second) * i32::from(sums[1]);
            }
            all.as_ptr().cast::<Self::Sums>().read_unaligned()
        }
    }

    /// The sums of two lots of elements, modulo 2³².
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn more(a: Self::Sums, b: Self::Sums) -> Self::Sums;

    /// All zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn zero() -> Self::Floats;

    /// `fma(sum, weight scale * scale, chain)`; reads `ROWS` weight scales.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `scales` is aligned and valid for reads
    /// of `ROWS` values.
    unsafe fn add(
        chain: Self::Floats,
        sums: Self::Sums,
        scales: *const f32,
        scale: f32,
    ) -> Self::Floats;

    /// `fma(−minimum, sum, chain)`; reads `ROWS` minimums.
    ///
    /// # Safety
    /// As for [`add`](Tile::add).
    unsafe fn less(chain: Self::Floats, mins: *const f32, sum: f32) -> Self::Floats;

    /// `a + b`.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn plus(a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// Writes `ROWS` values.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `to` is valid for writes of `ROWS`
    /// values.
    unsafe fn store(values: Self::Floats, to: *mut f32);
}

/// [`Tile::pack`] without vector instructions: `STEP` consecutive elements of every row, then the
/// next ones, as signed numbers.
///
/// # Safety
/// As for [`Tile::pack`]; the number of rows is that of the panel.
#[inline(always)]
pub(super) unsafe fn pack<F: Form, const STEP: usize>(rows: &[Row<'_>], panel: Panel) {
    for (r, row) in rows.iter().enumerate() {
        let bytes = row.quants().chunks_exact(F::DTYPE.quants_bytes(GROUP));
        for (g, bytes) in bytes.enumerate() {
            let mut quants = [0u8; GROUP];
            if F::NIBBLES {
                let offset = if F::CENTRED { 8 } else { 0 };
                let number = |nibble: u8| match F::FLOATS {
                    true => E2M1_DOUBLED[usize::from(nibble)] as u8,
                    false => nibble.wrapping_sub(offset),
                };
                for (i, byte) in bytes.iter().enumerate() {
                    quants[i] = number(byte & 15);
                    quants[HALF + i] = number(byte >> 4);
                }
            } else {
                quants.copy_from_slice(bytes);
            }
            // SAFETY: the group is as large as all rows, and aligned.
            unsafe {
                let group = panel.group(g);
                for (step, quants) in quants.as_chunks::<STEP>().0.iter().enumerate() {
                    let to = group.add((step * rows.len() + r) * STEP);
                    to.cast::<[u8; STEP]>().write(*quants);
                }
            }
        }
        let groups = if F::CHANNEL {
            0
        } else {
            row.len().div_ceil(GROUP)
        };
        for first in (0..groups).step_by(CHUNK_GROUPS) {
            let count = CHUNK_GROUPS.min(groups - first);
            let (mut scales, mut mins) = ([0.0; CHUNK_GROUPS], [0.0; CHUNK_GROUPS]);
            if F::MINS {
                (scales, mins) = q4k::factors(row.scales(), groups, first, count);
            } else if F::FLOATS {
                let exponents = &row.scales()[first..first + count];
                for (scale, &e) in scales.iter_mut().zip(exponents) {
                    *scale = MXFP4_SCALES[usize::from(e)];
                }
            } else {
                let (stored, _) = row.scales().as_chunks::<2>();
                for (scale, half) in scales.iter_mut().zip(&stored[first..first + count]) {
                    *scale = f16_to_f32(u16::from_le_bytes(*half));
                }
            }
            for g in 0..count {
                // SAFETY: the group has room for the scales and, if there are any, the minimums of
                // all rows, and is aligned.
                unsafe {
                    let to = panel.group(first + g).add(rows.len() * GROUP).cast::<f32>();
                    to.add(r).write(scales[g]);
                    if F::MINS {
                        to.add(rows.len() + r).write(mins[g]);
                    }
                }
            }
        }
    }
}

/// `y.row(t)[r] = row r · token t` by the chain rule.
///
/// # Safety
/// The CPU has the instruction set of `K`; the rows are of one grouped format and as long
/// as the activations; `y` has a row for each token and a column for each weight row; and
/// `scratch` has at least [`scratch_len`] elements.
#[inline(always)]
pub(super) unsafe fn matmul<K: Tile + Unit, R: Rows>(
    rows: R,
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    if rows.count() == 0 {
        return;
    }
    let dtype = rows.at(0).dtype();
    // SAFETY: passed on from the caller.
    unsafe {
        with_form!(dtype, F => {
            match xs.tokens() < K::PACK_FROM[usize::from(!F::NIBBLES)] {
                true => K::few::<R, F>(rows, xs, y, scratch),
                false => matmul_as::<K, R, F, Parts<F>>(rows, xs, y, scratch),
            }
        })
    }
}

/// How panels are packed; a type and no closure, as closures are not always inlined.
pub(super) trait Pack<K> {
    /// As [`Tile::pack`].
    ///
    /// # Safety
    /// As for [`Tile::pack`].
    unsafe fn pack(rows: &[Row<'_>], panel: Panel);
}

/// Packs rows in the format `F` by [`Tile::pack`].
struct Parts<F>(PhantomData<F>);

impl<K: Tile, F: Form> Pack<K> for Parts<F> {
    #[inline(always)]
    unsafe fn pack(rows: &[Row<'_>], panel: Panel) {
        // SAFETY: passed on from the caller.
        unsafe { K::pack::<F>(rows, panel) }
    }
}

/// [`matmul`] of at least one row, in the format `F`, which `P` packs.
///
/// # Safety
/// As for [`matmul`].
#[inline(always)]
pub(super) unsafe fn matmul_as<K: Tile + Unit, R: Rows, F: Form, P: Pack<K>>(
    rows: R,
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    // SAFETY: bytes may be anything.
    let (_, scratch, _) = unsafe { scratch.align_to_mut::<Line>() };
    const { assert!(group_bytes::<F>(K::ROWS) <= MAX_GROUP_BYTES) }
    let panel = Panel {
        base: scratch.as_mut_ptr().cast(),
        groups: xs.n().div_ceil(GROUP),
        group_bytes: const { group_bytes::<F>(K::ROWS) },
    };
    debug_assert!(2 * panel.bytes() <= size_of_val(scratch));
    let (count, last) = (rows.count(), rows.count() - 1);
    let mut r = 0;
    while r < count {
        let pair = K::PAIR_TOKENS > 0 && r + K::ROWS < count;
        let panels = if pair { 2 } else { 1 };
        for p in 0..panels {
            // The last panel repeats the last row.
            let first = r + p * K::ROWS;
            let of_panel: [Row<'_>; MAX_ROWS] =
                std::array::from_fn(|i| rows.at((first + i).min(last)));
            // SAFETY: two panels fit in the scratch memory.
            unsafe {
                let base = panel.base.add(p * panel.bytes());
                let panel = Panel { base, ..panel };
                P::pack(&of_panel[..K::ROWS], panel);
                if F::CHANNEL {
                    pack_scales(&of_panel[..K::ROWS], panel);
                }
            }
        }
        let width = (panels * K::ROWS).min(count - r);
        // The next panels are read while these are multiplied.
        for next in r + width..(r + 2 * width).min(count) {
            dot::prefetch_row::<K>(rows.at(next));
        }
        // SAFETY: the panels are packed.
        unsafe { tiles::<K, F>(panel, pair, xs, y, r, width) }
        r += width;
    }
}

/// One panel or two times all tokens.
///
/// # Safety
/// The CPU has the instruction set of `K`. [`Tile::pack`] has packed the panel, and if
/// `pair` the one that follows it in memory, with the same `F`; they have as many groups
/// as the activations.
#[inline(always)]
unsafe fn tiles<K: Tile, F: Form>(
    panel: Panel,
    pair: bool,
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
    r: usize,
    width: usize,
) {
    let mut t = 0;
    while t < xs.tokens() {
        let left = xs.tokens() - t;
        let sizes = if pair {
            [K::PAIR_TOKENS, 4, 2]
        } else {
            [K::TOKENS, 4, 2]
        };
        let size = sizes.into_iter().find(|&size| size <= left).unwrap_or(1);
        let x = xs.range(t, size);
        let mut out = Out { y, t, r, width };
        // SAFETY: passed on from the caller; `x` has `size` tokens.
        unsafe {
            match (pair, size) {
                (true, 6) => tile::<K, F, 2, 6>(panel, x, &mut out),
                (true, 4) => tile::<K, F, 2, 4>(panel, x, &mut out),
                (true, 2) => tile::<K, F, 2, 2>(panel, x, &mut out),
                (true, _) => tile::<K, F, 2, 1>(panel, x, &mut out),
                (false, 12) => tile::<K, F, 1, 12>(panel, x, &mut out),
                (false, 4) => tile::<K, F, 1, 4>(panel, x, &mut out),
                (false, 2) => tile::<K, F, 1, 2>(panel, x, &mut out),
                (false, _) => tile::<K, F, 1, 1>(panel, x, &mut out),
            }
        }
        t += size;
    }
}

/// A cache line of scratch memory.
#[repr(align(64))]
pub(super) struct Line(#[allow(dead_code)] [u8; ALIGN]);

/// Destination of a tile's results.
pub(super) struct Out<'a, 'y> {
    pub y: &'a mut Columns<'y, f32>,
    pub t: usize,
    pub r: usize,
    pub width: usize,
}

/// `P` panels times `T` tokens.
///
/// # Safety
/// As for [`tiles`], with `P` panels one after the other in memory; `x` has `T` tokens.
#[inline(always)]
unsafe fn tile<K: Tile, F: Form, const P: usize, const T: usize>(
    panel: Panel,
    x: ActivationsRef<'_>,
    out: &mut Out<'_, '_>,
) {
    if F::CHANNEL {
        // SAFETY: passed on from the caller.
        return unsafe { channel_panels::<K, F, P, T>(panel, x, out) };
    }
    let stride = x.n().div_ceil(CHUNK_GROUPS * GROUP);
    let apart = panel.bytes();
    // SAFETY: the panels hold all their groups, and every group has its chunk.
    unsafe {
        let mut chains = [[K::zero(); T]; P];
        // Chain 0 pairs with 8, then both with 4 and 12, and so on: in bit-reversed order a sum
        // waits only for the sums that come right after it.
        let mut waiting = [[[K::zero(); T]; P]; ROUNDS];
        for i in 0..CHUNK_GROUPS {
            let m = i.reverse_bits() >> (usize::BITS as usize - ROUNDS);
            chains = [[K::zero(); T]; P];
            if m < panel.groups {
                let mut group = panel.group(m).cast_const();
                let mut x = Tokens {
                    first: x.chunks().as_ptr(),
                    stride,
                };
                for _ in 0..panel.chain_len(m) {
                    let sums = K::sums::<F, P, T>(Step { group, apart, x, m });
                    for p in 0..P {
                        let scales = group.add(p * apart + K::ROWS * GROUP).cast::<f32>();
                        for t in 0..T {
                            let scale = (*x.chunk(t)).scales[m];
                            chains[p][t] = K::add(chains[p][t], sums[p][t], scales, scale);
                            let mins = scales.add(mins_at::<F>() * K::ROWS);
                            if F::MIN_STEPS {
                                let steps = scales.add(min_steps_at::<F>() * K::ROWS).cast();
                                let halves = &(*x.chunk(t)).halves;
                                let sums = K::of_halves(steps, [halves[2 * m], halves[2 * m + 1]]);
                                chains[p][t] = K::add(chains[p][t], sums, mins, scale);
                            } else if F::MINS {
                                let sum = (*x.chunk(t)).sums[m];
                                chains[p][t] = K::less(chains[p][t], mins, sum);
                            }
                        }
                    }
                    group = group.add(panel.group_bytes);
                    x.first = x.first.wrapping_add(1);
                }
            }
            let rounds = i.trailing_ones() as usize;
            for earlier in &waiting[..rounds] {
                for p in 0..P {
                    for t in 0..T {
                        chains[p][t] = K::plus(earlier[p][t], chains[p][t]);
                    }
                }
            }
            if rounds < ROUNDS {
                waiting[rounds] = chains;
            }
        }
        for (p, chains) in chains.into_iter().enumerate() {
            let width = K::ROWS.min(out.width - p * K::ROWS);
            for (t, sums) in chains.into_iter().enumerate() {
                let mut values = [0.0f32; MAX_ROWS];
                K::store(sums, values.as_mut_ptr());
                let row = &mut out.y.row_mut(out.t + t)[out.r + p * K::ROWS..][..width];
                row.copy_from_slice(&values[..width]);
            }
        }
    }
}

/// Of rows without elements.
static NO_SCALES: [f32; MAX_ROWS] = [0.0; MAX_ROWS];

/// Writes the scales of a panel's rows behind the quants of its first group.
///
/// # Safety
/// The panel is packed for so many rows.
#[inline(always)]
unsafe fn pack_scales(rows: &[Row<'_>], panel: Panel) {
    if panel.groups == 0 {
        return;
    }
    for (r, &row) in rows.iter().enumerate() {
        // SAFETY: a group has room for the scales of all rows, and is aligned.
        unsafe {
            let to = panel.group(0).add(rows.len() * GROUP).cast::<f32>();
            to.add(r).write(scale_of(row));
        }
    }
}

/// `P` panels times `T` tokens, without outliers.
///
/// # Safety
/// The CPU has the instruction set of `K`. [`Tile::pack`] and [`pack_scales`] have packed `P` panels one
/// after the other in memory, with the same `F`; they have as many groups as the activations, which are
/// of `T` tokens.
#[inline(always)]
unsafe fn channel_panels<K: Tile, F: Form, const P: usize, const T: usize>(
    panel: Panel,
    xs: ActivationsRef<'_>,
    out: &mut Out<'_, '_>,
) {
    let (stride, apart) = (xs.n().div_ceil(CHUNK), panel.bytes());
    // SAFETY: the panels hold all their groups, and every group has its chunk; sums are an i32 for each
    // row, of which any bits are some.
    unsafe {
        const { assert!(size_of::<K::Sums>() == K::ROWS * size_of::<i32>()) };
        let mut all = [[std::mem::zeroed::<K::Sums>(); T]; P];
        for m in 0..CHUNK_GROUPS.min(panel.groups) {
            let mut group = panel.group(m).cast_const();
            let first = xs.chunks().as_ptr();
            let mut x = Tokens { first, stride };
            for _ in 0..panel.chain_len(m) {
                let sums = K::sums::<F, P, T>(Step { group, apart, x, m });
                for p in 0..P {
                    for t in 0..T {
                        all[p][t] = K::more(all[p][t], sums[p][t]);
                    }
                }
                group = group.add(panel.group_bytes);
                x.first = x.first.wrapping_add(1);
            }
        }
        for p in 0..P {
            let width = K::ROWS.min(out.width - p * K::ROWS);
            let scales = match panel.groups {
                0 => NO_SCALES.as_ptr(),
                _ => panel.group(0).add(p * apart + K::ROWS * GROUP).cast(),
            };
            for t in 0..T {
                let token = channel::scale_of_token(xs.range(t, 1).chunks());
                let sums = (&raw const all[p][t]).cast::<i32>();
                let row = &mut out.y.row_mut(out.t + t)[out.r + p * K::ROWS..][..width];
                for (r, y) in row.iter_mut().enumerate() {
                    *y = channel::scaled(sums.add(r).read_unaligned(), *scales.add(r), token);
                }
            }
        }
    }
}
