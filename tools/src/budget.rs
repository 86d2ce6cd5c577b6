//! Budgets against what the machine has: more than that is a promise that nobody can keep.

use emberflow_engine::Budget;
use emberflow_storage::mem::{Giver, Mem};

use crate::cli::EngineArgs;
use crate::{Failure, size};

/// Refuses, before any work, a budget that this machine or the process's control group does not
/// have. With `force` it is told and taken.
///
/// # Errors
/// Wrong usage.
pub fn may_take(args: &EngineArgs, force: bool) -> Result<(), Failure> {
    match beyond(args.memory, &Mem::system()) {
        Some(why) if force => {
            eprintln!("emberflow: {why}; the system may swap or end this program");
            Ok(())
        }
        Some(why) => Err(Failure::usage(format!(
            "{why}: give less, `auto`, or --force to try all the same"
        ))),
        None => Ok(()),
    }
}

/// Why a budget cannot be kept.
pub fn beyond(budget: Budget, mem: &Mem) -> Option<String> {
    let Budget::Bytes(bytes) = budget else {
        return None;
    };
    let limit = mem.limit()?;
    let whose = match limit.giver {
        Giver::Machine => "of memory that this machine has",
        Giver::ControlGroup => "that this process's control group may hold",
    };
    // groups round their limits down to pages
    const PAGE: u64 = 64 << 10;
    (bytes.saturating_sub(PAGE) >= limit.bytes).then(|| {
        format!(
            "--memory {} is more than the {} {whose}",
            size::show(bytes),
            size::show(limit.bytes)
        )
    })
}

/// What to say where a plan holds `bytes` more and so much is not free now.
pub fn tight(bytes: u64, mem: &Mem) -> Option<String> {
    let free = mem.available()?;
    (bytes > free).then(|| {
        format!(
            "the plan holds {} more and {} are free now: the system may swap or end this program; \
             `auto` takes less",
            size::show(bytes),
            size::show(free)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of 1 GiB with 100 MiB free, and maybe a group with a limit.
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
        let why = |bytes: u64, group| beyond(Budget::Bytes(bytes), &machine(group).1);
        assert_eq!(why(1 << 30, None), None);
        let machine = why(99_999 << 30, None).unwrap();
        assert!(
            machine.contains("1.0 GiB of memory that this machine"),
            "{machine}"
        );
        // the tighter of both, on an ancestor
        assert_eq!(why(393 << 20, Some(393 << 20)), None);
        let group = why(450 << 20, Some(393 << 20)).unwrap();
        assert!(
            group
                .contains("450.0 MiB is more than the 393.0 MiB that this process's control group"),
            "{group}"
        );
        assert!(why(2 << 30, Some(4 << 30)).unwrap().contains("machine"));
        // a limit in whole pages below the budget is that budget
        assert_eq!(why((393 << 20) + 4095, Some(393 << 20)), None);
    }

    #[test]
    fn what_is_chosen_here_and_what_nobody_knows_pass() {
        let (_dir, mem) = machine(Some(1 << 20));
        assert_eq!(beyond(Budget::Auto, &mem), None);
        assert_eq!(beyond(Budget::FfnShare(1.0), &mem), None);
        let nothing = Mem::at("/does/not/exist");
        assert_eq!(beyond(Budget::Bytes(u64::MAX), &nothing), None);
        assert_eq!(tight(u64::MAX, &nothing), None);
    }

    #[test]
    fn what_is_not_free_now_is_told() {
        let (_dir, mem) = machine(None);
        assert_eq!(tight(100 << 20, &mem), None);
        let told = tight(101 << 20, &mem).unwrap();
        assert!(
            told.contains("101.0 MiB more and 100.0 MiB are free"),
            "{told}"
        );
        let (_dir, mem) = machine(Some(50 << 20));
        assert!(tight(60 << 20, &mem).is_some());
    }
}
