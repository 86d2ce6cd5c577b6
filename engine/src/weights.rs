//! The resident weights: everything outside the FFNs.

use std::sync::Arc;
use std::thread::{Builder, ScopedJoinHandle};
use std::time::Duration;

use emberflow_kernels::{Cpu, DType};
use emberflow_models::config::{ModelConfig, Parallel};
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::arena::Arena;
use emberflow_storage::container::{Container, TensorEntry};

use crate::device::products::Products;
use crate::error::Error;
use crate::matrix::Matrix;
use crate::matrix::Sharing;
use crate::norm::Norm;
use crate::store::region;

/// Threads that load layers.
const LOADERS: usize = 4;

/// Bytes of their stacks.
const STACK: usize = 256 << 10;

/// The router of a layer's experts.
#[derive(Debug)]
pub struct Router {
    /// Scores of the experts, `[experts × d_model]`.
    pub scores: Matrix,
    /// Biases of these scores, `[experts]`.
    pub bias: Option<Vec<f32>>,
    /// What is added to the scores where experts are chosen, `[experts]`.
    pub choice_bias: Option<Vec<f32>>,
    /// Gate of the shared expert, `[d_model]`; `None` also where it has none.
    pub shared: Option<Vec<f32>>,
}

/// Biases of a layer's FFN, in packed order, one bank's after the other's. All banks are of the same
/// size.
#[derive(Debug)]
pub(crate) struct FfnBiases {
    pub banks: usize,
    /// Of Gate and Up, `[banks × neurons]` each; Up's is empty without a gate.
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    /// Of Down, `[banks × d_model]`.
    pub down: Vec<f32>,
}

/// Attention weights of one layer, its norms, its router and its FFN's biases.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    /// Norm before attention.
    pub attn_norm: Option<Norm>,
    /// Norm of attention's output.
    pub attn_post_norm: Option<Norm>,
    /// Query projection, `[heads·head_dim × d_model]`.
    pub q: Matrix,
    /// Key projection, `[kv_heads·head_dim × d_model]`; `None` in a layer that reads the keys and
    /// values of another.
    pub k: Option<Matrix>,
    /// Value projection, the same.
    pub v: Option<Matrix>,
    /// Output projection, `[d_model × heads·head_dim]`.
    pub o: Matrix,
    /// Biases of Q, K, V.
    pub qkv_bias: Option<[Vec<f32>; 3]>,
    /// Bias of O.
    pub o_bias: Option<Vec<f32>>,
    /// RMSNorm over each head of Q and of K, or over all of them; that of K is empty where there is
    /// no K.
    pub qk_norm: Option<[Vec<f32>; 2]>,
    /// RMSNorm over each head of V: ones.
    pub value_norm: Option<Vec<f32>>,
    /// Logit of each query head beside those of the positions.
    pub sinks: Option<Vec<f32>>,
    /// Norm before the FFN; `None` also where it reads the output of the norm before attention.
    pub ffn_norm: Option<Norm>,
    /// Norm of the FFN's output.
    pub ffn_post_norm: Option<Norm>,
    /// Biases of the FFN, or of every expert.
    pub ffn_bias: Option<FfnBiases>,
    /// The router, where the FFN is a mixture of experts.
    pub router: Option<Router>,
}

impl LayerWeights {
    /// The projections of attention.
    pub(crate) fn projections(&self) -> impl Iterator<Item = &Matrix> {
        let [k, v] = [&self.k, &self.v].map(Option::as_ref);
        [Some(&self.q), k, v, Some(&self.o)].into_iter().flatten()
    }

    /// As [`LayerWeights::projections`].
    pub(crate) fn projections_mut(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let [k, v] = [&mut self.k, &mut self.v].map(Option::as_mut);
        let all = [Some(&mut self.q), k, v, Some(&mut self.o)];
        all.into_iter().flatten()
    }

    /// The norm whose output the FFN reads; `None` if it reads the residual stream.
    pub(crate) fn before_ffn(&self) -> Option<&Norm> {
        self.ffn_norm.as_ref().or(self.attn_norm.as_ref())
    }
}

/// All resident weights.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Output head, `[vocab × d_model]`; also the embedding where tied.
    pub head: Matrix,
    /// Its bias, `[vocab]`.
    pub head_bias: Option<Vec<f32>>,
    /// Norm before the head.
    pub final_norm: Norm,
    /// Learned positions.
    pub positions: Option<Matrix>,
    /// One entry per decoder layer.
    pub layers: Vec<LayerWeights>,
}

impl Weights {
    /// Reads and verifies all weights, several layers at once: one read at a time leaves most of the
    /// device idle.
    pub fn load(container: &Container, c: &ModelConfig) -> Result<Self, Error> {
        let src = Loader { container };
        let d = c.d_model as usize;
        let vocab = c.vocab as usize;
        let load = |first: usize| {
            let numbers = (first as u32..c.layers).step_by(LOADERS);
            let layers = numbers.map(|l| src.layer(l, c));
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
            let head = src.matrix(head_role(c), 0, vocab, d);
            let bias = c.form.head_bias;
            let head_bias = bias.then(|| src.vector(Role::HeadBias, 0, vocab));
            let final_norm = src.norm(Role::FinalNorm, Some(Role::FinalNormBias), 0, c);
            let positions = match c.position_rows() as usize {
                0 => Ok(None),
                rows => src.matrix(Role::Positions, 0, rows, d).map(Some),
            };
            let mut parts = Vec::with_capacity(LOADERS);
            for (first, thread) in started {
                let part = match thread.map(ScopedJoinHandle::join) {
                    Ok(Ok(part)) => part,
                    Ok(Err(panic)) => std::panic::resume_unwind(panic),
                    // The system has no thread for it.
                    Err(_) => load(first),
                };
                parts.push(part?.into_iter());
            }
            let layers = (0..c.layers as usize).filter_map(|l| parts[l % LOADERS].next());
            Ok(Self {
                layers: layers.collect(),
                head: head?,
                head_bias: head_bias.transpose()?,
                final_norm: final_norm?,
                positions: positions?,
            })
        })
    }

    /// Shares them with a device, for whose products there is room then.
    pub(crate) fn share(&mut self, sharing: &mut Sharing<'_>) -> Result<(), Error> {
        sharing.make_room()?;
        sharing.share(self.large())
    }

    /// The matrices that are worth a device: projections and head.
    fn large(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let projections = self
            .layers
            .iter_mut()
            .flat_map(LayerWeights::projections_mut);
        projections.chain([&mut self.head])
    }

    /// Share of the weights of projections and head that a device multiplies for one token, and the time
    /// that was waited for it.
    pub(crate) fn on_device(&self) -> (f64, Duration) {
        let its = self.projections_on_device(1);
        let its = its + Matrix::weights_on_device([&self.head].into_iter(), 1);
        let all = || self.all_projections().chain([&self.head]);
        let weights: f64 = all().map(Matrix::weights).sum();
        (its / weights, Matrix::waited_for_device(all()))
    }

    /// Share of the weights of projections that a device multiplies for `n` tokens of a prompt.
    pub(crate) fn prompt_on_device(&self, n: usize) -> f64 {
        let weights: f64 = self.all_projections().map(Matrix::weights).sum();
        self.projections_on_device(n) / weights
    }

    fn projections_on_device(&self, n: usize) -> f64 {
        let layer = |l: &LayerWeights| {
            let [k, v] = [&l.k, &l.v].map(Option::as_ref);
            let input = [Some(&l.q), k, v].into_iter().flatten();
            let its = Matrix::weights_on_device(input, n);
            its + Matrix::weights_on_device([&l.o].into_iter(), n)
        };
        self.layers.iter().map(layer).sum()
    }

    fn all_projections(&self) -> impl Iterator<Item = &Matrix> {
        self.layers.iter().flat_map(LayerWeights::projections)
    }

    /// What multiplies with a device, by matrix.
    pub(crate) fn products(&self) -> impl Iterator<Item = &Products> {
        let all = self.all_projections().chain([&self.head]);
        all.filter_map(|matrix| Some(&*matrix.device()?.of))
    }

    /// The bytes of the attention matrices.
    pub(crate) fn attention_bytes(&self) -> Vec<&[u8]> {
        let matrices = self.layers.iter().flat_map(LayerWeights::projections);
        matrices.map(Matrix::bytes).collect()
    }

    /// Bytes read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let layer = |l: &LayerWeights| {
            let router = l.router.as_ref().map_or(0, |router| router.scores.len());
            l.projections().map(Matrix::len).sum::<u64>() + router
        };
        self.layers.iter().map(layer).sum::<u64>() + self.head.len()
    }

    /// Bytes that [`Weights::load`] will allocate, from the directory alone.
    pub fn bytes_for(container: &Container, c: &ModelConfig) -> u64 {
        let on_flash = [
            (!c.tied_head).then(|| name_of(Role::Embed, 0)),
            Some(name_of(Role::LayerInputs, 0)),
        ];
        let on_flash = |name: &str| on_flash.iter().any(|table| table.as_deref() == Some(name));
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

/// The tensor that serves as head.
pub(crate) fn head_role(c: &ModelConfig) -> Role {
    match c.tied_head {
        true => Role::Embed,
        false => Role::Head,
    }
}

/// Container name of a tensor.
pub(crate) fn name_of(role: Role, layer: u32) -> String {
    let expert = 0;
    TensorId {
        role,
        layer,
        expert,
    }
    .to_string()
}

/// Finds tensors and validates their shapes.
pub(crate) struct Loader<'a> {
    pub container: &'a Container,
}

impl<'a> Loader<'a> {
    /// The entry of a `[rows × cols]` matrix, and its block format.
    pub fn entry(
        &self,
        id: TensorId,
        rows: usize,
        cols: usize,
    ) -> Result<(&'a TensorEntry, DType), Error> {
        let name = id.to_string();
        let bad = |reason: String| Error::Tensor {
            path: self.container.path().to_path_buf(),
            name: name.clone(),
            reason,
        };
        let entry = self
            .container
            .tensor(&name)
            .ok_or_else(|| bad("is missing".into()))?;
        if entry.dims() != [rows as u64, cols as u64] {
            return Err(bad(format!(
                "has shape {:?}, expected [{rows}, {cols}]",
                entry.dims()
            )));
        }
        let dtype = DType::from_code(entry.dtype)
            .ok_or_else(|| bad(format!("has unknown block format {}", entry.dtype)))?;
        let expected = (rows as u64).checked_mul(dtype.row_bytes(cols) as u64);
        if expected != Some(entry.len) {
            return Err(bad(format!(
                "has {} bytes, expected {expected:?} for {rows} rows of {cols} {}",
                entry.len,
                dtype.name()
            )));
        }
        Ok((entry, dtype))
    }

    fn layer(&self, l: u32, c: &ModelConfig) -> Result<LayerWeights, Error> {
        let own = c.kv_layer(l) == l;
        let d = c.d_model as usize;
        let q_dim = c.heads as usize * c.head_dim as usize;
        let kv_dim = c.kv_heads as usize * c.head_dim as usize;
        Ok(LayerWeights {
            attn_norm: match c.form.pre_norm {
                true => Some(self.norm(Role::AttnNorm, Some(Role::AttnNormBias), l, c)?),
                false => None,
            },
            attn_post_norm: self.post_norm(Role::AttnPostNorm, l, c)?,
            q: self.matrix(Role::Q, l, q_dim, d)?,
            k: (own.then(|| self.matrix(Role::K, l, kv_dim, d))).transpose()?,
            v: (own.then(|| self.matrix(Role::V, l, kv_dim, d))).transpose()?,
            o: self.matrix(Role::O, l, d, q_dim)?,
            qkv_bias: if c.qkv_bias {
                let of_kv = |role| match own {
                    true => self.vector(role, l, kv_dim),
                    false => Ok(Vec::new()),
                };
                Some([
                    self.vector(Role::QBias, l, q_dim)?,
                    of_kv(Role::KBias)?,
                    of_kv(Role::VBias)?,
                ])
            } else {
                None
            },
            o_bias: if c.o_bias {
                Some(self.vector(Role::OBias, l, d)?)
            } else {
                None
            },
            qk_norm: if c.qk_norm {
                let [of_q, of_k] = match c.qk_norm_whole {
                    true => [q_dim, kv_dim],
                    false => [c.head_dim as usize; 2],
                };
                Some([
                    self.vector(Role::QNorm, l, of_q)?,
                    match own {
                        true => self.vector(Role::KNorm, l, of_k)?,
                        false => Vec::new(),
                    },
                ])
            } else {
                None
            },
            value_norm: (c.form.value_norm).then(|| vec![1.0; c.head_dim as usize]),
            sinks: if c.form.sinks {
                Some(self.vector(Role::Sinks, l, c.heads as usize)?)
            } else {
                None
            },
            ffn_norm: match c.form.pre_norm && c.form.parallel != Parallel::OneNorm {
                true => Some(self.norm(Role::FfnNorm, Some(Role::FfnNormBias), l, c)?),
                false => None,
            },
            ffn_post_norm: self.post_norm(Role::FfnPostNorm, l, c)?,
            ffn_bias: self.ffn_biases(l, c)?,
            router: self.router(c, l)?,
        })
    }

    /// A norm before attention, FFN or head, of the kind that the model has there; `bias` is its
    /// bias, where such norms have one.
    fn norm(
        &self,
        weight: Role,
        bias: Option<Role>,
        layer: u32,
        c: &ModelConfig,
    ) -> Result<Norm, Error> {
        let d = c.d_model as usize;
        Ok(Norm {
            weight: self.vector(weight, layer, d)?,
            bias: match bias.filter(|_| c.form.norm_bias) {
                Some(role) => Some(self.vector(role, layer, d)?),
                None => c.form.layer_norm.then(|| vec![0.0; d]),
            },
            eps: c.rms_eps,
        })
    }

    /// A norm of a layer's outputs, where the model has them.
    fn post_norm(&self, role: Role, layer: u32, c: &ModelConfig) -> Result<Option<Norm>, Error> {
        let norm = c.form.post_norm.then(|| self.norm(role, None, layer, c));
        norm.transpose()
    }

    /// The biases of a layer's FFN, where it has them.
    fn ffn_biases(&self, l: u32, c: &ModelConfig) -> Result<Option<FfnBiases>, Error> {
        if !c.form.ffn_bias {
            return Ok(None);
        }
        let banks = c.banks_of(l).count();
        let (neurons, d) = (banks * c.ffn as usize, c.d_model as usize);
        Ok(Some(FfnBiases {
            banks,
            gate: self.rows(Role::GateBias, l, neurons, 1)?,
            up: match c.ffn_kind.ungated {
                true => Vec::new(),
                false => self.rows(Role::UpBias, l, neurons, 1)?,
            },
            down: self.rows(Role::DownBias, l, banks, d)?,
        }))
    }

    /// A matrix.
    pub fn matrix(
        &self,
        role: Role,
        layer: u32,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, Error> {
        self.read(TensorId::layer(role, layer), rows, cols)
    }

    /// One of several matrices of a role outside the layers.
    pub fn numbered(
        &self,
        role: Role,
        number: u32,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, Error> {
        self.read(TensorId::numbered(role, number), rows, cols)
    }

    fn read(&self, id: TensorId, rows: usize, cols: usize) -> Result<Matrix, Error> {
        let (entry, dtype) = self.entry(id, rows, cols)?;
        let mut bytes = region(entry.len as usize)?;
        self.container.read_tensor(entry, bytes.as_mut_slice())?;
        Ok(Matrix::new(dtype, rows, cols, Arc::new(bytes)))
    }

    /// The router of a layer, if it has one.
    fn router(&self, c: &ModelConfig, layer: u32) -> Result<Option<Router>, Error> {
        let Some(mixture) = c.mixture_of(layer) else {
            return Ok(None);
        };
        let [d, experts] = [c.d_model, c.experts].map(|n| n as usize);
        Ok(Some(Router {
            scores: self.matrix(Role::Router, layer, experts, d)?,
            bias: match mixture.router_bias {
                false => None,
                true => Some(self.vector(Role::RouterBias, layer, experts)?),
            },
            choice_bias: match mixture.choice_bias {
                false => None,
                true => Some(self.vector(Role::ChoiceBias, layer, experts)?),
            },
            shared: match mixture.shared {
                _ if mixture.shared_is_plain => None,
                0 => None,
                _ => Some(self.vector(Role::SharedGate, layer, d)?),
            },
        }))
    }

    /// A vector.
    pub fn vector(&self, role: Role, layer: u32, n: usize) -> Result<Vec<f32>, Error> {
        self.rows(role, layer, 1, n)
    }

    /// The numbers of a matrix, row by row.
    pub fn rows(&self, role: Role, layer: u32, rows: usize, n: usize) -> Result<Vec<f32>, Error> {
        let m = self.matrix(role, layer, rows, n)?;
        let (cpu, mut out) = (Cpu::detect(), vec![0.0; rows * n]);
        for (r, out) in out.chunks_exact_mut(n).enumerate() {
            cpu.dequantize(m.row(r), out);
        }
        Ok(out)
    }
}
