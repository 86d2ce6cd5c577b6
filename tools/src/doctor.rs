//! `emberflow doctor`: checks this machine and suggests changes.
//!
//! Checks are independent: one that cannot run reports why and the others continue.

mod check;
#[cfg(feature = "devices")]
mod devices;
mod memory;
#[cfg(feature = "devices")]
mod npu;
mod processor;
mod storage;

use std::io::Write;
use std::path::Path;

use emberflow_storage::io::probe_uring;
use emberflow_storage::mem::Mem;
use emberflow_storage::profile::Machine;
use serde_json::{Map, json};

use self::check::{Check, Status};
use self::memory::{cgroup, huge_pages, locked_memory, memory};
use self::processor::{compute_rates, cores, energy, isa};
use self::storage::{device_profile, direct_io, facts, io_uring, read_ahead};
use crate::cli::DoctorArgs;
use crate::{Failure, print_json, size};

/// Runs the command.
pub fn command(args: &DoctorArgs) -> Result<(), Failure> {
    let machine = Machine::here();
    let checks = checks(args, &machine);
    if args.json {
        let mut all = Map::new();
        all.insert("machine".into(), json!(machine));
        for check in &checks {
            all.insert(check.name.into(), json!(check));
        }
        return print_json(&all);
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{}, {}, kernel {}, {} cores, {}\n",
        machine.cpu,
        machine.arch,
        machine.kernel,
        machine.cores,
        size::show(machine.memory)
    )?;
    for check in &checks {
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Advice => "advice",
            Status::Unknown => "unknown",
        };
        writeln!(out, "{mark:<8}{:<16}{}", check.name, check.found)?;
        if let Some(advice) = &check.advice {
            writeln!(out, "{:<24}-> {advice}", "")?;
        }
    }
    Ok(())
}

fn checks(args: &DoctorArgs, machine: &Machine) -> Vec<Check> {
    let here = Path::new(".");
    let path = args.file.as_deref().unwrap_or(here);
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let facts = facts(path);
    let mem = Mem::system();
    vec![
        direct_io(facts.as_ref()),
        io_uring(&probe_uring()),
        locked_memory(
            &text("/proc/self/limits"),
            &text("/proc/self/status"),
            &text("/proc/meminfo"),
        ),
        memory(&mem),
        cgroup(&mem),
        cores(
            &text("/proc/self/status"),
            &text("/sys/devices/system/cpu/online"),
            machine,
        ),
        isa(),
        huge_pages(
            &text("/sys/kernel/mm/transparent_hugepage/enabled"),
            &text("/sys/kernel/mm/transparent_hugepage/defrag"),
        ),
        read_ahead(facts.as_ref()),
        compute_rates(),
        device_profile(facts.as_ref().ok(), machine),
        energy(),
        #[cfg(feature = "devices")]
        devices::devices(args.retry_devices),
        #[cfg(feature = "devices")]
        npu::npu(args.retry_devices),
    ]
}
