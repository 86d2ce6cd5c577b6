//! Cost of the I/O thread itself: batches against a file in the page cache, so that the device
//! plays no part, and against a simulated device without waiting.
//!
//! `emberflow bench io` and `benches/io/compare_fio.sh` measure real devices.

use std::io::Write;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::io::{
    Completion, Faults, FileSource, IoChoice, IoOptions, IoThread, Profile, Read, SimOptions,
};

const SIZE: u32 = 4096;
const PLACES: u64 = 4096;

/// Reads submitted and completed per second, by batch size: neurons scattered over the file, and
/// adjacent ones that are merged.
fn batches(c: &mut Criterion) {
    let mut file = tempfile::NamedTempFile::new().expect("temporary file");
    let data: Vec<u8> = (0..PLACES * u64::from(SIZE))
        .map(|i| (i % 251) as u8)
        .collect();
    file.write_all(&data).expect("write");
    let quiet = SimOptions::new(Profile::Nvme, 1).faulty(Faults::default());
    let engines = [
        ("uring", IoChoice::Uring),
        ("pread", IoChoice::Pread),
        ("sim", IoChoice::Sim(quiet)),
    ];
    let mut group = c.benchmark_group("io_batch");
    for (name, choice) in engines {
        for (pattern, step) in [("random", 1237), ("neighbours", 1)] {
            for batch in [1u32, 16, 256] {
                // buffered intentionally: the page cache serves the reads
                let source = FileSource::buffered_only(file.reopen().expect("reopen"), "bench", 0);
                let io = match IoThread::spawn(source, choice, IoOptions::default()) {
                    Ok(io) => io,
                    Err(reason) => {
                        eprintln!("SKIPPED {name}: {reason}");
                        break;
                    }
                };
                let options = ArenaOptions::default();
                let mut arena = Arena::new(batch, SIZE as usize, 4096, options).expect("arena");
                let mut slots: Vec<Slot> = std::iter::from_fn(|| arena.take()).collect();
                let mut reads: Vec<Read> = Vec::with_capacity(batch as usize);
                let mut done: Vec<Completion> = Vec::with_capacity(batch as usize);
                let mut place = 0u64;
                group.throughput(Throughput::Elements(u64::from(batch)));
                group.bench_function(format!("{name}/{pattern}/{batch}"), |b| {
                    b.iter(|| {
                        for slot in slots.drain(..) {
                            place = (place + step) % PLACES;
                            reads.push(Read::new(0, place * u64::from(SIZE), SIZE, slot));
                        }
                        io.submit(&mut reads).expect("submit");
                        io.wait(&mut done, batch as usize).expect("wait");
                        for c in done.drain(..) {
                            c.result.expect("read");
                            slots.push(c.slot);
                        }
                    });
                });
            }
        }
    }
    group.finish();
}

/// Starting and ending a thread with its engine, once per run.
fn start(c: &mut Criterion) {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    c.bench_function("io_spawn_drop", |b| {
        b.iter_batched(
            || FileSource::buffered_only(file.reopen().expect("reopen"), "bench", 0),
            |source| IoThread::spawn(source, IoChoice::Auto, IoOptions::default()),
            BatchSize::PerIteration,
        );
    });
}

criterion_group!(benches, batches, start);
criterion_main!(benches);
