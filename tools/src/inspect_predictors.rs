//! What `inspect` says of a container's predictors.

use emberflow_models::config::ModelConfig;
use emberflow_predictor::section::{Directory, Kind};
use emberflow_storage::container::Container;
use serde::Serialize;

use crate::{Failure, size};

/// Predictors of a container. Keys are a contract.
#[derive(Debug, Serialize)]
pub struct Predictors {
    /// Bytes of all of them.
    pub bytes: u64,
    /// Tokens they were made from.
    pub trained_on: u64,
    /// Tokens of other text they were measured on.
    pub measured_on: u64,
    /// Recall they were calibrated to.
    pub target: f32,
    /// By layer.
    pub layers: Vec<LayerPredictor>,
}

/// One layer's predictor. Keys are a contract.
#[derive(Debug, Serialize)]
pub struct LayerPredictor {
    /// Layer.
    pub layer: usize,
    /// `exact` (none), `sign`, `low-rank`, `coarse` or `magnitude`.
    pub kind: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// Share of the neurons that fire which it names.
    pub recall: f64,
    /// Share of the neurons it names that fire.
    pub precision: f64,
    /// Share of all neurons that fire.
    pub active_share: f64,
    /// Share of all neurons that it names.
    pub predicted_share: f64,
}

/// Reads and checks the section, and the directory at its head; `None` where it is empty.
pub fn section(
    container: &Container,
    c: &ModelConfig,
) -> Result<Option<(Vec<u8>, Directory)>, Failure> {
    let section = container.read_predictor()?;
    if section.is_empty() {
        return Ok(None);
    }
    let [layers, d, neurons] = [c.layers, c.d_model, c.ffn].map(|n| n as usize);
    let bad = |e| Failure::Fault(format!("{}: predictors: {e}", container.path().display()));
    let directory =
        Directory::parse(&section, section.len() as u64, layers, d, neurons).map_err(bad)?;
    directory.check(&section).map_err(bad)?;
    Ok(Some((section, directory)))
}

/// What the section says of itself; `None` where it is empty.
pub fn predictors(container: &Container, c: &ModelConfig) -> Result<Option<Predictors>, Failure> {
    let Some((section, directory)) = section(container, c)? else {
        return Ok(None);
    };
    let layer = |layer: usize| {
        let entry = &directory.layers[layer];
        let q = entry.quality;
        LayerPredictor {
            layer,
            kind: match entry.kind {
                Kind::None => "exact",
                Kind::Sign { .. } => "sign",
                Kind::LowRank(_) => "low-rank",
                Kind::Coarse => "coarse",
                Kind::Magnitude { .. } => "magnitude",
            },
            bytes: directory.layer_bytes(layer) as u64,
            recall: q.recall(),
            precision: q.precision(),
            active_share: q.active_share(),
            predicted_share: q.predicted_share(),
        }
    };
    Ok(Some(Predictors {
        bytes: section.len() as u64,
        trained_on: directory.trained_on,
        measured_on: directory.measured_on,
        target: directory.target,
        layers: (0..directory.layers.len()).map(layer).collect(),
    }))
}

impl Predictors {
    /// As lines for people.
    pub fn lines(&self) -> Vec<String> {
        let head = format!(
            "predictors: {}, made from {} tokens for a recall of {:.1} %, measured on {} others",
            size::show(self.bytes),
            self.trained_on,
            100.0 * self.target,
            self.measured_on
        );
        let layers = self.layers.iter().map(|l| {
            format!(
                "  layer {:>2}: {:<9} {:>10}, recall {:.1} %, precision {:.1} %, names {:.1} % where {:.1} % fire",
                l.layer,
                l.kind,
                size::show(l.bytes),
                100.0 * l.recall,
                100.0 * l.precision,
                100.0 * l.predicted_share,
                100.0 * l.active_share
            )
        });
        std::iter::once(head).chain(layers).collect()
    }
}
