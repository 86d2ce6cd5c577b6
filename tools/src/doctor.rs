//! `emberflow doctor`: what this machine offers, and what to change.
//!
//! Every check stands alone: one that cannot be made says so and the rest goes on.

use std::fs::File;
use std::path::Path;

use emberflow_kernels::Cpu;
use emberflow_storage::io::{UringFacts, probe_uring};
use emberflow_storage::mem::Mem;
use emberflow_storage::profile::{DeviceProfile, FileFacts, Machine, ProfileError, Target};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::cli::DoctorArgs;
use crate::{Failure, print_json, size};

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    /// Something can be better.
    Advice,
    /// The system did not say.
    Unknown,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    #[serde(skip)]
    name: &'static str,
    status: Status,
    /// What is there, in words.
    found: String,
    /// What to change.
    advice: Option<String>,
    /// The same as `found` for programs.
    #[serde(flatten)]
    data: Map<String, Value>,
}

impl Check {
    fn new(name: &'static str, status: Status, found: impl Into<String>) -> Self {
        Self {
            name,
            status,
            found: found.into(),
            advice: None,
            data: Map::new(),
        }
    }

    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self::new(name, Status::Ok, found)
    }

    fn unknown(name: &'static str, why: impl Into<String>) -> Self {
        Self::new(name, Status::Unknown, why)
    }

    fn advise(mut self, advice: impl Into<String>) -> Self {
        self.status = Status::Advice;
        self.advice = Some(advice.into());
        self
    }

    fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.data.insert(key.into(), value.into());
        self
    }
}

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
    println!(
        "{}, {}, kernel {}, {} cores, {}\n",
        machine.cpu,
        machine.arch,
        machine.kernel,
        machine.cores,
        size::show(machine.memory)
    );
    for check in &checks {
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Advice => "advice",
            Status::Unknown => "unknown",
        };
        println!("{mark:<8}{:<16}{}", check.name, check.found);
        if let Some(advice) = &check.advice {
            println!("{:<24}-> {advice}", "");
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
        device_profile(facts.as_ref().ok(), machine),
    ]
}

/// Facts of the file, or of a folder by a file made there for a moment.
fn facts(path: &Path) -> Result<FileFacts, String> {
    if !path.is_dir() {
        let target = Target::open(path).map_err(|e| e.to_string())?;
        return Ok(target.facts().clone());
    }
    let probe = || -> std::io::Result<File> {
        let name = path.join(format!(".emberflow-doctor-{}.tmp", std::process::id()));
        let file = (File::options().read(true).write(true).create_new(true)).open(&name)?;
        std::fs::remove_file(&name)?;
        file.set_len(64 << 10)?;
        file.sync_all()?;
        Ok(file)
    };
    let file =
        probe().map_err(|e| format!("no test file can be made in {}: {e}", path.display()))?;
    let target = Target::unnamed(file, path).map_err(|e| e.to_string())?;
    Ok(FileFacts {
        path: path.to_owned(),
        ..target.facts().clone()
    })
}

fn direct_io(facts: Result<&FileFacts, &String>) -> Check {
    const NAME: &str = "direct_io";
    let facts = match facts {
        Ok(facts) => facts,
        Err(why) => {
            return Check::unknown(NAME, why.as_str()).with("sector", Value::Null);
        }
    };
    let place = format!(
        "{} on {} ({})",
        facts.path.display(),
        facts.device,
        facts.fs
    );
    let check = match (facts.sector, facts.memory_align) {
        (Some(sector), Some(memory)) => Check::ok(
            NAME,
            format!("{place}: offsets in {sector} B, memory in {memory} B"),
        ),
        _ => Check::ok(NAME, format!("{place}: none")).advise(
            "keep models on a file system with direct I/O (ext4, xfs, f2fs, btrfs); here reads go \
             through the page cache, which costs time and counts against memory limits",
        ),
    };
    check
        .with("sector", facts.sector)
        .with("memory_align", facts.memory_align)
        .with("fs", facts.fs.as_str())
        .with("device", facts.device.as_str())
}

fn io_uring(facts: &UringFacts) -> Check {
    const NAME: &str = "io_uring";
    let check = match facts.why_not() {
        None => {
            let check = Check::ok(NAME, format!("works, with {}", list(&facts.features)));
            if facts.features.contains(&"defer_taskrun") {
                check
            } else {
                check.advise("a kernel from 6.1 on saves CPU time per read (defer_taskrun)")
            }
        }
        // Whoever set such a filter will not change it.
        Some(why) if facts.killed.is_some() => {
            Check::ok(NAME, format!("not used: {why}; reads use threads (pread)"))
        }
        Some(why) => {
            let advice = match facts.disabled {
                Some(1 | 2) => {
                    "`sysctl kernel.io_uring_disabled=0` allows it; until then reads use threads \
                     (pread), at more CPU time per read"
                }
                _ => {
                    "allow the io_uring system calls (container seccomp profile) or use a newer \
                     kernel; until then reads use threads (pread), at more CPU time per read"
                }
            };
            Check::ok(NAME, why).advise(advice)
        }
    };
    check
        .with("available", facts.why_not().is_none())
        .with("killed", facts.killed.is_some())
        .with("errno", facts.errno)
        .with("disabled", facts.disabled)
        .with("features", facts.features.clone())
}

fn list(words: &[&str]) -> String {
    match words {
        [] => "no extras".into(),
        words => words.join(", "),
    }
}

/// Value in bytes of a line of /proc/meminfo.
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

/// Whether the effective capabilities in /proc/self/status allow locking without a limit.
fn may_lock_all(status: &str) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let all = line.and_then(|l| u64::from_str_radix(l.trim(), 16).ok());
    all.is_some_and(|all| all & CAP_IPC_LOCK != 0)
}

fn locked_memory(limits: &str, status: &str, meminfo: &str) -> Check {
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
        (None, _) => Check::unknown(NAME, "no limit is told"),
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
            format!("up to {}; nothing is swapped here", size::show(bytes)),
        ),
        (_, Some(bytes)) => {
            let first = match most {
                Some(most) if most <= bytes => String::new(),
                most => {
                    let most = most.map_or("unlimited".into(), |b| (b / 1024).to_string());
                    format!("`ulimit -l {most}` in the shell before, or ")
                }
            };
            Check::ok(NAME, format!("up to {}", size::show(bytes))).advise(format!(
                "this machine swaps, and weights beyond the limit can be swapped out; raise it: \
                 {first}memlock in /etc/security/limits.conf, LimitMEMLOCK= of the service, \
                 --ulimit memlock=-1 of the container"
            ))
        }
    };
    check
        .with("limit_bytes", limit)
        .with("hard_limit_bytes", most)
        .with("privileged", privileged)
        .with("swap_bytes", swap)
}

fn memory(mem: &Mem) -> Check {
    const NAME: &str = "memory";
    const LITTLE: u64 = 512 << 20;
    let (total, available, auto) = (mem.mem_total(), mem.mem_available(), mem.auto_budget());
    let check = match (available, auto) {
        (Some(available), Some(auto)) => {
            let check = Check::ok(
                NAME,
                format!(
                    "{} available, --memory auto takes {}",
                    size::show(available),
                    size::show(auto)
                ),
            );
            if auto < LITTLE {
                check.advise("very little: end other programs, or raise the limit on this one")
            } else {
                check
            }
        }
        _ => Check::unknown(NAME, "the kernel does not tell; give --memory SIZE"),
    };
    check
        .with("total_bytes", total)
        .with("available_bytes", available)
        .with("auto_budget_bytes", auto)
}

fn cgroup(mem: &Mem) -> Check {
    const NAME: &str = "cgroup";
    let (limit, free) = (mem.cgroup_limit(), mem.cgroup_available());
    let check = match (limit, free) {
        (Some(limit), Some(free)) => Check::ok(
            NAME,
            format!(
                "limited to {}, {} of it free",
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

/// Members of a list like `0-3,8`.
fn members(list: &str) -> Option<u64> {
    let mut count = 0u64;
    for part in list.trim().split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (u64, u64) = (from.parse().ok()?, to.parse().ok()?);
        count = count.checked_add(to.checked_sub(from)?.checked_add(1)?)?;
    }
    Some(count)
}

fn cores(status: &str, online: &str, machine: &Machine) -> Check {
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
            "affinity or a container keeps this process from the other cores; allow them if \
             nobody else needs them (taskset, cpuset, CPU quota)",
        );
    }
    check
        .with("usable", usable)
        .with("online", all)
        .with("allowed", allowed)
}

fn isa() -> Check {
    const NAME: &str = "isa";
    let chosen = Cpu::detect();
    let all: Vec<&str> = Cpu::all().into_iter().map(Cpu::name).collect();
    let check = Check::ok(NAME, format!("{} of {}", chosen.name(), all.join(", ")));
    let check = if all.last().is_some_and(|&best| best != chosen.name()) {
        check.advise("EMBERFLOW_ISA asks for less than this machine has; unset it")
    } else {
        check
    };
    check.with("chosen", chosen.name()).with("available", all)
}

/// The chosen word of a setting like `always [madvise] never`.
fn chosen(setting: &str) -> Option<&str> {
    (setting.split_whitespace()).find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

fn huge_pages(enabled: &str, defrag: &str) -> Check {
    const NAME: &str = "huge_pages";
    let (setting, defrag) = (chosen(enabled), chosen(defrag));
    let check = match (setting, defrag) {
        (None, _) => Check::unknown(NAME, "this kernel has none"),
        (Some("never"), _) => Check::ok(NAME, "never").advise(
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`: random reads of \
             weights in memory and large reads from disk become up to 1.5 times as fast",
        ),
        (Some(setting), Some(late @ ("never" | "defer"))) => {
            Check::ok(NAME, format!("{setting}, made {late}")).advise(
                "`echo madvise > /sys/kernel/mm/transparent_hugepage/defrag`: memory is then put \
                 together for them when weights are loaded",
            )
        }
        (Some(setting), _) => Check::ok(NAME, setting),
    };
    check.with("setting", setting).with("defrag", defrag)
}

fn read_ahead(facts: Result<&FileFacts, &String>) -> Check {
    const NAME: &str = "read_ahead";
    let kib = facts.ok().and_then(|f| f.read_ahead_kb);
    let check = match kib {
        Some(kib) => Check::ok(
            NAME,
            format!("{kib} KiB; direct reads do not use it, programs that map their model do"),
        ),
        None => Check::unknown(NAME, "the device does not tell"),
    };
    check.with("kb", kib)
}

fn device_profile(facts: Option<&FileFacts>, machine: &Machine) -> Check {
    const NAME: &str = "device_profile";
    const MEASURE: &str = "run `emberflow bench io` once, in the folder of the models";
    let Some(path) = DeviceProfile::default_path() else {
        return Check::unknown(NAME, "neither XDG_CACHE_HOME nor HOME is set")
            .with("path", Value::Null);
    };
    let check = match DeviceProfile::load(&path) {
        Err(ProfileError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Check::ok(NAME, "none saved").advise(MEASURE)
        }
        Err(e) => Check::ok(NAME, e.to_string()).advise(MEASURE),
        Ok(profile) => judge(&profile, facts, machine),
    };
    check.with("path", path.display().to_string())
}

fn judge(profile: &DeviceProfile, facts: Option<&FileFacts>, machine: &Machine) -> Check {
    const NAME: &str = "device_profile";
    let on = format!("{} ({})", profile.file.device, profile.file.fs);
    let check = match &profile.best {
        Some(best) => Check::ok(
            NAME,
            format!(
                "{on}: {} at depth {}, {:.0} MB/s random, {:.0} MB/s sequential",
                best.engine, best.depth, best.random_mb_per_s, best.sequential_mb_per_s
            ),
        )
        .with("engine", best.engine.as_str())
        .with("depth", best.depth)
        .with("random_mb_per_s", best.random_mb_per_s)
        .with("sequential_mb_per_s", best.sequential_mb_per_s),
        None => Check::ok(NAME, format!("{on}: empty")),
    };
    let elsewhere = facts.is_some_and(|f| f.device != profile.file.device);
    let other = profile.machine.kernel != machine.kernel || profile.machine.cores != machine.cores;
    if elsewhere {
        check.advise("it is of another device than this folder's; run `emberflow bench io` here")
    } else if other || profile.best.is_none() {
        check.advise("kernel or cores have changed since; run `emberflow bench io` again")
    } else {
        check
    }
}

#[cfg(test)]
mod tests {
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
        // Nothing to gain in the shell where the hard limit is reached.
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

    #[test]
    fn io_uring_that_is_forbidden_names_the_switch() {
        let facts = UringFacts {
            errno: Some(1),
            disabled: Some(2),
            ..UringFacts::default()
        };
        let check = io_uring(&facts);
        assert_eq!(check.status, Status::Advice);
        assert!(check.advice.unwrap().contains("kernel.io_uring_disabled=0"));
        assert_eq!(check.data["available"], false);
        let killed = UringFacts {
            killed: Some("a filter".into()),
            ..UringFacts::default()
        };
        let check = io_uring(&killed);
        assert_eq!(check.status, Status::Ok);
        assert!(check.found.contains("not used: a filter"));
        assert_eq!(check.data["available"], false);
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

    #[test]
    fn a_folder_without_direct_io_or_without_permission_is_no_failure() {
        let facts = FileFacts::default();
        assert_eq!(direct_io(Ok(&facts)).status, Status::Advice);
        assert_eq!(direct_io(Err(&"no".into())).status, Status::Unknown);
        assert_eq!(read_ahead(Err(&"no".into())).status, Status::Unknown);
        assert!(super::facts(Path::new("/no/such/model")).is_err());
    }

    #[test]
    fn a_profile_of_another_machine_is_not_trusted() {
        let here = Machine::here();
        let profile = DeviceProfile::new(here.clone(), FileFacts::default(), Vec::new());
        assert_eq!(judge(&profile, None, &here).status, Status::Advice);
        let other = FileFacts {
            device: "/dev/other".into(),
            ..FileFacts::default()
        };
        let advice = judge(&profile, Some(&other), &here).advice.unwrap();
        assert!(advice.contains("another device"), "{advice}");
    }
}
