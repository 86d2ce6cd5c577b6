//! `emberflow profile merge`: statistics of several texts become one.

use std::io::Write as _;

use emberflow_predictor::stats::ActivationStats;

use crate::cli::ProfileMergeArgs;
use crate::{Failure, atomic};

/// Runs the command.
pub fn command(args: &ProfileMergeArgs) -> Result<(), Failure> {
    if args.output.exists() && !args.force {
        return Err(Failure::usage(format!(
            "{} exists; give --force to replace it",
            args.output.display()
        )));
    }
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
    atomic::write(&args.output, &sum.to_bytes()?)?;
    writeln!(
        std::io::stdout().lock(),
        "{}: {} tokens",
        args.output.display(),
        sum.tokens
    )?;
    Ok(())
}
