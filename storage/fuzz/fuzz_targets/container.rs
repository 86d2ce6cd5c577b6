//! Edits a valid container as the input says, and uses what comes out as a caller would.
//!
//! The input is a list of edits, 11 bytes each. Checksums are repaired afterwards unless the
//! input has an odd length, so that edits of tables get past the first door.

#![no_main]

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::LazyLock;

use emberflow_storage::container::Container;
use libfuzzer_sys::fuzz_target;

#[path = "../../tests/container/forger.rs"]
#[allow(dead_code)]
mod forger;
#[path = "../../tests/container/support.rs"]
#[allow(dead_code)]
mod support;

use forger::Forger;

static ORIGINALS: LazyLock<[Vec<u8>; 2]> =
    LazyLock::new(|| [support::full().bytes(), support::bare().bytes()]);

thread_local! {
    /// One file for all runs: creating one each time would cost more than the reader.
    static SCRATCH: RefCell<File> = RefCell::new(tempfile::tempfile().expect("scratch file"));
}

fn edit(f: &mut Forger, at: usize, op: u8, value: u64) {
    let len = f.bytes.len();
    match op % 6 {
        0 if at < len => f.bytes[at] ^= value as u8,
        1 if at + 4 <= len => f.put32(at, value as u32),
        2 if at + 8 <= len => f.put64(at, value),
        3 if at + 8 <= len => f.put64(at, f.u64_at(at).wrapping_add(value)),
        4 => f.bytes.truncate(at),
        5 => f.bytes.resize(len + at % 8192, value as u8),
        _ => {}
    }
}

fuzz_target!(|data: &[u8]| {
    let which = data.first().is_some_and(|b| b & 0x80 != 0);
    let original = &ORIGINALS[usize::from(which)];
    let mut f = Forger {
        bytes: original.clone(),
    };
    for e in data.chunks_exact(11) {
        let at = usize::from(u16::from_le_bytes([e[1], e[2]]));
        let value = u64::from_le_bytes([e[3], e[4], e[5], e[6], e[7], e[8], e[9], e[10]]);
        edit(&mut f, at, e[0] & 0x7F, value);
    }
    let sealed = data.len().is_multiple_of(2) && f.bytes.len() >= 4096;
    if sealed {
        f.seal();
    }
    SCRATCH.with_borrow(|file| {
        file.set_len(0).expect("scratch file");
        file.write_all_at(&f.bytes, 0).expect("scratch file");
        let file = file.try_clone().expect("scratch file");
        let len = f.bytes.len() as u64;
        let Ok(container) = Container::open_at(file, Path::new("fuzz"), 0, len) else {
            return;
        };
        let report = container.verify(&mut |_, _| {}).expect("inspection");
        let read = support::read_all(&container);
        assert!(
            read.is_ok() || !report.is_clean(),
            "verify missed what reading finds"
        );
        for (b, bank) in container.banks().iter().enumerate() {
            let last = container.neuron_offset(b, bank.neurons - 1);
            assert!(last + u64::from(container.geometry().stride) <= container.file_len());
            let _ = container.check_bundle(b, 0, &vec![0; container.geometry().stride as usize]);
        }
        assert!(
            sealed || f.bytes == *original || !report.is_clean(),
            "damage went unnoticed"
        );
    });
});
