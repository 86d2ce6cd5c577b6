//! Token mixers: `mixer(norm(x), state)`.
//!
//! A mixer maps the rows of a pass to rows, and reads and extends the state of their sequences: pages
//! of positions, or a block of fixed size ([`crate::state`]). Other modules know what it [`needs`]: its
//! matrices, the size of its buffers and of its state.

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
mod mix;
mod needs;
mod pooled;
mod short_conv;

use emberflow_kernels::{Compute, DType};
use emberflow_models::config::{MixerKind, ModelConfig};

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
use mix::Mix;
pub(crate) use needs::{Matrices, MatrixSpec, Needs};
use pooled::PooledAttention;
use short_conv::ShortConv;

/// What the mixer of layer `layer` needs.
pub(crate) fn needs(c: &ModelConfig, layer: u32) -> Needs {
    match c.mixer_of(layer) {
        MixerKind::None => Needs::default(),
        MixerKind::Attention => attention::needs(c, layer),
        MixerKind::Latent(shape) => latent::needs(c, shape),
        MixerKind::Pooled(shape) => pooled::needs(c, shape),
        MixerKind::ShortConv { taps } => short_conv::needs(c, taps as usize),
        MixerKind::DeltaNet(shape) => delta_net::needs(c, shape),
        MixerKind::Kda(shape) => kda::needs(c, shape),
        MixerKind::Mamba(shape) => mamba::needs(c, shape),
        MixerKind::Mamba1(shape) => mamba1::needs(c, shape),
        MixerKind::Beside(shape) => beside::needs(c, layer, shape),
    }
}

/// A layer's mixer: its weights.
#[derive(Debug)]
pub(crate) struct Mixer {
    matrices: Matrices,
    mix: Box<dyn Mix>,
}

/// Values that a mixer has read and stored, for an observer.
pub(crate) struct Mixed<'a> {
    /// Input of its last projection, `[rows × width]`.
    pub mixed: &'a [f32],
    /// Keys and values as they are stored, `[rows × kv_heads·head_dim]` each; empty if it has none.
    pub stored: [&'a [f32]; 2],
}

impl Mixer {
    /// Loads and verifies the weights of layer `layer`; `None` if it has no mixer.
    pub fn load(from: &Loader<'_>, c: &ModelConfig, layer: u32) -> Result<Option<Self>, Error> {
        let needs = needs(c, layer);
        let start = recurrent_floats(c, layer);
        let part = start..start + needs.state_floats;
        let mix: Box<dyn Mix> = match c.mixer_of(layer) {
            MixerKind::None => return Ok(None),
            MixerKind::Attention => Box::new(Attention::load(from, c, layer)?),
            MixerKind::Latent(shape) => Box::new(LatentAttention::load(from, c, layer, shape)?),
            MixerKind::Pooled(shape) => {
                Box::new(PooledAttention::load(from, c, layer, shape, part)?)
            }
            MixerKind::ShortConv { taps } => {
                let taps = taps as usize;
                Box::new(ShortConv::load(from, c, layer, taps, part)?)
            }
            MixerKind::DeltaNet(shape) => Box::new(DeltaNet::load(from, layer, shape, part)?),
            MixerKind::Kda(shape) => Box::new(Kda::load(from, layer, shape, part)?),
            MixerKind::Mamba(shape) => Box::new(Mamba::load(from, layer, shape, part)?),
            MixerKind::Mamba1(shape) => Box::new(Mamba1::load(from, layer, shape, part)?),
            MixerKind::Beside(shape) => Box::new(Beside::load(from, c, layer, shape, part)?),
        };
        let matrices = Matrices::load(from, layer, &needs.matrices)?;
        Ok(Some(Self { matrices, mix }))
    }

    /// The matrices that it multiplies.
    pub fn matrices(&self) -> &Matrices {
        &self.matrices
    }

    /// The same, for sharing with a lane.
    pub fn matrices_mut(&mut self) -> &mut Matrices {
        &mut self.matrices
    }

    /// `s.out[row] = mixer(s.normed[row])` for the rows of the spans, each over its own sequence;
    /// extends the sequences' state.
    pub fn run(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        self.mix.run(on, &self.matrices, at, spans, s);
    }

    /// Extends a sequence's recurrent state by the first rows of the last pass, from the inputs of the recurrence
    /// ([`crate::replay`]); reads no weights.
    pub fn replay(&self, on: &Compute, layer: usize, span: Span<'_>, s: &mut Scratch) {
        self.mix.replay(on, layer, span, s);
    }

    /// The values that a pass of `rows` rows has left in the buffers, for an observer.
    pub fn seen<'a>(&self, rows: usize, s: &'a Scratch) -> Mixed<'a> {
        let width = self.matrices.output().map_or(0, Matrix::cols);
        let [mixed] = s.block.view(rows, [width]);
        Mixed {
            mixed,
            stored: self.mix.stored(rows, s),
        }
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
        let pool_layers = HeadLayers {
            layers,
            kv_heads: 1,
            head_dim: c.head_dim as usize,
        };
        let kinds = [pool_layers, HeadLayers::default()];
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
    let head_layers_of = |layers: u32, kv_heads: u32, head_dim| HeadLayers {
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
    let others = head_layers_of(c.kv_layers() - global, kv_heads, c.key_width());
    let heads = c.form.global_heads;
    let global = heads.map(|heads| head_layers_of(global, heads.kv_heads, heads.head_dim as usize));
    [others, global.unwrap_or_default()]
}

/// Floats by row of what [`crate::replay`] stores of each layer; empty if some recurrent state of the model cannot be replayed,
/// or if there is none.
pub(crate) fn replayed_floats(c: &ModelConfig) -> Vec<usize> {
    let needs: Vec<Needs> = (0..c.layers).map(|layer| needs(c, layer)).collect();
    let all = (needs.iter()).all(|of| (of.state_floats > 0) == (of.input_floats > 0));
    let any = needs.iter().any(|of| of.state_floats > 0);
    if all && any && ngram_floats(c) == 0 {
        needs.iter().map(|of| of.input_floats).collect()
    } else {
        Vec::new()
    }
}

/// Floats of a thread's buffer for passes of `rows` rows.
pub(crate) fn thread_floats(c: &ModelConfig, rows: usize) -> usize {
    let floats =
        (0..c.layers).filter_map(|layer| Some(needs(c, layer).scores?.thread_floats(rows)));
    floats.max().unwrap_or(0)
}

/// Floats of the state after those of all layers: of the convolution over n-gram rows.
pub(crate) fn ngram_floats(c: &ModelConfig) -> usize {
    c.form.ngrams.as_ref().map_or(0, |ngrams| {
        let reach = 1 + (ngrams.taps as usize - 1) * ngrams.longest();
        conv::state_floats(c.form.further_streams(c.d_model), reach)
    })
}

/// Floats of recurrent state before layer `layer`.
pub(crate) fn recurrent_floats(c: &ModelConfig, layer: u32) -> usize {
    (0..layer).map(|layer| needs(c, layer).state_floats).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use emberflow_models::names::{TensorId, required};

    use super::*;
    use crate::testing::fixtures;

    /// Each declared matrix has the shape that files have, and one of them makes the output.
    #[test]
    fn declared_matrices_are_those_of_the_files() {
        for (name, c) in fixtures() {
            let files = required(&c).into_iter();
            let files: BTreeMap<String, [usize; 2]> = files
                .map(|tensor| (tensor.id.to_string(), [tensor.rows, tensor.cols]))
                .collect();
            for layer in 0..c.layers {
                let needs = needs(&c, layer);
                for spec in &needs.matrices {
                    let id = TensorId::layer(spec.role, layer).to_string();
                    assert_eq!(
                        files.get(&id),
                        Some(&[spec.rows, spec.cols]),
                        "{name}: {id}"
                    );
                }
                let outputs = needs.matrices.iter().filter(|spec| spec.is_output());
                let mixers = usize::from(c.mixer_of(layer) != MixerKind::None);
                assert_eq!(outputs.count(), mixers, "{name}, layer {layer}");
            }
        }
    }
}
