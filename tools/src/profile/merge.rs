//! `emberflow profile merge`: merges statistics of several texts.

use std::io::Write as _;

use emberflow_predictor::stats::ActivationStats;
use serde::Serialize;

use crate::cli::ProfileMergeArgs;
use crate::{Failure, atomic, print_json};

/// Output of `profile merge --json`.
#[derive(Serialize)]
struct Merged {
    /// Path of the merged statistics.
    output: String,
    /// Number of merged statistics.
    texts: usize,
    /// Total tokens profiled.
    tokens: u64,
}

/// Runs the command.
pub fn command(args: &ProfileMergeArgs) -> Result<(), Failure> {
    let reads: Vec<_> = args.stats.iter().map(|path| Some(path.as_path())).collect();
    atomic::may_write(&args.output, args.force, &reads)?;
    let mut sum: Option<ActivationStats> = None;
    for path in &args.stats {
        let bytes = std::fs::read(path).map_err(Failure::file(path))?;
        let named = |e| Failure::Fault(format!("{}: {e}", path.display()));
        let stats = ActivationStats::read(&bytes).map_err(named)?;
        match &mut sum {
            Some(sum) => sum.merge(&stats).map_err(named)?,
            None => sum = Some(stats),
        }
    }
    let Some(sum) = sum else {
        return Err(Failure::usage("nothing to merge"));
    };
    atomic::write(
        &args.output,
        &sum.to_bytes().map_err(Failure::stats(&args.output))?,
    )?;
    if args.json {
        return print_json(&Merged {
            output: args.output.display().to_string(),
            texts: args.stats.len(),
            tokens: sum.tokens,
        });
    }
    writeln!(
        std::io::stdout().lock(),
        "{}: {} tokens",
        args.output.display(),
        sum.tokens
    )?;
    Ok(())
}
