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

The text is cut into windows spread evenly over it: eight of ten make the predictors, one sets their
thresholds, one measures them. A run that was stopped goes on where it was when the same command is
given again.")]
pub struct TrainPredictorArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// The text.
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// The container to write.
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// Which predictor; auto takes the one that looks at the fewest neurons.
    #[arg(long, value_enum, default_value = "auto")]
    pub kind: PredictorArg,
    /// Bytes for all predictors, in percent of the model.
    #[arg(long, value_name = "PERCENT", default_value_t = 6.0, value_parser = parse_percent)]
    pub bytes: f64,
    /// Share of the neurons that fire which have to be named.
    #[arg(long, value_name = "SHARE", default_value_t = 0.98, value_parser = parse_share)]
    pub recall: f64,
    /// A layer whose predictor names less than this on text it has not seen gets none.
    #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = parse_share)]
    pub floor: f64,
    /// For activations without zeros: share of the gates to cut away, the smallest ones.
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = parse_share)]
    pub cut: f64,
    /// Tokens to take from the text.
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
    /// The best of those that fit.
    Auto,
    /// Signs of gate rows and inputs, without training.
    Sign,
    /// Two thin matrices.
    LowRank,
    /// Gate rows in two bits; where gates fire above a cutoff of their token, in three if these fit.
    Coarse,
    /// Cut small gates of an activation without zeros.
    Magnitude,
}

fn parse_percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if v > 0.0 && v <= 100.0 => Ok(v),
        _ => Err(format!(
            "{text:?} is not a percentage above 0 and up to 100"
        )),
    }
}
