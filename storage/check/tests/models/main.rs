//! The models: each a few steps of a few threads, in every order.
//!
//! `faults` runs them again with broken primitives, and expects failures.

mod device;
mod faults;
mod thread;

use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use emberflow_storage_check::arena::{Arena, ArenaOptions};

/// Bytes of a slot.
const LEN: usize = 512;

/// Runs `model` in all orders with up to `preemptions` involuntary switches, plus
/// `EMBERFLOW_CHECK_DEEPER` more: each takes about ten times as long.
fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let deeper = std::env::var("EMBERFLOW_CHECK_DEEPER").ok();
    let more = deeper.and_then(|n| n.parse().ok()).unwrap_or(0);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions + more);
    builder.max_branches = 100_000;
    let orders = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&orders);
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{} orders", orders.load(Ordering::Relaxed));
}

/// A file in which page `n` is full of the byte `n + 1`.
fn file() -> &'static File {
    static FILE: OnceLock<File> = OnceLock::new();
    FILE.get_or_init(|| {
        let mut file = tempfile::tempfile().expect("a temporary file");
        for page in 1..=16 {
            file.write_all(&[page; LEN]).expect("room for 8 KiB");
        }
        file
    })
}

/// File offset of page `n`.
fn page(n: u8) -> u64 {
    u64::from(n) * LEN as u64
}

/// Whether `bytes` are page `n` of the file.
fn is_page(bytes: &[u8], n: u8) -> bool {
    bytes.iter().all(|&b| b == n + 1)
}

fn arena(slots: u32) -> Arena {
    Arena::new(slots, LEN, LEN, ArenaOptions::default()).expect("a small arena")
}
