//! The program under a system call filter that ends processes using io_uring, as Android's filter
//! does with applications.

use std::collections::BTreeMap;
use std::process::{Output, Stdio};

use crate::common::emberflow;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};
use serde_json::Value;

/// From the kernel's interface, the same on every architecture.
const URING_CALLS: [i64; 3] = [425, 426, 427];

/// A filter that takes an action on some calls.
fn filter(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    action: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, SeccompAction::Allow, action, arch)?.try_into()
}

/// Runs the program under filters. `None` if they cannot be installed.
fn filtered(
    args: &[&str],
    filters: impl IntoIterator<Item = Result<BpfProgram, seccompiler::BackendError>>,
) -> Option<Output> {
    let filters: Result<Vec<_>, _> = filters.into_iter().collect();
    let filters = filters.map_err(|e| e.to_string());
    // filters apply to this thread and the processes it starts
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let set = filters.and_then(|all| {
                let mut all = all.iter();
                all.try_for_each(|f| apply_filter(f).map_err(|e| e.to_string()))
            });
            if let Err(e) = set {
                eprintln!("SKIPPED: no filter can be set here: {e}");
                return None;
            }
            Some(
                emberflow()
                    .args(args)
                    .stdin(Stdio::piped())
                    .output()
                    .unwrap(),
            )
        });
        thread.join().unwrap()
    })
}

/// Runs the program without io_uring.
fn forbidden(args: &[&str]) -> Option<Output> {
    let rules = BTreeMap::from(URING_CALLS.map(|call| (call, vec![])));
    filtered(args, [filter(rules, SeccompAction::KillProcess)])
}

/// Runs the program where there are no threads left: `clone` fails when it is to make one, and `clone3`, whose flags no filter
/// sees, is not known.
fn without_threads(args: &[&str]) -> Option<Output> {
    const CLONE3: i64 = 435;
    const CLONE: i64 = if cfg!(target_arch = "x86_64") {
        56
    } else {
        220
    };
    const CLONE_THREAD: u64 = 0x10000;
    let [not_known, not_now] = [38, 11].map(SeccompAction::Errno);
    let makes_thread = SeccompCmpOp::MaskedEq(CLONE_THREAD);
    let flags = SeccompCondition::new(0, SeccompCmpArgLen::Qword, makes_thread, CLONE_THREAD);
    let rule = flags.and_then(|flags| SeccompRule::new(vec![flags]));
    let rules = rule.map(|rule| BTreeMap::from([(CLONE, vec![rule])]));
    filtered(
        args,
        [
            filter(BTreeMap::from([(CLONE3, vec![])]), not_known),
            rules.and_then(|rules| filter(rules, not_now)),
        ],
    )
}

/// What needs no other thread goes on, and what does is an error.
#[test]
fn a_system_without_threads_is_an_error_and_no_crash() {
    for (args, told) in [
        (&["run", "-n", "4"][..], "standard input"),
        (&["run", "-p", "A", "-n", "4"], "tok/s"),
        (
            &["run", "-p", "A", "-n", "4", "--device", "cpu"],
            "cannot start a thread",
        ),
        (
            &["point", "-p", "A", "-n", "4", "--io", "pread"],
            "os error 11",
        ),
        (
            &["run", "-p", "A", "--device", "npu:cpu"],
            "cannot start a process",
        ),
        (
            &["run", "-p", "A", "--device", "opencl"],
            "cannot start a process",
        ),
        (&["doctor"], "OpenCL: cannot start a process"),
        (&["bench", "io"], "os error 11"),
        (&["serve", "--port", "0"], "os error 11"),
    ] {
        let Some(output) = without_threads(args) else {
            return;
        };
        let both = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
        assert!(
            !both[1].contains("panicked") && matches!(output.status.code(), Some(0..=3)),
            "{args:?}: {}: {both:?}",
            output.status
        );
        assert!(
            both.iter().any(|of| of.contains(told)),
            "{args:?}: {both:?}"
        );
    }
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
