//! Reports per bank, and finished banks on disk.

use std::io::Write;
use std::path::Path;

use emberflow_predictor::Quality;
use emberflow_predictor::section::{Directory, Kind, NewBank, Training, encode};
use emberflow_predictor::train::{GateLayer, Made};
use emberflow_storage::container::Container;
use serde::{Deserialize, Serialize};

use crate::cli::TrainPredictorArgs;
use crate::{Failure, print_json, size};

/// A trained predictor of one bank. Keys are a contract.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Candidate {
    /// `sign`, `low-rank`, `coarse` or `magnitude`.
    pub kind: String,
    /// Rank of a low-rank predictor.
    pub rank: Option<usize>,
    /// Size of its weights.
    pub bytes: u64,
    /// Share of active pairs that are predicted.
    pub recall: f64,
    /// Share of predicted pairs that are active.
    pub precision: f64,
    /// Predicted pairs per active pair.
    pub overhead: f64,
    /// Microseconds per token on this machine.
    pub us_per_token: f64,
}

/// Result for one bank. Keys are a contract.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BankReport {
    /// Layer number.
    pub layer: u32,
    /// Expert; absent in dense models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert: Option<u32>,
    /// The predictor's kind, or `exact` if none reaches the floor.
    pub kind: String,
    /// Share of active neurons.
    pub active_share: f64,
    /// Share of neurons that are computed.
    pub looked_at_share: f64,
    /// Threshold of a magnitude predictor: smallest magnitude of an activated gate that counts.
    pub cut: Option<f32>,
    /// Candidates, best last.
    pub candidates: Vec<Candidate>,
}

/// Output of `train-predictor --json`. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct Trained {
    /// Path of the container.
    pub output: String,
    /// Size of all predictors.
    pub bytes: u64,
    /// Size as a share of the model without them.
    pub share: f64,
    /// Tokens of the training text.
    pub trained_on: u64,
    /// Tokens of the held-out text.
    pub measured_on: u64,
    /// Target recall.
    pub target: f64,
    /// Recall over all banks.
    pub recall: f64,
    /// Precision over all banks.
    pub precision: f64,
    /// Computed pairs per active pair, including banks without a predictor.
    pub overhead: f64,
    /// Time of all predictors per token, in microseconds.
    pub us_per_token: f64,
    /// By layer, or by layer and expert.
    pub layers: Vec<BankReport>,
}

/// Takes the best candidate of a bank; none if it is below the floor.
pub fn judged(
    layer: u32,
    expert: Option<u32>,
    mut made: Vec<(&'static str, Made)>,
    floor: f64,
) -> (NewBank, BankReport) {
    let candidates = made
        .iter()
        .map(|(kind, made)| {
            let q = made.bank.quality;
            Candidate {
                kind: (*kind).into(),
                rank: match made.bank.kind {
                    Kind::LowRank(spec) => Some(spec.rank),
                    _ => None,
                },
                bytes: made.bank.parts.iter().map(|p| p.len() as u64).sum(),
                recall: q.recall(),
                precision: q.precision(),
                overhead: q.overhead(),
                us_per_token: made.ns_per_token / 1e3,
            }
        })
        .collect();
    let (name, best) = match made.pop() {
        Some((name, made)) => (name, made.bank),
        None => (
            "exact",
            NewBank {
                kind: Kind::None,
                quality: Quality::default(),
                parts: Vec::new(),
            },
        ),
    };
    let good = best.quality.recall() >= floor;
    let looks = if good && best.kind.predicts() {
        best.quality.predicted_share()
    } else {
        1.0
    };
    let report = BankReport {
        layer,
        expert,
        kind: if good { name } else { "exact" }.into(),
        active_share: best.quality.active_share(),
        looked_at_share: looks,
        cut: match best.kind {
            Kind::Magnitude { threshold } => Some(threshold),
            _ => None,
        },
        candidates,
    };
    let kept = if good {
        best
    } else {
        NewBank {
            kind: Kind::None,
            parts: Vec::new(),
            ..best
        }
    };
    (kept, report)
}

/// Saves a finished bank: the report as a line of JSON, then a predictor section with this bank only.
pub fn save(
    path: &Path,
    of: &GateLayer<'_>,
    bank: &NewBank,
    report: &BankReport,
) -> Result<(), Failure> {
    let mut bytes = serde_json::to_vec(report).map_err(std::io::Error::from)?;
    bytes.push(b'\n');
    let training = Training {
        trained_on: 0,
        measured_on: (of.texts.measure.len() / of.d) as u64,
        target: 0.0,
    };
    let neurons = of.gate.len() / of.d;
    let one = std::slice::from_ref(bank);
    bytes.extend(encode(of.d, &[neurons], training, one));
    let partial = path.with_extension("partial");
    std::fs::write(&partial, bytes).map_err(Failure::file(&partial))?;
    std::fs::rename(&partial, path).map_err(Failure::file(path))
}

/// Loads a saved bank of `neurons` neurons with inputs of `d` elements, if it is intact.
pub fn load(path: &Path, d: usize, neurons: usize) -> Option<(NewBank, BankReport)> {
    let bytes = std::fs::read(path).ok()?;
    let end = bytes.iter().position(|&b| b == b'\n')?;
    let report = serde_json::from_slice(&bytes[..end]).ok()?;
    Some((take_apart(&bytes[end + 1..], d, neurons)?, report))
}

impl Trained {
    /// Sums up the banks.
    pub fn new(
        args: &TrainPredictorArgs,
        container: &Container,
        bytes: usize,
        training: Training,
        qualities: &[Quality],
        layers: Vec<BankReport>,
    ) -> Self {
        let mut all = Quality::default();
        let mut looked_at = 0.0;
        for (quality, layer) in qualities.iter().zip(&layers) {
            let mut quality = *quality;
            if layer.kind == "exact" {
                (quality.predicted, quality.hit) = (quality.pairs, quality.active);
            }
            looked_at += layer.looked_at_share * quality.pairs as f64;
            all += quality;
        }
        Self {
            output: args.output.display().to_string(),
            bytes: bytes as u64,
            share: bytes as f64 / (container.file_len() - container.predictor_len()).max(1) as f64,
            trained_on: training.trained_on,
            measured_on: training.measured_on,
            target: args.recall,
            recall: all.recall(),
            precision: all.precision(),
            overhead: looked_at / (all.active as f64).max(1.0),
            us_per_token: layers
                .iter()
                .filter(|l| l.kind != "exact")
                .filter_map(|l| l.candidates.last())
                .map(|c| c.us_per_token)
                .sum(),
            layers,
        }
    }

    /// Prints a table, or JSON.
    pub fn print(&self, json: bool) -> Result<(), Failure> {
        if json {
            return print_json(self);
        }
        let mut out = std::io::stdout().lock();
        if self.layers.iter().all(|l| l.cut.is_some()) {
            return self.print_cuts(&mut out);
        }
        if self.layers.iter().any(|bank| bank.expert.is_some()) {
            self.print_layers(&mut out)?;
            return self.print_sum(&mut out);
        }
        writeln!(
            out,
            "layer  kind        rank      bytes   active   computed  recall  precision  per active  us/token"
        )?;
        for layer in &self.layers {
            for (i, c) in layer.candidates.iter().enumerate().rev() {
                let chosen = i + 1 == layer.candidates.len();
                let first = |text: String| if chosen { text } else { String::new() };
                let rank = c.rank.map_or(String::new(), |r| r.to_string());
                writeln!(
                    out,
                    "{:>5}  {:<10} {rank:>5} {:>10} {:>8} {:>10} {:>7.4} {:>10.3} {:>11.2} {:>9.1}{}",
                    first(layer.layer.to_string()),
                    c.kind,
                    c.bytes,
                    first(format!("{:.1} %", 100.0 * layer.active_share)),
                    first(format!("{:.1} %", 100.0 * layer.looked_at_share)),
                    c.recall,
                    c.precision,
                    c.overhead,
                    c.us_per_token,
                    if chosen && layer.kind == "exact" {
                        "  below the floor: exact"
                    } else {
                        ""
                    },
                )?;
            }
        }
        self.print_sum(&mut out)
    }

    /// Prints the table of a mixture of experts, one line per layer.
    fn print_layers(&self, out: &mut impl Write) -> Result<(), Failure> {
        writeln!(
            out,
            "layer  experts  predicted     bytes   active   computed  recall  precision  kinds"
        )?;
        for banks in self.layers.chunk_by(|a, b| a.layer == b.layer) {
            let with = || banks.iter().filter(|bank| bank.kind != "exact");
            let best = || with().filter_map(|bank| bank.candidates.last());
            let mean = |sum: f64, of: usize| sum / of.max(1) as f64;
            let named = with().count();
            let mut kinds: Vec<&str> = with().map(|bank| bank.kind.as_str()).collect();
            kinds.sort_unstable();
            kinds.dedup();
            let shares = [
                |bank: &BankReport| bank.active_share,
                |bank: &BankReport| bank.looked_at_share,
            ];
            let [active, looks] = shares.map(|of| mean(banks.iter().map(of).sum(), banks.len()));
            writeln!(
                out,
                "{:>5} {:>8} {named:>9} {:>10} {:>6.1} % {:>8.1} % {:>7.4} {:>10.3}  {}",
                banks[0].layer,
                banks.len(),
                best().map(|c| c.bytes).sum::<u64>(),
                100.0 * active,
                100.0 * looks,
                mean(best().map(|c| c.recall).sum(), named),
                mean(best().map(|c| c.precision).sum(), named),
                kinds.join(", "),
            )?;
        }
        Ok(())
    }

    /// Prints the totals.
    fn print_sum(&self, out: &mut impl Write) -> Result<(), Failure> {
        writeln!(
            out,
            "{}: {} of predictors ({:.2} % of the model), recall {:.2} %, {:.2} neurons computed \
             per active neuron, {:.0} us per token; measured on {} tokens",
            self.output,
            size::show(self.bytes),
            100.0 * self.share,
            100.0 * self.recall,
            self.overhead,
            self.us_per_token,
            self.measured_on,
        )?;
        Ok(())
    }

    /// Prints the table of layers whose small gates are dropped.
    fn print_cuts(&self, out: &mut impl Write) -> Result<(), Failure> {
        writeln!(out, "layer      threshold     kept")?;
        for (l, cut) in (self.layers.iter()).filter_map(|l| Some((l, l.cut?))) {
            let left = 100.0 * l.active_share;
            writeln!(out, "{:>5} {cut:>14.5} {left:>6.1} %", l.layer)?;
        }
        let left: f64 = self.layers.iter().map(|l| l.active_share).sum();
        writeln!(
            out,
            "{}: gates below the threshold count as zero, {:.1} % are kept over {} tokens; \
             compare perplexity with --sparsity predicted and --sparsity dense",
            self.output,
            100.0 * left / self.layers.len().max(1) as f64,
            self.measured_on,
        )?;
        Ok(())
    }
}

/// Parses a saved bank.
fn take_apart(bytes: &[u8], d: usize, neurons: usize) -> Option<NewBank> {
    let directory = Directory::parse(bytes, bytes.len() as u64, d, &[neurons]).ok()?;
    directory.check(bytes).ok()?;
    directory.bank(0, bytes)
}
