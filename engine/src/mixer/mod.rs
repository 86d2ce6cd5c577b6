//! Token mixers: `mixer(norm(x), state)`.
//!
//! A mixer maps the rows of a pass to rows, and reads and extends the state of their sequences: pages
//! of positions, or a block of fixed size ([`crate::state`]). Other modules need to know only the size
//! of this state ([`state_shape`]), the matrices that the mixer multiplies, and the widths of its
//! buffers.

mod attention;
mod beside;
mod blockwise;
mod conv;
mod delta_net;
mod kda;
mod latent;
mod layer_pass;
mod mamba;
mod mamba1;
mod pooled;
mod short_conv;

use emberflow_kernels::{Compute, DType};
use emberflow_models::config::{LatentSizes, MixerKind, ModelConfig};
use emberflow_models::names::Role;

use crate::error::Error;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::scratch::Scratch;
use crate::state::{HeadLayers, KvShape, PoolShape, Span, StateShape};

use attention::Attention;
use beside::Beside;
pub(crate) use conv::{Convolution, by_tap};
use delta_net::DeltaNet;
use kda::Kda;
use latent::LatentAttention;
pub(crate) use layer_pass::LayerPass;
use mamba::Mamba;
use mamba1::Mamba1;
use pooled::PooledAttention;
use short_conv::ShortConv;

/// The matrices that mixers multiply.
pub(crate) const PROJECTIONS: [Role; 19] = [
    Role::Q,
    Role::QGate,
    Role::K,
    Role::V,
    Role::O,
    Role::ConvIn,
    Role::ConvOut,
    Role::DeltaIn,
    Role::DeltaGate,
    Role::DeltaGateIn,
    Role::DeltaDecays,
    Role::DeltaOut,
    Role::LatentQ,
    Role::LatentKv,
    Role::PooledOut,
    Role::PoolKv,
    Role::PoolGate,
    Role::MambaIn,
    Role::MambaOut,
];

/// A layer's mixer: its weights.
#[derive(Debug)]
pub(crate) enum Mixer {
    Attention(Attention),
    Latent(LatentAttention),
    Pooled(PooledAttention),
    ShortConv(ShortConv),
    DeltaNet(DeltaNet),
    Kda(Box<Kda>),
    Mamba(Mamba),
    Mamba1(Box<Mamba1>),
    Beside(Box<Beside>),
    /// No mixer.
    None,
}

/// Values that a mixer has read and stored, for an observer.
pub(crate) struct Mixed<'a> {
    /// Input of its last projection, `[rows × width]`.
    pub mixed: &'a [f32],
    /// Keys and values as they are stored, `[rows × kv_heads·head_dim]` each; empty if it has none.
    pub stored: [&'a [f32]; 2],
}

impl Mixer {
    /// Loads and verifies the weights of layer `layer`.
    pub fn load(from: &Loader<'_>, c: &ModelConfig, layer: u32) -> Result<Self, Error> {
        Ok(match c.mixer_of(layer) {
            MixerKind::None => Self::None,
            MixerKind::Attention => Self::Attention(Attention::load(from, c, layer)?),
            MixerKind::Latent(shape) => Self::Latent(LatentAttention::load(from, c, layer, shape)?),
            MixerKind::Pooled(shape) => {
                let at = recurrent_floats(c, layer);
                Self::Pooled(PooledAttention::load(from, c, layer, shape, at)?)
            }
            MixerKind::ShortConv { taps } => {
                let at = recurrent_floats(c, layer);
                Self::ShortConv(ShortConv::load(from, c, layer, taps as usize, at)?)
            }
            MixerKind::DeltaNet(shape) => {
                let at = recurrent_floats(c, layer);
                Self::DeltaNet(DeltaNet::load(from, c, layer, shape, at)?)
            }
            MixerKind::Kda(shape) => {
                let at = recurrent_floats(c, layer);
                Self::Kda(Box::new(Kda::load(from, c, layer, shape, at)?))
            }
            MixerKind::Mamba(shape) => {
                let at = recurrent_floats(c, layer);
                Self::Mamba(Mamba::load(from, c, layer, shape, at)?)
            }
            MixerKind::Mamba1(shape) => {
                let at = recurrent_floats(c, layer);
                Self::Mamba1(Box::new(Mamba1::load(from, c, layer, shape, at)?))
            }
            MixerKind::Beside(shape) => {
                let at = recurrent_floats(c, layer);
                Self::Beside(Box::new(Beside::load(from, c, layer, shape, at)?))
            }
        })
    }

    /// `s.out[row] = mixer(s.normed[row])` for the rows of the spans, each over its own sequence;
    /// extends the sequences' state.
    pub fn run(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        match self {
            Self::Attention(attention) => attention.run(on, at, spans, s),
            Self::Latent(attention) => attention.run(on, at, spans, s),
            Self::Pooled(attention) => attention.run(on, at, spans, s),
            Self::ShortConv(conv) => conv.run(on, spans, s),
            Self::DeltaNet(net) => net.run(on, at, spans, s),
            Self::Kda(kda) => kda.run(on, at, spans, s),
            Self::Mamba(mamba) => mamba.run(on, at, spans, s),
            Self::Mamba1(mamba) => mamba.run(on, at, spans, s),
            Self::Beside(both) => both.run(on, at, spans, s),
            Self::None => {}
        }
    }

    /// The values that a pass of `rows` rows has left in the buffers, for an observer.
    pub fn seen<'a>(&self, rows: usize, s: &'a Scratch) -> Mixed<'a> {
        let stored = match self {
            Self::Attention(of) => rows * of.stored(),
            Self::Beside(of) => rows * of.attention.stored(),
            _ => 0,
        };
        let width = self.output().map_or(0, Matrix::cols);
        Mixed {
            mixed: &s.attended[..rows * width],
            stored: [&s.k[..stored], &s.v[..stored]],
        }
    }

    /// The matrices that multiply the mixer's input.
    pub fn inputs(&self) -> impl Iterator<Item = &Matrix> + Clone {
        let all = match self {
            Self::Attention(of) => {
                let gate = of.gate.as_ref();
                [Some(&of.q), of.k.as_ref(), of.v.as_ref(), gate, None]
            }
            Self::Latent(of) => {
                let query = of.query_latent.as_ref().unwrap_or(&of.q);
                [Some(query), Some(&of.latent), of.gates.as_ref(), None, None]
            }
            Self::Pooled(of) => {
                let pools = of.pools.as_ref();
                [
                    Some(&of.query_latent),
                    Some(&of.kv),
                    pools.map(|pools| &pools.kv),
                    pools.map(|pools| &pools.gate),
                    None,
                ]
            }
            Self::ShortConv(of) => [Some(&of.input), None, None, None, None],
            Self::DeltaNet(of) => [Some(&of.input), Some(&of.gate), None, None, None],
            Self::Kda(of) => {
                let [q, k, v] = &of.input;
                let (gate, decays) = match &of.gate.first {
                    Some(first) => (first, None),
                    None => (&of.gate.last, Some(&of.decay.last)),
                };
                [Some(q), Some(k), Some(v), Some(gate), decays]
            }
            Self::Mamba(of) => [Some(&of.input), None, None, None, None],
            Self::Mamba1(of) => [Some(&of.input), None, None, None, None],
            Self::Beside(of) => {
                let Attention { q, k, v, gate, .. } = &of.attention;
                let input = Some(&of.mamba.input);
                [Some(q), k.as_ref(), v.as_ref(), gate.as_ref(), input]
            }
            Self::None => [None; 5],
        };
        all.into_iter().flatten()
    }

    /// The matrices between input and output.
    pub fn between(&self) -> impl Iterator<Item = &Matrix> + Clone {
        let all = match self {
            Self::Latent(of) => {
                let deeper = of.query_latent.is_some().then_some(&of.q);
                [deeper, Some(&of.keys), Some(&of.values)]
            }
            Self::Pooled(of) => [Some(&of.q), Some(&of.low), None],
            Self::Kda(of) if of.gate.first.is_some() => [Some(&of.gate.last), None, None],
            Self::Mamba1(of) => [Some(&of.mix), Some(&of.steps), None],
            // beside that of attention
            Self::Beside(of) => [Some(&of.mamba.output), None, None],
            _ => [None; 3],
        };
        all.into_iter().flatten()
    }

    /// The output matrix, if any.
    pub fn output(&self) -> Option<&Matrix> {
        match self {
            Self::Attention(of) => Some(&of.o),
            Self::Latent(of) => Some(&of.output),
            Self::Pooled(of) => Some(&of.output),
            Self::ShortConv(of) => Some(&of.output),
            Self::DeltaNet(of) => Some(&of.output),
            Self::Kda(of) => Some(&of.output),
            Self::Mamba(of) => Some(&of.output),
            Self::Mamba1(of) => Some(&of.output),
            Self::Beside(of) => Some(&of.attention.o),
            Self::None => None,
        }
    }

    /// All matrices, for sharing with a device.
    pub fn projections_mut(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let all = match self {
            Self::Attention(of) => [
                Some(&mut of.q),
                of.k.as_mut(),
                of.v.as_mut(),
                of.gate.as_mut(),
                Some(&mut of.o),
                None,
            ],
            Self::Latent(of) => [
                Some(&mut of.q),
                of.query_latent.as_mut(),
                Some(&mut of.latent),
                of.gates.as_mut(),
                None,
                Some(&mut of.output),
            ],
            Self::Pooled(of) => {
                let (pool, gate) = match &mut of.pools {
                    Some(pools) => (Some(&mut pools.kv), Some(&mut pools.gate)),
                    None => (None, None),
                };
                [
                    Some(&mut of.q),
                    Some(&mut of.query_latent),
                    Some(&mut of.kv),
                    pool,
                    gate,
                    Some(&mut of.output),
                ]
            }
            Self::ShortConv(of) => of_input(&mut of.input, &mut of.output),
            Self::DeltaNet(of) => [
                Some(&mut of.input),
                Some(&mut of.gate),
                None,
                None,
                None,
                Some(&mut of.output),
            ],
            Self::Kda(of) => {
                let Kda { input, output, .. } = &mut **of;
                let [q, k, v] = input;
                [Some(q), Some(k), Some(v), None, None, Some(output)]
            }
            Self::Mamba(of) => of_input(&mut of.input, &mut of.output),
            Self::Mamba1(of) => {
                let Mamba1 { input, output, .. } = &mut **of;
                of_input(input, output)
            }
            Self::Beside(of) => {
                let Beside { attention, mamba } = &mut **of;
                [
                    Some(&mut attention.q),
                    attention.k.as_mut(),
                    attention.v.as_mut(),
                    Some(&mut attention.o),
                    Some(&mut mamba.input),
                    Some(&mut mamba.output),
                ]
            }
            Self::None => [const { None }; 6],
        };
        all.into_iter().flatten()
    }
}

/// The matrices of a mixer with one input matrix and one output matrix.
fn of_input<'a>(input: &'a mut Matrix, output: &'a mut Matrix) -> [Option<&'a mut Matrix>; 6] {
    [Some(input), Some(output), None, None, None, None]
}

/// Rows and columns of the matrices of layer `layer`'s mixer, assuming its own keys and values: the
/// input matrices, the output matrix, and up to three between.
pub(crate) fn projections(c: &ModelConfig, layer: u32) -> [[usize; 2]; 5] {
    const NONE: [usize; 2] = [0; 2];
    let of = c.heads_of(layer);
    let [d, hd, heads, kv] = [c.d_model, of.head_dim, c.heads, of.kv_heads].map(|n| n as usize);
    match c.mixer_of(layer) {
        MixerKind::Attention => {
            let gated = 1 + usize::from(c.form.output_gate);
            let stored = 2 - usize::from(of.key_is_value);
            let rows = (gated * heads + stored * kv) * hd;
            [[rows, d], [d, heads * hd], NONE, NONE, NONE]
        }
        MixerKind::Beside(shape) => {
            let rows = (heads + 2 * kv) * hd + shape.inputs();
            [[rows, d], [d, heads * hd], [d, shape.values()], NONE, NONE]
        }
        MixerKind::Latent(shape) => {
            let of = LatentSizes::new(c, shape);
            let all = of.heads * of.query;
            let (queries, deeper) = match of.query_rank {
                0 => (all, NONE),
                rank => (rank, [all, rank]),
            };
            [
                [queries + of.stored() + of.gates, d],
                [d, of.heads * of.value],
                deeper,
                [of.heads * of.rank, of.plain()],
                [of.heads * of.value, of.rank],
            ]
        }
        MixerKind::Pooled(shape) => {
            let [rank, groups, low] =
                [shape.query_rank, shape.groups, shape.group_rank].map(|n| n as usize);
            [
                [rank + (1 + 2 * shape.series()) * hd, d],
                [d, groups * low],
                [heads * hd, rank],
                [groups * low, heads * hd / groups],
                NONE,
            ]
        }
        MixerKind::ShortConv { .. } => [[3 * d, d], [d, d], NONE, NONE, NONE],
        MixerKind::DeltaNet(shape) => {
            let (channels, values) = (shape.channels(), shape.values());
            let rows = channels + values + 2 * shape.value_heads as usize;
            [[rows, d], [d, values], NONE, NONE, NONE]
        }
        MixerKind::Kda(shape) => {
            let (values, dim) = (shape.values(), shape.dim as usize);
            let (width, deeper) = if shape.direct {
                (values, NONE)
            } else {
                (dim, [2 * values, dim])
            };
            let rows = 3 * values + shape.heads as usize + 2 * width;
            [[rows, d], [d, values], deeper, NONE, NONE]
        }
        MixerKind::Mamba(shape) => [[shape.inputs(), d], [d, shape.values()], NONE, NONE, NONE],
        MixerKind::Mamba1(shape) => {
            let [channels, rank] = [shape.channels, shape.rank].map(|n| n as usize);
            let [mix, steps] = [[shape.mixed(), channels], [channels, rank]];
            [[2 * channels, d], [d, channels], mix, steps, NONE]
        }
        MixerKind::None => [NONE; 5],
    }
}

/// The state of a sequence of up to `context` positions.
pub(crate) fn state_shape(c: &ModelConfig, dtype: DType, context: usize) -> StateShape {
    StateShape {
        pages: KvShape {
            latent: c.form.stores_one_vector(),
            ..KvShape::new(dtype, head_layers(c), context)
        },
        pools: pool_shapes(c, dtype, context),
        recurrent: recurrent_floats(c, c.layers) + ngram_floats(c),
    }
}

/// Pool vectors, by pool size.
fn pool_shapes(c: &ModelConfig, dtype: DType, context: usize) -> [PoolShape; 2] {
    let sizes = c.form.pooled.as_ref().map(|pooled| pooled.sizes());
    sizes.unwrap_or_default().map(|(size, layers)| {
        let size = size as usize;
        let of = HeadLayers {
            layers,
            kv_heads: 1,
            head_dim: c.head_dim as usize,
        };
        let kinds = [of, HeadLayers::default()];
        let pools = context.checked_div(size).unwrap_or(0);
        PoolShape {
            size,
            pages: KvShape {
                latent: true,
                ..KvShape::new(dtype, kinds, pools)
            },
        }
    })
}

/// The layers with keys and values, in the order of [`ModelConfig::kv_place`]. Latent attention stores
/// one vector for all heads.
fn head_layers(c: &ModelConfig) -> [HeadLayers; 2] {
    let of = |layers: u32, kv_heads: u32, head_dim| HeadLayers {
        layers: layers as usize,
        kv_heads: kv_heads as usize,
        head_dim,
    };
    let kv_heads = if c.form.stores_one_vector() {
        1
    } else {
        c.kv_heads
    };
    let global = c.global_kv_layers();
    let others = of(c.kv_layers() - global, kv_heads, c.key_width());
    let heads = c.form.global_heads;
    let global = heads.map(|heads| of(global, heads.kv_heads, heads.head_dim as usize));
    [others, global.unwrap_or_default()]
}

/// Floats of a thread's buffer for passes of `rows` rows.
pub(crate) fn thread_floats(c: &ModelConfig, rows: usize) -> usize {
    let floats = |of: HeadLayers| {
        let group = c.heads as usize / of.kv_heads.max(1);
        blockwise::thread_floats(of.head_dim, group, rows, c.form.stores_one_vector())
    };
    let all = head_layers(c).map(floats);
    all[0].max(all[1])
}

/// Floats of the state after those of all layers: of the convolution over n-gram rows.
pub(crate) fn ngram_floats(c: &ModelConfig) -> usize {
    c.form.ngrams.as_ref().map_or(0, |of| {
        let reach = 1 + (of.taps as usize - 1) * of.longest();
        conv::state_floats(c.form.further_streams(c.d_model), reach)
    })
}

/// Floats of recurrent state before layer `layer`.
pub(crate) fn recurrent_floats(c: &ModelConfig, layer: u32) -> usize {
    let floats = |layer| match c.mixer_of(layer) {
        MixerKind::Attention | MixerKind::Latent(_) | MixerKind::None => 0,
        MixerKind::Pooled(shape) => pooled::state_floats(shape, c.head_dim as usize),
        MixerKind::ShortConv { taps } => conv::state_floats(c.d_model as usize, taps as usize),
        MixerKind::DeltaNet(shape) => delta_net::state_floats(shape),
        MixerKind::Kda(shape) => kda::state_floats(shape),
        MixerKind::Mamba(shape) | MixerKind::Beside(shape) => mamba::state_floats(shape),
        MixerKind::Mamba1(shape) => mamba1::state_floats(shape),
    };
    (0..layer).map(floats).sum()
}
