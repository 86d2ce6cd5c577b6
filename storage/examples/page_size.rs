//! Benefit of huge pages for slots: random reads of slots in memory, direct reads from a file into
//! slots, and the first touch. Alternates small and huge pages, so that drift of the machine
//! affects both alike; the table shows medians.
//!
//! `cargo run --release -p emberflow-storage --example page_size -- FILE [ROUNDS] [MIB]`
//!
//! FILE is only read; it should be larger than 1 GiB and be on the disk to measure. MIB is the
//! memory for the reads from memory, 1024 by default.

use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::io::{FileSource, IoChoice, IoOptions, IoThread, Read};
use emberflow_storage::limits::Limits;
use fastrand::Rng;

const KIB: usize = 1 << 10;
const ALIGN: usize = 4096;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn slots(huge_pages: bool, bytes: usize, len: usize) -> Result<Vec<Slot>> {
    let options = ArenaOptions {
        huge_pages,
        populate: true,
        ..ArenaOptions::default()
    };
    let mut arena = Arena::new((bytes / len) as u32, len, ALIGN, options)?;
    Ok(std::iter::from_fn(|| arena.take()).collect())
}

/// GB/s of summing whole slots in random order, on one thread.
fn memory(huge: bool, bytes: usize, len: usize) -> Result<f64> {
    let mut all = slots(huge, bytes, len)?;
    for slot in &mut all {
        slot.as_mut_slice().fill(1);
    }
    let reads = (bytes / len).min(256 * KIB * KIB / len);
    let mut random = Rng::with_seed(7);
    let began = Instant::now();
    let mut sum = 0u64;
    for _ in 0..reads {
        let slot = &all[random.usize(..all.len())];
        let (words, _) = slot.as_slice().as_chunks::<8>();
        sum = (words.iter()).fold(sum, |s, w| s.wrapping_add(u64::from_le_bytes(*w)));
    }
    black_box(sum);
    Ok((reads * len) as f64 / began.elapsed().as_secs_f64() / 1e9)
}

/// MB/s of direct reads. Each run of `run` adjacent reads merges into one command; each read has
/// its own slot.
fn disk(huge: bool, file: &Path, len: usize, run: usize) -> Result<f64> {
    const WAVE: usize = 16 << 20;
    const WAVES: usize = 12;
    let source = FileSource::open(file, 0)?;
    let places = std::fs::metadata(file)?.len() / (len * run) as u64;
    let options = IoOptions {
        limits: Limits::PRODUCTION,
        ..IoOptions::default()
    };
    let io = IoThread::spawn(source, IoChoice::Auto, options)?;
    let per_wave = (WAVE / (len * run)).max(1) * run;
    let mut free = slots(huge, 2 * per_wave * len, len)?;
    let (mut batch, mut done) = (Vec::new(), Vec::new());
    let mut random = Rng::new();
    let began = Instant::now();
    for wave in 0..=WAVES {
        // The next wave queues behind this one, so the device never runs dry.
        while wave < WAVES && batch.len() < per_wave {
            let at = random.u64(..places) * (len * run) as u64;
            for (i, slot) in (0..run as u64).map_while(|i| Some((i, free.pop()?))) {
                batch.push(Read::new(0, at + i * len as u64, len as u32, slot));
            }
        }
        let before = io.outstanding();
        io.submit(&mut batch)?;
        io.wait(&mut done, before)?;
        for c in done.drain(..) {
            c.result?;
            free.push(c.slot);
        }
    }
    io.wait(&mut done, io.outstanding())?;
    let bytes = io.stats().bytes;
    Ok(bytes as f64 / began.elapsed().as_secs_f64() / 1e6)
}

/// Seconds per GiB until everything is resident.
fn first_touch(huge: bool, bytes: usize, populate: bool) -> Result<f64> {
    let options = ArenaOptions {
        huge_pages: huge,
        populate,
        ..ArenaOptions::default()
    };
    let len = 64 * KIB;
    let began = Instant::now();
    let mut arena = Arena::new((bytes / len) as u32, len, ALIGN, options)?;
    while let Some(mut slot) = arena.take() {
        let bytes = slot.as_mut_slice();
        (0..len).step_by(ALIGN).for_each(|at| bytes[at] = 1);
    }
    Ok(began.elapsed().as_secs_f64() * (1 << 30) as f64 / bytes as f64)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

fn compare(
    what: &str,
    unit: &str,
    rounds: usize,
    mut one: impl FnMut(bool) -> Result<f64>,
) -> Result<()> {
    let (mut small, mut huge) = (Vec::new(), Vec::new());
    for round in 0..rounds * 2 {
        // Small, huge, huge, small: neither always comes first.
        let is_huge = matches!(round % 4, 1 | 2);
        let value = one(is_huge)?;
        if is_huge {
            huge.push(value);
        } else {
            small.push(value);
        }
    }
    let (small, huge) = (median(small), median(huge));
    println!(
        "| {what} | {small:.2} | {huge:.2} | {:.2} | {unit} |",
        huge / small
    );
    Ok(())
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let file = args.next().ok_or("FILE is missing")?;
    let file = Path::new(&file);
    let rounds = args.next().map_or(Ok(5), |n| n.parse())?;
    let bytes = args.next().map_or(Ok(1024), |n| n.parse::<usize>())? << 20;
    println!("| what | small pages | huge pages | ratio | |\n|---|---|---|---|---|");
    for len in [4, 8, 24] {
        let what = format!("random slots of {len} KiB in memory");
        compare(&what, "GB/s", rounds, |huge| memory(huge, bytes, len * KIB))?;
    }
    for (len, run) in [(4, 1), (8, 1), (24, 1), (8, 8), (24, 4)] {
        let what = format!("disk, {run} neighbours of {len} KiB");
        compare(&what, "MB/s", rounds, |huge| {
            disk(huge, file, len * KIB, run)
        })?;
    }
    for len in [64, 256, 512] {
        let what = format!("disk, random reads of {len} KiB");
        compare(&what, "MB/s", rounds, |huge| disk(huge, file, len * KIB, 1))?;
    }
    for populate in [false, true] {
        let what = if populate { "populate" } else { "first touch" };
        compare(what, "s/GiB", rounds, |huge| {
            first_touch(huge, bytes / 2, populate)
        })?;
    }
    Ok(())
}
