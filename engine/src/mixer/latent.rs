//! Latent attention (MLA, DeepSeek-V2): the keys and values of all heads are products of one vector per
//! position, and only that vector is stored.
//!
//! ```text
//! [q_n, q_r] by head = Q·x, or Q·rmsnorm(Qa·x)        q_r rotated        q ← scale · q
//! [c, k_r] = Kv·x                                     c ← rmsnorm(c)     k_r rotated: stored
//! k_h = [Keys_h·c, k_r]        v_h = Values_h·c
//! ```
//!
//! In Ling 3, each head's weighted sum of values is multiplied by the sigmoid of a gate, `Gates·x`.
//! In layers without rotary positions (Kimi Linear), `q_r` and `k_r` are not rotated.
//! Neither `k_h` nor `v_h` is computed: `q_n·(Keys_h·c) = (Keys_hᵀ·q_n)·c`, and a weighted sum of values
//! is `Values_h` times the same sum of latent vectors. So all heads share one key `[c, k_r]`, whose first
//! part is the value. Prompts are computed in the same way as single tokens, so no bit depends on chunks;
//! this takes `(2·rank + rotated) / (head_dim + value_dim)` times the products of scores and sums, and
//! saves those of `k_h` and `v_h`.

use emberflow_kernels::Compute;
use emberflow_models::config::{LatentShape, LatentSizes, ModelConfig};
use emberflow_models::names::Role;

use super::blockwise::{self, Layer, ScoreSizes};
use super::mix::Mix;
use super::needs::buffers;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::norm::sigmoid;
use crate::scratch::Scratch;
use crate::state::Span;

/// The weights of one layer's attention.
#[derive(Debug)]
pub(crate) struct LatentAttention {
    sizes: LatentSizes,
    /// Epsilon of the norms of latent vectors.
    eps: f32,
    /// RMSNorm of the queries' own latent vector; empty if queries are projected from the input.
    query_norm: Vec<f32>,
    /// RMSNorm of the latent vector.
    norm: Vec<f32>,
    /// Index of its vectors in a page.
    place: usize,
}

buffers! { sizes: LatentSizes {
    /// The part of queries that is not rotated, all rows of head 0, then those of head 1; then sums of latent vectors;
    /// then the mixed values.
    mixed: sizes.heads * sizes.rank.max(sizes.plain()).max(sizes.value),
    /// Queries; then products with `Keys_hᵀ`, and later sums of latent vectors, all rows of head 0, then those of head 1.
    parts: sizes.heads * sizes.query.max(sizes.rank),
    /// Queries of latent vectors, `rank + rotated` elements for each head.
    queries: sizes.heads * sizes.stored(),
    /// Latent vectors with the rotated parts of the keys.
    latents: sizes.stored(),
    /// The queries' own latent vectors.
    query_latents: sizes.query_rank,
    /// Gates of the heads' outputs.
    gates: sizes.gates,
} }

/// What a layer needs.
pub(super) fn needs(c: &ModelConfig, shape: LatentShape) -> Needs {
    let (d, sizes) = (c.d_model as usize, LatentSizes::new(c, shape));
    let (heads, queries) = (sizes.heads, sizes.heads * sizes.query);
    let mut matrices = match sizes.query_rank {
        0 => vec![MatrixSpec::input(Role::Q, queries, d)],
        rank => vec![
            MatrixSpec::between(Role::Q, queries, rank),
            MatrixSpec::input(Role::LatentQ, rank, d),
        ],
    };
    matrices.push(MatrixSpec::input(Role::LatentKv, sizes.stored(), d));
    if sizes.gates > 0 {
        matrices.push(MatrixSpec::input(Role::QGate, sizes.gates, d));
    }
    let keys = MatrixSpec::between(Role::LatentKeys, heads * sizes.rank, sizes.plain());
    let values = MatrixSpec::between(Role::LatentValues, heads * sizes.value, sizes.rank);
    matrices.extend([
        keys.in_blocks(heads),
        values.in_blocks(heads),
        MatrixSpec::output(Role::O, d, heads * sizes.value),
    ]);
    Needs {
        matrices,
        row_floats: widths(sizes).iter().sum(),
        state_floats: 0,
        input_floats: 0,
        scores: Some(ScoreSizes {
            head_dim: sizes.stored(),
            heads,
            kv_heads: 1,
            latent: true,
            pool: 0,
        }),
    }
}

impl LatentAttention {
    /// Loads the weights of layer `l`.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        l: u32,
        shape: LatentShape,
    ) -> Result<Self, Error> {
        let sizes = LatentSizes::new(c, shape);
        Ok(Self {
            sizes,
            eps: shape.norm_eps,
            query_norm: match sizes.query_rank {
                0 => Vec::new(),
                rank => from.vector(Role::LatentQNorm, l, rank)?,
            },
            norm: from.vector(Role::LatentKvNorm, l, sizes.rank)?,
            place: c.kv_place(l) as usize,
        })
    }

    /// Queries, latent vectors and gates.
    fn project(&self, on: &Compute, matrices: &Matrices, d: usize, rows: usize, s: &mut Scratch) {
        let b = Buffers::split(self.sizes, rows, &mut s.block);
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let (q, query_latent) = (&matrices[Role::Q], matrices.get(Role::LatentQ));
        let first = match query_latent {
            Some(matrix) => (matrix, &mut *b.query_latents),
            None => (q, &mut *b.parts),
        };
        let mut products = [first, (&matrices[Role::LatentKv], b.latents)];
        Matrix::matmul_all(on, &mut products, input, &mut s.rows);
        if let Some(matrix) = matrices.get(Role::QGate) {
            matrix.matmul(on, input, &mut s.rows, b.gates);
        }
        if query_latent.is_none() {
            return;
        }
        for row in b.query_latents.chunks_exact_mut(self.sizes.query_rank) {
            on.cpu.rmsnorm_inplace(row, &self.query_norm, self.eps);
        }
        let input = Input::new(on.cpu, b.query_latents, rows, &mut s.input);
        q.matmul(on, input, &mut s.rows, b.parts);
    }

    /// Rotates the last part of each query and of the keys, and stores the latent vectors. The rotated parts of queries
    /// get their final position; the others wait for [`LatentAttention::absorb_keys`].
    fn rotate_and_store(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        b: &mut Buffers<'_>,
    ) {
        let (c, sizes, cpu) = (at.config, self.sizes, on.cpu);
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let (plain, stored) = (sizes.plain(), sizes.stored());
        let scale = (c.form.attention_scale).unwrap_or(1.0 / libm::sqrtf(sizes.query as f32));
        let rotates = c.rotates(at.number as u32);
        let mut row = 0;
        for span in spans.iter_mut() {
            let first = span.sequence.len();
            let kv = &mut span.sequence.pages;
            for position in first..first + span.tokens.len() {
                let scale = scale
                    * c.form
                        .query_scale
                        .map_or(1.0, |growth| growth.at(position, true));
                let (cos, sin) = at.rope.at(row);
                for h in 0..sizes.heads {
                    let query =
                        &mut b.parts[(row * sizes.heads + h) * sizes.query..][..sizes.query];
                    query.iter_mut().for_each(|q| *q *= scale);
                    if rotates {
                        cpu.rope_rotate_half(&mut query[plain..], cos, sin);
                    }
                    let rotated = &mut b.queries[(row * sizes.heads + h) * stored + sizes.rank..];
                    rotated[..sizes.rotated].copy_from_slice(&query[plain..]);
                    b.mixed[(h * rows + row) * plain..][..plain].copy_from_slice(&query[..plain]);
                }
                let latent = &mut b.latents[row * stored..][..stored];
                cpu.rmsnorm_inplace(&mut latent[..sizes.rank], &self.norm, self.eps);
                if rotates {
                    cpu.rope_rotate_half(&mut latent[sizes.rank..], cos, sin);
                }
                kv.writer(position).store_value(cpu, self.place, 0, latent);
                row += 1;
            }
        }
    }

    /// The first part of each query: `Keys_hᵀ` times the part that is not rotated.
    fn absorb_keys(&self, on: &Compute, keys: &Matrix, rows: usize, s: &mut Scratch) {
        let sizes = self.sizes;
        let b = Buffers::split(sizes, rows, &mut s.block);
        let (plain, stored) = (sizes.plain(), sizes.stored());
        let parts = &b.mixed[..sizes.heads * rows * plain];
        let input = Input::new(on.cpu, parts, sizes.heads * rows, &mut s.input);
        keys.matmul_blocks(on, sizes.heads, input, &mut s.rows, b.parts);
        let queries = b.queries.chunks_exact_mut(stored);
        for (query, part) in queries
            .zip(b.parts.chunks_exact(sizes.rank))
            .take(rows * sizes.heads)
        {
            query[..sizes.rank].copy_from_slice(part);
        }
    }

    /// The sums of latent vectors, `[rows × heads·rank]`.
    fn attend(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        let layer = Layer {
            place: self.place,
            head_dim: self.sizes.stored(),
            value_dim: self.sizes.rank,
            kv_heads: 1,
            group: self.sizes.heads,
            reach: at.config.reach(at.number as u32),
            pools: None,
            sinks: None,
            cap: None,
        };
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        let b = Buffers::split(self.sizes, rows, &mut s.block);
        blockwise::run(on, spans, layer, b.queries, b.mixed, &mut s.partials);
    }

    /// Replaces sums of latent vectors by values, `[rows × heads·value_dim]`.
    fn apply_values(&self, on: &Compute, values: &Matrix, rows: usize, s: &mut Scratch) {
        let sizes = self.sizes;
        let b = Buffers::split(sizes, rows, &mut s.block);
        let sums = b.mixed.chunks_exact(sizes.rank).take(rows * sizes.heads);
        for (i, sum) in sums.enumerate() {
            let (row, h) = (i / sizes.heads, i % sizes.heads);
            b.parts[(h * rows + row) * sizes.rank..][..sizes.rank].copy_from_slice(sum);
        }
        let sums = &b.parts[..rows * sizes.heads * sizes.rank];
        let input = Input::new(on.cpu, sums, sizes.heads * rows, &mut s.input);
        values.matmul_blocks(on, sizes.heads, input, &mut s.rows, b.mixed);
    }
}

impl Mix for LatentAttention {
    /// Appends the rows' latent vectors.
    fn run(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) {
        let (rows, sizes) = (spans.iter().map(|span| span.tokens.len()).sum(), self.sizes);
        self.project(on, matrices, at.config.d_model as usize, rows, s);
        let b = &mut Buffers::split(sizes, rows, &mut s.block);
        self.rotate_and_store(on, at, spans, b);
        self.absorb_keys(on, &matrices[Role::LatentKeys], rows, s);
        self.attend(on, at, spans, s);
        self.apply_values(on, &matrices[Role::LatentValues], rows, s);
        let b = Buffers::split(sizes, rows, &mut s.block);
        let heads = b.mixed.chunks_exact_mut(sizes.value);
        for (head, gate) in heads.zip(&*b.gates) {
            let share = sigmoid(*gate);
            head.iter_mut().for_each(|value| *value *= share);
        }
        let mixed = &b.mixed[..rows * sizes.heads * sizes.value];
        let input = Input::new(on.cpu, mixed, rows, &mut s.input);
        matrices[Role::O].matmul(on, input, &mut s.rows, &mut s.out);
    }
}
