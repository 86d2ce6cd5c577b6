//! `emberflow bench device`: how fast this machine computes, saved for the planner.

use std::path::PathBuf;

use emberflow_engine::Model;
use emberflow_engine::measure::{Effort, layers, measure};
use emberflow_engine::planner::rates::{FORMATS, Rates, counts};
use emberflow_storage::profile::Machine;
use serde::Serialize;

use crate::cli::{BenchDeviceArgs, ModelArg};
use crate::model::open_model;
use crate::{Failure, atomic, print_json, progress};

/// What `--json` prints: the rates and where they went.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    rates: &'a Rates,
    saved_to: Option<PathBuf>,
}

/// Runs the command.
pub fn command(args: &BenchDeviceArgs) -> Result<(), Failure> {
    if let Some(path) = &args.save {
        atomic::may_replace(path, args.force)?;
    }
    let path = args.save.clone().or_else(Rates::default_path);
    let rates = measure_here()?;
    if let Some(path) = &path {
        rates.save(path)?;
    }
    if args.json {
        return print_json(&Report {
            rates: &rates,
            saved_to: path,
        });
    }
    print!("{}", table(&rates));
    if let Some(path) = path {
        println!("saved to {}", path.display());
    }
    Ok(())
}

/// The saved rates of this machine, or new ones, which are saved too.
///
/// # Errors
/// No memory to measure with. Rates that cannot be saved are used all the same.
pub fn saved_or_measured() -> Result<(), Failure> {
    if Rates::saved().is_some() {
        return Ok(());
    }
    eprintln!("emberflow: this machine was not measured yet; that takes a few seconds, once");
    let rates = measure_here()?;
    match Rates::default_path().map(|path| rates.save(&path)) {
        Some(Ok(())) => Ok(()),
        Some(Err(e)) => {
            eprintln!("emberflow: the measurement cannot be kept: {e}");
            Ok(())
        }
        None => {
            eprintln!(
                "emberflow: the measurement cannot be kept, as neither XDG_CACHE_HOME nor HOME is set"
            );
            Ok(())
        }
    }
}

fn measure_here() -> Result<Rates, Failure> {
    let steps = counts(Machine::here().cores).len() * FORMATS.len();
    let bar = progress::steps("measuring", steps as u64);
    let mut rates = measure(Effort::default(), || bar.inc(1))?;
    let bundled = || -> Result<Model, Failure> { open_model(&ModelArg { model: None }) };
    layers(&mut rates, bundled)?;
    bar.finish_and_clear();
    Ok(rates)
}

fn table(rates: &Rates) -> String {
    let mut out = format!(
        "{}, {}, {} cores; checksums {:.1} GB/s, {:.0} ns per neuron looked up, {:.0} replaced, \
         {:.1} µs to wake a thread and {:.1} to tell it\n\n",
        rates.machine.cpu,
        rates.isa,
        rates.machine.cores,
        rates.check_gb_per_s,
        rates.lookup_ns,
        rates.replace_ns,
        rates.wake_ns / 1e3,
        rates.tell_ns / 1e3
    );
    out += "threads  format    GB/s from memory: rows  neurons   plain read    GMAC/s by tokens\n";
    for t in &rates.threads {
        for k in &t.kernels {
            let gemm: Vec<String> = (k.gemm.iter())
                .map(|(tokens, speed)| format!("{tokens}: {speed:.0}"))
                .collect();
            out += &format!(
                "{:>7}  {:<6} {:>24.1} {:>8.1} {:>12.1}    {}\n",
                t.threads,
                k.dtype,
                k.dot.at(f64::MAX),
                k.neuron.at(f64::MAX),
                t.read.at(f64::MAX),
                gemm.join("  ")
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_format_and_thread_count() {
        let text = table(&Rates::assumed(2));
        assert_eq!(text.lines().count(), 3 + 2 * FORMATS.len(), "{text}");
        assert!(text.contains("q4") && text.contains("64: 40"), "{text}");
    }
}
