//! Measures the compute rates of this machine once, and saves them for the planner.

use std::process::{Command, Stdio};

use crate::measure::{Effort, layers, measure};
use crate::tell::tell;
use emberflow_engine::Model;
use emberflow_engine::planner::rates::{FORMATS, Rates, counts};
use emberflow_storage::profile::Machine;

use crate::cli::ModelArg;
use crate::model::open_model;
use crate::{Failure, print_json, progress};

/// Measures this machine and saves the rates for the planner.
///
/// # Errors
/// Not enough memory.
pub fn measure_for_plans() -> Result<Rates, Failure> {
    let rates = measure_here()?;
    save(&rates);
    Ok(rates)
}

/// The hidden command: measures, saves, and prints the rates as JSON.
pub fn command() -> Result<(), Failure> {
    print_json(&measure_for_plans()?)
}

/// Saves the rates for the planner. If that fails, prints why and continues.
fn save(rates: &Rates) {
    let Some(path) = Rates::default_path() else {
        return tell(
            "emberflow: cannot save the measurement: neither XDG_CACHE_HOME nor HOME is set",
        );
    };
    if let Err(e) = rates.save(&path) {
        tell(format_args!("emberflow: cannot save the measurement: {e}"));
    }
}

/// Loads the rates of this machine, or measures them in a child process, so that the memory used for measuring does
/// not count towards the peak of this run.
///
/// # Errors
/// Not enough memory.
pub fn load_or_measure() -> Result<(), Failure> {
    if Rates::saved().is_some() {
        return Ok(());
    }
    tell("emberflow: measuring this machine, once; this takes a few seconds");
    let rates = match measure_in_child() {
        Ok(rates) => rates,
        Err(reason) => {
            tracing::info!(
                "measuring in this process, which counts towards its peak memory: {reason}"
            );
            measure_for_plans()?
        }
    };
    rates.remember();
    Ok(())
}

fn measure_in_child() -> Result<Rates, Box<dyn std::error::Error>> {
    let mut bench = Command::new(std::env::current_exe()?);
    bench.arg("measure-machine");
    bench.stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = bench.output()?;
    if !output.status.success() {
        return Err(format!("the measurement ended with {}", output.status).into());
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

/// Formats the rates as a table.
pub fn table(rates: &Rates) -> String {
    let mut out = format!(
        "{}, {}, {} cores; checksums {:.1} GB/s, {:.0} ns per cache lookup, {:.0} per eviction, \
         {:.1} µs to wake a thread, {:.1} to signal it\n\n",
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
    use emberflow_kernels::Isa;

    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_format_and_thread_count() {
        let text = table(&Rates::assumed(2, Isa::Neon));
        assert_eq!(text.lines().count(), 3 + 2 * FORMATS.len(), "{text}");
        assert!(text.contains("q4") && text.contains("64: 40"), "{text}");
    }
}
