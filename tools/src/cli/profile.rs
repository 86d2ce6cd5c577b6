//! Arguments of `profile`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{EngineArgs, ModelArg};

/// `profile`
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "\
Examples:
  emberflow profile model.ember -f text.txt -o stats.bin --memory 2GiB
  emberflow profile merge part1.bin part2.bin -o stats.bin
  emberflow profile show stats.bin --svg stats.svg
  emberflow pack checkpoint -o model.ember --stats stats.bin

To resume an interrupted run, run the same command again (mixtures of experts start over). Statistics of different texts, even from
several machines, can be merged if --window is the same."
)]
pub struct ProfileArgs {
    /// Merge or show statistics.
    #[command(subcommand)]
    pub command: Option<ProfileCommand>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub run: ProfileRunArgs,
}

/// `profile …`
#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// Merge the statistics of several texts.
    Merge(ProfileMergeArgs),
    /// Print and plot statistics.
    Show(ProfileShowArgs),
}

/// `profile MODEL`
#[derive(Debug, Args)]
pub struct ProfileRunArgs {
    #[command(flatten)]
    #[expect(missing_docs)]
    pub model: ModelArg,
    /// The text.
    #[arg(short, long, value_name = "TEXT", required = true)]
    pub file: Option<PathBuf>,
    /// Statistics file to write.
    #[arg(short, long, value_name = "STATS", required = true)]
    pub output: Option<PathBuf>,
    /// Tokens per window; each starts with an empty context. Default: 256, or the model's limit.
    #[arg(long, value_name = "N")]
    pub window: Option<u32>,
    /// Stop after this many tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
    #[command(flatten)]
    #[expect(missing_docs)]
    pub engine: EngineArgs,
    /// Replace existing statistics.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// For tests: stop after this many windows, as on Ctrl-C.
    #[arg(long, hide = true)]
    pub stop_after: Option<u64>,
}

/// `profile merge`
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  emberflow profile merge part1.bin part2.bin -o stats.bin")]
pub struct ProfileMergeArgs {
    /// Statistics of the same model over different texts.
    #[arg(value_name = "STATS", required = true)]
    pub stats: Vec<PathBuf>,
    /// Statistics file to write.
    #[arg(short, long, value_name = "STATS")]
    pub output: PathBuf,
    /// Replace existing statistics.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `profile show`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  emberflow profile show stats.bin
  emberflow profile show stats.bin --svg stats.svg --json")]
pub struct ProfileShowArgs {
    /// Statistics file.
    #[arg(value_name = "STATS")]
    pub stats: PathBuf,
    /// Plot them as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long, requires = "svg")]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
