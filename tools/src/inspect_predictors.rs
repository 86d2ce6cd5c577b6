//! What `inspect` says of a container's predictors.

use emberflow_models::config::{Bank, ModelConfig};
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
    /// By layer, or by layer and expert.
    pub layers: Vec<BankPredictor>,
}

/// One bank's predictor. Keys are a contract.
#[derive(Debug, Serialize)]
pub struct BankPredictor {
    /// Layer.
    pub layer: usize,
    /// Expert; absent in models without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert: Option<u32>,
    /// Neurons.
    #[serde(skip)]
    pub neurons: usize,
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
    let neurons: Vec<usize> = c.banks().map(|bank| bank.neurons as usize).collect();
    let bad = |e| Failure::Fault(format!("{}: predictors: {e}", container.path().display()));
    let len = section.len() as u64;
    let directory = Directory::parse(&section, len, c.d_model as usize, &neurons).map_err(bad)?;
    directory.check(&section).map_err(bad)?;
    Ok(Some((section, directory)))
}

/// What the section says of itself; `None` where it is empty.
pub fn predictors(container: &Container, c: &ModelConfig) -> Result<Option<Predictors>, Failure> {
    let Some((section, directory)) = section(container, c)? else {
        return Ok(None);
    };
    let bank = |(number, bank): (usize, Bank)| {
        let entry = directory.banks.get(number)?;
        let q = entry.quality;
        Some(BankPredictor {
            layer: bank.layer as usize,
            expert: c.mixture.is_some().then_some(bank.expert),
            neurons: entry.neurons,
            kind: match entry.kind {
                Kind::None => "exact",
                Kind::Sign { .. } => "sign",
                Kind::LowRank(_) => "low-rank",
                Kind::Coarse(_) | Kind::CoarseTop(_) => "coarse",
                Kind::Magnitude { .. } => "magnitude",
            },
            bytes: directory.bank_bytes(number) as u64,
            recall: q.recall(),
            precision: q.precision(),
            active_share: q.active_share(),
            predicted_share: q.predicted_share(),
        })
    };
    Ok(Some(Predictors {
        bytes: section.len() as u64,
        trained_on: directory.trained_on,
        measured_on: directory.measured_on,
        target: directory.target,
        layers: c.banks().enumerate().filter_map(bank).collect(),
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
        if self.layers.iter().any(|bank| bank.expert.is_some()) {
            let layers = self.layers.chunk_by(|a, b| a.layer == b.layer);
            return std::iter::once(head).chain(layers.map(experts)).collect();
        }
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

/// The predictors of a layer's experts in one line.
fn experts(banks: &[BankPredictor]) -> String {
    let with: Vec<&BankPredictor> = banks.iter().filter(|b| b.kind != "exact").collect();
    let mean = |of: fn(&BankPredictor) -> f64| {
        100.0 * with.iter().map(|b| of(b)).sum::<f64>() / with.len().max(1) as f64
    };
    format!(
        "  layer {:>2}: {} of {} experts, {:>10}, recall {:.1} %, precision {:.1} %, names {:.1} % where \
         {:.1} % fire",
        banks[0].layer,
        with.len(),
        banks.len(),
        size::show(with.iter().map(|b| b.bytes).sum()),
        mean(|b| b.recall),
        mean(|b| b.precision),
        mean(|b| b.predicted_share),
        mean(|b| b.active_share)
    )
}
