//! An idle engine uses no CPU. A separate file, as it checks all threads of the process.

#[path = "all/io_common/mod.rs"]
#[allow(dead_code, reason = "it needs a part of it")]
mod io_common;

use std::time::Duration;

use emberflow_storage::io::{IoChoice, IoOptions, IoThread, Profile, Read, SimOptions};
use io_common::{arena, patterned, source};

/// CPU nanoseconds of all threads whose name starts with `ember-`.
fn cpu() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| {
            let task = task.ok()?.path();
            let comm = std::fs::read_to_string(task.join("comm")).ok()?;
            comm.starts_with("ember-").then_some(())?;
            let stat = std::fs::read_to_string(task.join("schedstat")).ok()?;
            stat.split(' ').next()?.parse::<u64>().ok()
        })
        .sum()
}

#[test]
fn an_idle_engine_uses_no_cpu() {
    let file = patterned(1 << 20);
    let sim = IoChoice::Sim(SimOptions::new(Profile::Ufs4, 1));
    for choice in [IoChoice::Pread, IoChoice::Uring, sim] {
        let io = match IoThread::spawn(source(&file), choice, IoOptions::default()) {
            Ok(io) => io,
            Err(reason) => {
                eprintln!("SKIPPED for {choice:?}: {reason}");
                continue;
            }
        };
        let mut arena = arena(8, 4096);
        let mut batch = (0..8)
            .map(|i| Read::new(i, i * 8192, 4096, arena.take().unwrap()))
            .collect();
        io.submit(&mut batch).unwrap();
        io.wait(&mut Vec::new(), 8).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let before = cpu();
        assert!(before > 0, "the threads of the engine were not found");
        std::thread::sleep(Duration::from_millis(300));
        let used = cpu() - before;
        assert!(
            used < 3_000_000,
            "{used} ns of cpu in 300 ms of idling, {choice:?}"
        );
    }
}
