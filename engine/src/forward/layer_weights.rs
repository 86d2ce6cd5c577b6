//! The resident weights of a layer, as they are loaded.

use std::sync::Arc;

use emberflow_kernels::Cpu;
use emberflow_models::config::{Mixture, ModelConfig, Parallel};
use emberflow_models::names::Role;

use super::narrow_experts::{self, ExpertsIn, ExpertsOut};
use super::router_ahead::Upcoming;
use crate::error::Error;
use crate::ffn::FfnBiases;
use crate::loader::{Loader, name_of};
use crate::matrix::Matrix;
use crate::mixer::Mixer;
use crate::norm::Norm;
use crate::router::Router;
use crate::tiles::{TileFfn, TileLayout};

/// The mixer of a layer, its norms, its router and its FFN's biases, from which its steps are made.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    /// Norm before attention.
    pub attn_norm: Option<Arc<Norm>>,
    /// Norm of the output of attention.
    pub attn_post_norm: Option<Norm>,
    /// The token mixer, if the layer has one.
    pub mixer: Option<Mixer>,
    /// Norm before the FFN; also `None` if the FFN reads the output of the norm before attention.
    pub ffn_norm: Option<Arc<Norm>>,
    /// Norm of the output of the FFN.
    pub ffn_post_norm: Option<Norm>,
    /// Biases of the FFN, or of every expert.
    pub ffn_bias: Option<Arc<FfnBiases>>,
    /// The router, if the FFN is a mixture of experts.
    pub router: Option<Arc<Router>>,
    /// The matrices around experts of another width.
    pub narrow: Option<(ExpertsIn, ExpertsOut)>,
    /// Norms of experts and of the dense FFN that runs in parallel with them.
    pub parallel_dense: Option<ParallelNorms>,
    /// Factor of the residual stream at the layer's end.
    pub scale: f32,
    /// The FFN, if its matrices lie by rows.
    pub tiles: Option<TileFfn>,
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
    pub fn load(
        from: &Loader<'_>,
        tiles: Option<&TileLayout>,
        c: &ModelConfig,
        l: u32,
    ) -> Result<Self, Error> {
        Ok(Self {
            attn_norm: if c.norms_of(l).before {
                Some(norm(from, Role::AttnNorm, Some(Role::AttnNormBias), l, c)?.into())
            } else {
                None
            },
            attn_post_norm: post_norm(from, Role::AttnPostNorm, l, c)?,
            mixer: Mixer::load(from, c, l)?,
            ffn_norm: if c.norms_of(l).before && c.form.parallel != Parallel::OneNorm {
                Some(norm(from, Role::FfnNorm, Some(Role::FfnNormBias), l, c)?.into())
            } else {
                None
            },
            ffn_post_norm: post_norm(from, Role::FfnPostNorm, l, c)?,
            ffn_bias: ffn_biases(from, l, c)?.map(Arc::new),
            router: router(from, c, l)?.map(Arc::new),
            narrow: narrow_experts::load(from, c, l)?,
            parallel_dense: ParallelNorms::load(from, c, l)?,
            scale: if c.form.layer_scale {
                from.vector(Role::LayerScale, l, 1)?[0]
            } else {
                1.0
            },
            tiles: match tiles {
                Some(tiles) => TileFfn::load(from, tiles, c, l)?,
                None => None,
            },
        })
    }

    /// What the layer before knows of this one.
    pub fn upcoming(&self) -> Upcoming {
        let norm = self.ffn_norm.as_ref().or(self.attn_norm.as_ref());
        Upcoming {
            norm: norm.cloned(),
            biases: self.ffn_bias.clone(),
            router: self.router.clone(),
        }
    }
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
pub(super) fn norm(
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
