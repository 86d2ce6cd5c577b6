//! Activations as 8-bit integers, for products with weights that are integers.
//!
//! ```text
//! A TOKEN OF n ACTIVATIONS: ceil(n / 512) chunks of 768 bytes
//!
//! chunk        16 groups of 32, one per chain of a dot product
//!     0  512   quants  4 × {first halves of 4 groups, second halves of 4 groups}
//!   512   64   scales  16 × f32, the largest magnitude of the group, or the limit of the token, / 127
//!   576   64   by_8    16 × i32, −8 times the sum of the group's quants
//!   640   64   halves  32 × i16, the sum of the quants of each half of a group
//!   704   64   sums    16 × f32, that sum times the group's scale
//! ```
//!
//! `by_8` corrects a sum of products whose weights were 8 too large, as stored nibbles are; 16 times as
//! much corrects that of signed bytes turned into unsigned ones. `sums` is what a minimum that is taken
//! from all weights of a group takes from the product; `halves` are for minimums of halves of groups.
//!
//! The quants are in the order of the nibbles of a q4 row: 64 bytes of such a row hold the first
//! halves of 4 groups in their low nibbles and the second halves in their high ones. Elements
//! beyond `n` are zero. A token with one scale also stores what a few elements exceed it by ([`Excess`]), unless outliers
//! are pruned.

pub(crate) use crate::dtype::{CHUNK, CHUNK_GROUPS, HALF};
use crate::{
    LANES,
    dtype::GROUP,
    excess::{EXCESSES, Excess},
};

/// Groups whose halves are interleaved: the groups in 64 bytes of a q4 row.
const QUAD: usize = 4;
const _: () = assert!(size_of::<Chunk>() == 768 && align_of::<Chunk>() == 64);
const _: () = assert!(CHUNK_GROUPS.is_multiple_of(QUAD) && CHUNK.is_multiple_of(LANES));

/// 512 quantised activations of one token; see the file's layout.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub struct Chunk {
    pub(crate) quants: [i8; CHUNK],
    pub(crate) scales: [f32; CHUNK_GROUPS],
    pub(crate) by_8: [i32; CHUNK_GROUPS],
    pub(crate) halves: [i16; 2 * CHUNK_GROUPS],
    pub(crate) sums: [f32; CHUNK_GROUPS],
}

impl Chunk {
    /// By which power of two [`by_8`](Chunk::by_8) is to be multiplied for weights that were 128 too large.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const BY_128: i32 = 4;

    const ZERO: Chunk = Chunk {
        quants: [0; CHUNK],
        scales: [0.0; CHUNK_GROUPS],
        by_8: [0; CHUNK_GROUPS],
        halves: [0; 2 * CHUNK_GROUPS],
        sums: [0.0; CHUNK_GROUPS],
    };
}

/// Index in [`Chunk::quants`] of the first half of group `group`; the second half follows
/// [`SECOND_HALF`] bytes later.
#[inline(always)]
pub(crate) const fn first_half(group: usize) -> usize {
    group / QUAD * (QUAD * GROUP) + group % QUAD * HALF
}

/// Distance from the first to the second half of a group.
pub(crate) const SECOND_HALF: usize = QUAD * HALF;

/// Owned activations of one or several tokens, quantised once and used for every weight row.
/// Refilling allocates only for a shape larger than all before.
#[derive(Clone, Debug, Default)]
pub struct Activations {
    n: usize,
    tokens: usize,
    per_token: bool,
    pruned: bool,
    chunks: Vec<Chunk>,
    /// Of each token, where tokens have one scale and outliers are not pruned.
    excess: Vec<[Excess; EXCESSES]>,
}

impl Activations {
    /// Empty, with capacity for `tokens` tokens of `n` activations.
    pub fn with_capacity(n: usize, tokens: usize) -> Activations {
        Activations {
            n: 0,
            tokens: 0,
            per_token: false,
            pruned: false,
            chunks: Vec::with_capacity(tokens.saturating_mul(n.div_ceil(CHUNK))),
            excess: Vec::with_capacity(tokens),
        }
    }

    /// Bytes of `tokens` tokens of `n` activations, saturating.
    pub const fn bytes(n: usize, tokens: usize) -> usize {
        Self::chunk_bytes(n)
            .saturating_add(size_of::<[Excess; EXCESSES]>())
            .saturating_mul(tokens)
    }

    /// Bytes of a token's chunks, saturating: what [`ActivationsRef::bytes`] has of each.
    pub const fn chunk_bytes(n: usize) -> usize {
        n.div_ceil(CHUNK).saturating_mul(size_of::<Chunk>())
    }

    /// Elements that the `n` activations of a token take, padding included.
    pub const fn padded(n: usize) -> usize {
        n.div_ceil(CHUNK).saturating_mul(CHUNK)
    }

    /// Changes the shape, for tokens with a scale for each group. The contents are unspecified until
    /// [`Cpu::quantize_token`](crate::Cpu::quantize_token) has written every token. To divide that work among threads,
    /// split [`chunks_mut`](Activations::chunks_mut) by token.
    pub fn reshape(&mut self, n: usize, tokens: usize) {
        (self.n, self.tokens) = (n, tokens);
        (self.per_token, self.pruned) = (false, false);
        self.chunks
            .resize(tokens.saturating_mul(n.div_ceil(CHUNK)), Chunk::ZERO);
        self.excess.clear();
    }

    /// Empties it and begins to gather tokens of `n` activations.
    pub fn clear(&mut self, n: usize) {
        (self.n, self.tokens) = (n, 0);
        self.chunks.clear();
        self.excess.clear();
    }

    /// Appends one token of other activations with as many elements. The first one decides whether
    /// tokens have one scale each, and whether outliers are pruned.
    ///
    /// # Panics
    /// If there is no such token, or it has another number of activations, or other scales.
    pub fn push(&mut self, from: ActivationsRef<'_>, token: usize) {
        assert!(
            from.n == self.n,
            "{} activations, expected {}",
            from.n,
            self.n
        );
        if self.tokens == 0 {
            (self.per_token, self.pruned) = (from.per_token, from.pruned);
        }
        assert!(
            (from.per_token, from.pruned) == (self.per_token, self.pruned),
            "tokens with other scales"
        );
        let from = from.range(token, 1);
        self.chunks.extend_from_slice(from.chunks);
        self.excess.extend_from_slice(from.excess);
        self.tokens += 1;
    }

    /// Activations per token.
    #[inline]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of tokens.
    #[inline]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Gives each token one scale. Returns the chunks of all tokens, and their excess unless outliers are `pruned`.
    pub(crate) fn with_one_scale(
        &mut self,
        pruned: bool,
    ) -> (&mut [Chunk], Option<&mut [[Excess; EXCESSES]]>) {
        (self.per_token, self.pruned) = (true, pruned);
        if pruned {
            return (&mut self.chunks, None);
        }
        self.excess.resize(self.tokens, Default::default());
        (&mut self.chunks, Some(&mut self.excess))
    }

    /// Chunks per token: `ceil(n / 512)`.
    #[inline]
    pub fn chunks_per_token(&self) -> usize {
        self.n.div_ceil(CHUNK)
    }

    /// The chunks of all tokens, token after token.
    #[inline]
    pub fn chunks_mut(&mut self) -> &mut [Chunk] {
        &mut self.chunks
    }

    /// All tokens.
    #[inline]
    pub fn all(&self) -> ActivationsRef<'_> {
        ActivationsRef {
            n: self.n,
            tokens: self.tokens,
            per_token: self.per_token,
            pruned: self.pruned,
            chunks: &self.chunks,
            excess: &self.excess,
        }
    }

    /// One token.
    ///
    /// # Panics
    /// If `token >= self.tokens()`.
    #[inline]
    pub fn token(&self, token: usize) -> ActivationsRef<'_> {
        self.all().range(token, 1)
    }
}

/// Borrowed activations of consecutive tokens.
#[derive(Clone, Copy, Debug)]
pub struct ActivationsRef<'a> {
    n: usize,
    tokens: usize,
    per_token: bool,
    pruned: bool,
    // `tokens * ceil(n / CHUNK)` chunks, which the kernels rely on.
    chunks: &'a [Chunk],
    // Of each token if tokens have one scale and outliers are not pruned, otherwise empty.
    excess: &'a [[Excess; EXCESSES]],
}

impl<'a> ActivationsRef<'a> {
    /// Activations per token.
    #[inline]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of tokens.
    #[inline]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether each token has one scale.
    #[inline]
    pub fn per_token(&self) -> bool {
        self.per_token
    }

    /// How many times the limit of a token's scale its largest element is, at least 1: the importance of its outliers
    /// (llm.npu, §3.3). 1 without excess.
    ///
    /// # Panics
    /// If there is no such token.
    pub fn importance(&self, token: usize) -> f32 {
        let excess = self.range(token, 1).excess.iter().flatten();
        let most = excess.map(|excess| excess.steps.unsigned_abs()).max();
        1.0 + most.unwrap_or(0) as f32 / 127.0
    }

    /// `count` tokens from `first` on.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[inline]
    pub fn range(&self, first: usize, count: usize) -> ActivationsRef<'a> {
        assert!(
            first <= self.tokens && count <= self.tokens - first,
            "tokens {first} to {} of {}",
            first.saturating_add(count),
            self.tokens
        );
        let per_token = self.n.div_ceil(CHUNK);
        ActivationsRef {
            n: self.n,
            tokens: count,
            per_token: self.per_token,
            pruned: self.pruned,
            chunks: &self.chunks[first * per_token..(first + count) * per_token],
            excess: match self.excess.is_empty() {
                true => &[],
                false => &self.excess[first..first + count],
            },
        }
    }

    /// Passes the quants of token `token` to `then`, in the order of its elements; clipped where they have an excess. Those beyond
    /// `n` in the last group are zero.
    ///
    /// # Panics
    /// If there is no such token.
    pub fn each_quant(&self, token: usize, mut then: impl FnMut(i8)) {
        let groups = self.n.div_ceil(GROUP);
        let chunks = self.range(token, 1).chunks;
        for g in 0..groups {
            let at = first_half(g % CHUNK_GROUPS);
            let halves =
                [at, at + SECOND_HALF].map(|at| &chunks[g / CHUNK_GROUPS].quants[at..at + HALF]);
            halves.into_iter().flatten().for_each(|&quant| then(quant));
        }
    }

    /// The quant of element `i` of the only token.
    #[inline(always)]
    pub(crate) fn quant(chunks: &[Chunk], i: usize) -> Option<i8> {
        let (group, e) = (i % CHUNK / GROUP, i % GROUP);
        let place = first_half(group) + e / HALF * SECOND_HALF + e % HALF;
        Some(chunks.get(i / CHUNK)?.quants[place])
    }

    /// The stored value of element `i` of token `token`: its steps times its group's scale. For
    /// tests and reports.
    ///
    /// # Panics
    /// If there is no such element.
    pub fn value(&self, token: usize, i: usize) -> f32 {
        assert!(i < self.n, "element {i} of {}", self.n);
        let token = self.range(token, 1);
        let chunk = &token.chunks[i / CHUNK];
        let (group, e) = (i % CHUNK / GROUP, i % GROUP);
        let quant = chunk.quants[first_half(group) + e / HALF * SECOND_HALF + e % HALF];
        let excess = token.excess.iter().flatten();
        let excess = excess.filter(|excess| excess.element as usize == i);
        let steps = i32::from(quant) + excess.map(|excess| excess.steps).sum::<i32>();
        steps as f32 * chunk.scales[group]
    }

    /// The excess of each token; empty where groups have scales or outliers are pruned.
    #[inline(always)]
    pub(crate) fn excess(&self) -> &'a [[Excess; EXCESSES]] {
        self.excess
    }

    /// Chunks of all tokens, token after token.
    #[inline(always)]
    pub(crate) fn chunks(&self) -> &'a [Chunk] {
        self.chunks
    }
}
