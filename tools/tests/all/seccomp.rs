//! The program under a system call filter that ends processes using io_uring, as Android's filter
//! does with applications.

use std::collections::BTreeMap;
use std::process::Output;

use crate::common::emberflow;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use serde_json::Value;

/// From the kernel's interface, the same on every architecture.
const URING_CALLS: [i64; 3] = [425, 426, 427];

/// Runs the program under the filter. `None` if none can be installed.
fn forbidden(args: &[&str]) -> Option<Output> {
    let filter = || -> Result<BpfProgram, seccompiler::BackendError> {
        let rules = BTreeMap::from(URING_CALLS.map(|call| (call, vec![])));
        let arch = std::env::consts::ARCH.try_into()?;
        let (others, these) = (SeccompAction::Allow, SeccompAction::KillProcess);
        SeccompFilter::new(rules, others, these, arch)?.try_into()
    };
    let set = filter().map_err(|e| e.to_string());
    // the filter applies to this thread and the processes it starts
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let set = set.and_then(|f| apply_filter(&f).map_err(|e| e.to_string()));
            if let Err(e) = set {
                eprintln!("SKIPPED: no filter can be set here: {e}");
                return None;
            }
            Some(emberflow().args(args).output().unwrap())
        });
        thread.join().unwrap()
    })
}

#[test]
fn a_run_reads_with_threads_instead() {
    let args = ["run", "-n", "4", "--ffn-resident", "0.4", "--json"];
    let Some(output) = forbidden(&args) else {
        return;
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["io"]["engine"], "pread");
    assert!(report["io"]["reads"].as_u64().unwrap() > 0);
}

#[test]
fn to_insist_on_it_is_an_error_and_no_crash() {
    let Some(output) = forbidden(&["point", "-n", "1", "--io", "uring"]) else {
        return;
    };
    assert_eq!(output.status.code(), Some(1), "{}", output.status);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("SIGSYS"), "{stderr}");
}

#[test]
fn doctor_says_why() {
    let Some(output) = forbidden(&["doctor", "--json"]) else {
        return;
    };
    assert!(output.status.success(), "{}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let check = &report["io_uring"];
    assert_eq!(check["available"], false, "{check}");
    assert!(check["found"].as_str().unwrap().contains("SIGSYS"));
}
