//! Scratch buffers of a forward pass, allocated once.

use emberflow_kernels::{Activations, GROUP};
use emberflow_models::config::{
    DeltaNetShape, KdaShape, LatentSizes, Mamba1Shape, MambaShape, Mixing, ModelConfig, NGrams,
    Parallel, PooledAttention,
};

use crate::lane::ProductRoom;
use crate::matrix::Matrix;
use crate::narrow_sizes;
use crate::options::Options;
use crate::router::Routes;
use crate::state::BLOCK;
use crate::thread_buffer::renew;

/// Dimensions of the buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScratchRoom {
    /// Most rows of a pass.
    pub rows: usize,
    /// Most rows of logits per call.
    pub batch: usize,
    /// Context length in positions.
    pub context: usize,
    pub threads: usize,
}

impl ScratchRoom {
    /// Dimensions for passes of `rows` rows.
    pub fn of(options: &Options, rows: usize) -> Self {
        Self {
            rows,
            batch: options.batch,
            context: options.context,
            threads: options.threads,
        }
    }
}

/// Largest products on a device: of projections for `rows` rows, and of the head for `batch` rows.
pub(crate) fn product_room(
    c: &ModelConfig,
    rows: usize,
    batch: usize,
    gates: usize,
) -> ProductRoom {
    let [d, .., vocab] = widths(c);
    // results of all matrices of a mixer with the same input
    let projected = projected(c) + output_gates(c) + 2 * kv_width(c);
    let widest = widest_input(c);
    let token = Activations::bytes(widest, 1).max(4 * widest);
    ProductRoom {
        input: rows.max(batch) * token,
        results: (rows * projected.max(d).max(gates)).max(batch * vocab),
    }
}

/// Buffers of a pass, except its residual stream.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Normalised input of a block, `[rows × d_model]`.
    pub normed: Vec<f32>,
    /// Output of a block, `[rows × d_model]`.
    pub out: Vec<f32>,
    /// Attention's output in layers whose FFN reads the same input (parallel blocks),
    /// or Mamba-2's beside attention, `[rows × d_model]`, or the output of a parallel dense FFN; otherwise empty.
    pub parallel: Vec<f32>,
    /// Queries, `[rows × heads·head_dim]`, or the projected input of another mixer, later the outputs
    /// of a DeltaNet, head by head; in the FFN, the projected input of experts of another width.
    pub q: Vec<f32>,
    /// Keys, `[rows × kv_heads·head_dim]`, latent vectors, or β of a DeltaNet, `[rows × value_heads]`.
    pub k: Vec<f32>,
    /// Values, `[rows × kv_heads·head_dim]`; latent vectors of queries and gates of heads; inputs of a DeltaNet's decay;
    /// in Kimi Delta Attention, inputs of the decays and later of the gates.
    pub v: Vec<f32>,
    /// Gates of a mixer's output; earlier the decays of Kimi Delta Attention, the intermediate values of latent attention, or the outputs of a Mamba's
    /// heads; empty if no mixer needs it.
    pub gate: Vec<f32>,
    /// Output of experts of another width; a mixer's output before the projection, `[rows × heads·head_dim]` for attention; earlier, the
    /// convolved channels of a DeltaNet or a Mamba.
    pub attended: Vec<f32>,
    /// Per-block attention results of one token: `width + 2` floats for each block of 256 positions
    /// or pools and query head. Empty if the context is a single block.
    pub partials: Vec<f32>,
    /// Dequantised rows for multi-token products, by thread.
    pub rows: Vec<Vec<f32>>,
    /// Quantised input of a matrix.
    pub input: Activations,
    /// Routes of a layer's rows to experts.
    pub routes: Routes,
    /// Logits of one token of each sequence, `[batch × vocab]`.
    pub logits: Vec<f32>,
}

impl Scratch {
    /// Allocates the buffers for a model.
    pub fn new(c: &ModelConfig, room: ScratchRoom) -> Self {
        let [.., vocab] = widths(c);
        let empty = Vec::new;
        let mut new = Self {
            normed: empty(),
            out: empty(),
            parallel: empty(),
            q: empty(),
            k: empty(),
            v: empty(),
            gate: empty(),
            attended: empty(),
            partials: vec![0.0; partials_len(c, room.context)],
            rows: vec![vec![0.0; Matrix::scratch_len(widest_input(c))]; room.threads],
            input: Activations::default(),
            routes: Routes::new(c, 0),
            logits: vec![0.0; room.batch * vocab],
        };
        new.set_rows(c, room.rows);
        new
    }

    /// Resizes the buffers for another number of rows, except the logits.
    pub fn set_rows(&mut self, c: &ModelConfig, rows: usize) {
        let [d, ..] = widths(c);
        let all = [
            (&mut self.normed, d),
            (&mut self.out, d),
            (&mut self.parallel, parallel(c)),
            (&mut self.q, projected(c)),
            (&mut self.k, kv_width(c)),
            (&mut self.v, kv_width(c)),
            (&mut self.gate, output_gates(c)),
            (&mut self.attended, mixed(c)),
        ];
        for (buffer, width) in all {
            renew(buffer, rows * width);
        }
        // The old buffer is freed first, so that both never exist at once.
        self.input = Activations::default();
        self.input = Activations::with_capacity(widest_input(c), rows);
        self.routes = Routes::new(c, rows);
    }

    /// Bytes allocated by [`Scratch::new`].
    pub fn bytes_for(c: &ModelConfig, room: ScratchRoom) -> u64 {
        let [d, .., vocab] = widths(c);
        let (chunk, threads) = (room.rows, room.threads);
        let mixer = projected(c) + mixed(c) + 2 * kv_width(c) + output_gates(c);
        let rows = chunk * (2 * d + parallel(c) + mixer);
        let shared = rows + room.batch * vocab + partials_len(c, room.context);
        let per_thread = Matrix::scratch_len(widest_input(c));
        let input = Activations::bytes(widest_input(c), chunk);
        let routes = Routes::bytes_for(c, chunk);
        (4 * (shared + threads * per_thread) + input + routes) as u64
    }
}

/// Length of [`Scratch::partials`].
fn partials_len(c: &ModelConfig, context: usize) -> usize {
    let global = c.form.global_heads.map_or(0, |of| of.head_dim as usize);
    let width = c.key_width().max(global).next_multiple_of(GROUP);
    let blocks = context.div_ceil(BLOCK);
    // A token sees the pools of one layer, at most those of the smallest size.
    let sizes = pooled(c).map(|of| of.sizes().map(|(size, _)| size as usize));
    let pools = (sizes.into_iter().flatten()).map(|size| context.checked_div(size).unwrap_or(0));
    match blocks + pools.max().unwrap_or(0).div_ceil(BLOCK) {
        0 | 1 => 0,
        blocks => blocks
            .saturating_mul(c.heads as usize)
            .saturating_mul(width + 2),
    }
}

/// Width of [`Scratch::parallel`].
fn parallel(c: &ModelConfig) -> usize {
    match c.form.parallel {
        Parallel::No if c.mixture.as_ref().is_some_and(|m| m.parallel_dense) => c.d_model as usize,
        Parallel::No if c.form.mamba.as_ref().is_some_and(|of| of.beside) => c.d_model as usize,
        Parallel::No => 0,
        Parallel::OneNorm | Parallel::TwoNorms => c.d_model as usize,
    }
}

/// Width of [`Scratch::q`].
fn projected(c: &ModelConfig) -> usize {
    let [d, q, ..] = widths(c);
    let conv = c.form.short_conv.as_ref().map_or(0, |_| 3 * d);
    let latent = latent(c).map_or(0, |of| of.heads * of.stored());
    q.max(conv)
        .max(latent)
        .max(narrow_sizes::room(c)[0])
        .max(delta_net(c).map_or(0, DeltaNetShape::channels))
        .max(kda(c).map_or(0, |kda| 3 * kda.values()))
        .max(mamba(c).map_or(0, MambaShape::inputs))
        // and the outputs of its channels
        .max(3 * channels(c))
}

/// Width of [`Scratch::attended`].
fn mixed(c: &ModelConfig) -> usize {
    let [d, q, ..] = widths(c);
    let conv = c.form.short_conv.as_ref().map_or(0, |_| d);
    let latent = latent(c).map_or(0, |of| of.heads * of.rank.max(of.plain()).max(of.value));
    let pooled = pooled(c).map_or(0, |of| of.groups as usize * of.group_rank as usize);
    q.max(conv)
        .max(latent)
        .max(narrow_sizes::room(c)[0])
        .max(pooled)
        .max(given_to_pools(c))
        .max(delta_net(c).map_or(0, DeltaNetShape::channels))
        .max(kda(c).map_or(0, |kda| 3 * kda.values()))
        .max(mamba(c).map_or(0, MambaShape::channels))
        .max(channels(c))
}

/// Width of [`Scratch::k`] and [`Scratch::v`].
fn kv_width(c: &ModelConfig) -> usize {
    let [_, _, kv, _] = widths(c);
    let latent = latent(c).map_or(0, |of| of.stored().max(of.query_rank + of.gates));
    let pooled = pooled(c).map_or(0, |of| of.query_rank as usize);
    kv.max(latent)
        .max(pooled)
        .max(delta_net(c).map_or(0, |net| net.value_heads as usize))
        .max(kda(c).map_or(0, |kda| kda.heads.max(2 * kda.dim) as usize))
        .max(mamba1(c).map_or(0, Mamba1Shape::mixed))
}

/// Width of [`Scratch::gate`].
fn output_gates(c: &ModelConfig) -> usize {
    let [_, q, ..] = widths(c);
    let of_attention = q * usize::from(c.form.output_gate || c.form.pooled.is_some());
    let latent = latent(c).map_or(0, |of| of.heads * of.query.max(of.rank));
    of_attention
        .max(latent)
        .max(narrow_sizes::room(c)[1])
        .max(given_to_pools(c))
        .max(delta_net(c).map_or(0, DeltaNetShape::values))
        .max(kda(c).map_or(0, KdaShape::values))
        .max(mamba(c).map_or(0, MambaShape::values))
        .max(channels(c))
}

/// Columns of the widest matrix outside the FFN.
fn widest_input(c: &ModelConfig) -> usize {
    let [d, q, ..] = widths(c);
    let latent = latent(c).map_or(0, |of| {
        let parts = [of.plain(), of.rank].map(|n| of.heads * Activations::padded(n));
        let whole = of.query_rank.max(of.heads * of.value);
        parts.into_iter().fold(whole, usize::max)
    });
    let pooled = pooled(c).map_or(0, |of| {
        let [groups, rank] = [of.groups, of.group_rank].map(|n| n as usize);
        let parts = groups * Activations::padded(q / groups.max(1));
        parts.max(groups * rank).max(of.query_rank as usize)
    });
    let delta = delta_net(c).map_or(0, DeltaNetShape::values);
    let mamba = mamba(c).map_or(0, MambaShape::values);
    let steps = mamba1(c).map_or(0, |of| of.channels.max(of.rank) as usize);
    let mamba = mamba.max(steps);
    let kda = kda(c).map_or(0, KdaShape::values);
    let hyper = hyper(c);
    let experts = narrow_sizes::room(c)[2];
    d.max(q)
        .max(latent)
        .max(delta)
        .max(kda)
        .max(mamba)
        .max(hyper)
        .max(experts)
        .max(pooled)
}

/// Columns of the widest matrix of hyper-connections.
fn hyper(c: &ModelConfig) -> usize {
    c.form.hyper.map_or(0, |of| {
        let rank = match of.mixing {
            Mixing::Gated { rank } => rank as usize,
            Mixing::Sinkhorn { .. } => 0,
        };
        let ngrams = c.form.ngrams.as_ref();
        let embedding = ngrams.map_or(0, NGrams::embedding);
        of.width(c.d_model).max(rank).max(embedding)
    })
}

fn latent(c: &ModelConfig) -> Option<LatentSizes> {
    c.form.latent.map(|shape| LatentSizes::new(c, shape))
}

fn pooled(c: &ModelConfig) -> Option<&PooledAttention> {
    c.form.pooled.as_ref()
}

/// Most elements that a position contributes to the pools of a layer.
fn given_to_pools(c: &ModelConfig) -> usize {
    let series = |of: &PooledAttention| 1 + usize::from(of.overlapping > 0);
    pooled(c).map_or(0, |of| series(of) * c.head_dim as usize)
}

fn delta_net(c: &ModelConfig) -> Option<DeltaNetShape> {
    c.form.delta_net.as_ref().map(|nets| nets.shape)
}

fn kda(c: &ModelConfig) -> Option<KdaShape> {
    c.form.kda.as_ref().map(|layers| layers.shape)
}

fn mamba(c: &ModelConfig) -> Option<MambaShape> {
    c.form.mamba.as_ref().map(|mambas| mambas.shape)
}

fn mamba1(c: &ModelConfig) -> Option<Mamba1Shape> {
    c.form.mamba1.as_ref().map(|mambas| mambas.shape)
}

/// Channels of Mamba-1.
fn channels(c: &ModelConfig) -> usize {
    mamba1(c).map_or(0, |of| of.channels as usize)
}

fn widths(c: &ModelConfig) -> [usize; 4] {
    let global = c.form.global_heads;
    let global = global.map_or((0, 0), |of| (of.head_dim, of.kv_heads * of.head_dim));
    [
        c.d_model as usize,
        c.heads as usize * c.head_dim.max(global.0) as usize,
        (c.kv_heads * c.head_dim).max(global.1) as usize,
        c.vocab as usize,
    ]
}
