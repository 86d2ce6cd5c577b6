//! Arguments of `train-predictor`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{EngineArgs, ModelArg, parse_share};

/// `train-predictor`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow train-predictor model.ember -f text.txt -o model-predicted.ember
  emberflow train-predictor relu-7b.ember -f text.txt --kind low-rank --bytes 6 -o out.ember
  emberflow train-predictor silu-7b.ember -f text.txt --cut 0.5 -o out.ember
  emberflow perplexity out.ember -f other.txt --sparsity predicted

Windows are taken evenly from the text: 80 % to train, 10 % to set thresholds, 10 % to measure recall
and precision. To resume an interrupted run, run the same command again.")]
pub struct TrainPredictorArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// The text.
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Container to write.
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// Kind of predictor; auto chooses the one that predicts the fewest neurons.
    #[arg(long, value_enum, default_value = "auto")]
    pub kind: PredictorArg,
    /// Size limit for all predictors together, in percent of the model.
    #[arg(long, value_name = "PERCENT", default_value_t = 6.0, value_parser = parse_percent)]
    pub bytes: f64,
    /// Target recall: share of active neurons that must be predicted.
    #[arg(long, value_name = "SHARE", default_value_t = 0.98, value_parser = parse_share)]
    pub recall: f64,
    /// Minimum recall on held-out text; layers below it get no predictor.
    #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = parse_share)]
    pub floor: f64,
    /// For activations without exact zeros: share of neurons to drop, by smallest gate.
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = parse_share)]
    pub cut: f64,
    /// Tokens of the text to use.
    #[arg(long, value_name = "N", default_value_t = 65536)]
    pub tokens: u32,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Replace an existing output.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object at the end.
    #[arg(long)]
    pub json: bool,
}

/// Predictors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PredictorArg {
    /// The best kind that fits in --bytes.
    Auto,
    /// Signs of gate rows and inputs, without training.
    Sign,
    /// Low-rank factorization of the Gate matrix.
    LowRank,
    /// Gate rows in 2 bits (3 bits for Gaussian top-k, if they fit).
    Coarse,
    /// Drop small gates of an activation without exact zeros.
    Magnitude,
}

fn parse_percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if v > 0.0 && v <= 100.0 => Ok(v),
        _ => Err(format!(
            "{text:?} is not a percentage above 0 and at most 100"
        )),
    }
}
