//! Arguments of `prune-outliers`.

use std::path::PathBuf;

use clap::Args;

use super::{EngineArgs, ModelArg};

/// `prune-outliers`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow pack checkpoint -o model.ember --quant q8c
  emberflow prune-outliers model.ember -f text.txt -o pruned.ember
  emberflow prune-outliers model.ember -f text.txt -o pruned.ember --loss 2 --limit 32768
  emberflow perplexity pruned.ember -f other.txt

The text runs through the model 3 to about 15 times. Layers are pruned by the
importance of their outliers, least first; the loss is measured. A container
that is pruned already is pruned anew.")]
pub struct PruneOutliersArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// The text, similar to the model's later input but not used for evaluation.
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Container to write.
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// How much the perplexity on the text may rise, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 0.5, value_parser = parse_loss, allow_negative_numbers = true)]
    pub loss: f64,
    /// Tokens of the text to use, from its beginning.
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u64).range(2..))]
    pub limit: u64,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Replace an existing output, and allow a --memory that this machine does not have.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object at the end.
    #[arg(long)]
    pub json: bool,
}

fn parse_loss(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if v >= 0.0 && v.is_finite() => Ok(v),
        _ => Err(format!("{text:?} is not a percentage of at least 0")),
    }
}
