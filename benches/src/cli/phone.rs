//! Arguments of `phone`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::LabEngineArgs;

/// `phone`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow-lab phone
  emberflow-lab phone --svg orders.svg --paper llm-npu
  emberflow-lab phone --svg plan.svg --paper plan
  emberflow-lab phone -f models/demo/heldout.txt --limit 32768 --json

\"ratio\" is the simulated value over the nearest published one. What lies outside 0.75 to 1.25 says what explains it.
With a text, the bundled models run on it: the first half sets capacities and limits, the second half is counted.")]
pub struct PhoneArgs {
    /// Also run the bundled models on this text and count experts' capacities and outliers.
    #[arg(short, long, value_name = "TEXT")]
    pub file: Option<PathBuf>,
    /// Maximum tokens of the text.
    #[arg(long, value_name = "N", default_value_t = 16384, value_parser = clap::value_parser!(u64).range(2..))]
    pub limit: u64,
    /// Tokens of a pass over the text.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..=512))]
    pub rows: u16,
    /// An input of a matrix is an outlier beyond this multiple of the root mean square of these
    /// inputs.
    #[arg(long, value_name = "N", default_value_t = 6.0, value_parser = parse_times)]
    pub beyond: f64,
    /// Draw a timeline.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// The paper whose simulation is drawn. With the chart of a paper no plans are simulated.
    #[arg(long, value_enum, value_name = "NAME", default_value = "llm-npu")]
    pub paper: Paper,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: LabEngineArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Papers with a simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Paper {
    /// Subgraphs of a prompt in chunks on CPU and NPU.
    LlmNpu,
    /// Experts in static shapes.
    Npumoe,
    /// Products on GPU and NPU.
    Heteroinfer,
    /// A sparse model with half of its FFN on flash.
    #[value(name = "powerinfer-2")]
    Powerinfer2,
    /// A plan of the engine for a phone, no paper: a token and a chunk of a prompt.
    Plan,
}

/// A positive factor.
fn parse_times(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(times) if times > 0.0 && times.is_finite() => Ok(times),
        _ => Err("give a positive number".into()),
    }
}
