//! Everything outside the FFNs, and FFNs whose matrices are stored by rows: resident, or read for every pass.

use std::sync::Arc;
use std::thread::{Builder, ScopedJoinHandle};

use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::arena::Arena;
use emberflow_storage::container::Container;

use super::layer::Layer;
use super::layer_weights::{LayerWeights, norm};
use super::router_ahead::Upcoming;
use crate::error::Error;
use crate::loader::Loader;
use crate::matrix::{Matrix, MatrixStream};
use crate::meta::ContainerMeta;
use crate::mixer::Mixer;
use crate::norm::Norm;
use crate::tiles::{TileLayout, is_tiled};

/// Threads that load layers: enough reads at once to keep storage busy.
const LOADERS: usize = 4;

/// Stack size of these threads in bytes.
const STACK: usize = 256 << 10;

/// These weights.
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
    pub layers: Vec<Layer>,
    /// Reads the matrices that are not resident.
    pub stream: Option<Arc<MatrixStream>>,
}

impl Weights {
    /// Reads and verifies all weights, several layers at once: single reads would leave most of the
    /// device idle. `shared`: the output head, if it is another model's; `stream` reads the matrices that stay on disk.
    pub fn load(
        container: &Container,
        tiles: Option<&TileLayout>,
        meta: &ContainerMeta,
        shared: Option<Matrix>,
        stream: Option<Arc<MatrixStream>>,
    ) -> Result<Self, Error> {
        let (stream_of, c) = (stream.as_ref(), &meta.config);
        let from = Loader {
            container,
            stream: stream_of,
        };
        let d = c.d_model as usize;
        let vocab = c.vocab as usize;
        let load = |first: usize| {
            let numbers = (first as u32..c.layers).step_by(LOADERS);
            let layers = numbers.map(|l| LayerWeights::load(&from, tiles, c, l));
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
            let head = shared.map_or_else(|| from.matrix(head_role(c), 0, vocab, d), Ok);
            let bias = c.form.head_bias && !c.form.mtp;
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
            let mut layers = steps(c, layers.collect());
            let pruned = meta.pruned.iter().flat_map(|chosen| &chosen.layers);
            pruned.for_each(|&number| layers[number as usize].pruned = true);
            Ok(Self {
                layers,
                stream: stream.clone(),
                head: head?,
                head_bias: head_bias.transpose()?,
                final_norm: final_norm.transpose()?,
                positions: positions?,
            })
        })
    }

    /// The matrices that a lane may multiply: projections and head.
    pub(crate) fn large(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let mixers = self.layers.iter_mut().filter_map(Layer::mixer_mut);
        let projections = mixers.flat_map(|mixer| mixer.matrices_mut().shared_mut());
        projections.chain([&mut self.head])
    }

    /// The mixers of the layers that have one.
    pub(crate) fn mixers(&self) -> impl Iterator<Item = &Mixer> {
        self.layers.iter().filter_map(Layer::mixer)
    }

    /// The matrices of all mixers.
    pub(crate) fn all_projections(&self) -> impl Iterator<Item = &Matrix> {
        self.mixers().flat_map(|mixer| mixer.matrices().iter())
    }

    /// The bytes of the attention matrices.
    pub(crate) fn attention_bytes(&self) -> Vec<&[u8]> {
        self.all_projections().map(Matrix::bytes).collect()
    }

    /// Bytes read per token.
    pub fn bytes_per_token(&self) -> u64 {
        self.layers.iter().map(Layer::bytes_per_token).sum::<u64>() + self.head.len()
    }

    /// Bytes that [`Weights::load`] will allocate without a stream, computed from the directory only.
    pub fn bytes_for(container: &Container, c: &ModelConfig) -> u64 {
        let on_flash = |name: &str| {
            let id = name.parse::<TensorId>();
            id.is_ok_and(|id| id.role.is_table(c.tied_head))
        };
        container
            .tensors()
            .iter()
            .filter(|t| !is_predictor(t.name()) && !on_flash(t.name()))
            .filter(|t| !is_tiled(container, t))
            .map(|t| Arena::charge(1, t.len as usize))
            .sum()
    }
}

/// The steps of every layer.
fn steps(c: &ModelConfig, weights: Vec<LayerWeights>) -> Vec<Layer> {
    let upcoming: Vec<Upcoming> = weights.iter().map(LayerWeights::upcoming).collect();
    let layer = |(number, weights): (usize, LayerWeights)| {
        let next = (number + 1..upcoming.len()).find(|&layer| c.has_ffn(layer as u32));
        Layer::new(c, number, weights, next.map(|next| &upcoming[next]))
    };
    weights.into_iter().enumerate().map(layer).collect()
}

fn is_predictor(name: &str) -> bool {
    name.contains(".predictor.")
}

/// The tensor used as head.
pub(crate) fn head_role(c: &ModelConfig) -> Role {
    if c.tied_head { Role::Embed } else { Role::Head }
}
