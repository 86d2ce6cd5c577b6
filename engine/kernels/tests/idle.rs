//! A pool without work uses no CPU. Alone in its process, so that only the pool counts.
#![cfg(target_os = "linux")]

use std::{fs, thread, time::Duration};

use emberflow_kernels::Workers;

/// Clock ticks (10 ms) of CPU time this process has used.
fn ticks() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    // Fields are counted from the end of the name, which may contain anything.
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn sleeping_workers_use_no_cpu() {
    let workers = Workers::new(thread::available_parallelism().unwrap().get(), None);
    workers.run(&|_| {});
    let before = ticks();
    thread::sleep(Duration::from_millis(500));
    // A single spinning thread would use 50.
    assert!(ticks() - before <= 5, "{} ticks", ticks() - before);
    workers.run(&|_| {});
}
