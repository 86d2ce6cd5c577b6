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

use super::LayerPass;
use super::blockwise::{self, Layer};
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
    /// Projection to the queries' own latent vector, `[query_rank × d_model]`; `None` if queries are
    /// projected from the input.
    pub query_latent: Option<Matrix>,
    /// RMSNorm of this vector; empty without.
    query_norm: Vec<f32>,
    /// Projection to the queries, `[heads·head_dim × query_rank or d_model]`.
    pub q: Matrix,
    /// Projection to the latent vector and the rotated part of the keys, `[rank + rotated × d_model]`.
    pub latent: Matrix,
    /// RMSNorm of the latent vector.
    norm: Vec<f32>,
    /// `Keys_hᵀ` of each head, `[heads·rank × head_dim − rotated]`.
    pub keys: Matrix,
    /// `Values_h` of each head, `[heads·value_dim × rank]`.
    pub values: Matrix,
    /// Projection to the gates of the heads' outputs, `[heads × d_model]`; `None` without them.
    pub gates: Option<Matrix>,
    /// Output projection, `[d_model × heads·value_dim]`.
    pub output: Matrix,
    /// Index of its vectors in a page.
    place: usize,
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
        let (d, heads) = (c.d_model as usize, sizes.heads);
        let (query_latent, query_norm, input) = match sizes.query_rank {
            0 => (None, Vec::new(), d),
            rank => {
                let matrix = from.matrix(Role::LatentQ, l, rank, d)?;
                (Some(matrix), from.vector(Role::LatentQNorm, l, rank)?, rank)
            }
        };
        Ok(Self {
            sizes,
            eps: shape.norm_eps,
            query_latent,
            query_norm,
            q: from.matrix(Role::Q, l, heads * sizes.query, input)?,
            latent: from.matrix(Role::LatentKv, l, sizes.stored(), d)?,
            norm: from.vector(Role::LatentKvNorm, l, sizes.rank)?,
            keys: from.matrix(Role::LatentKeys, l, heads * sizes.rank, sizes.plain())?,
            values: from.matrix(Role::LatentValues, l, heads * sizes.value, sizes.rank)?,
            gates: (shape.gated)
                .then(|| from.matrix(Role::QGate, l, heads, d))
                .transpose()?,
            output: from.matrix(Role::O, l, d, heads * sizes.value)?,
            place: c.kv_place(l) as usize,
        })
    }

    /// See [`super::Mixer::run`]. Appends the rows' latent vectors.
    pub fn run(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        self.project(on, rows, s);
        self.rotate_and_store(on, at, spans, s);
        self.absorb_keys(on, rows, s);
        self.attend(on, at, spans, s);
        self.apply_values(on, rows, s);
        self.gate(rows, s);
        let width = self.sizes.heads * self.sizes.value;
        let input = Input::new(on.cpu, &s.attended[..rows * width], rows, &mut s.input);
        self.output.matmul(on, input, &mut s.rows, &mut s.out);
    }

    /// `s.gate`: queries, head by head. `s.k`: latent vectors with the keys' rotated parts. `s.v`: the
    /// queries' own latent vectors, then the gates of heads.
    fn project(&self, on: &Compute, rows: usize, s: &mut Scratch) {
        let d = self.output.rows();
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let width = self.sizes.query_rank;
        let (latents, gates) = s.v.split_at_mut(rows * width);
        let first = match &self.query_latent {
            Some(matrix) => (matrix, &mut *latents),
            None => (&self.q, &mut s.gate[..]),
        };
        let mut all = [first, (&self.latent, &mut s.k[..])];
        Matrix::matmul_all(on, &mut all, input, &mut s.rows);
        if let Some(matrix) = &self.gates {
            matrix.matmul(on, input, &mut s.rows, gates);
        }
        if self.query_latent.is_none() {
            return;
        }
        for row in latents.chunks_exact_mut(width) {
            on.cpu.rmsnorm_inplace(row, &self.query_norm, self.eps);
        }
        let input = Input::new(on.cpu, latents, rows, &mut s.input);
        self.q.matmul(on, input, &mut s.rows, &mut s.gate);
    }

    /// Rotates the last part of each query and of the keys, and stores the latent vectors. Leaves the
    /// rotated parts in `s.q`, at their final position in queries of `rank + rotated` elements, and
    /// the others in `s.attended`: all rows of head 0, then those of head 1.
    fn rotate_and_store(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) {
        let (c, of, cpu) = (at.config, self.sizes, on.cpu);
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let (plain, stored) = (of.plain(), of.stored());
        let scale = (c.form.attention_scale).unwrap_or(1.0 / libm::sqrtf(of.query as f32));
        let rotates = c.rotates(at.number as u32);
        let mut row = 0;
        for span in spans.iter_mut() {
            let first = span.sequence.len();
            let kv = &mut span.sequence.pages;
            for position in first..first + span.tokens.len() {
                let scale = scale * c.form.query_scale.map_or(1.0, |of| of.at(position, true));
                let (cos, sin) = at.rope.at(row);
                for h in 0..of.heads {
                    let query = &mut s.gate[(row * of.heads + h) * of.query..][..of.query];
                    query.iter_mut().for_each(|q| *q *= scale);
                    if rotates {
                        cpu.rope_rotate_half(&mut query[plain..], cos, sin);
                    }
                    let rotated = &mut s.q[(row * of.heads + h) * stored + of.rank..];
                    rotated[..of.rotated].copy_from_slice(&query[plain..]);
                    s.attended[(h * rows + row) * plain..][..plain]
                        .copy_from_slice(&query[..plain]);
                }
                let latent = &mut s.k[row * stored..][..stored];
                cpu.rmsnorm_inplace(&mut latent[..of.rank], &self.norm, self.eps);
                if rotates {
                    cpu.rope_rotate_half(&mut latent[of.rank..], cos, sin);
                }
                kv.writer(position).store_value(cpu, self.place, 0, latent);
                row += 1;
            }
        }
    }

    /// The first part of each query in `s.q`: `Keys_hᵀ` times the contents of `s.attended`.
    fn absorb_keys(&self, on: &Compute, rows: usize, s: &mut Scratch) {
        let of = self.sizes;
        let (plain, stored) = (of.plain(), of.stored());
        let parts = &s.attended[..of.heads * rows * plain];
        let input = Input::new(on.cpu, parts, of.heads * rows, &mut s.input);
        (self.keys).matmul_blocks(on, of.heads, input, &mut s.rows, &mut s.gate);
        let queries = s.q.chunks_exact_mut(stored);
        for (query, part) in queries
            .zip(s.gate.chunks_exact(of.rank))
            .take(rows * of.heads)
        {
            query[..of.rank].copy_from_slice(part);
        }
    }

    /// `s.attended`: sums of latent vectors, `[rows × heads·rank]`.
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
        blockwise::run(on, spans, layer, &s.q, &mut s.attended, &mut s.partials);
    }

    /// `s.attended`: replaces sums of latent vectors by values, `[rows × heads·value_dim]`.
    fn apply_values(&self, on: &Compute, rows: usize, s: &mut Scratch) {
        let of = self.sizes;
        let sums = s.attended.chunks_exact(of.rank).take(rows * of.heads);
        for (i, sum) in sums.enumerate() {
            let (row, h) = (i / of.heads, i % of.heads);
            s.gate[(h * rows + row) * of.rank..][..of.rank].copy_from_slice(sum);
        }
        let sums = &s.gate[..rows * of.heads * of.rank];
        let input = Input::new(on.cpu, sums, of.heads * rows, &mut s.input);
        (self.values).matmul_blocks(on, of.heads, input, &mut s.rows, &mut s.attended);
    }

    /// `s.attended`: the values of each head, times the sigmoid of its gate.
    fn gate(&self, rows: usize, s: &mut Scratch) {
        let of = self.sizes;
        let gates = &s.v[rows * of.query_rank..][..rows * of.gates];
        let heads = s.attended.chunks_exact_mut(of.value);
        for (head, gate) in heads.zip(gates) {
            let share = sigmoid(*gate);
            head.iter_mut().for_each(|value| *value *= share);
        }
    }
}
