//! Softmax attention of a chunk over the pages of its sequences, between the projections.
//!
//! Visible positions are split at multiples of [`BLOCK`]. Each block yields its maximum score `m`,
//! `Σ exp(s − m)` and `Σ exp(s − m)·v`; blocks are merged in position order (online softmax). The
//! computation depends on the query's position alone, so threads, chunks and the work split below
//! cannot change a bit.

#[cfg(test)]
mod tests;

use std::ops::Range;

use emberflow_kernels::{Columns, Compute, Cpu, GROUP, Workers, matmul_scratch, soft_cap};
use emberflow_models::config::Reach;

use crate::state::{BLOCK, LayerKv, Sequence, Span};
use crate::thread_buffer::with_thread_buffer;

/// Queries that share one read of a block.
const BATCH: usize = 16;

/// Work items per thread, for load balance.
const PIECES: usize = 4;

/// Attention of a layer.
#[derive(Clone, Copy)]
pub(super) struct Layer<'a> {
    /// Its place among those that store keys and values.
    pub place: usize,
    /// Elements of a query and of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Positions that a query sees.
    pub reach: Reach,
    /// Positions of a pool, and where the vectors of pools are; see [`Pass::pools`].
    pub pools: Option<(usize, (usize, usize))>,
    /// By query head, the attention sink: an additional logit.
    pub sinks: Option<&'a [f32]>,
    /// Scores `s` become `cap · tanh(s / cap)`.
    pub cap: Option<f32>,
}

impl<'a> Layer<'a> {
    fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Its `tokens` rows from `row` on of scaled queries, `[rows × heads·head_dim]`.
    fn pass(
        self,
        cpu: Cpu,
        sequence: &'a Sequence,
        queries: &'a [f32],
        row: usize,
        tokens: usize,
    ) -> Pass<'a> {
        let vectors = |(size, (place, layer)): (usize, (usize, usize))| {
            (size, sequence.entries[place].layer(layer))
        };
        Pass {
            cpu,
            kv: sequence.pages.layer(self.place),
            queries: &queries[row * self.heads() * self.head_dim..],
            first: sequence.len(),
            tokens,
            pools: self.pools.map(vectors),
            layer: self,
        }
    }
}

/// The queries of a chunk of one sequence in one layer.
#[derive(Clone, Copy)]
struct Pass<'a> {
    cpu: Cpu,
    kv: LayerKv<'a>,
    /// Scaled queries, `[tokens × heads·head_dim]`.
    queries: &'a [f32],
    /// Position of the first token.
    first: usize,
    tokens: usize,
    /// Pools whose vectors it sees beside these, all that are complete at its position: positions of a
    /// pool, and the vectors, which are like those of positions.
    pools: Option<(usize, LayerKv<'a>)>,
    layer: Layer<'a>,
}

/// Sizes of a layer's attention, from which its buffers follow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScoreSizes {
    /// Elements of a query and of a key.
    pub head_dim: usize,
    /// Query heads.
    pub heads: usize,
    pub kv_heads: usize,
    /// A position's key is also its value.
    pub latent: bool,
    /// Positions of a pool; 0 without pools.
    pub pool: usize,
}

impl ScoreSizes {
    /// Elements of a stored vector, padding included.
    fn width(self) -> usize {
        self.head_dim.next_multiple_of(GROUP)
    }

    /// Floats of a thread's buffer for chunks of up to `chunk` tokens.
    pub fn thread_floats(self, chunk: usize) -> usize {
        let group = self.heads / self.kv_heads.max(1);
        let batch = BATCH * (BLOCK + self.width() + self.head_dim);
        batch + products(self.head_dim, self.latent) + 2 * chunk * group
    }

    /// Floats of the results per block of one token: `width + 2` for each query head and each block of positions or
    /// pools; 0 if there is at most one block.
    pub fn partials(self, context: usize) -> usize {
        let pools = context.checked_div(self.pool).unwrap_or(0);
        match context.div_ceil(BLOCK) + pools.div_ceil(BLOCK) {
            0 | 1 => 0,
            blocks => blocks
                .saturating_mul(self.heads)
                .saturating_mul(self.width() + 2),
        }
    }
}

/// Floats of scratch for products of queries and latent vectors.
fn products(head_dim: usize, latent: bool) -> usize {
    if latent { matmul_scratch(head_dim) } else { 0 }
}

/// Softmax state of one query: maximum score and `Σ exp(s − max)`.
#[derive(Clone, Copy)]
struct Sums {
    max: f32,
    sum: f32,
}

impl Sums {
    /// Merges the next block, whose weighted values are `mix`, into `out`.
    fn merge(&mut self, cpu: Cpu, next: Sums, mix: &[f32], out: &mut [f32]) {
        let max = if next.max > self.max {
            next.max
        } else {
            self.max
        };
        let (a, b) = (rescale(self.max, max), rescale(next.max, max));
        self.sum = b.mul_add(next.sum, a * self.sum);
        self.max = max;
        cpu.blend(a, out, b, mix);
    }

    /// Normalizes `out` by the sum, to which a sink adds its share.
    fn finish(self, sink: Option<f32>, out: &mut [f32]) {
        let scale = match sink {
            None => 1.0 / self.sum,
            Some(sink) => {
                let max = if sink > self.max { sink } else { self.max };
                let seen = rescale(self.max, max);
                seen / seen.mul_add(self.sum, rescale(sink, max))
            }
        };
        for value in out {
            *value *= scale;
        }
    }
}

/// `exp(from − to)`: rescales sums from maximum `from` to maximum `to`.
fn rescale(from: f32, to: f32) -> f32 {
    emberflow_kernels::math::exp(from - to)
}

/// A thread's scratch.
struct Buffers<'a> {
    scores: &'a mut [f32],
    mixes: &'a mut [f32],
    queries: &'a mut [f32],
    products: &'a mut [f32],
}

/// Fills the first values of `out`, `[rows × heads·value_dim]`, for the rows of the spans, over the keys and values of
/// their sequences, by scaled queries `[rows × heads·head_dim]`. `partials` holds the results per block of a single
/// token.
pub(super) fn run(
    on: &Compute,
    spans: &[Span<'_>],
    layer: Layer<'_>,
    queries: &[f32],
    out: &mut [f32],
    partials: &mut [f32],
) {
    let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
    let width = layer.heads() * layer.value_dim;
    let pass = |row: usize, index: usize| {
        let span = &spans[index];
        layer.pass(on.cpu, &*span.sequence, queries, row, span.tokens.len())
    };
    let out = &mut out[..rows * width];
    // enough (row, KV head) pairs to keep all threads busy
    if spans.len() == rows && rows * layer.kv_heads >= PIECES * on.workers.threads() {
        run_rows(&on.workers, out, |row| pass(row, row));
        return;
    }
    let mut row = 0;
    let mut rest = out;
    for index in 0..spans.len() {
        let pass = pass(row, index);
        let (out, after) = rest.split_at_mut(pass.tokens * width);
        pass.run(&on.workers, out, partials);
        row += pass.tokens;
        rest = after;
    }
}

/// Computes `out`, one row per sequence, in one parallel section; `pass(t)` is the one-token pass
/// of row `t`.
fn run_rows<'a>(workers: &Workers, out: &mut [f32], pass: impl Fn(usize) -> Pass<'a> + Sync) {
    let Layer {
        kv_heads,
        group,
        value_dim,
        ..
    } = pass(0).layer;
    let width = group * value_dim;
    workers.for_each_chunk_mut(out, width, &|_, item, out| {
        let mut tile = Columns::new(out, 1, width, width);
        pass(item / kv_heads).tokens_of_head(item % kv_heads, 0, &mut tile);
    });
}

impl Pass<'_> {
    /// Fills `out`, `[tokens × heads·value_dim]`. `partials` holds the per-block results of a single
    /// token.
    fn run(self, workers: &Workers, out: &mut [f32], partials: &mut [f32]) {
        let heads = self.layer.kv_heads * self.layer.group;
        let (query, row) = (heads * self.layer.head_dim, heads * self.layer.value_dim);
        let enough = PIECES * workers.threads();
        let few = self.tokens * self.layer.kv_heads < enough;
        if few && self.splits(partials.len() / (heads * (self.kv.width() + 2))) {
            // Few queries: threads share the blocks of one token.
            for t in 0..self.tokens {
                let pass = Pass {
                    queries: &self.queries[t * query..][..query],
                    first: self.first + t,
                    tokens: 1,
                    ..self
                };
                pass.split_positions(workers, &mut out[t * row..][..row], partials);
            }
            return;
        }
        // Many queries: a work item is some tokens of one KV head, at least a batch, so that one
        // read of a block serves all of them.
        let pieces = enough.div_ceil(self.layer.kv_heads);
        let tokens = self
            .tokens
            .div_ceil(pieces)
            .max(BATCH / self.layer.group.min(BATCH));
        let width = self.layer.group * self.layer.value_dim;
        let matrix = Columns::new(out, self.tokens, row, row);
        workers.for_each_tile(matrix, tokens, width, &|t, column, mut tile| {
            self.tokens_of_head(column / width, t, &mut tile);
        });
    }

    /// Visible positions of a token of the chunk.
    fn seen(&self, token: usize) -> Range<usize> {
        let position = self.first + token;
        self.layer.reach.first(position)..position + 1
    }

    /// The same for pools, as if they were positions.
    fn seen_pools(&self, token: usize) -> Range<usize> {
        let size = self.pools.map_or(0, |(size, _)| size);
        0..(self.first + token + 1).checked_div(size).unwrap_or(0)
    }

    /// Whether a token of the chunk sees several blocks, and none sees more than `most`.
    fn splits(&self, most: usize) -> bool {
        let count = |t| self.blocks(t).len() + self.pool_blocks(t);
        let blocks = (0..self.tokens).map(count).max();
        blocks.is_some_and(|blocks| (2..=most).contains(&blocks))
    }

    /// Blocks with positions that a token of the chunk sees.
    fn blocks(&self, token: usize) -> Range<usize> {
        let seen = self.seen(token);
        seen.start / BLOCK..seen.end.div_ceil(BLOCK)
    }

    /// Blocks with visible pools, from the first block on.
    fn pool_blocks(&self, token: usize) -> usize {
        self.seen_pools(token).end.div_ceil(BLOCK)
    }

    /// Runs `f` with this thread's buffers and `rest` more floats.
    fn with_buffers(&self, rest: usize, f: impl FnOnce(Buffers<'_>, &mut [f32])) {
        let (scores, mixes) = (BATCH * BLOCK, BATCH * self.kv.width());
        let queries = BATCH * self.layer.head_dim;
        let products = products(self.layer.head_dim, self.kv.is_latent());
        with_thread_buffer(scores + mixes + queries + products + rest, |buffer| {
            let (scores, buffer) = buffer.split_at_mut(scores);
            let (mixes, buffer) = buffer.split_at_mut(mixes);
            let (queries, buffer) = buffer.split_at_mut(queries);
            let (products, rest) = buffer.split_at_mut(products);
            let buffers = Buffers {
                scores,
                mixes,
                queries,
                products,
            };
            f(buffers, rest);
        });
    }

    /// Attention of `tile.rows()` tokens from `first` on, for the query heads of one KV head.
    fn tokens_of_head(&self, head: usize, first: usize, tile: &mut Columns<'_, f32>) {
        let (tokens, group, hd) = (tile.rows(), self.layer.group, self.layer.value_dim);
        let count = tokens * group;
        self.with_buffers(2 * count, |mut buffers, state| {
            let (max, sum) = state.split_at_mut(count);
            let batch = || (0..count).map(|i| (first + i / group, head * group + i % group));
            let mut take = |begins: bool, (t, h): (usize, usize), next: Sums, mix: &[f32]| {
                let (row, column) = (t - first, h % group);
                let out = &mut tile.row_mut(row)[column * hd..][..hd];
                let i = row * group + column;
                let mut sums = Sums {
                    max: max[i],
                    sum: sum[i],
                };
                if begins {
                    sums = next;
                    out.copy_from_slice(&mix[..hd]);
                } else {
                    sums.merge(self.cpu, next, &mix[..hd], out);
                }
                (max[i], sum[i]) = (sums.max, sums.sum);
            };
            let last = self.seen(first + tokens - 1).end - 1;
            for block in self.seen(first).start / BLOCK..=last / BLOCK {
                let begins = |t| block == self.seen(t).start / BLOCK;
                let seen = |t| self.seen(t);
                self.block(
                    head,
                    block,
                    batch(),
                    seen,
                    &mut buffers,
                    |query, next, mix| {
                        take(begins(query.0), query, next, mix);
                    },
                );
            }
            if let Some((_, kv)) = self.pools {
                let pools = Self { kv, ..*self };
                let pools_end = self.seen_pools(first + tokens - 1).end;
                for block in 0..pools_end.div_ceil(BLOCK) {
                    let seen = |t| self.seen_pools(t);
                    pools.block(
                        head,
                        block,
                        batch(),
                        seen,
                        &mut buffers,
                        |query, next, mix| {
                            take(false, query, next, mix);
                        },
                    );
                }
            }
            for i in 0..count {
                let sums = Sums {
                    max: max[i],
                    sum: sum[i],
                };
                let sink = self
                    .layer
                    .sinks
                    .map(|sinks| sinks[head * group + i % group]);
                sums.finish(sink, &mut tile.row_mut(i / group)[i % group * hd..][..hd]);
            }
        });
    }

    /// Attention of a single token, its blocks computed in parallel: those of positions, then those of
    /// pools, each for as many query heads as share a read of it.
    fn split_positions(&self, workers: &Workers, out: &mut [f32], partials: &mut [f32]) {
        let (group, hd) = (self.layer.group, self.layer.value_dim);
        let size = self.kv.width() + 2;
        let position_blocks = self.blocks(0);
        let blocks = position_blocks.len() + self.pool_blocks(0);
        let each = if group.is_multiple_of(BATCH) {
            BATCH
        } else {
            group
        };
        let pools = self.pools.map(|(_, kv)| Self { kv, ..*self });
        let partials = &mut partials[..self.layer.kv_heads * blocks * group * size];
        workers.for_each_chunk_mut(partials, each * size, &|_, item, partials| {
            let (part, unit) = (item % (group / each), item / (group / each));
            let (head, block) = (unit / blocks, unit % blocks);
            let first = head * group + part * each;
            let batch = (0..each).map(|i| (0, first + i));
            let done = |(_, h): (usize, usize), sums: Sums, mix: &[f32]| {
                let partial = &mut partials[(h - first) * size..][..size];
                (partial[0], partial[1]) = (sums.max, sums.sum);
                partial[2..].copy_from_slice(mix);
            };
            self.with_buffers(0, |mut buffers, _| {
                match (block.checked_sub(position_blocks.len()), &pools) {
                    (Some(block), Some(pools)) => {
                        let seen = |t| self.seen_pools(t);
                        pools.block(head, block, batch, seen, &mut buffers, done);
                    }
                    _ => {
                        let (seen, block) = (|t| self.seen(t), position_blocks.start + block);
                        self.block(head, block, batch, seen, &mut buffers, done);
                    }
                }
            });
        });
        let partials = &*partials;
        workers.for_each_chunk_mut(out, hd, &|_, h, out| {
            let head_partials = &partials[h / group * blocks * group * size..];
            let parts = head_partials.chunks_exact(group * size).take(blocks);
            let mut parts = parts.map(|part| {
                let part = &part[h % group * size..][..size];
                let (max, sum) = (part[0], part[1]);
                (Sums { max, sum }, &part[2..2 + hd])
            });
            if let Some((mut sums, mix)) = parts.next() {
                out.copy_from_slice(mix);
                for (next, mix) in parts {
                    sums.merge(self.cpu, next, mix, out);
                }
                sums.finish(self.layer.sinks.map(|sinks| sinks[h]), out);
            }
        });
    }

    /// Calls `done(query, sums, mix)` for each of the `queries` ((token, query head), in token
    /// order) with visible positions in `block`; `seen` gives the visible positions.
    fn block(
        &self,
        head: usize,
        block: usize,
        queries: impl Iterator<Item = (usize, usize)>,
        seen: impl Fn(usize) -> Range<usize>,
        buffers: &mut Buffers<'_>,
        mut done: impl FnMut((usize, usize), Sums, &[f32]),
    ) {
        let block_positions = block * BLOCK..(block + 1) * BLOCK;
        let mut queries = queries.filter_map(|(t, h)| {
            let seen = seen(t);
            let seen = seen.start.max(block_positions.start)..seen.end.min(block_positions.end);
            (!seen.is_empty()).then_some((t, h, seen))
        });
        loop {
            let mut batch = [const { (0, 0, 0..0) }; BATCH];
            let mut count = 0;
            for (slot, query) in batch.iter_mut().zip(&mut queries) {
                *slot = query;
                count += 1;
            }
            if count == 0 {
                return;
            }
            self.batch(head, &batch[..count], buffers, &mut done);
        }
    }

    /// A batch of queries with their visible positions, all in one block.
    fn batch(
        &self,
        head: usize,
        batch: &[(usize, usize, Range<usize>)],
        buffers: &mut Buffers<'_>,
        done: &mut impl FnMut((usize, usize), Sums, &[f32]),
    ) {
        let (cpu, hd, width) = (self.cpu, self.layer.head_dim, self.kv.width());
        let row = self.layer.kv_heads * self.layer.group * hd;
        let count = batch.len();
        let queries = &mut buffers.queries[..count * hd];
        for (query, (t, h, _)) in queries.chunks_exact_mut(hd).zip(batch) {
            query.copy_from_slice(&self.queries[t * row + h * hd..][..hd]);
        }

        // Tokens ascend, and so do both ends of their visible ranges.
        let (low, high) = (&batch[0].2, &batch[count - 1].2);
        let start = low.start / GROUP * GROUP;
        let scores = &mut buffers.scores[..count * BLOCK];
        for piece in self.kv.pieces(low.start..high.end) {
            self.scores(head, piece, start, queries, scores, buffers.products);
        }
        let mut sums = [Sums { max: 0.0, sum: 0.0 }; BATCH];
        for ((sums, scores), (_, _, seen)) in sums
            .iter_mut()
            .zip(scores.chunks_exact_mut(BLOCK))
            .zip(batch)
        {
            let scores = &mut scores[seen.start - start..seen.end - start];
            if let Some(cap) = self.layer.cap {
                soft_cap(cpu, scores, cap);
            }
            let (max, sum) = cpu.exp_block(scores);
            *sums = Sums { max, sum };
        }

        // Read the common visible range once for all queries, and the ends per query.
        let mixes = &mut buffers.mixes[..count * width];
        mixes.fill(0.0);
        let common = high.start..low.end;
        let mix = |positions: Range<usize>, weights: &[f32], mixes: &mut [f32]| {
            for piece in self.kv.pieces(positions.clone()) {
                let weights = &weights[piece.start - positions.start..];
                let values = self.kv.values(head, piece);
                cpu.mix_values(self.kv.dtype(), values, width, weights, BLOCK, mixes);
            }
        };
        let each = |mixes: &mut [f32], part: &dyn Fn(&Range<usize>) -> Range<usize>| {
            let rows = mixes.chunks_exact_mut(width);
            for ((mixes, scores), (_, _, seen)) in rows.zip(scores.chunks_exact(BLOCK)).zip(batch) {
                let part = part(seen);
                if !part.is_empty() {
                    mix(part.clone(), &scores[part.start - start..], mixes);
                }
            }
        };
        if common.is_empty() {
            each(mixes, &|seen| seen.clone());
        } else {
            each(mixes, &|seen| seen.start..common.start);
            mix(common.clone(), &scores[common.start - start..], mixes);
            each(mixes, &|seen| common.end..seen.end);
        }
        for (((t, h, _), sums), mix) in batch.iter().zip(sums).zip(mixes.chunks_exact(width)) {
            done((*t, *h), sums, mix);
        }
    }

    /// Products of the queries and the keys of `head` at `positions`, which lie in one page. Rows of
    /// `scores` are [`BLOCK`] apart and begin at position `start`.
    fn scores(
        &self,
        head: usize,
        positions: Range<usize>,
        start: usize,
        queries: &[f32],
        scores: &mut [f32],
        products: &mut [f32],
    ) {
        let (dtype, dim) = (self.kv.dtype(), self.layer.head_dim);
        if !self.kv.is_latent() {
            let (keys, first) = self.kv.keys(head, positions);
            let scores = &mut scores[first - start..];
            (self.cpu).key_scores(dtype, keys, dim, queries, scores, BLOCK);
            return;
        }
        let stride = dtype.row_bytes(self.kv.width());
        let scores = &mut scores[positions.start - start..];
        let count = queries.len() / dim;
        let mut scores = Columns::new(scores, count, BLOCK, positions.len());
        let rows = self.kv.values(0, positions);
        (self.cpu).matmul_columns(dtype, rows, stride, dim, queries, &mut scores, products);
    }
}
