//! Memory: free memory, limits, locking, huge pages.

use emberflow_storage::mem::Mem;

use super::check::Check;
use crate::size;

/// Value of a line of /proc/meminfo, in bytes.
fn kib(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace()
        .next()?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Whether the effective capabilities in /proc/self/status include CAP_IPC_LOCK.
fn may_lock_all(status: &str) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let all = line.and_then(|l| u64::from_str_radix(l.trim(), 16).ok());
    all.is_some_and(|all| all & CAP_IPC_LOCK != 0)
}

pub(super) fn locked_memory(limits: &str, status: &str, meminfo: &str) -> Check {
    const NAME: &str = "locked_memory";
    let line = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max locked memory"));
    let mut words = line.unwrap_or_default().split_whitespace();
    let (soft, hard) = (words.next(), words.next());
    let number = |word: Option<&str>| word.and_then(|w| w.parse::<u64>().ok());
    let (limit, most) = (number(soft), number(hard));
    let swap = kib(meminfo, "SwapTotal").unwrap_or(0);
    let privileged = may_lock_all(status);
    let check = match (soft, limit) {
        (None, _) => Check::unknown(NAME, "not reported"),
        (_, None) => Check::ok(NAME, "unlimited"),
        (_, Some(bytes)) if privileged => Check::ok(
            NAME,
            format!(
                "unlimited for this user (CAP_IPC_LOCK); up to {} for others",
                size::show(bytes)
            ),
        ),
        (_, Some(bytes)) if swap == 0 => Check::ok(
            NAME,
            format!("up to {}; this machine has no swap", size::show(bytes)),
        ),
        (_, Some(bytes)) => {
            let first = match most {
                Some(most) if most <= bytes => String::new(),
                most => {
                    let most = most.map_or("unlimited".into(), |b| (b / 1024).to_string());
                    format!("`ulimit -l {most}` in the shell, or ")
                }
            };
            Check::ok(NAME, format!("up to {}", size::show(bytes))).advise(format!(
                "this machine has swap, and weights beyond the limit can be swapped out; raise it: \
                 {first}memlock in /etc/security/limits.conf, LimitMEMLOCK= in the systemd unit, \
                 --ulimit memlock=-1 for the container"
            ))
        }
    };
    check
        .with("limit_bytes", limit)
        .with("hard_limit_bytes", most)
        .with("privileged", privileged)
        .with("swap_bytes", swap)
}

pub(super) fn memory(mem: &Mem) -> Check {
    const NAME: &str = "memory";
    const LITTLE: u64 = 512 << 20;
    let (total, available, auto) = (mem.mem_total(), mem.mem_available(), mem.auto_budget());
    let check = match (available, auto) {
        (Some(available), Some(auto)) => {
            let check = Check::ok(
                NAME,
                format!(
                    "{} available; --memory auto uses {}",
                    size::show(available),
                    size::show(auto)
                ),
            );
            if auto < LITTLE {
                check
                    .advise("very little: close other programs, or raise the limit of this process")
            } else {
                check
            }
        }
        _ => Check::unknown(NAME, "not reported by the kernel; use --memory SIZE"),
    };
    check
        .with("total_bytes", total)
        .with("available_bytes", available)
        .with("auto_budget_bytes", auto)
}

pub(super) fn cgroup(mem: &Mem) -> Check {
    const NAME: &str = "cgroup";
    let (limit, free) = (mem.cgroup_limit(), mem.cgroup_available());
    let check = match (limit, free) {
        (Some(limit), Some(free)) => Check::ok(
            NAME,
            format!(
                "limited to {}, {} free",
                size::show(limit),
                size::show(free)
            ),
        ),
        _ => Check::ok(NAME, "no memory limit"),
    };
    check
        .with("limit_bytes", limit)
        .with("available_bytes", free)
}

/// The selected word of a setting like `always [madvise] never`.
fn chosen(setting: &str) -> Option<&str> {
    (setting.split_whitespace()).find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

pub(super) fn huge_pages(enabled: &str, defrag: &str) -> Check {
    const NAME: &str = "huge_pages";
    let (setting, defrag) = (chosen(enabled), chosen(defrag));
    let check = match (setting, defrag) {
        (None, _) => Check::unknown(NAME, "not supported by this kernel"),
        (Some("never"), _) => Check::ok(NAME, "never").advise(
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`: random access to \
             weights in memory and large reads from disk are up to 1.5 times as fast",
        ),
        (Some(setting), Some(late @ ("never" | "defer"))) => Check::ok(
            NAME,
            format!("{setting}, defrag {late}"),
        )
        .advise(
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/defrag`: the kernel then compacts \
                 memory for huge pages when weights are loaded",
        ),
        (Some(setting), _) => Check::ok(NAME, setting),
    };
    check.with("setting", setting).with("defrag", defrag)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn locked_memory_matters_where_there_is_swap() {
        let line =
            |soft, hard| format!("Limit  Soft\nMax locked memory   {soft}   {hard}   bytes\n");
        let limits = line("8388608", "8388608");
        let check = locked_memory(&limits, "", "SwapTotal: 0 kB\n");
        assert_eq!(check.status, Status::Ok);
        assert!(check.found.starts_with("up to 8.0 MiB"), "{}", check.found);
        let check = locked_memory(&limits, "", "SwapTotal: 1024 kB\n");
        assert_eq!(check.status, Status::Advice);
        assert_eq!(check.data["swap_bytes"], 1 << 20);
        // The shell cannot raise the soft limit above the hard limit.
        let advice = check.advice.unwrap();
        assert!(
            advice.contains("limits.conf") && !advice.contains("ulimit -l"),
            "{advice}"
        );
        let advice = |hard| {
            let check = locked_memory(&line("65536", hard), "", "SwapTotal: 9 kB\n");
            check.advice.unwrap()
        };
        assert!(advice("unlimited").contains("`ulimit -l unlimited`"));
        assert!(advice("1048576").contains("`ulimit -l 1024`"));
        let free = line("unlimited", "unlimited");
        let check = locked_memory(&free, "", "SwapTotal: 9 kB\n");
        assert_eq!(check.status, Status::Ok);
        let root = "Name:\tx\nCapEff:\t000001ffffffffff\n";
        assert_eq!(
            locked_memory(&limits, root, "SwapTotal: 9 kB\n").status,
            Status::Ok
        );
        let plain = "CapEff:\t0000000000000000\n";
        assert!(may_lock_all(root) && !may_lock_all(plain) && !may_lock_all("CapEff:\tx\n"));
        assert_eq!(locked_memory("", "", "").status, Status::Unknown);
    }

    #[test]
    fn huge_page_settings() {
        let defrag = "always defer [madvise] never\n";
        let check = huge_pages("always [madvise] never\n", defrag);
        assert_eq!(
            (check.status, check.found.as_str()),
            (Status::Ok, "madvise")
        );
        let never = "always madvise [never]\n";
        assert_eq!(huge_pages(never, defrag).status, Status::Advice);
        assert_eq!(huge_pages("[always]\n", never).status, Status::Advice);
        assert_eq!(huge_pages("[always]\n", "").status, Status::Ok);
        assert_eq!(huge_pages("", "").status, Status::Unknown);
    }
}
