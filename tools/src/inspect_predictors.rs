//! The predictors shown by `inspect`.

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
    /// Tokens of the training text.
    pub trained_on: u64,
    /// Tokens of the held-out text on which recall and precision were measured.
    pub measured_on: u64,
    /// Target recall of the calibration.
    pub target: f32,
    /// By layer, or by layer and expert.
    pub layers: Vec<BankPredictor>,
}

/// One bank's predictor. Keys are a contract.
#[derive(Debug, Serialize)]
pub struct BankPredictor {
    /// Layer.
    pub layer: usize,
    /// Expert; absent in dense models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert: Option<u32>,
    /// Neurons.
    #[serde(skip)]
    pub neurons: usize,
    /// `exact` (no predictor), `sign`, `low-rank`, `coarse` or `magnitude`.
    pub kind: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// Share of active neurons that are predicted.
    pub recall: f64,
    /// Share of predicted neurons that are active.
    pub precision: f64,
    /// Share of all neurons that are active.
    pub active_share: f64,
    /// Share of all neurons that are predicted.
    pub predicted_share: f64,
}

/// Reads and checks the predictor section and its directory; `None` if the section is empty.
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
    let directory =
        Directory::parse(&section, len, c.bundle_width() as usize, &neurons).map_err(bad)?;
    directory.check(&section).map_err(bad)?;
    Ok(Some((section, directory)))
}

/// Summary of the predictor section; `None` if it is empty.
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
    /// Formats the predictors as lines of text.
    pub fn lines(&self) -> Vec<String> {
        let head = format!(
            "predictors: {}, trained on {} tokens for a recall of {:.1} %, measured on {} held-out tokens",
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
                "  layer {:>2}: {:<9} {:>10}, recall {:.1} %, precision {:.1} %, predicts {:.1} %, {:.1} % are active",
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

/// Formats the predictors of a layer's experts as one line.
fn experts(banks: &[BankPredictor]) -> String {
    let with: Vec<&BankPredictor> = banks.iter().filter(|b| b.kind != "exact").collect();
    let mean = |of: fn(&BankPredictor) -> f64| {
        100.0 * with.iter().map(|b| of(b)).sum::<f64>() / with.len().max(1) as f64
    };
    format!(
        "  layer {:>2}: {} of {} experts, {:>10}, recall {:.1} %, precision {:.1} %, predicts {:.1} %, \
         {:.1} % are active",
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
