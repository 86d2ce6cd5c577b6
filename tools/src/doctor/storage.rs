//! Storage: direct I/O, io_uring, and the device profile.

use std::fs::File;
use std::path::Path;

use emberflow_storage::durable;
use emberflow_storage::io::UringFacts;
use emberflow_storage::profile::{DeviceProfile, FileFacts, Machine, ProfileError, Target};
use serde_json::Value;

use super::check::Check;
use crate::bench::io::{random, sequential};

/// Facts of a file; for a folder, of a temporary file in it.
pub(super) fn facts(path: &Path) -> Result<FileFacts, String> {
    if !path.is_dir() {
        let target = Target::open(path).map_err(|e| e.to_string())?;
        return Ok(target.facts().clone());
    }
    let probe = || -> std::io::Result<File> {
        let name = path.join(format!(".emberflow-doctor-{}.tmp", std::process::id()));
        let file = (File::options().read(true).write(true).create_new(true)).open(&name)?;
        std::fs::remove_file(&name)?;
        file.set_len(64 << 10)?;
        durable::sync_all(&file, &name)?;
        Ok(file)
    };
    let file =
        probe().map_err(|e| format!("cannot create a test file in {}: {e}", path.display()))?;
    let target = Target::unnamed(file, path).map_err(|e| e.to_string())?;
    Ok(FileFacts {
        path: path.to_owned(),
        ..target.facts().clone()
    })
}

pub(super) fn direct_io(facts: Result<&FileFacts, &String>) -> Check {
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
            format!("{place}: alignment {sector} B in the file, {memory} B in memory"),
        ),
        _ => Check::ok(NAME, format!("{place}: none")).advise(
            "keep models on a file system with direct I/O (ext4, xfs, f2fs, btrfs); here reads go \
             through the page cache, which is slower and counts towards memory limits",
        ),
    };
    check
        .with("sector", facts.sector)
        .with("memory_align", facts.memory_align)
        .with("fs", facts.fs.as_str())
        .with("device", facts.device.as_str())
}

pub(super) fn io_uring(facts: &UringFacts) -> Check {
    const NAME: &str = "io_uring";
    let check = match facts.why_not() {
        None => {
            let check = Check::ok(NAME, format!("works, with {}", list(&facts.features)));
            if facts.features.contains(&"defer_taskrun") {
                check
            } else {
                check.advise("kernel 6.1 or later needs less CPU time per read (defer_taskrun)")
            }
        }
        // No advice: the user cannot change a seccomp filter that kills the process.
        Some(why) if facts.killed.is_some() => {
            Check::ok(NAME, format!("not used: {why}; reads use threads (pread)"))
        }
        Some(why) => {
            let advice = match facts.disabled {
                Some(1 | 2) => {
                    "`sysctl kernel.io_uring_disabled=0` allows it; until then reads use threads \
                     (pread), which needs more CPU time per read"
                }
                _ => {
                    "allow the io_uring system calls (container seccomp profile) or use a newer \
                     kernel; until then reads use threads (pread), which needs more CPU time per read"
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
        [] => "no optional features".into(),
        words => words.join(", "),
    }
}

pub(super) fn read_ahead(facts: Result<&FileFacts, &String>) -> Check {
    const NAME: &str = "read_ahead";
    let kib = facts.ok().and_then(|f| f.read_ahead_kb);
    let check = match kib {
        Some(kib) => Check::ok(
            NAME,
            format!("{kib} KiB; direct I/O does not use it, mmap does"),
        ),
        None => Check::unknown(NAME, "not reported by the device"),
    };
    check.with("kb", kib)
}

pub(super) fn device_profile(facts: Option<&FileFacts>, machine: &Machine) -> Check {
    const NAME: &str = "device_profile";
    const MEASURE: &str = "run `emberflow bench io` once, in the folder with the models";
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
                "{on}: {} at depth {}; {}; {}",
                best.engine,
                best.depth,
                random(profile),
                sequential(best)
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
        check.advise("it belongs to another device; run `emberflow bench io` in this folder")
    } else if other || profile.best.is_none() {
        check.advise("the kernel or the cores have changed since; run `emberflow bench io` again")
    } else if let Some(doubt) = profile.doubt() {
        check.advise(format!(
            "it was measured under load ({doubt}); run `emberflow bench io` again"
        ))
    } else {
        check
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::profile::Best;

    use super::super::Status;
    use super::*;

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
    fn a_folder_without_direct_io_or_without_permission_is_no_failure() {
        let facts = FileFacts::default();
        assert_eq!(direct_io(Ok(&facts)).status, Status::Advice);
        assert_eq!(direct_io(Err(&"no".into())).status, Status::Unknown);
        assert_eq!(read_ahead(Err(&"no".into())).status, Status::Unknown);
        assert!(super::facts(Path::new("/no/such/model")).is_err());
    }

    #[test]
    fn what_was_not_measured_is_said_so() {
        let here = Machine::here();
        let mut profile = DeviceProfile::new(here.clone(), FileFacts::default(), Vec::new());
        let best = Best {
            engine: "uring".into(),
            depth: 32,
            random_mb_per_s: 900.0,
            sequential_mb_per_s: None,
        };
        profile.best = Some(best.clone());
        let check = judge(&profile, None, &here);
        assert!(
            check.found.ends_with("; sequential not measured"),
            "{check:?}"
        );
        assert_eq!(check.data["sequential_mb_per_s"], Value::Null);
        profile.best = Some(Best {
            sequential_mb_per_s: Some(1500.0),
            ..best
        });
        let check = judge(&profile, None, &here);
        assert!(check.found.ends_with("; 1500 MB/s sequential"), "{check:?}");
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
