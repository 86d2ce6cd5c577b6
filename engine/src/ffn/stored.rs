//! The predictors stored in a container: its PREDICTOR section, or the tensors of a PowerInfer
//! checkpoint.

use std::sync::Arc;

use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_predictor::section::{Directory, Kind};
use emberflow_predictor::{
    LowRank, LowRankSpec, Predictor, Quality, Reads, Shared, SharedBytes, SharedShape, Thresholds,
};
use emberflow_storage::arena::{Arena, Slot};
use emberflow_storage::container::Container;

use super::lookahead::{FEW, Lookahead};
use super::predict::Predictors;
use crate::error::Error;
use crate::store::region;

/// Where a container stores its predictors.
enum Origin {
    /// The PREDICTOR section.
    Section(Directory),
    /// Tensors of a PowerInfer checkpoint.
    Imported(Vec<LowRankSpec>),
}

/// A container's predictors before loading.
pub(crate) struct StoredPredictors {
    origin: Origin,
    /// By bank: threshold on the magnitude of activated gates.
    cuts: Vec<f32>,
    /// By bank: whether it has a predictor.
    predicts: Vec<bool>,
    /// Bytes of weights.
    pub bytes: u64,
    /// Multiply-adds per token for scoring all neurons.
    pub products: f64,
    shape: SharedShape,
    /// Elements of an input; neurons of the largest bank.
    size: [usize; 2],
    /// Share of the neurons that a token visits.
    visited: f64,
    /// Whether every layer has one bank, so that margins are stored and the next layer's neurons
    /// can be predicted early.
    looks_ahead: bool,
    /// Measured on held-out text, if known.
    pub quality: Option<Quality>,
}

/// Share of the neurons that a token visits.
fn visited(c: &ModelConfig) -> f64 {
    let all: u64 = c.banks().map(|bank| u64::from(bank.neurons)).sum();
    let of_layer = |layer: u32| {
        let banks = c.banks_of(layer).map(|bank| u64::from(bank.neurons));
        match c.mixture_of(layer) {
            Some(m) => u64::from(m.chosen) * u64::from(c.ffn) + u64::from(m.shared_bank()),
            None => banks.sum(),
        }
    };
    let visits: u64 = (0..c.layers).map(of_layer).sum();
    visits as f64 / (all as f64).max(1.0)
}

/// Whether exactly the layers whose gates have a cutoff per token have predictors that estimate it.
fn check_cutoffs(directory: &Directory, c: &ModelConfig) -> Result<(), String> {
    for (bank, entry) in c.banks().zip(&directory.banks) {
        let top = c.form.gate_top.get(bank.layer as usize);
        let above_cutoff = top.is_some_and(|&share| share > 0.0);
        let wrong = if above_cutoff {
            !entry.kind.knows_cutoffs()
        } else {
            entry.kind.knows_cutoffs() || top.is_some() && entry.kind != Kind::None
        };
        if wrong {
            return Err(format!(
                "layer {} has predictors of kind {:?}, and its gates {}; train them again",
                bank.layer,
                entry.kind,
                if above_cutoff {
                    "fire above a cutoff per token, which only coarse gates estimate"
                } else {
                    "have no cutoff per token"
                }
            ));
        }
    }
    Ok(())
}

/// Whether every layer with an FFN has one bank.
fn looks_ahead(c: &ModelConfig) -> bool {
    c.banks().count() == c.ffn_layers().count()
}

impl StoredPredictors {
    /// Finds the predictors of `container`; `None` if it has none.
    pub fn look(container: &Container, c: &ModelConfig) -> Result<Option<Self>, Error> {
        if container.predictor_len() > 0 {
            return Ok(Some(Self::section(container, c)?));
        }
        if c.form.has_gate_top() {
            Ok(None)
        } else {
            Self::imported(container, c)
        }
    }

    fn section(container: &Container, c: &ModelConfig) -> Result<Self, Error> {
        let d = c.bundle_width() as usize;
        let neurons: Vec<usize> = c.banks().map(|bank| bank.neurons as usize).collect();
        let bad = |e: &dyn std::fmt::Display| Error::Predictor {
            path: container.path().to_path_buf(),
            reason: e.to_string(),
        };
        let len = container.predictor_len();
        let mut head = vec![0; (Directory::len_for(neurons.len()) as u64).min(len) as usize];
        container.peek_predictor(&mut head)?;
        let directory = Directory::parse(&head, len, d, &neurons).map_err(|e| bad(&e))?;
        check_cutoffs(&directory, c).map_err(|e| bad(&e))?;
        let kinds = directory.banks.iter().map(|b| b.kind);
        let shape = (directory.banks.iter()).map(|b| b.kind.shared_shape(d, b.neurons));
        let products = (directory.banks.iter()).map(|b| b.kind.products(d, b.neurons));
        Ok(Self {
            cuts: kinds
                .clone()
                .map(|kind| match kind {
                    Kind::Magnitude { threshold } => threshold,
                    _ => 0.0,
                })
                .collect(),
            predicts: kinds.map(|kind| kind.predicts()).collect(),
            bytes: Arena::charge(1, directory.len()),
            products: products.sum(),
            shape: shape.fold(SharedShape::default(), SharedShape::max),
            size: [d, neurons.into_iter().max().unwrap_or(0)],
            visited: visited(c),
            looks_ahead: looks_ahead(c),
            quality: Some(directory.quality()),
            origin: Origin::Section(directory),
        })
    }

    /// PowerInfer's form: `fc2 · relu(fc1 · x)` on the residual before the norm, one threshold for
    /// all neurons.
    fn imported(container: &Container, c: &ModelConfig) -> Result<Option<Self>, Error> {
        let [d, neurons] = [c.d_model, c.ffn].map(|n| n as usize);
        let mut specs = Vec::new();
        for layer in 0..c.layers {
            let name = |role| TensorId::layer(role, layer).to_string();
            let find = |role| container.tensor(&name(role));
            let (Some(fc1), Some(fc2)) = (find(Role::PredictorFc1), find(Role::PredictorFc2))
            else {
                return Ok(None);
            };
            let bad = |role, reason: String| Error::Tensor {
                path: container.path().to_path_buf(),
                name: name(role),
                reason,
            };
            let rank = fc1.dims().first().copied().unwrap_or(0) as usize;
            let mut formats = [DType::F32; 2];
            for ((entry, role, rows, cols), format) in [
                (fc1, Role::PredictorFc1, rank, d),
                (fc2, Role::PredictorFc2, neurons, rank),
            ]
            .into_iter()
            .zip(&mut formats)
            {
                *format = DType::from_code(entry.dtype).ok_or_else(|| {
                    bad(role, format!("has unknown block format {}", entry.dtype))
                })?;
                let len = (rows as u64).checked_mul(format.row_bytes(cols) as u64);
                if rank == 0 || entry.dims() != [rows as u64, cols as u64] || len != Some(entry.len)
                {
                    return Err(bad(
                        role,
                        format!(
                            "has shape {:?} in {} bytes, expected [{rows}, {cols}] in {len:?}",
                            entry.dims(),
                            entry.len
                        ),
                    ));
                }
            }
            specs.push(LowRankSpec {
                d,
                neurons,
                rank,
                fc1: formats[0],
                fc2: formats[1],
                reads: Reads::Residual,
                relu: true,
            });
        }
        let shapes = specs.iter().map(|s| s.shared_shape());
        Ok(Some(Self {
            cuts: vec![0.0; specs.len()],
            predicts: vec![true; specs.len()],
            bytes: specs
                .iter()
                .map(|s| Arena::charge(1, s.fc1_bytes()) + Arena::charge(1, s.fc2_bytes()))
                .sum(),
            products: specs.iter().map(LowRankSpec::products).sum(),
            shape: shapes.fold(SharedShape::default(), SharedShape::max),
            size: [d, neurons],
            visited: visited(c),
            looks_ahead: looks_ahead(c),
            quality: None,
            origin: Origin::Imported(specs),
        }))
    }

    /// By bank: whether it has a predictor.
    pub fn predicting(&self) -> &[bool] {
        &self.predicts
    }

    /// Whether any bank has a predictor.
    pub fn predicts(&self) -> bool {
        self.predicts.contains(&true)
    }

    /// Whether any bank has a threshold on gates.
    pub fn cuts(&self) -> bool {
        self.cuts.iter().any(|&cut| cut > 0.0)
    }

    /// Share of the neurons that a token visits, and of the weights that select them.
    pub fn visited(&self) -> f64 {
        self.visited
    }

    /// Expected share of gates computed; 1 for banks without a predictor.
    pub fn looked_at(&self) -> f64 {
        let banks = self.predicts.len().max(1) as f64;
        let predicting = self.predicts.iter().filter(|&&p| p).count() as f64;
        let Origin::Section(directory) = &self.origin else {
            return 1.0;
        };
        let share: f64 = directory
            .banks
            .iter()
            .filter(|b| b.kind.predicts())
            .map(|b| b.quality.predicted_share())
            .sum();
        (share + banks - predicting) / banks
    }

    /// Bytes that [`StoredPredictors::load`], the lookahead and `threads` threads allocate.
    pub fn memory(&self, chunk: usize, threads: usize) -> u64 {
        let [d, neurons] = self.size;
        let ahead = if self.looks_ahead {
            Lookahead::bytes_for(d, neurons, chunk.min(FEW), self.predicts.len())
                + 4 * neurons as u64
        } else {
            0
        };
        self.bytes + Shared::bytes_for(self.shape, chunk, threads) + ahead
    }

    /// Reads and verifies the weights.
    pub fn load(
        self,
        container: &Container,
        c: &ModelConfig,
        chunk: usize,
    ) -> Result<Predictors, Error> {
        let layers = match &self.origin {
            Origin::Section(directory) => {
                let mut slot = region(directory.len())?;
                container.read_predictor_into(slot.as_mut_slice())?;
                directory
                    .check(slot.as_slice())
                    .map_err(|e| Error::Predictor {
                        path: container.path().to_path_buf(),
                        reason: e.to_string(),
                    })?;
                let section: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(Weights(slot));
                (0..directory.banks.len())
                    .map(|bank| directory.predictor(bank, &section))
                    .collect()
            }
            Origin::Imported(specs) => {
                let threshold = c.predictor_threshold.unwrap_or(0.0);
                let mut layers = Vec::new();
                for (layer, spec) in (0..).zip(specs) {
                    let read = |role| -> Result<SharedBytes, Error> {
                        let name = TensorId::layer(role, layer).to_string();
                        let missing = || Error::Tensor {
                            path: container.path().to_path_buf(),
                            name: name.clone(),
                            reason: "is missing".into(),
                        };
                        let entry = container.tensor(&name).ok_or_else(missing)?;
                        let mut slot = region(entry.len as usize)?;
                        container.read_tensor(entry, slot.as_mut_slice())?;
                        let len = slot.as_slice().len();
                        SharedBytes::new(Arc::new(Weights(slot)), 0..len).ok_or_else(missing)
                    };
                    let predictor: Box<dyn Predictor> = Box::new(LowRank::new(
                        *spec,
                        read(Role::PredictorFc1)?,
                        read(Role::PredictorFc2)?,
                        Thresholds::One(threshold),
                    ));
                    layers.push(Some(predictor));
                }
                layers
            }
        };
        Ok(Predictors::new(layers, self.cuts, self.shape, chunk))
    }
}

/// Weights on huge pages.
struct Weights(Slot);

impl AsRef<[u8]> for Weights {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use emberflow_kernels::Narrow;
    use emberflow_predictor::section::{NewBank, Training, encode};

    use super::*;
    use crate::model::Model;

    const COARSE: Kind = Kind::Coarse(Narrow::Two);
    const TOP: Kind = Kind::CoarseTop(Narrow::Two);

    #[test]
    fn gates_above_a_cutoff_need_predictors_that_know_it() {
        let model = Model::demo().expect("the bundled model");
        let mut c = model.text().config().clone();
        let (d, neurons) = (c.d_model as usize, vec![c.ffn as usize; c.layers as usize]);
        let rows = Narrow::Two.row_bytes(d) * neurons[0];
        let coarse = vec![vec![0; rows], vec![0; 2 * neurons[0]]];
        let top = vec![coarse[0].clone(), vec![0; 12], coarse[1].clone()];
        let mut accepts = |share: f32, first: Kind, last: Kind| {
            c.form.gate_top = vec![share; neurons.len()];
            c.form.gate_top[1..].fill(0.0);
            if share == 0.0 {
                c.form.gate_top.clear();
            }
            let kinds = std::iter::once(first).chain(std::iter::repeat(last));
            let bank = |kind: Kind| NewBank {
                kind,
                quality: Quality::default(),
                parts: match kind {
                    Kind::Coarse(_) => coarse.clone(),
                    Kind::CoarseTop(_) => top.clone(),
                    _ => Vec::new(),
                },
            };
            let banks: Vec<NewBank> = kinds.take(neurons.len()).map(bank).collect();
            let training = Training {
                trained_on: 0,
                measured_on: 0,
                target: 0.98,
            };
            let bytes = encode(d, &neurons, training, &banks);
            let parsed = Directory::parse(&bytes, bytes.len() as u64, d, &neurons);
            check_cutoffs(&parsed.expect("a section"), &c).is_ok()
        };
        assert!(accepts(0.95, TOP, Kind::None));
        assert!(!accepts(0.95, COARSE, Kind::None));
        assert!(!accepts(0.95, Kind::None, Kind::None));
        assert!(!accepts(0.95, TOP, TOP));
        assert!(!accepts(0.95, TOP, COARSE));
        assert!(accepts(0.0, COARSE, Kind::None));
        assert!(!accepts(0.0, TOP, Kind::None));
    }
}
