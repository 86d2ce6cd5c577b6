//! Steady state does not allocate: neither caller, I/O thread, lanes nor cache. A separate file, as
//! the counting allocator sees the whole process.

#![allow(unsafe_code)]

#[path = "all/io_common/mod.rs"]
#[allow(dead_code, reason = "it needs a part of it")]
mod io_common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use emberflow_storage::cache::{Key, SlotCache};
use emberflow_storage::io::{IoChoice, IoOptions, IoThread, Read};
use emberflow_storage::limits::Limits;
use fastrand::Rng;
use io_common::{arena, expect_bytes, patterned, source};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Thread that allocated last, to name it in a failure.
static CULPRIT: AtomicI32 = AtomicI32::new(0);

fn count() {
    // SAFETY: neither call has preconditions.
    let (thread, process) = unsafe { (libc::gettid(), libc::getpid()) };
    // The main thread belongs to the test harness.
    if thread != process {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        CULPRIT.store(thread, Ordering::Relaxed);
    }
}

// SAFETY: forwards everything to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's contract is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const NEURONS: u32 = 256;
const WAVE: u32 = 32;

/// One wave as in the engine: look up, reserve and read misses, admit, release.
fn wave(
    io: &IoThread,
    cache: &mut SlotCache,
    rng: &mut Rng,
    batch: &mut Vec<Read>,
    out: &mut Vec<emberflow_storage::io::Completion>,
) {
    for _ in 0..WAVE {
        let key = Key::new(0, rng.u64(..u64::from(NEURONS)) as u32);
        if cache.get_pin(key).is_some() {
            cache.unpin(key);
        } else if let Some(slot) = cache.reserve(key) {
            let offset = u64::from(key.neuron) * 4096;
            batch.push(Read::new(u64::from(key.neuron), offset, 4096, slot));
        }
    }
    let n = batch.len();
    io.submit(batch).unwrap();
    io.wait(out, n).unwrap();
    for done in out.drain(..) {
        done.result.unwrap();
        let key = Key::new(0, done.tag as u32);
        let id = cache.admit(key, done.slot);
        expect_bytes(cache.bytes(id), done.tag * 4096);
        cache.unpin(key);
    }
}

#[test]
fn steady_state_allocates_nothing() {
    let file = patterned(u64::from(NEURONS) * 4096);
    for choice in [IoChoice::Pread, IoChoice::Uring] {
        let options = IoOptions {
            limits: Limits::PRODUCTION,
            ..IoOptions::default()
        };
        let io = match IoThread::spawn(source(&file), choice, options) {
            Ok(io) => io,
            Err(reason) => {
                eprintln!("SKIPPED for {choice:?}: {reason}");
                continue;
            }
        };
        let mut cache = SlotCache::new(arena(96, 4096), &[NEURONS]).unwrap();
        let (mut rng, mut batch, mut out) = (Rng::with_seed(5), Vec::new(), Vec::new());
        // A channel allocates the first time a thread actually sleeps on it, so let that happen
        // first.
        for _ in 0..10 {
            std::thread::sleep(std::time::Duration::from_millis(10));
            for _ in 0..20 {
                wave(&io, &mut cache, &mut rng, &mut batch, &mut out);
            }
        }
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..500 {
            wave(&io, &mut cache, &mut rng, &mut batch, &mut out);
        }
        let made = ALLOCATIONS.load(Ordering::Relaxed) - before;
        let stats = cache.stats();
        assert!(stats.evictions > 1000, "{stats:?}");
        let culprit = CULPRIT.load(Ordering::Relaxed);
        let name = std::fs::read_to_string(format!("/proc/self/task/{culprit}/comm"));
        assert_eq!(made, 0, "allocations with {choice:?}, the last by {name:?}");
    }
}
