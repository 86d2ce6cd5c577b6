//! Readers of external bytes are given damaged ones: the result is always a value or an error. No
//! panic, no memory out of proportion to the input, no endless loop.
//!
//! Past findings in `fixtures/fuzz/` come first, then new inputs by case number, for
//! `EMBERFLOW_FUZZ_SECONDS` (default: 0.3 for each target). `EMBERFLOW_FUZZ_SEED` is the number of
//! the first case. A failure leaves its case number in `target/tmp/fuzz-NAME.case` and its input
//! next to it, a crash of the whole test the number; `EMBERFLOW_FUZZ_CASES=1` with the number as
//! seed repeats it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use emberflow_tests::fixtures;
use emberflow_tests::fuzz::{TARGETS, Target};

/// Bytes that a reader may allocate per byte of its input, in addition to the allowance of its form.
/// JSON needs the most: `[1],` is seven values of 72 bytes while the list around it grows, 126 per
/// byte.
const TIMES: usize = 144;

/// Longest time for one input.
const PATIENCE: u32 = 60;

/// Counts the allocations of each thread, and refuses those beyond its limit.
struct Metered;

thread_local! {
    static TAKEN: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
    static LIMIT: Cell<isize> = const { Cell::new(isize::MAX) };
}

/// Whether this thread may allocate that much more.
fn take(bytes: isize) -> bool {
    let taken = TAKEN.get() + bytes;
    if taken > LIMIT.get() {
        let message = b"an input makes its reader allocate more than it pays for\n";
        drop(std::io::stderr().write_all(message));
        // reporting the failure needs memory, too
        LIMIT.set(isize::MAX);
        return false;
    }
    TAKEN.set(taken);
    MOST.set(MOST.get().max(taken));
    true
}

// SAFETY: every call is passed on unchanged to the system's allocator, or answered with none.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Metered {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size() as isize) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size() as isize) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        TAKEN.set(TAKEN.get() - layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !take(size as isize - layout.size() as isize) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Metered = Metered;

/// Runs one input on a separate thread, since libraries keep caches in a thread until it ends.
/// Returns whether it was accepted, and its memory.
fn run(target: &Target, input: &[u8]) -> std::thread::Result<(bool, isize)> {
    let limit = target.form.room + TIMES * input.len();
    let metered = || {
        let before = TAKEN.get();
        MOST.set(before);
        LIMIT.set(before + limit as isize);
        let accepted = (target.run)(input);
        LIMIT.set(isize::MAX);
        (accepted, MOST.get() - before)
    };
    std::thread::scope(|scope| scope.spawn(metered).join())
}

fn variable<T: std::str::FromStr>(name: &str, usual: T) -> T {
    match std::env::var(name) {
        Ok(value) => match value.parse() {
            Ok(value) => value,
            Err(_) => panic!("{name}={value} is no number"),
        },
        Err(_) => usual,
    }
}

/// Ends the process if a case takes too long; a test cannot be stopped from outside.
fn watch(name: &str, case: &AtomicU64, over: &mpsc::Receiver<()>) {
    let (mut last, mut seconds) = (u64::MAX, 0);
    while over.recv_timeout(Duration::from_secs(1)) == Err(mpsc::RecvTimeoutError::Timeout) {
        let now = case.load(Ordering::Relaxed);
        seconds = if now == last { seconds + 1 } else { 0 };
        last = now;
        if seconds == PATIENCE {
            drop(writeln!(
                std::io::stderr(),
                "{name}: case {now} does not end"
            ));
            std::process::abort();
        }
    }
}

fn fuzz(name: &str, target: &Target) {
    let folder = fixtures().join("fuzz").join(name);
    for entry in std::fs::read_dir(&folder).into_iter().flatten() {
        let path = entry.expect("a find").path();
        eprintln!("{}", path.display());
        let input = std::fs::read(&path).expect("a find");
        run(target, &input).unwrap_or_else(|panic| resume_unwind(panic));
    }
    for (i, seed) in target.seeds.iter().enumerate() {
        let (accepted, most) = run(target, seed).unwrap_or_else(|panic| resume_unwind(panic));
        eprintln!("{name}: {most} bytes for {} of an original", seed.len());
        assert!(accepted || i > 0, "{name}: the first original is refused");
    }
    let seconds = variable("EMBERFLOW_FUZZ_SECONDS", 0.3);
    let first = variable("EMBERFLOW_FUZZ_SEED", 0u64);
    let cases = variable("EMBERFLOW_FUZZ_CASES", u64::MAX);
    let (began, case) = (Instant::now(), AtomicU64::new(first));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}.case"));
    let log = File::create(&path).expect("the file of the case");
    let (mut done, mut accepted, mut most) = (0, 0, 0);
    let (end, over) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let number = &case;
        scope.spawn(move || watch(name, number, &over));
        // dropped at the end or by a panic, which ends the watch
        let _end = end;
        while done < cases && began.elapsed().as_secs_f64() < seconds {
            let seed = first.wrapping_add(done);
            case.store(seed, Ordering::Relaxed);
            log.write_all_at(format!("{seed:020}\n").as_bytes(), 0)
                .expect("the file of the case");
            let input = target.case(seed);
            match run(target, &input) {
                Ok((is_accepted, taken)) => {
                    accepted += u64::from(is_accepted);
                    most = most.max(taken);
                }
                Err(panic) => {
                    let found = path.with_extension("input");
                    std::fs::write(&found, &input).expect("the input");
                    eprintln!("{name}: case {seed}, its input lies in {}", found.display());
                    resume_unwind(panic);
                }
            }
            done += 1;
        }
    });
    drop(std::fs::remove_file(&path));
    eprintln!("{name}: {done} cases from {first} on, {accepted} accepted, {most} bytes at most");
}

macro_rules! fuzz {
    ($($name:ident)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                let name = stringify!($name);
                let target = TARGETS.iter().find(|target| target.0 == name);
                fuzz(name, &target.expect("a target").1());
            }
        )*
    };
}

fuzz! {
    container model stats stats_json predictor trace
    gguf unpacked safetensors blocks quantized config tokenizer tokenizer_config generation_config index
}

#[test]
fn no_target_is_forgotten() {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.0).collect();
    assert_eq!(names, NAMES);
    for entry in std::fs::read_dir(fixtures().join("fuzz")).expect("finds") {
        let name = entry.expect("a folder").file_name();
        assert!(names.iter().any(|known| **known == *name), "{name:?}");
    }
}
