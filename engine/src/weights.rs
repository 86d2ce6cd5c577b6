//! The resident weights: everything outside the FFNs.

use std::thread::{Builder, ScopedJoinHandle};

use emberflow_kernels::Cpu;
use emberflow_models::config::{Mixture, ModelConfig, Parallel};
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::arena::Arena;
use emberflow_storage::container::Container;

use crate::error::Error;
use crate::ffn::FfnBiases;
use crate::loader::{Loader, name_of};
use crate::matrix::Matrix;
use crate::meta::ContainerMeta;
use crate::mixer::Mixer;
use crate::narrow_experts::NarrowExperts;
use crate::norm::Norm;
use crate::router::Router;

/// Threads that load layers: enough reads at once to keep storage busy.
const LOADERS: usize = 4;

/// Stack size of these threads in bytes.
const STACK: usize = 256 << 10;

/// The mixer of a layer, its norms, its router and its FFN's biases.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    /// Norm before attention.
    pub attn_norm: Option<Norm>,
    /// Norm of the output of attention.
    pub attn_post_norm: Option<Norm>,
    /// The token mixer.
    pub mixer: Mixer,
    /// Norm before the FFN; also `None` if the FFN reads the output of the norm before attention.
    pub ffn_norm: Option<Norm>,
    /// Norm of the output of the FFN.
    pub ffn_post_norm: Option<Norm>,
    /// Biases of the FFN, or of every expert.
    pub ffn_bias: Option<FfnBiases>,
    /// The router, if the FFN is a mixture of experts.
    pub router: Option<Router>,
    /// The matrices around experts of another width.
    pub narrow: Option<NarrowExperts>,
    /// Norms of experts and of the dense FFN that runs in parallel with them.
    pub parallel_dense: Option<ParallelNorms>,
    /// Factor of the residual stream at the layer's end.
    pub scale: f32,
    /// Outliers of its inputs are pruned, where tokens have one scale.
    pub pruned: bool,
}

/// Norms of experts and of a parallel dense FFN. The input of the dense FFN has the norm before the
/// FFN.
#[derive(Debug)]
pub(crate) struct ParallelNorms {
    /// Before the experts.
    pub experts: Norm,
    /// Of the dense FFN's output.
    pub dense_post: Norm,
    /// Of the experts' output.
    pub experts_post: Norm,
}

impl ParallelNorms {
    /// The norms of layer `l`, if it has a parallel dense FFN.
    fn load(from: &Loader<'_>, c: &ModelConfig, l: u32) -> Result<Option<Self>, Error> {
        if !c
            .mixture_of(l)
            .is_some_and(|mixture| mixture.parallel_dense)
        {
            return Ok(None);
        }
        Ok(Some(Self {
            experts: norm(from, Role::ExpertsNorm, None, l, c)?,
            dense_post: norm(from, Role::DensePostNorm, None, l, c)?,
            experts_post: norm(from, Role::ExpertsPostNorm, None, l, c)?,
        }))
    }
}

impl LayerWeights {
    /// Reads the weights of layer `l`.
    fn load(from: &Loader<'_>, c: &ModelConfig, l: u32) -> Result<Self, Error> {
        Ok(Self {
            attn_norm: if c.norms_of(l).before {
                Some(norm(from, Role::AttnNorm, Some(Role::AttnNormBias), l, c)?)
            } else {
                None
            },
            attn_post_norm: post_norm(from, Role::AttnPostNorm, l, c)?,
            mixer: Mixer::load(from, c, l)?,
            ffn_norm: if c.norms_of(l).before && c.form.parallel != Parallel::OneNorm {
                Some(norm(from, Role::FfnNorm, Some(Role::FfnNormBias), l, c)?)
            } else {
                None
            },
            ffn_post_norm: post_norm(from, Role::FfnPostNorm, l, c)?,
            ffn_bias: ffn_biases(from, l, c)?,
            router: router(from, c, l)?,
            narrow: NarrowExperts::load(from, c, l)?,
            parallel_dense: ParallelNorms::load(from, c, l)?,
            scale: if c.form.layer_scale {
                from.vector(Role::LayerScale, l, 1)?[0]
            } else {
                1.0
            },
            pruned: false,
        })
    }

    /// The norm whose output the FFN reads; `None` if it reads the residual stream.
    pub(crate) fn before_ffn(&self) -> Option<&Norm> {
        self.ffn_norm.as_ref().or(self.attn_norm.as_ref())
    }
}

/// All resident weights.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Output head, `[vocab × d_model]`; also the embedding if tied.
    pub head: Matrix,
    /// Bias of the head, `[vocab]`.
    pub head_bias: Option<Vec<f32>>,
    /// Norm before the head; `None` if the head reads a mixture of hyper-connections.
    pub final_norm: Option<Norm>,
    /// Learned position embeddings.
    pub positions: Option<Matrix>,
    /// One entry per decoder layer.
    pub layers: Vec<LayerWeights>,
}

impl Weights {
    /// Reads and verifies all weights, several layers at once: single reads would leave most of the
    /// device idle.
    pub fn load(container: &Container, meta: &ContainerMeta) -> Result<Self, Error> {
        let (from, c) = (Loader { container }, &meta.config);
        let d = c.d_model as usize;
        let vocab = c.vocab as usize;
        let load = |first: usize| {
            let numbers = (first as u32..c.layers).step_by(LOADERS);
            let layers = numbers.map(|l| LayerWeights::load(&from, c, l));
            layers.collect::<Result<Vec<_>, Error>>()
        };
        let load = &load;
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..LOADERS)
                .map(|first| {
                    let thread = Builder::new().name("ember-load".into()).stack_size(STACK);
                    (first, thread.spawn_scoped(scope, move || load(first)))
                })
                .collect();
            let head = from.matrix(head_role(c), 0, vocab, d);
            let bias = c.form.head_bias;
            let head_bias = bias.then(|| from.vector(Role::HeadBias, 0, vocab));
            let bias = Some(Role::FinalNormBias);
            let final_norm = c
                .form
                .has_final_norm()
                .then(|| norm(&from, Role::FinalNorm, bias, 0, c));
            let positions = match c.position_rows() as usize {
                0 => Ok(None),
                rows => from.matrix(Role::Positions, 0, rows, d).map(Some),
            };
            let mut parts = Vec::with_capacity(LOADERS);
            for (first, thread) in started {
                let part = match thread.map(ScopedJoinHandle::join) {
                    Ok(Ok(part)) => part,
                    Ok(Err(panic)) => std::panic::resume_unwind(panic),
                    // No further thread could be started.
                    Err(_) => load(first),
                };
                parts.push(part?.into_iter());
            }
            let layers = (0..c.layers as usize).filter_map(|l| parts[l % LOADERS].next());
            let mut layers: Vec<LayerWeights> = layers.collect();
            let pruned = meta.pruned.iter().flat_map(|of| &of.layers);
            pruned.for_each(|&number| layers[number as usize].pruned = true);
            Ok(Self {
                layers,
                head: head?,
                head_bias: head_bias.transpose()?,
                final_norm: final_norm.transpose()?,
                positions: positions?,
            })
        })
    }

    /// The matrices that a lane may multiply: projections and head.
    pub(crate) fn large(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let layers = self.layers.iter_mut();
        let projections = layers.flat_map(|layer| layer.mixer.matrices_mut().shared_mut());
        projections.chain([&mut self.head])
    }

    /// The matrices of all mixers.
    pub(crate) fn all_projections(&self) -> impl Iterator<Item = &Matrix> {
        self.layers
            .iter()
            .flat_map(|layer| layer.mixer.matrices().iter())
    }

    /// The bytes of the attention matrices.
    pub(crate) fn attention_bytes(&self) -> Vec<&[u8]> {
        self.all_projections().map(Matrix::bytes).collect()
    }

    /// Bytes read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let layer = |l: &LayerWeights| {
            let router = l.router.as_ref().map_or(0, |router| router.scores.len());
            let narrow = l.narrow.iter().flat_map(NarrowExperts::matrices);
            let all = l.mixer.matrices().iter().chain(narrow);
            all.map(Matrix::len).sum::<u64>() + router
        };
        self.layers.iter().map(layer).sum::<u64>() + self.head.len()
    }

    /// Bytes that [`Weights::load`] will allocate, computed from the directory only.
    pub fn bytes_for(container: &Container, c: &ModelConfig) -> u64 {
        let on_flash = |name: &str| {
            let id = name.parse::<TensorId>();
            id.is_ok_and(|id| id.role.is_table(c.tied_head))
        };
        container
            .tensors()
            .iter()
            .filter(|t| !is_predictor(t.name()) && !on_flash(t.name()))
            .map(|t| Arena::charge(1, t.len as usize))
            .sum()
    }
}

fn is_predictor(name: &str) -> bool {
    name.contains(".predictor.")
}

/// The tensor used as head.
pub(crate) fn head_role(c: &ModelConfig) -> Role {
    if c.tied_head { Role::Embed } else { Role::Head }
}

/// A norm of a layer's outputs, if the model has it.
fn post_norm(
    from: &Loader<'_>,
    role: Role,
    layer: u32,
    c: &ModelConfig,
) -> Result<Option<Norm>, Error> {
    let of = (c.norms_of(layer).after).then(|| norm(from, role, None, layer, c));
    of.transpose()
}

/// The biases of a layer's FFN, if it has them.
fn ffn_biases(from: &Loader<'_>, l: u32, c: &ModelConfig) -> Result<Option<FfnBiases>, Error> {
    if !c.form.ffn_bias || !c.has_ffn(l) {
        return Ok(None);
    }
    let banks = c.banks_of(l).count();
    let (neurons, d) = (banks * c.ffn as usize, c.d_model as usize);
    Ok(Some(FfnBiases {
        banks,
        gate: from.rows(Role::GateBias, l, neurons, 1)?,
        up: if c.ffn_kind.ungated {
            Vec::new()
        } else {
            from.rows(Role::UpBias, l, neurons, 1)?
        },
        down: from.rows(Role::DownBias, l, banks, d)?,
    }))
}

/// A norm before attention, FFN or head, of the kind that the model uses; `bias` is its bias, if
/// such norms have one.
fn norm(
    from: &Loader<'_>,
    weight: Role,
    bias: Option<Role>,
    layer: u32,
    c: &ModelConfig,
) -> Result<Norm, Error> {
    let d = c.d_model as usize;
    Ok(Norm {
        weight: from.vector(weight, layer, d)?,
        bias: match bias.filter(|_| c.form.norm_bias) {
            Some(role) => Some(from.vector(role, layer, d)?),
            None => c.form.layer_norm.then(|| vec![0.0; d]),
        },
        eps: c.rms_eps,
    })
}

/// The router of a layer, if it has one.
fn router(from: &Loader<'_>, c: &ModelConfig, layer: u32) -> Result<Option<Router>, Error> {
    let Some(mixture) = c.mixture_of(layer) else {
        return Ok(None);
    };
    let [d, experts] = [c.d_model, c.experts].map(|n| n as usize);
    Ok(Some(Router {
        scores: from.matrix(Role::Router, layer, experts, d)?,
        bias: if mixture.router_bias {
            Some(from.vector(Role::RouterBias, layer, experts)?)
        } else {
            None
        },
        by_token: if mixture.is_by_token(layer) {
            Some(token_experts(from, c, mixture, layer)?)
        } else {
            None
        },
        choice_bias: if mixture.choice_bias && !mixture.is_by_token(layer) {
            Some(from.vector(Role::ChoiceBias, layer, experts)?)
        } else {
            None
        },
        shared: match mixture.shared {
            _ if mixture.shared_is_plain => None,
            0 => None,
            _ => Some(from.vector(Role::SharedGate, layer, d)?),
        },
        norm: if mixture.parallel_dense {
            Some(router_norm(from, c, layer)?)
        } else {
            None
        },
        factors: if mixture.parallel_dense {
            Some(from.vector(Role::ExpertScale, layer, experts)?)
        } else {
            None
        },
    }))
}

/// The experts of each token of the vocabulary.
fn token_experts(
    from: &Loader<'_>,
    c: &ModelConfig,
    mixture: &Mixture,
    layer: u32,
) -> Result<Matrix, Error> {
    let (vocab, chosen) = (c.vocab as usize, mixture.chosen as usize);
    let table = from.matrix(Role::TokenExperts, layer, vocab, chosen)?;
    let (cpu, mut row) = (Cpu::detect(), vec![0.0; chosen]);
    for token in 0..vocab {
        cpu.dequantize(table.row(token), &mut row);
        row.sort_unstable_by(f32::total_cmp);
        let sound = |x: &f32| *x >= 0.0 && *x < c.experts as f32 && x.fract() == 0.0;
        if !row.iter().all(sound) || row.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(Error::Tensor {
                path: from.container.path().to_path_buf(),
                name: name_of(Role::TokenExperts, layer),
                reason: format!("names {row:?} for token {token}, expected {chosen} experts"),
            });
        }
    }
    Ok(table)
}

/// The norm of a router's input, with the factor `1 / √d_model` in its weights.
fn router_norm(from: &Loader<'_>, c: &ModelConfig, layer: u32) -> Result<Norm, Error> {
    let mut norm = norm(from, Role::RouterScale, None, layer, c)?;
    let factor = 1.0 / (c.d_model as f32).sqrt();
    norm.weight.iter_mut().for_each(|weight| *weight *= factor);
    Ok(norm)
}
