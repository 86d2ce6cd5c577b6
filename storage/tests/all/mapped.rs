//! A mapped file that is shortened between the check and the access: the process ends with a
//! message.

use std::io::Write;
use std::process::Command;

use emberflow_storage::io::Mapped;

/// Set in the process that is expected to end; selects the case.
const PART: &str = "EMBERFLOW_TEST_MAPPED";

/// Runs its part if this test's program was started again, and otherwise does nothing.
#[test]
fn the_part_that_dies() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 3 << 12]).unwrap();
    let mapped = |name: &str| Mapped::new(&file, name.as_ref(), 0).unwrap();
    let last = |m: &Mapped| m.bytes(2 << 12, 1).unwrap()[0];
    let first = mapped("first.ember");
    let mut second = mapped("second.ember");
    assert_eq!((last(&first), last(&second)), (7, 7));
    match &*part {
        "shortened" => {}
        "one is gone" => drop(first),
        "all are new" => {
            drop(first);
            drop(second);
            second = mapped("third.ember");
        }
        // Not of a mapping, so it must not be reported as one. The standard library's handler,
        // installed before, waits for a repeated fault: the second one ends the program.
        "sent" => {
            let me = std::process::id().to_string();
            for _ in 0..2 {
                Command::new("kill").args(["-BUS", &me]).status().unwrap();
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            return;
        }
        other => panic!("no part {other}"),
    }
    file.set_len(1).unwrap();
    unreachable!("a missing page was read: {}", last(&second));
}

/// Exit status and message of the program in a case.
fn play(part: &str) -> (Option<i32>, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "mapped::the_part_that_dies", "--nocapture"])
        .env(PART, part)
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), message)
}

#[test]
fn whoever_touches_a_missing_page_is_told() {
    for (part, file) in [
        ("shortened", "second"),
        ("one is gone", "second"),
        ("all are new", "third"),
    ] {
        let (code, message) = play(part);
        assert_eq!(code, Some(3), "{part}: {message}");
        let told = format!("emberflow: {file}.ember: the file was shortened");
        assert!(message.contains(&told), "{part}: {message}");
    }
}

#[test]
fn another_sigbus_ends_as_it_did() {
    let (code, message) = play("sent");
    assert_eq!(code, None, "{message}");
    assert!(!message.contains(".ember"), "{message}");
}
