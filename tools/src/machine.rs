//! Measures the machine for the planner if nothing is saved: compute rates, and the disk by a few reads of the model.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::measure::{Effort, layers, measure};
use crate::tell::tell;
use emberflow_engine::Model;
use emberflow_engine::planner::rates::{Rates, measured_as};
use emberflow_kernels::DType;
use emberflow_storage::io::IoChoice;
use emberflow_storage::profile::{
    DeviceProfile, FileFacts, Machine, MeasurePlan, ProfileError, Target, Watch,
    measure as measure_reads,
};
use serde::{Deserialize, Serialize};

use crate::cli::MeasureMachineArgs;
use crate::{Failure, print_json, progress};

/// Measured values.
#[derive(Serialize, Deserialize)]
struct MachineFacts {
    rates: Option<Rates>,
    disk: Option<DeviceProfile>,
}

/// Measures this machine thoroughly and saves the rates for the planner.
///
/// # Errors
/// Not enough memory.
pub fn measure_for_plans() -> Result<Rates, Failure> {
    let rates = rates(&Effort::default(), None)?;
    save(&rates);
    Ok(rates)
}

/// The hidden command: measures, saves, and prints the results as JSON. Without options, everything but the disk.
pub fn command(args: &MeasureMachineArgs) -> Result<(), Failure> {
    let found = match (&args.formats[..], &args.disk) {
        ([], None) => MachineFacts {
            rates: Some(measure_for_plans()?),
            disk: None,
        },
        (formats, disk) => brief(formats, disk.as_deref())?,
    };
    print_json(&found)
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

/// Whether the saved profile of the disk says more than `new`.
fn is_poorer(new: &DeviceProfile) -> bool {
    let saved = DeviceProfile::default_path().map(|path| DeviceProfile::load(&path));
    saved.is_some_and(|saved| saved.is_ok_and(|saved| new.is_poorer_than(&saved)))
}

/// Saves the profile of a disk. Without a cache folder, and if it fails, the next plan measures again.
fn save_disk(profile: &DeviceProfile) {
    let Some(path) = DeviceProfile::default_path() else {
        return;
    };
    if let Err(e) = profile.save(&path) {
        tracing::info!("the profile of the disk is not saved: {e}");
    }
}

/// Measures what a model's plan needs, if it was not measured on this machine yet or only under load: compute rates of its
/// formats, and the disk of `file`. A child process does so, so that the memory of measurements does not count towards this
/// process's peak.
///
/// # Errors
/// Not enough memory.
pub fn load_or_measure(model: &Model, file: Option<&Path>) -> Result<(), Failure> {
    let (saved, wanted) = (Rates::saved(), formats(model));
    let is_known = |rates: &Rates| rates.doubt.is_none() && rates.has(&wanted);
    let first = saved.is_none();
    let wanted = match saved.as_ref().is_some_and(is_known) {
        true => Vec::new(),
        false => wanted,
    };
    let file = file.filter(|file| file.is_file() && needs_reads(file));
    if wanted.is_empty() && file.is_none() {
        return Ok(());
    }
    if first {
        tell("emberflow: measuring this machine, once");
    }
    let found = match in_child(&wanted, file) {
        Ok(found) => found,
        Err(reason) => {
            tracing::info!(
                "measuring in this process, which counts towards its peak memory: {reason}"
            );
            brief(&wanted, file)?
        }
    };
    found.rates.into_iter().for_each(Rates::remember);
    found.disk.into_iter().for_each(DeviceProfile::remember);
    Ok(())
}

/// Rates for matrices of one format, measured briefly and saved.
///
/// # Errors
/// Not enough memory.
pub fn measured(format: DType) -> Result<Rates, Failure> {
    if let Ok(MachineFacts {
        rates: Some(rates), ..
    }) = in_child(&[format], None)
    {
        return Ok(rates);
    }
    brief_rates(&[format])
}

/// The measured formats of a model's weights.
fn formats(model: &Model) -> Vec<DType> {
    let quant = &model.text().meta().quant;
    let all = [&quant.ffn, &quant.attention, &quant.embedding];
    let all = all.map(|name| DType::parse(name).map(measured_as));
    let is_used = |format: &DType| all.contains(&Some(*format));
    DType::all().filter(is_used).collect()
}

/// Whether no measurement of the file's disk is known.
fn needs_reads(file: &Path) -> bool {
    let known = |facts| {
        DeviceProfile::for_device(&facts)
            .is_some_and(|profile| !profile.brief || profile.doubt().is_none())
    };
    FileFacts::of(file).is_ok_and(|facts| !known(facts))
}

fn in_child(
    formats: &[DType],
    disk: Option<&Path>,
) -> Result<MachineFacts, Box<dyn std::error::Error>> {
    let mut child = Command::new(std::env::current_exe()?);
    child.arg("measure-machine");
    for format in formats {
        child.args(["--format", format.name()]);
    }
    if let Some(path) = disk {
        child.arg("--disk").arg(path);
    }
    child.stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = child.output()?;
    if !output.status.success() {
        return Err(format!("the measurement ended with {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Measures and saves: rates of some formats, together with saved ones, and a disk.
fn brief(formats: &[DType], disk: Option<&Path>) -> Result<MachineFacts, Failure> {
    let mut found = MachineFacts {
        rates: None,
        disk: None,
    };
    if !formats.is_empty() {
        found.rates = Some(brief_rates(formats)?);
    }
    if let Some(path) = disk {
        // The plan assumes a value and says so.
        found.disk = reads(path)
            .map_err(|e| tracing::info!("the disk is not measured: {e}"))
            .ok();
        let fuller = found.disk.iter().filter(|profile| !is_poorer(profile));
        fuller.for_each(save_disk);
    }
    Ok(found)
}

/// Measures and saves rates of some formats, together with saved ones.
fn brief_rates(formats: &[DType]) -> Result<Rates, Failure> {
    let saved = Rates::saved();
    let rates = rates(&Effort::brief(again(formats, saved.as_ref())), saved)?;
    save(&rates);
    Ok(rates)
}

/// The formats to measure: those that are wanted, and all saved ones if they are in doubt.
fn again(wanted: &[DType], saved: Option<&Rates>) -> Vec<DType> {
    let doubtful = saved.filter(|saved| saved.doubt.is_some());
    let doubtful = doubtful.map_or_else(Vec::new, Rates::formats);
    let is_measured = |format: &DType| wanted.contains(format) || doubtful.contains(format);
    DType::all().filter(is_measured).collect()
}

/// Measures a disk by a few reads of a file.
fn reads(path: &Path) -> Result<DeviceProfile, ProfileError> {
    let target = Target::open(path)?;
    let direct = target.facts().sector.is_some();
    if direct {
        target.filled()?;
    }
    let device = || target.device_bytes().filter(|_| direct);
    let watch = Watch::start(device());
    let round = measure_reads(&target, &MeasurePlan::brief(IoChoice::Auto), |_| ())?;
    let conditions = watch.end(round.bytes, device());
    target.proven(round.bytes, &conditions)?;
    Ok(DeviceProfile {
        conditions: Some(conditions),
        brief: true,
        ..DeviceProfile::new(Machine::here(), target.facts().clone(), round.points)
    })
}

/// Measures compute rates. Better or unmeasured ones are kept from `saved`.
fn rates(effort: &Effort, saved: Option<Rates>) -> Result<Rates, Failure> {
    let steps = effort.counts(Machine::here().cores).len() * effort.formats.len();
    let bar = progress::steps("measuring", u64::from(effort.rounds) * steps as u64);
    let mut rates = measure(effort, || bar.inc(1))?;
    if let Some(saved) = saved {
        rates = rates.completed_by(saved);
    }
    layers(&mut rates, || Ok(Model::demo()?))?;
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
    use emberflow_engine::planner::rates::FORMATS;
    use emberflow_kernels::Isa;

    use super::*;

    #[test]
    fn formats_in_doubt_are_measured_again() {
        let sure = Rates::assumed(2, Isa::Neon);
        let doubtful = Rates {
            doubt: Some("others".into()),
            ..sure.clone()
        };
        let wanted = [DType::Q8];
        assert_eq!(again(&wanted, None), wanted);
        assert_eq!(again(&wanted, Some(&sure)), wanted);
        assert_eq!(again(&wanted, Some(&doubtful)), sure.formats());
    }

    #[test]
    fn the_table_has_a_row_for_each_format_and_thread_count() {
        let text = table(&Rates::assumed(2, Isa::Neon));
        assert_eq!(text.lines().count(), 3 + 2 * FORMATS.len(), "{text}");
        assert!(text.contains("q4") && text.contains("64: 40"), "{text}");
    }
}
