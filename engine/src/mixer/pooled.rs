//! Attention over a window and over pools (DeepSeek-V4, `modeling_deepseek_v4.py`): one vector per
//! position is key and value of all heads, and pools of positions have their own vectors.
//!
//! ```text
//! q by head = rmsnorm(Q·rmsnorm(Qa·x)), its end rotated        v = rmsnorm(Kv·x), its end rotated: stored
//! y by head = Σ softmax(q·v, sink) v over the window and the complete pools, its end rotated back
//! out = O·[Out_g·(y of the heads of group g)]
//! ```
//!
//! A pool of `size` positions has one vector, element by element a weighted mean over its positions:
//! `p = rmsnorm(Σ softmax(g + bias) ∘ c)`, rotated as the first position of the pool, with `c = PoolKv·x`
//! and `g = PoolGate·x`. If pools overlap, a position has two vectors: the second belongs to its own pool,
//! the first to the next. The sums run from position to position with the largest gate so far (online
//! softmax), so a text stores three numbers for each element of an unfinished pool, and its bits do not
//! depend on chunks.

use std::ops::Range;

use emberflow_kernels::{Compute, math};
use emberflow_models::config::{ModelConfig, PooledShape};
use emberflow_models::names::Role;

use super::blockwise::{self, Layer, ScoreSizes};
use super::mix::Mix;
use super::needs::buffers;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::rope::RopeTable;
use crate::scratch::Scratch;
use crate::state::{RecurrentPart, Span};

/// Numbers stored per element of an unfinished pool: the largest gate, and sums of weights and of weighted
/// elements.
const KEPT: usize = 3;

/// The weights of one layer's attention.
#[derive(Debug)]
pub(crate) struct PooledAttention {
    sizes: Sizes,
    eps: f32,
    /// RMSNorm of the queries' latent vector.
    query_norm: Vec<f32>,
    /// RMSNorm of the vector of a position.
    norm: Vec<f32>,
    /// Norm of queries without weights: ones.
    plain: Vec<f32>,
    sinks: Vec<f32>,
    /// Pools, in a layer that has some.
    pools: Option<Pools>,
    /// Index of its vectors in a page.
    place: usize,
}

/// The weights of the pools of a layer.
#[derive(Debug)]
struct Pools {
    /// Positions of a pool.
    size: usize,
    head_dim: usize,
    overlap: bool,
    /// Added to gates, by position in the pool, `[size × series·head_dim]`.
    bias: Vec<f32>,
    /// RMSNorm of a pool's vector.
    norm: Vec<f32>,
    /// Index of its vectors among the sequence's, and in their pages.
    place: (usize, usize),
    /// Its part of the recurrent state.
    part: Range<usize>,
}

/// Sizes of the buffers.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    heads: usize,
    head_dim: usize,
    shape: PooledShape,
}

impl Sizes {
    fn new(c: &ModelConfig, shape: PooledShape) -> Self {
        let [heads, head_dim] = [c.heads, c.head_dim].map(|n| n as usize);
        Self {
            heads,
            head_dim,
            shape,
        }
    }

    /// Width of all queries.
    fn queries(self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of what a position adds to pools.
    fn pooled(self) -> usize {
        self.shape.series() * self.head_dim
    }

    /// Width of the output before the last projection.
    fn low(self) -> usize {
        self.shape.groups as usize * self.shape.group_rank as usize
    }
}

buffers! { sizes: Sizes {
    /// Gates of the positions' vectors for pools; then sums of vectors; then the groups' projections.
    mixed: sizes.queries().max(sizes.pooled()).max(sizes.low()),
    /// The positions' vectors for pools; later the sums by group, all rows of group 0, then those of group 1.
    parts: sizes.queries().max(sizes.pooled()),
    /// Queries.
    queries: sizes.queries(),
    /// Latent vectors of queries.
    query_latents: sizes.shape.query_rank as usize,
    /// Vectors of positions.
    vectors: sizes.head_dim,
} }

/// What a layer needs.
pub(super) fn needs(c: &ModelConfig, shape: PooledShape) -> Needs {
    let (d, sizes) = (c.d_model as usize, Sizes::new(c, shape));
    let [rank, groups, pool] = [shape.query_rank, shape.groups, shape.pool].map(|n| n as usize);
    let mut matrices = vec![
        MatrixSpec::between(Role::Q, sizes.queries(), rank),
        MatrixSpec::input(Role::LatentQ, rank, d),
        MatrixSpec::input(Role::LatentKv, sizes.head_dim, d),
    ];
    if pool > 0 {
        let roles = [Role::PoolKv, Role::PoolGate];
        matrices.extend(roles.map(|role| MatrixSpec::input(role, sizes.pooled(), d)));
    }
    let low = MatrixSpec::between(Role::PooledOut, sizes.low(), sizes.queries() / groups);
    matrices.extend([
        low.in_blocks(groups),
        MatrixSpec::output(Role::O, d, sizes.low()),
    ]);
    Needs {
        matrices,
        row_floats: widths(sizes).iter().sum(),
        state_floats: KEPT * sizes.pooled(),
        input_floats: 0,
        scores: Some(ScoreSizes {
            head_dim: sizes.head_dim,
            heads: sizes.heads,
            kv_heads: 1,
            latent: true,
            pool,
        }),
    }
}

impl Pools {
    fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        l: u32,
        shape: PooledShape,
        part: Range<usize>,
    ) -> Result<Option<Self>, Error> {
        let Some(place) = c.form.pooled.as_ref().and_then(|pooled| pooled.place(l)) else {
            return Ok(None);
        };
        let [head_dim, size] = [c.head_dim, shape.pool].map(|n| n as usize);
        let width = shape.series() * head_dim;
        Ok(Some(Self {
            size,
            head_dim,
            overlap: shape.overlaps,
            bias: from.rows(Role::PoolBias, l, size, width)?,
            norm: from.vector(Role::PoolNorm, l, head_dim)?,
            place,
            part,
        }))
    }

    /// Adds a position's vectors `kv` with `gates` to the sums in `state`. At the end of a pool,
    /// its vector replaces the beginning of `kv`.
    fn add(&self, position: usize, kv: &mut [f32], gates: &[f32], state: &mut [f32]) {
        let (hd, at) = (self.head_dim, position % self.size);
        let (current, next) = state.split_at_mut(KEPT * hd);
        if at == 0 {
            if self.overlap {
                current.copy_from_slice(next)
            } else {
                current.fill(0.0)
            }
            next.fill(0.0);
        }
        let bias = &self.bias[at * kv.len()..][..kv.len()];
        let last = kv.len() - hd;
        add_to(current, &kv[last..], &gates[last..], &bias[last..]);
        if self.overlap {
            add_to(next, &kv[..hd], &gates[..hd], &bias[..hd]);
        }
        if at + 1 == self.size {
            let (sums, mixes) = current[hd..].split_at(hd);
            for (value, (sum, mix)) in kv.iter_mut().zip(sums.iter().zip(mixes)) {
                *value = mix / sum;
            }
        }
    }
}

/// Adds elements with their gates to sums, `[largest gate, sum of weights, weighted sum]` for each
/// element. A sum of weights of 0 means that nothing was added yet.
fn add_to(sums: &mut [f32], values: &[f32], gates: &[f32], bias: &[f32]) {
    let width = values.len();
    let (largest, rest) = sums.split_at_mut(width);
    let (weights, mixes) = rest.split_at_mut(width);
    for i in 0..width {
        let gate = gates[i] + bias[i];
        if weights[i] == 0.0 {
            (largest[i], weights[i], mixes[i]) = (gate, 1.0, values[i]);
        } else if gate > largest[i] {
            let scale = math::exp(largest[i] - gate);
            weights[i] = weights[i].mul_add(scale, 1.0);
            mixes[i] = mixes[i].mul_add(scale, values[i]);
            largest[i] = gate;
        } else {
            let weight = math::exp(gate - largest[i]);
            weights[i] += weight;
            mixes[i] = values[i].mul_add(weight, mixes[i]);
        }
    }
}

/// Rotates the last pairs of adjacent elements of `x` by `angle(pair)`, given as cosine and sine.
fn rotate_pairs(x: &mut [f32], pairs: usize, angle: impl Fn(usize) -> (f32, f32)) {
    let first = x.len() - 2 * pairs;
    for (pair, values) in x[first..].chunks_exact_mut(2).enumerate() {
        let (cos, sin) = angle(pair);
        let (a, b) = (values[0], values[1]);
        values[0] = (-b).mul_add(sin, a * cos);
        values[1] = a.mul_add(sin, b * cos);
    }
}

/// The same with the angles of row `row`; backwards if `sign` is −1.
fn rotate_row(x: &mut [f32], rope: &RopeTable, row: usize, sign: f32) {
    let (cos, sin) = rope.at(row);
    rotate_pairs(x, rope.pairs(), |pair| (cos[pair], sign * sin[pair]));
}

impl PooledAttention {
    /// Loads the weights of layer `l`, whose state is `part` of a sequence's recurrent state.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        l: u32,
        shape: PooledShape,
        part: Range<usize>,
    ) -> Result<Self, Error> {
        let sizes = Sizes::new(c, shape);
        Ok(Self {
            sizes,
            eps: c.rms_eps,
            query_norm: from.vector(Role::LatentQNorm, l, shape.query_rank as usize)?,
            norm: from.vector(Role::LatentKvNorm, l, sizes.head_dim)?,
            plain: vec![1.0; sizes.head_dim],
            sinks: from.vector(Role::Sinks, l, sizes.heads)?,
            pools: Pools::load(from, c, l, shape, part)?,
            place: c.kv_place(l) as usize,
        })
    }

    /// Latent vectors of queries, vectors of positions, and their vectors for pools with gates.
    fn project(&self, on: &Compute, matrices: &Matrices, d: usize, rows: usize, s: &mut Scratch) {
        let b = Buffers::split(self.sizes, rows, &mut s.block);
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let query = (&matrices[Role::LatentQ], &mut *b.query_latents);
        let kv = (&matrices[Role::LatentKv], b.vectors);
        if self.pools.is_some() {
            let vectors = (&matrices[Role::PoolKv], b.parts);
            let gates = (&matrices[Role::PoolGate], b.mixed);
            Matrix::matmul_all(on, &mut [query, kv, vectors, gates], input, &mut s.rows);
        } else {
            Matrix::matmul_all(on, &mut [query, kv], input, &mut s.rows);
        }
        let rank = self.query_norm.len();
        (on.workers).for_each_chunk_mut(b.query_latents, rank, &|_, _, row| {
            on.cpu.rmsnorm_inplace(row, &self.query_norm, self.eps);
        });
    }

    /// Adds the rows to their pools, and stores the vectors of completed pools.
    fn fill(
        &self,
        on: &Compute,
        pools: &Pools,
        rope: &RopeTable,
        spans: &mut [Span<'_>],
        b: &mut Buffers<'_>,
    ) {
        let (width, hd) = (self.sizes.pooled(), self.sizes.head_dim);
        let mut row = 0;
        for span in spans.iter_mut() {
            let (first, count) = (span.sequence.len(), span.tokens.len());
            let given = &mut b.parts[row * width..][..count * width];
            let gates = &b.mixed[row * width..][..count * width];
            let RecurrentPart {
                before,
                after,
                mut marked,
            } = span.sequence.recurrent(pools.part.clone());
            after.copy_from_slice(before);
            let rows = given.chunks_exact_mut(width).zip(gates.chunks_exact(width));
            for (number, (given, gates)) in rows.enumerate() {
                pools.add(first + number, given, gates, after);
                if let Some((rows, to)) = &mut marked
                    && *rows == number + 1
                {
                    to.copy_from_slice(after);
                }
            }
            let (size, (place, layer)) = (pools.size, pools.place);
            for pool in first / size..(first + count) / size {
                let number = (pool + 1) * size - 1 - first;
                let vector = &mut given[number * width..][..hd];
                on.cpu.rmsnorm_inplace(vector, &pools.norm, self.eps);
                rotate_pairs(vector, rope.pairs(), |pair| rope.angle(pool * size, pair));
                let entries = &mut span.sequence.entries[place];
                (entries.writer(pool)).store_value(on.cpu, layer, 0, vector);
            }
            row += count;
        }
    }

    /// Norms, scales and rotates queries, and stores the rows' vectors.
    fn rotate_and_store(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        b: &mut Buffers<'_>,
    ) {
        let (hd, width) = (self.sizes.head_dim, self.sizes.queries());
        let usual = 1.0 / libm::sqrtf(hd as f32);
        let scale = at.config.form.attention_scale.unwrap_or(usual);
        on.workers
            .for_each_chunk_mut(b.queries, width, &|_, row, queries| {
                for query in queries.chunks_exact_mut(hd) {
                    on.cpu.rmsnorm_inplace(query, &self.plain, self.eps);
                    rotate_row(query, at.rope, row, 1.0);
                    query.iter_mut().for_each(|q| *q *= scale);
                }
            });
        (on.workers).for_each_chunk_mut(b.vectors, hd, &|_, row, vector| {
            on.cpu.rmsnorm_inplace(vector, &self.norm, self.eps);
            rotate_row(vector, at.rope, row, 1.0);
        });
        let mut vectors = b.vectors.chunks_exact(hd);
        for span in spans.iter_mut() {
            let first = span.sequence.len();
            for position in first..first + span.tokens.len() {
                let Some(vector) = vectors.next() else {
                    return;
                };
                let mut page = span.sequence.pages.writer(position);
                page.store_value(on.cpu, self.place, 0, vector);
            }
        }
    }

    /// The sums of vectors, `[rows × heads·head_dim]`.
    fn attend(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        let layer = Layer {
            place: self.place,
            head_dim: self.sizes.head_dim,
            value_dim: self.sizes.head_dim,
            kv_heads: 1,
            group: self.sizes.heads,
            reach: at.config.reach(at.number as u32),
            pools: self.pools.as_ref().map(|pools| (pools.size, pools.place)),
            sinks: Some(&self.sinks),
            cap: None,
        };
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        let b = Buffers::split(self.sizes, rows, &mut s.block);
        blockwise::run(on, spans, layer, b.queries, b.mixed, &mut s.partials);
    }

    /// Rotates the sums back and projects them, first by group and then together, to `s.out`.
    fn give(
        &self,
        on: &Compute,
        matrices: &Matrices,
        rope: &RopeTable,
        rows: usize,
        s: &mut Scratch,
    ) {
        let (hd, width) = (self.sizes.head_dim, self.sizes.queries());
        let groups = self.sizes.shape.groups as usize;
        let each = width / groups;
        let b = Buffers::split(self.sizes, rows, &mut s.block);
        let (parts, sums) = (&mut b.parts[..rows * width], &*b.mixed);
        // all rows of group 0, then those of group 1
        on.workers
            .for_each_chunk_mut(parts, each, &|_, item, part| {
                let (group, row) = (item / rows, item % rows);
                part.copy_from_slice(&sums[row * width + group * each..][..each]);
                for sum in part.chunks_exact_mut(hd) {
                    rotate_row(sum, rope, row, -1.0);
                }
            });
        let parts = &b.parts[..rows * width];
        let input = Input::new(on.cpu, parts, groups * rows, &mut s.input);
        matrices[Role::PooledOut].matmul_blocks(on, groups, input, &mut s.rows, b.mixed);
        let low = &b.mixed[..rows * self.sizes.low()];
        let input = Input::new(on.cpu, low, rows, &mut s.input);
        matrices[Role::O].matmul(on, input, &mut s.rows, &mut s.out);
    }
}

impl Mix for PooledAttention {
    /// Appends the rows' vectors and those of pools that they complete.
    fn run(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) {
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        self.project(on, matrices, at.config.d_model as usize, rows, s);
        let b = &mut Buffers::split(self.sizes, rows, &mut s.block);
        if let Some(pools) = &self.pools {
            self.fill(on, pools, at.rope, spans, b);
        }
        let input = Input::new(on.cpu, b.query_latents, rows, &mut s.input);
        matrices[Role::Q].matmul(on, input, &mut s.rows, b.queries);
        self.rotate_and_store(on, at, spans, b);
        self.attend(on, at, spans, s);
        self.give(on, matrices, at.rope, rows, s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_a_softmax() {
        let mut sums = [0.0; 3];
        let terms = [(2.0, 0.5), (-1.0, 3.0), (4.0, -2.0f32)];
        for (value, gate) in terms {
            add_to(&mut sums, &[value], &[gate - 1.0], &[1.0]);
        }
        let weight: f32 = terms.iter().map(|(_, gate)| gate.exp()).sum();
        let mixed: f32 = terms.iter().map(|(value, gate)| value * gate.exp()).sum();
        assert!(
            (sums[2] / sums[1] - mixed / weight).abs() < 1e-5,
            "{sums:?}"
        );
    }

    #[test]
    fn rotation_and_back_is_nothing() {
        let angle = |pair: usize| (0.5f32 + pair as f32).sin_cos();
        let mut x = [1.0, 2.0, 3.0, 4.0, 5.0];
        rotate_pairs(&mut x, 2, |pair| (angle(pair).1, angle(pair).0));
        assert_eq!(x[0], 1.0);
        assert!((x[1] - 2.0).abs() > 0.1);
        rotate_pairs(&mut x, 2, |pair| (angle(pair).1, -angle(pair).0));
        for (found, expected) in x.iter().zip([1.0, 2.0, 3.0, 4.0, 5.0]) {
            assert!((found - expected).abs() < 1e-5);
        }
    }
}
