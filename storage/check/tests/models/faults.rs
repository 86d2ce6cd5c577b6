//! Proves that the checker finds faults: the same models with broken primitives.

use std::process::Command;

use emberflow_storage_check::fault::{Fault, VARIABLE};

/// A model, the fault injected in it, and its expected message.
const NOTICED: [(&str, Fault, &str); 4] = [
    (
        "thread::a_sleeping_device_is_woken_for_new_reads",
        Fault::Fence,
        "deadlock",
    ),
    (
        "thread::a_sleeping_device_is_woken_for_new_reads",
        Fault::NotifyOne,
        "deadlock",
    ),
    (
        "thread::two_callers_both_return",
        Fault::NotifyAll,
        "deadlock",
    ),
    (
        "device::two_lanes_finish_everything",
        Fault::NotifyOne,
        "deadlock",
    ),
];

#[test]
fn every_broken_primitive_is_noticed() {
    let this = std::env::current_exe().unwrap();
    for fault in Fault::ALL {
        assert!(NOTICED.iter().any(|(_, f, _)| *f == fault), "{fault:?}");
    }
    for (model, fault, said) in NOTICED {
        // A separate process: a model that fails midway may abort its process.
        let output = (Command::new(&this).args(["--exact", model, "--nocapture"]))
            .env(VARIABLE, fault.name())
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(
            !output.status.success() && text.contains(said),
            "{model} does not notice {fault:?}:\n{text}"
        );
    }
}
