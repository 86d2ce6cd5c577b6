//! Super-blocks of q4k: up to eight groups whose scales and minimums are six-bit multiples of two
//! f16 numbers.
//!
//! ```text
//! SUPER-BLOCK OF g <= 8 GROUPS: 4 + ceil(3 g / 2) bytes among the scales of a row
//!   0   2   d        f16
//!   2   2   dmin     f16
//!   4   …   entries  12 bits per group, lowest bits first: 6 of scale, 6 of minimum
//!
//! value      d · scale · nibble − dmin · minimum, rounded once
//! ```
//!
//! The numbers are those of ggml's Q4_K in another order, so that a row of whole super-blocks holds
//! exactly what it held there.

use half::f16;

use crate::{
    dtype::{DType, GROUP, SUPER_BYTES, SUPER_GROUPS, SUPER_HEAD},
    math::f16_to_f32,
};

/// Largest scale or minimum.
pub const SIX_BITS: u8 = 63;

/// The numbers of a super-block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SuperBlock {
    /// Bits of the f16 that scales are multiples of.
    pub d: u16,
    /// Bits of the f16 that minimums are multiples of.
    pub dmin: u16,
    /// Six bits for each group; zero where there is none.
    pub scales: [u8; SUPER_GROUPS],
    /// As the scales.
    pub mins: [u8; SUPER_GROUPS],
}

impl SuperBlock {
    /// Reads `groups` groups, as stored; those that `bytes` ends before are zero.
    #[inline]
    fn read(bytes: &[u8], groups: usize) -> SuperBlock {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut block = SuperBlock {
            d: half(0),
            dmin: half(2),
            ..SuperBlock::default()
        };
        for g in 0..groups.min(SUPER_GROUPS) {
            let at = SUPER_HEAD + 3 * (g / 2);
            let entry = match g % 2 {
                0 => half(at) & 0xfff,
                _ => half(at + 1) >> 4,
            };
            (block.scales[g], block.mins[g]) = ((entry & 63) as u8, (entry >> 6) as u8);
        }
        block
    }

    /// Writes as many groups as `out` has room for.
    fn write(&self, out: &mut [u8]) {
        out[..2].copy_from_slice(&self.d.to_le_bytes());
        out[2..SUPER_HEAD].copy_from_slice(&self.dmin.to_le_bytes());
        for (pair, out) in out[SUPER_HEAD..].chunks_mut(3).enumerate() {
            let entry =
                |g: usize| u32::from(self.scales[g] & 63) | u32::from(self.mins[g] & 63) << 6;
            let both = entry(2 * pair) | entry(2 * pair + 1) << 12;
            out.copy_from_slice(&both.to_le_bytes()[..out.len()]);
        }
    }

    /// Gives group `g < 8` the six-bit scale and minimum with the least weighted squared error on up
    /// to 32 elements that the search finds, `d` and `dmin` being what they are.
    ///
    /// # Panics
    /// If there are not as many weights as elements.
    pub fn refit(&mut self, g: usize, xs: &[f32], weights: &[f32]) {
        assert!(xs.len() <= GROUP && xs.len() == weights.len());
        let (d, dmin) = (f16_to_f32(self.d), f16_to_f32(self.dmin));
        let group = Group::new(xs, weights);
        let found = round_group(&group, &fit(&group), d, dmin);
        (self.scales[g], self.mins[g]) = (found.scale, found.min);
    }

    /// Scale and minimum of group `g < 8`: an element is `scale · nibble − minimum`. Both are exact.
    #[inline]
    pub fn factors(&self, g: usize) -> (f32, f32) {
        (
            f16_to_f32(self.d) * f32::from(self.scales[g]),
            f16_to_f32(self.dmin) * f32::from(self.mins[g]),
        )
    }
}

/// The super-blocks of a row with these `scales` and so many groups.
///
/// # Panics
/// If `scales` is shorter than those groups take.
pub fn super_blocks(scales: &[u8], groups: usize) -> impl Iterator<Item = SuperBlock> {
    (0..groups).step_by(SUPER_GROUPS).map(move |first| {
        let bytes = &scales[first / SUPER_GROUPS * SUPER_BYTES..];
        SuperBlock::read(bytes, groups - first)
    })
}

/// Scales and minimums of the groups `first..first + count` of a row of `groups` groups; the others
/// are zero. `first` begins a super-block, `count` is at most `N`.
#[inline]
pub(crate) fn factors<const N: usize>(
    scales: &[u8],
    groups: usize,
    first: usize,
    count: usize,
) -> ([f32; N], [f32; N]) {
    debug_assert!(first.is_multiple_of(SUPER_GROUPS) && count <= N);
    let mut out = ([0.0; N], [0.0; N]);
    let bytes = scales
        .get(first / SUPER_GROUPS * SUPER_BYTES..)
        .unwrap_or_default();
    for (s, block) in super_blocks(bytes, groups - first).enumerate() {
        let start = s * SUPER_GROUPS;
        if start >= count {
            break;
        }
        for g in 0..SUPER_GROUPS.min(count - start) {
            (out.0[start + g], out.1[start + g]) = block.factors(g);
        }
    }
    out
}

/// Stores a q4k row that the caller has rounded: a quant of 0 to 15 per element, and the
/// super-blocks. Scales follow the quants.
///
/// # Panics
/// If a length is wrong: `out` needs [`DType::row_bytes`], `blocks` one entry per 256 elements.
pub fn store_q4k_row(quants: &[u8], blocks: &[SuperBlock], out: &mut [u8]) {
    let n = quants.len();
    assert!(
        out.len() == DType::Q4k.row_bytes(n) && blocks.len() == n.div_ceil(SUPER_GROUPS * GROUP),
        "{} bytes and {} super-blocks for {n} elements",
        out.len(),
        blocks.len()
    );
    let (to, scales_to) = out.split_at_mut(DType::Q4k.quants_bytes(n));
    const SUPER: usize = SUPER_GROUPS * GROUP;
    let parts = to
        .chunks_mut(SUPER / 2)
        .zip(scales_to.chunks_mut(SUPER_BYTES));
    for ((quants, block), (to, scales_to)) in quants.chunks(SUPER).zip(blocks).zip(parts) {
        store(quants, block, to, scales_to);
    }
}

/// Stores one super-block.
pub(crate) fn store(quants: &[u8], block: &SuperBlock, to: &mut [u8], scales: &mut [u8]) {
    for (group, to) in quants.chunks(GROUP).zip(to.chunks_exact_mut(GROUP / 2)) {
        let nibble = |i: usize| group.get(i).map_or(0, |quant| quant & 15);
        for (j, byte) in to.iter_mut().enumerate() {
            *byte = nibble(j) | nibble(j + GROUP / 2) << 4;
        }
    }
    block.write(scales);
}

/// The quant of element `i` of a q4 or q4k row with these `quants`.
#[inline]
pub fn nibble(quants: &[u8], i: usize) -> u8 {
    let byte = quants[i / GROUP * (GROUP / 2) + i % (GROUP / 2)];
    match i % GROUP < GROUP / 2 {
        true => byte & 15,
        false => byte >> 4,
    }
}

/// A group's form as `scale · nibble − min`.
#[derive(Clone, Copy, Debug, Default)]
struct Fit {
    scale: f32,
    min: f32,
    error: f32,
}

/// Steps between the ends of a group, as candidates of the search: fewer steps than 15 clip the
/// other end, more leave the last nibbles unused.
const CANDIDATES: [f32; 14] = [
    15.0, 14.6, 14.2, 13.8, 13.4, 13.0, 12.6, 15.4, 15.8, 16.2, 16.6, 17.0, 17.6, 18.2,
];
/// Passes that fit a super-block's two f16 numbers to its rounded groups.
const REFITS: usize = 2;
/// Adding and taking away this rounds to an integer, half to even.
const ROUNDS: f32 = 12_582_912.0; // 1.5 · 2^23

/// The nearest nibble of `x` plus the minimum, as a float.
#[inline(always)]
fn nearest(x: f32, min: f32, inverse: f32) -> f32 {
    let steps = ((x + min) * inverse).clamp(0.0, 15.0);
    (steps + ROUNDS) - ROUNDS
}

/// `1 / scale`, or 0 where that is no number.
fn inverse_of(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Sums over the elements of a group: weights, and weights times `q`, `q²`, `x` and `q·x`.
#[derive(Clone, Copy, Default)]
struct Sums {
    w: f32,
    q: f32,
    qq: f32,
    x: f32,
    qx: f32,
    error: f32,
}

/// Up to 32 elements and their weights, then elements that weigh nothing.
struct Group {
    xs: [f32; GROUP],
    weights: [f32; GROUP],
    len: usize,
}

impl Group {
    fn new(xs: &[f32], weights: &[f32]) -> Group {
        let mut group = Group {
            xs: [0.0; GROUP],
            weights: [0.0; GROUP],
            len: xs.len(),
        };
        group.xs[..xs.len()].copy_from_slice(xs);
        group.weights[..xs.len()].copy_from_slice(weights);
        group
    }

    /// The sums of the group rounded with `scale` and `min`, and its weighted squared error.
    #[inline(always)]
    fn sums(&self, scale: f32, min: f32) -> Sums {
        // as many sums side by side as the compiler turns into registers
        const SIDE: usize = 8;
        let inverse = inverse_of(scale);
        let [mut of_w, mut of_q, mut of_qq] = [[0.0f32; SIDE]; 3];
        let [mut of_x, mut of_qx, mut error] = [[0.0f32; SIDE]; 3];
        let (xs, _) = self.xs.as_chunks::<SIDE>();
        let (weights, _) = self.weights.as_chunks::<SIDE>();
        for (xs, weights) in xs.iter().zip(weights) {
            for k in 0..SIDE {
                let (x, w) = (xs[k], weights[k]);
                let q = nearest(x, min, inverse);
                let e = q * scale - min - x;
                let wq = w * q;
                of_w[k] += w;
                of_q[k] += wq;
                of_qq[k] += wq * q;
                of_x[k] += w * x;
                of_qx[k] += wq * x;
                error[k] += w * e * e;
            }
        }
        let sum = |of: [f32; SIDE]| of.iter().sum();
        Sums {
            w: sum(of_w),
            q: sum(of_q),
            qq: sum(of_qq),
            x: sum(of_x),
            qx: sum(of_qx),
            error: sum(error),
        }
    }
}

/// The scale and the minimum, none of them negative, with the least weighted squared error that the
/// search finds: for some numbers of steps between the ends, and then by least squares for the
/// nibbles that come of it.
fn fit(group: &Group) -> Fit {
    let xs = &group.xs[..group.len];
    let (low, high) = xs.iter().fold((0.0f32, 0.0f32), |(low, high), &x| {
        (low.min(x), high.max(x))
    });
    let (low, high) = match low == high {
        true => return Fit::default(),
        false => (low, high),
    };
    // a group that does not reach zero is better off with a minimum of its own
    let least = xs.iter().copied().fold(f32::INFINITY, f32::min);
    let low = if low < 0.0 { least } else { low };
    let mut best = Fit {
        error: f32::INFINITY,
        ..Fit::default()
    };
    let mut take = |scale: f32, min: f32| {
        let found = group.sums(scale, min);
        if found.error < best.error {
            best = Fit {
                scale,
                min,
                error: found.error,
            };
        }
        found
    };
    for steps in CANDIDATES {
        let found = take((high - low) / steps, -low);
        let Some((scale, min)) = least_squares(&found) else {
            continue;
        };
        // once more from there
        if let Some((scale, min)) = least_squares(&take(scale, min)) {
            take(scale, min);
        }
    }
    best
}

/// Scale and minimum with the least error for given nibbles; `None` where no positive scale has.
fn least_squares(s: &Sums) -> Option<(f32, f32)> {
    let determinant = s.w * s.qq - s.q * s.q;
    let scale = (s.w * s.qx - s.q * s.x) / determinant;
    let min = (s.q * s.qx - s.qq * s.x) / determinant;
    if scale > 0.0 && min >= 0.0 && scale.is_finite() && min.is_finite() {
        return Some((scale, min));
    }
    let alone = s.qx / s.qq;
    (alone > 0.0 && alone.is_finite()).then_some((alone, 0.0))
}

/// The super-block with the least weighted squared error on up to 256 elements that the search
/// finds. `None` where an f16 cannot hold what it takes.
///
/// # Panics
/// If there are more elements, or not as many weights.
pub fn best_super_block(xs: &[f32], weights: &[f32]) -> Option<SuperBlock> {
    assert!(xs.len() <= SUPER_GROUPS * GROUP && xs.len() == weights.len());
    let count = xs.len().div_ceil(GROUP);
    let groups: [Group; SUPER_GROUPS] = std::array::from_fn(|g| {
        let part = (g * GROUP).min(xs.len())..((g + 1) * GROUP).min(xs.len());
        Group::new(&xs[part.clone()], &weights[part])
    });
    let mut fits = [Fit::default(); SUPER_GROUPS];
    for (fitted, group) in fits.iter_mut().zip(&groups[..count]) {
        *fitted = fit(group);
    }
    let most = |of: fn(&Fit) -> f32| fits.iter().map(of).fold(0.0f32, f32::max);
    let largest = f32::from(SIX_BITS);
    let mut d = most(|fit| fit.scale) / largest;
    let mut dmin = most(|fit| fit.min) / largest;
    let mut best = (f32::INFINITY, SuperBlock::default());
    for _ in 0..=REFITS {
        let [d16, dmin16] = [d, dmin].map(f16::from_f32);
        if !d16.is_finite() || !dmin16.is_finite() {
            break;
        }
        let mut block = SuperBlock {
            d: d16.to_bits(),
            dmin: dmin16.to_bits(),
            ..SuperBlock::default()
        };
        let mut error = 0.0;
        // normal equations of the two numbers, for the nibbles of all groups
        let (mut ss, mut sm, mut mm, mut sx, mut mx) = (0.0f32, 0.0f32, 0.0f32, 0.0f32, 0.0f32);
        for (g, group) in groups[..count].iter().enumerate() {
            let found = round_group(group, &fits[g], d16.to_f32(), dmin16.to_f32());
            (block.scales[g], block.mins[g]) = (found.scale, found.min);
            let (s, m) = (f32::from(found.scale), f32::from(found.min));
            error += found.sums.error;
            ss += s * s * found.sums.qq;
            sm += s * m * found.sums.q;
            mm += m * m * found.sums.w;
            sx += s * found.sums.qx;
            mx += m * found.sums.x;
        }
        if error < best.0 {
            best = (error, block);
        }
        // Σ w (d·s·q − dmin·m − x)² is least where its derivatives vanish
        let determinant = ss * mm - sm * sm;
        let (new_d, new_dmin) = match determinant > 0.0 && mm > 0.0 {
            true => (
                (sx * mm - sm * mx) / determinant,
                (sm * sx - ss * mx) / determinant,
            ),
            false => (sx / ss, dmin),
        };
        if !(new_d > 0.0 && new_dmin >= 0.0 && new_d.is_finite() && new_dmin.is_finite()) {
            break;
        }
        (d, dmin) = (new_d, new_dmin);
    }
    best.0.is_finite().then_some(best.1)
}

/// A group in six bits each.
struct Rounded {
    scale: u8,
    min: u8,
    sums: Sums,
}

/// The six-bit scale and minimum near those of `fit` with the least error.
fn round_group(group: &Group, fit: &Fit, d: f32, dmin: f32) -> Rounded {
    let six = |x: f32| x.round().clamp(0.0, f32::from(SIX_BITS));
    let at = |scale: f32, min: f32| Rounded {
        scale: scale as u8,
        min: min as u8,
        sums: group.sums(d * scale, dmin * min),
    };
    let scale = six(fit.scale * inverse_of(d));
    let mut best = at(scale, six(fit.min * inverse_of(dmin)));
    for near in [scale - 1.0, scale, scale + 1.0] {
        if !(0.0..=f32::from(SIX_BITS)).contains(&near) {
            continue;
        }
        // the minimum that fits the mean with this scale, and its neighbours
        let s = &best.sums;
        let wanted = (d * near * s.q - s.x) / s.w * inverse_of(dmin);
        let middle = six(if wanted.is_finite() { wanted } else { 0.0 });
        for min in [middle - 1.0, middle, middle + 1.0] {
            if (0.0..=f32::from(SIX_BITS)).contains(&min) {
                let found = at(near, min);
                if found.sums.error < best.sums.error {
                    best = found;
                }
            }
        }
    }
    best
}

/// The super-block whose groups reach from their least element to their largest, as far as six bits
/// go. `None` as for [`best_super_block`].
pub(crate) fn plain_super_block(xs: &[f32]) -> Option<SuperBlock> {
    let ends = |xs: &[f32]| {
        let ends = |(low, high): (f32, f32), &x: &f32| (low.min(x), high.max(x));
        xs.iter().fold((0.0f32, 0.0f32), ends)
    };
    let mut fits = [Fit::default(); SUPER_GROUPS];
    for (fit, xs) in fits.iter_mut().zip(xs.chunks(GROUP)) {
        let (low, high) = ends(xs);
        (fit.scale, fit.min) = (high / 15.0 - low / 15.0, -low);
    }
    let most = |of: fn(&Fit) -> f32| fits.iter().map(of).fold(0.0f32, f32::max);
    let unit =
        |most: f32| Some(f16::from_f32(most / f32::from(SIX_BITS))).filter(|u| u.is_finite());
    let (d, dmin) = (unit(most(|fit| fit.scale))?, unit(most(|fit| fit.min))?);
    let six = |x: f32, unit: f16| {
        let steps = (x * inverse_of(unit.to_f32())).round();
        steps.clamp(0.0, f32::from(SIX_BITS)) as u8
    };
    Some(SuperBlock {
        d: d.to_bits(),
        dmin: dmin.to_bits(),
        scales: fits.map(|fit| six(fit.scale, d)),
        mins: fits.map(|fit| six(fit.min, dmin)),
    })
}

/// The largest error of elements that are rounded to these nibbles.
pub(crate) fn largest_error(xs: &[f32], block: &SuperBlock, quants: &[u8]) -> f32 {
    let mut largest = 0.0f32;
    for (g, (xs, quants)) in xs.chunks(GROUP).zip(quants.chunks(GROUP)).enumerate() {
        let (scale, min) = block.factors(g);
        for (x, quant) in xs.iter().zip(quants) {
            largest = largest.max((f32::from(*quant) * scale - min - x).abs());
        }
    }
    largest
}

/// Rounds up to 256 elements to the nibbles of a super-block.
pub(crate) fn round(xs: &[f32], block: &SuperBlock, quants: &mut [u8]) {
    for (g, (xs, quants)) in xs.chunks(GROUP).zip(quants.chunks_mut(GROUP)).enumerate() {
        let (scale, min) = block.factors(g);
        let inverse = inverse_of(scale);
        for (x, quant) in xs.iter().zip(quants) {
            *quant = nearest(*x, min, inverse) as u8;
        }
    }
}
