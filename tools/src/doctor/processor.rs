//! CPU cores, instruction set and energy counters.

use std::path::Path;

use emberflow_engine::energy::Meter;
use emberflow_engine::planner::rates::Rates;
use emberflow_kernels::{Cpu, DType};
use emberflow_storage::profile::Machine;

use super::check::Check;
use crate::machine::measured;

/// Number of entries in a list like `0-3,8`.
fn members(list: &str) -> Option<u64> {
    let mut count = 0u64;
    for part in list.trim().split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (u64, u64) = (from.parse().ok()?, to.parse().ok()?);
        count = count.checked_add(to.checked_sub(from)?.checked_add(1)?)?;
    }
    Some(count)
}

/// What plans know of the processor and the memory; measures it if nothing was saved.
pub(super) fn compute_rates() -> Check {
    const NAME: &str = "compute_rates";
    let rates = match Rates::saved().map_or_else(|| measured(DType::Q4), Ok) {
        Ok(rates) => rates,
        Err(e) => return Check::unknown(NAME, e.to_string()),
    };
    let Some(all) = rates.threads.last() else {
        return Check::unknown(NAME, "no rates are saved");
    };
    let memory = rates.of_memory().map(|speed| speed / 1e9);
    let speed = memory.map_or("memory not measured".into(), |speed| {
        format!("{speed:.1} GB/s from memory")
    });
    let check = Check::ok(NAME, format!("{speed}, up to {} threads", all.threads));
    let check = check
        .with("memory_gb_per_s", memory)
        .with("threads", all.threads);
    match rates.doubt {
        Some(why) => check.advise(format!(
            "they were measured under load ({why}); the next `emberflow plan` measures again"
        )),
        None => check,
    }
}

pub(super) fn cores(status: &str, online: &str, machine: &Machine) -> Check {
    const NAME: &str = "cores";
    let allowed = (status.lines())
        .find_map(|l| l.strip_prefix("Cpus_allowed_list:"))
        .map(str::trim);
    let usable = u64::from(machine.cores);
    let all = members(online);
    let mut check = Check::ok(NAME, format!("{usable} usable"));
    if let Some(allowed) = allowed {
        check.found += &format!(", numbers {allowed}");
    }
    if let Some(all) = all.filter(|&all| all > usable) {
        check.found += &format!(", of {all}");
        check = check.advise(
            "CPU affinity or a container excludes the other cores; allow them if \
             nothing else needs them (taskset, cpuset, CPU quota)",
        );
    }
    check
        .with("usable", usable)
        .with("online", all)
        .with("allowed", allowed)
}

pub(super) fn isa() -> Check {
    const NAME: &str = "isa";
    let chosen = Cpu::detect();
    let all: Vec<&str> = Cpu::all().into_iter().map(Cpu::name).collect();
    let check = Check::ok(NAME, format!("{} of {}", chosen.name(), all.join(", ")));
    let check = if all.last().is_some_and(|&best| best != chosen.name()) {
        check.advise("EMBERFLOW_ISA selects less than this machine supports; unset it")
    } else {
        check
    };
    check.with("chosen", chosen.name()).with("available", all)
}

/// Whether the energy per token can be measured.
pub(super) fn energy() -> Check {
    const NAME: &str = "energy";
    let meter = Meter::find(Path::new("/sys"));
    let source = meter.as_ref().map(Meter::name);
    let check = match source {
        Some(source) => Check::ok(NAME, format!("measured by {source}")),
        None => Check::unknown(
            NAME,
            "not available: no CPU energy counter that this user may read, and no battery \
             that is discharging",
        ),
    };
    check.with("source", source)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn core_lists_are_counted() {
        assert_eq!(members("0-3,8\n"), Some(5));
        assert_eq!(members("7"), Some(1));
        assert_eq!(members("3-1"), None);
        assert_eq!(members(""), None);
        let machine = Machine {
            cores: 2,
            ..Machine::default()
        };
        let check = cores("Cpus_allowed_list:\t0,5\n", "0-7", &machine);
        assert_eq!(check.status, Status::Advice);
        assert_eq!(check.found, "2 usable, numbers 0,5, of 8");
        assert_eq!(cores("", "0-1", &machine).status, Status::Ok);
    }
}
