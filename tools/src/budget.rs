//! Checks a memory budget against what the machine and the control group offer.

use emberflow_engine::Budget;
use emberflow_engine::memory::MemoryPlan;
use emberflow_storage::mem::{Giver, Mem};

use crate::cli::EngineArgs;
use crate::tell::tell;
use crate::{Failure, size};

/// Fails if the budget exceeds the memory of the machine or of the process's control group. With `force`, prints a
/// warning instead.
///
/// # Errors
/// A usage error.
pub fn may_take(args: &EngineArgs, force: bool) -> Result<(), Failure> {
    match exceeds_limit(args.memory, &Mem::system()) {
        Some(why) if force => {
            tell(format_args!(
                "emberflow: {why}; the system may swap or end this program"
            ));
            Ok(())
        }
        Some(why) => Err(Failure::usage(format!(
            "{why}: use a smaller budget, `auto`, or --force to try anyway"
        ))),
        None => Ok(()),
    }
}

/// Why the budget exceeds the machine or the control group; `None` if it does not.
pub fn exceeds_limit(budget: Budget, mem: &Mem) -> Option<String> {
    let Budget::Bytes(bytes) = budget else {
        return None;
    };
    let limit = mem.limit()?;
    let whose = match limit.giver {
        Giver::Machine => "of memory in this machine",
        Giver::ControlGroup => "limit of this process's control group",
    };
    // The kernel rounds a group's limit down to whole pages, of at most 64 KiB.
    const PAGE: u64 = 64 << 10;
    (bytes.saturating_sub(PAGE) >= limit.bytes).then(|| {
        format!(
            "--memory {} is more than the {} {whose}",
            size::show(bytes),
            size::show(limit.bytes)
        )
    })
}

/// Fails if the plan needs more memory than is free now. With `force`, prints a warning instead.
///
/// # Errors
/// A usage error.
pub fn check_free_memory(budget: Budget, plan: &MemoryPlan, force: bool) -> Result<(), Failure> {
    match exceeds_free(budget, plan.held(), &Mem::system()) {
        Some(why) if force => {
            tell(format_args!(
                "emberflow: {why}; the system may swap or end this program"
            ));
            Ok(())
        }
        Some(why) => Err(Failure::usage(format!(
            "{why}: close other programs, use a smaller budget, `--memory auto`, or --force to try anyway"
        ))),
        None => Ok(()),
    }
}

/// Why a plan of `bytes` does not fit in the memory that is free now; `None` if it does.
pub fn exceeds_free(budget: Budget, bytes: u64, mem: &Mem) -> Option<String> {
    let asked = match budget {
        // `auto` follows what is free.
        Budget::Auto => return None,
        Budget::Bytes(asked) => format!("--memory {}", size::show(asked)),
        Budget::FfnShare(share) => format!("--ffn-resident {share}"),
    };
    let free = mem.conceded()?;
    let whose = match free.giver {
        Giver::Machine => "this machine has free",
        Giver::ControlGroup => "this process's control group has left",
    };
    // Allow for page tables, rounding and small processes.
    let slack = (4 << 20).max(free.bytes / 64);
    (bytes > free.bytes.saturating_add(slack)).then(|| {
        format!(
            "{asked} needs {}, more than the {} that {whose}",
            size::show(bytes),
            size::show(free.bytes)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of 1 GiB with 100 MiB free, optionally with a control group limit.
    fn machine(group: Option<u64>) -> (tempfile::TempDir, Mem) {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let free = 100 << 10;
        write(
            "proc/meminfo",
            &format!("MemTotal: {} kB\nMemAvailable: {free} kB\n", 1 << 20),
        );
        if let Some(bytes) = group {
            write("proc/self/cgroup", "0::/a/b\n");
            let mount = "31 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
            write("proc/self/mountinfo", mount);
            write("sys/fs/cgroup/a/memory.max", &bytes.to_string());
            write("sys/fs/cgroup/a/b/memory.max", "max");
        }
        let mem = Mem::at(dir.path());
        (dir, mem)
    }

    #[test]
    fn more_than_the_machine_or_its_group_has_is_refused() {
        let why = |bytes: u64, group| exceeds_limit(Budget::Bytes(bytes), &machine(group).1);
        assert_eq!(why(1 << 30, None), None);
        let machine = why(99_999 << 30, None).unwrap();
        assert!(
            machine.contains("1.0 GiB of memory in this machine"),
            "{machine}"
        );
        // The tighter limit counts, even on an ancestor.
        assert_eq!(why(393 << 20, Some(393 << 20)), None);
        let group = why(450 << 20, Some(393 << 20)).unwrap();
        assert!(
            group.contains(
                "450.0 MiB is more than the 393.0 MiB limit of this process's control group"
            ),
            "{group}"
        );
        assert!(why(2 << 30, Some(4 << 30)).unwrap().contains("machine"));
        // The group's limit is rounded down to whole pages.
        assert_eq!(why((393 << 20) + 4095, Some(393 << 20)), None);
    }

    #[test]
    fn what_is_chosen_here_and_what_nobody_knows_pass() {
        let (_dir, mem) = machine(Some(1 << 20));
        assert_eq!(exceeds_limit(Budget::Auto, &mem), None);
        assert_eq!(exceeds_limit(Budget::FfnShare(1.0), &mem), None);
        let nothing = Mem::at("/does/not/exist");
        assert_eq!(exceeds_limit(Budget::Bytes(u64::MAX), &nothing), None);
        assert_eq!(exceeds_free(Budget::Auto, u64::MAX, &mem), None);
        assert_eq!(
            exceeds_free(Budget::FfnShare(1.0), u64::MAX, &nothing),
            None
        );
    }

    #[test]
    fn what_is_not_free_now_is_refused_by_both_names_of_a_budget() {
        let (_dir, mem) = machine(None);
        let why = |budget, mib: u64, mem: &Mem| exceeds_free(budget, mib << 20, mem);
        let bytes = Budget::Bytes(999 << 20);
        // A shortfall of a few MiB is tolerated.
        assert_eq!(why(bytes, 104, &mem), None);
        let told = why(bytes, 105, &mem).unwrap();
        assert!(
            told.contains("--memory 999.0 MiB needs 105.0 MiB, more than the 100.0 MiB"),
            "{told}"
        );
        assert!(told.contains("this machine has free"), "{told}");
        let (_dir, mem) = machine(Some(50 << 20));
        let told = why(Budget::FfnShare(0.5), 60, &mem).unwrap();
        assert!(
            told.contains("--ffn-resident 0.5 needs 60.0 MiB, more than the 50.0 MiB that")
                && told.contains("control group"),
            "{told}"
        );
    }
}
