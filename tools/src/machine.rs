//! How fast this machine computes, measured once and saved for plans.

use std::process::{Command, Stdio};

use crate::measure::{Effort, layers, measure};
use crate::tell::tell;
use emberflow_engine::Model;
use emberflow_engine::planner::rates::{FORMATS, Rates, counts};
use emberflow_storage::profile::Machine;

use crate::cli::ModelArg;
use crate::model::open_model;
use crate::{Failure, print_json, progress};

/// Measures this machine and keeps the rates where plans look for them.
///
/// # Errors
/// No memory to measure with.
pub fn measure_for_plans() -> Result<Rates, Failure> {
    let rates = measure_here()?;
    keep(&rates);
    Ok(rates)
}

/// The hidden command: measures, keeps, and prints the rates as JSON.
pub fn command() -> Result<(), Failure> {
    print_json(&measure_for_plans()?)
}

/// Saves rates where plans look for them. Where that cannot be, it says why: they are of use all the
/// same.
fn keep(rates: &Rates) {
    let Some(path) = Rates::default_path() else {
        return tell(
            "emberflow: the measurement cannot be kept, as neither XDG_CACHE_HOME nor HOME is set",
        );
    };
    if let Err(e) = rates.save(&path) {
        tell(format_args!(
            "emberflow: the measurement cannot be kept: {e}"
        ));
    }
}

/// Has this process know the rates of this machine. Where nobody has measured them, a process of its
/// own does: what measuring takes is no part of the memory of a run, which a plan begins with.
///
/// # Errors
/// No memory to measure with.
pub fn know() -> Result<(), Failure> {
    if Rates::saved().is_some() {
        return Ok(());
    }
    tell("emberflow: this machine was not measured yet; that takes a few seconds, once");
    let rates = match measured_apart() {
        Ok(rates) => rates,
        Err(reason) => {
            tracing::info!("measuring in this process, whose memory that counts to: {reason}");
            measure_for_plans()?
        }
    };
    rates.remember();
    Ok(())
}

fn measured_apart() -> Result<Rates, Box<dyn std::error::Error>> {
    let mut bench = Command::new(std::env::current_exe()?);
    bench.arg("measure-machine");
    bench.stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = bench.output()?;
    if !output.status.success() {
        return Err(format!("measuring ended with {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
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

/// The rates for people.
pub fn table(rates: &Rates) -> String {
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
