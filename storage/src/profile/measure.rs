//! Measurement loop: keeps the I/O thread supplied with reads and counts completions.

use std::time::{Duration, Instant};

use super::{Pattern, Point, ProfileError, Target};
use crate::arena::{Arena, ArenaOptions, Slot};
use crate::io::{Completion, IoChoice, IoError, IoOptions, IoThread, Read, process_cpu_ns};
use crate::limits::Limits;
use crate::random::Random;

/// Bytes that may be queued behind those in flight.
const AHEAD: u32 = 4 << 20;

/// Alignment of slots, which satisfies every direct I/O in use.
const ALIGN: u32 = 4096;

/// Sizes of random reads: one page, bundles of small and large models, and a large block.
const RANDOM: [u32; 5] = [4 << 10, 8 << 10, 24 << 10, 64 << 10, 512 << 10];
const SEQUENTIAL: u32 = 1 << 20;

/// Intervals of [`settle`], each with its own rate, and the number of them that must agree.
const SETTLING: u32 = 40;
const STEADY: usize = 6;

/// Which points to measure, and for how long.
#[derive(Debug, Clone)]
pub struct MeasurePlan {
    /// Engines.
    pub engines: Vec<IoChoice>,
    /// Bytes per random read, multiples of 4096.
    pub random: Vec<u32>,
    /// Bytes per sequential read, multiples of 4096.
    pub sequential: Vec<u32>,
    /// Depths for every size.
    pub depths: Vec<u32>,
    /// Address ranges in bytes in addition to the whole file; those larger than the file are
    /// skipped.
    pub ranges: Vec<u64>,
    /// Time per point, plus a quarter for latency.
    pub time: Duration,
    /// Longest time to read before measuring, until a device's burst has ended.
    pub settle: Duration,
    /// After this time no further point is begun.
    pub limit: Duration,
}

impl MeasurePlan {
    /// About one and a half minutes per engine.
    #[must_use]
    pub fn full(engines: Vec<IoChoice>) -> Self {
        Self {
            engines,
            random: RANDOM.to_vec(),
            sequential: vec![SEQUENTIAL],
            depths: vec![1, 2, 4, 8, 16, 32, 64],
            ranges: vec![128 << 20, 512 << 20],
            time: Duration::from_millis(250),
            settle: Duration::from_secs(8),
            limit: Duration::MAX,
        }
    }

    /// Some ten seconds in two rounds; the whole file only.
    #[must_use]
    pub fn quick(engines: Vec<IoChoice>) -> Self {
        Self {
            engines,
            random: RANDOM.to_vec(),
            sequential: vec![SEQUENTIAL],
            depths: vec![1, 8, 32],
            ranges: Vec::new(),
            time: Duration::from_millis(80),
            settle: Duration::from_secs(2),
            limit: Duration::MAX,
        }
    }

    /// A few reads: a fifth of a second, half a second on a slow device. The lengths that matter
    /// most come first.
    #[must_use]
    pub fn brief(engine: IoChoice) -> Self {
        Self {
            engines: vec![engine],
            random: vec![64 << 10, 512 << 10, 4 << 10, 16 << 10],
            sequential: vec![SEQUENTIAL],
            depths: vec![32, 4, 1],
            ranges: Vec::new(),
            time: Duration::from_millis(10),
            settle: Duration::ZERO,
            limit: Duration::from_millis(400),
        }
    }

    /// The points for a file of `len` bytes, grouped by size to reuse memory.
    fn work(&self, len: u64) -> Vec<Work> {
        let mut ranges: Vec<u64> = self.ranges.iter().copied().filter(|&r| r < len).collect();
        ranges.push(len);
        let mut all = Vec::new();
        let mut add = |pattern, size: u32, ranges: &[u64]| {
            for &range in ranges.iter().filter(|&&r| r >= u64::from(size)) {
                for &depth in &self.depths {
                    for &engine in &self.engines {
                        all.push(Work {
                            engine,
                            pattern,
                            size,
                            depth: depth.max(1),
                            range,
                        });
                    }
                }
            }
        };
        for &size in &self.random {
            add(Pattern::Random, size, &ranges);
        }
        // Sequential reads do not depend on the range.
        for &size in &self.sequential {
            add(Pattern::Sequential, size, &[len]);
        }
        all
    }

    /// Number of points for a file of `len` bytes.
    #[must_use]
    pub fn points(&self, len: u64) -> usize {
        self.work(len).len()
    }
}

/// One point to measure.
#[derive(Debug, Clone, Copy)]
struct Work {
    engine: IoChoice,
    pattern: Pattern,
    size: u32,
    depth: u32,
    range: u64,
}

impl Work {
    /// Reads per batch, and reads kept outstanding. The device's queue never runs dry while the
    /// submitting thread wakes up and submits again.
    fn supply(&self) -> (u32, u32) {
        let chunk = (self.depth * 2).max(32).min(AHEAD / self.size).max(1);
        (chunk, self.depth + chunk * 2)
    }

    /// Disables merging and splitting, so that a read is one command and `depth` is exact.
    fn limits(&self, keep: u32) -> Limits {
        // A lane runs one read and has the next one queued.
        let ahead = if self.engine == IoChoice::Pread { 2 } else { 1 };
        Limits {
            depth: self.depth * ahead,
            lanes: self.depth,
            queued: keep as usize * 2,
            block: self.size,
            pieces: 1,
            gap: 0,
            ..Limits::PRODUCTION
        }
    }
}

/// One measurement of all points.
#[derive(Debug)]
pub struct Round {
    /// The points.
    pub points: Vec<Point>,
    /// Bytes read for them, including latencies and warm-up.
    pub bytes: u64,
}

/// What long reads gave before the points were measured, 10^6 bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settled {
    /// At the start.
    pub first: f64,
    /// At the end.
    pub last: f64,
    /// Bytes read for that.
    pub bytes: u64,
}

/// Reads large blocks until the rate has fallen and is steady, or for `most`. Disks limited by
/// their host, and flash with a fast cache, are faster in the first seconds than later.
///
/// # Errors
/// The first failure of the engine or a read.
pub fn settle(target: &Target, engine: IoChoice, most: Duration) -> Result<Settled, ProfileError> {
    let work = Work {
        engine,
        pattern: Pattern::Sequential,
        size: u32::try_from(target.facts.len).map_or(SEQUENTIAL, |len| len.min(SEQUENTIAL)) / ALIGN
            * ALIGN,
        depth: 8,
        range: target.facts.len,
    };
    let (_arena, mut slots) = slots_for(&[work])?;
    let (mut rates, mut bytes) = (Vec::new(), 0);
    let start = Instant::now();
    while rates.is_empty() || start.elapsed() < most {
        let (point, read) = one(target, work, most / SETTLING, &mut slots)?;
        rates.push(point.mb_per_s);
        bytes += read;
        if has_settled(&rates) {
            break;
        }
    }
    let last = &rates[rates.len().saturating_sub(STEADY)..];
    Ok(Settled {
        first: rates.first().copied().unwrap_or(0.0),
        last: last.iter().sum::<f64>() / last.len().max(1) as f64,
        bytes,
    })
}

/// Whether the last rates are steady, well below the highest.
fn has_settled(rates: &[f64]) -> bool {
    let Some((before, last)) = rates.split_at_checked(rates.len().wrapping_sub(STEADY)) else {
        return false;
    };
    let most = last.iter().copied().fold(0.0, f64::max);
    let least = last.iter().copied().fold(f64::MAX, f64::min);
    let highest = before.iter().copied().fold(0.0, f64::max);
    most < 1.15 * least && most < 0.8 * highest
}

/// Memory for the reads of some points of one size. The arena must outlive the use of its slots.
fn slots_for(group: &[Work]) -> Result<(Arena, Vec<Slot>), ProfileError> {
    let count = group.iter().map(|w| w.supply().1).max().unwrap_or(1);
    let size = group.first().map_or(ALIGN, |w| w.size);
    let huge = ArenaOptions {
        huge_pages: true,
        ..ArenaOptions::default()
    };
    let mut arena = Arena::new(count, size as usize, ALIGN as usize, huge)?;
    let mut slots: Vec<Slot> = std::iter::from_fn(|| arena.take()).collect();
    for slot in &mut slots {
        // Fault pages in before the clock starts.
        slot.as_mut_slice().fill(1);
    }
    Ok((arena, slots))
}

/// Measures all points of `plan`; calls `tick` after each. The caller must leave out engines that
/// do not work here.
///
/// # Errors
/// The first failure of an engine or a read.
pub fn measure(
    target: &Target,
    plan: &MeasurePlan,
    mut tick: impl FnMut(&Point),
) -> Result<Round, ProfileError> {
    let work = plan.work(target.facts.len);
    let (mut points, mut bytes) = (Vec::with_capacity(work.len()), 0);
    let start = Instant::now();
    for group in work.chunk_by(|a, b| a.size == b.size) {
        if start.elapsed() >= plan.limit {
            break;
        }
        let (_arena, mut slots) = slots_for(group)?;
        for &work in group {
            if start.elapsed() >= plan.limit {
                break;
            }
            let (point, read) = one(target, work, plan.time, &mut slots)?;
            tick(&point);
            points.push(point);
            bytes += read;
        }
    }
    Ok(Round { points, bytes })
}

fn one(
    target: &Target,
    work: Work,
    time: Duration,
    slots: &mut Vec<Slot>,
) -> Result<(Point, u64), ProfileError> {
    let (chunk, keep) = work.supply();
    let options = IoOptions {
        limits: work.limits(keep),
        ..IoOptions::default()
    };
    let io = IoThread::spawn(target.source()?, work.engine, options)?;
    let mut supplier = Supplier::new(&io, &work, keep);
    // Latency first, which also warms up.
    let mut alone = supplier.run(slots, work.depth, 1, time / 4)?;
    let (before, all_before) = (io.stats(), process_cpu_ns());
    let pass = supplier.run(slots, keep, chunk, time)?;
    let (after, all_after) = (io.stats(), process_cpu_ns());
    alone.latencies.sort_unstable();
    let percentile = |p: usize| {
        let at = (alone.latencies.len() * p / 100).min(alone.latencies.len().saturating_sub(1));
        alone
            .latencies
            .get(at)
            .map_or(0.0, |ns| *ns as f64 / 1000.0)
    };
    let per_read = |ns: u64| {
        let reads = after.reads.saturating_sub(before.reads).max(1);
        ns as f64 / 1000.0 / reads as f64
    };
    let iops = pass.reads as f64 / pass.time.as_secs_f64().max(1e-9);
    let point = Point {
        engine: io.engine().to_owned(),
        pattern: work.pattern,
        size: work.size,
        depth: work.depth,
        range: work.range,
        mb_per_s: iops * f64::from(work.size) / 1e6,
        iops,
        io_cpu_us_per_read: per_read(after.cpu_ns.saturating_sub(before.cpu_ns)),
        cpu_us_per_read: per_read(all_after.saturating_sub(all_before)),
        p50_us: percentile(50),
        p99_us: percentile(99),
        reads: pass.reads,
    };
    Ok((point, io.stats().bytes))
}

/// Reads counted between the first and the last clock reading.
#[derive(Default)]
struct Pass {
    reads: u64,
    time: Duration,
    /// Nanoseconds from submission to completion.
    latencies: Vec<u64>,
}

/// The submitting side.
struct Supplier<'a> {
    io: &'a IoThread,
    size: u32,
    pattern: Pattern,
    /// Number of whole reads in the range.
    places: u64,
    next: u64,
    random: Random,
    /// Submission time by tag.
    started: Vec<Instant>,
    batch: Vec<Read>,
    done: Vec<Completion>,
}

impl<'a> Supplier<'a> {
    fn new(io: &'a IoThread, work: &Work, keep: u32) -> Self {
        let keep = keep as usize;
        Self {
            io,
            size: work.size,
            pattern: work.pattern,
            places: (work.range / u64::from(work.size)).max(1),
            next: 0,
            random: Random(1),
            started: vec![Instant::now(); keep],
            batch: Vec::with_capacity(keep),
            done: Vec::with_capacity(keep),
        }
    }

    /// Offset of the next read: random, or sequential in the range.
    fn offset(&mut self) -> u64 {
        let place = match self.pattern {
            Pattern::Sequential => self.next,
            Pattern::Random => self.random.next(),
        };
        self.next += 1;
        place % self.places * u64::from(self.size)
    }

    fn ask(&mut self, tag: u64, slot: Slot, now: Instant) {
        let offset = self.offset();
        if let Some(started) = self.started.get_mut(tag as usize) {
            *started = now;
        }
        self.batch.push(Read::new(tag, offset, self.size, slot));
    }

    /// Keeps `keep` reads outstanding for `time`, and submits again after every `chunk`
    /// completions. Afterwards all slots are back and the I/O thread is idle.
    fn run(
        &mut self,
        slots: &mut Vec<Slot>,
        keep: u32,
        chunk: u32,
        time: Duration,
    ) -> Result<Pass, IoError> {
        let now = Instant::now();
        for tag in 0..u64::from(keep) {
            let Some(slot) = slots.pop() else { break };
            self.ask(tag, slot, now);
        }
        self.io.submit(&mut self.batch)?;
        let mut pass = Pass::default();
        let mut began: Option<Instant> = None;
        // Do not count until the device has reached its full depth.
        let mut ramp = i64::from(keep);
        let mut going = true;
        while going {
            self.io.wait(&mut self.done, chunk as usize)?;
            let now = Instant::now();
            let mut done = std::mem::take(&mut self.done);
            match began {
                None => {
                    ramp -= done.len() as i64;
                    began = (ramp <= 0).then_some(now);
                }
                Some(began) => {
                    pass.reads += done.len() as u64;
                    pass.time = now - began;
                    going = pass.time < time;
                    let since = |c: &Completion| {
                        let started = self.started.get(c.tag as usize).copied();
                        (now - started.unwrap_or(now)).as_nanos() as u64
                    };
                    if chunk == 1 {
                        pass.latencies.extend(done.iter().map(since));
                    }
                }
            }
            for c in done.drain(..) {
                c.result?;
                if going {
                    self.ask(c.tag, c.slot, now);
                } else {
                    slots.push(c.slot);
                }
            }
            self.done = done;
            self.io.submit(&mut self.batch)?;
        }
        self.io.wait(&mut self.done, self.io.outstanding())?;
        for c in self.done.drain(..) {
            c.result?;
            slots.push(c.slot);
        }
        Ok(pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Profile, SimOptions};
    use crate::profile::Conditions;

    fn target(len: usize) -> Target {
        let file = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8 + 1).collect();
        std::io::Write::write_all(&mut &file, &data).unwrap();
        Target::unnamed(file, &std::env::temp_dir()).unwrap()
    }

    #[test]
    fn work_covers_what_the_file_holds() {
        let plan = MeasurePlan::full(vec![IoChoice::Pread]);
        // Three ranges for five sizes, one for the sequential size; seven depths each.
        assert_eq!(plan.points(1 << 30), (5 * 3 + 1) * 7);
        assert_eq!(plan.points(64 << 20), (5 + 1) * 7);
        // 100 KiB is too small for 512 KiB or 1 MiB
        assert_eq!(plan.points(100 << 10), 4 * 7);
        for w in plan.work(1 << 30) {
            let (chunk, keep) = w.supply();
            assert!(chunk >= 1 && keep > w.depth + chunk, "{w:?}");
            assert!(u64::from(keep) * u64::from(w.size) <= 80 << 20, "{w:?}");
        }
    }

    #[test]
    fn a_simulated_device_measures_as_it_is_modelled() {
        let sim = IoChoice::Sim(SimOptions::new(Profile::Emmc, 1));
        let mut plan = MeasurePlan::quick(vec![sim]);
        plan.depths = vec![32];
        let mut ticks = 0;
        let points = (measure(&target(2 << 20), &plan, |_| ticks += 1).unwrap()).points;
        assert_eq!((points.len(), ticks), (6, 6));
        for (at, want) in [(0, 40.0), (4, 250.0)] {
            let p = &points[at];
            // A busy machine may be late, but never early.
            let share = p.mb_per_s / want;
            assert!((0.5..1.1).contains(&share), "{p:?}");
            assert!(
                p.engine == "sim" && p.reads > 0 && p.p50_us > 150.0,
                "{p:?}"
            );
            assert!(p.p99_us >= p.p50_us && p.cpu_us_per_read > 0.0, "{p:?}");
        }
    }

    #[test]
    fn every_engine_reads_only_and_gives_its_slots_back() {
        let plan = MeasurePlan {
            time: Duration::from_millis(2),
            ..MeasurePlan::quick(vec![IoChoice::Auto, IoChoice::Pread])
        };
        let round = measure(&target(1 << 20), &plan, |_| ()).unwrap();
        let points = round.points;
        assert_eq!(points.len(), 6 * 3 * 2);
        let counted = |p: &Point| p.reads * u64::from(p.size);
        assert!(round.bytes >= points.iter().map(counted).sum());
        assert!(points.iter().all(|p| p.iops > 0.0 && p.p50_us > 0.0));
    }

    #[test]
    fn a_burst_is_waited_for() {
        let settled = |rates: &[f64]| has_settled(rates);
        assert!(!settled(&[]));
        assert!(!settled(&[900.0; 20]), "no burst was seen yet");
        let fallen = [2300.0, 2200.0, 1500.0, 800.0, 790.0, 810.0, 805.0, 800.0];
        assert!(!settled(&fallen));
        assert!(settled(&[&fallen[..], &[795.0]].concat()));
        let sim = IoChoice::Sim(SimOptions::new(Profile::Ufs4, 1));
        let most = Duration::from_millis(40);
        let seen = settle(&target(2 << 20), sim, most).unwrap();
        assert!(seen.first > 0.0 && seen.last > 0.0 && seen.bytes > 0);
    }

    #[test]
    fn holes_and_what_no_device_gave_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        let sparse = Target::unnamed(file, &std::env::temp_dir()).unwrap();
        let error = sparse.filled().unwrap_err().to_string();
        assert!(error.contains("holes are not read"), "{error}");
        let full = target(1 << 20);
        full.filled().unwrap();
        let gave = |device_bytes| Conditions {
            device_bytes,
            ..Conditions::default()
        };
        full.proven(1000, &gave(None)).unwrap();
        full.proven(1000, &gave(Some(0.99))).unwrap();
        let error = full.proven(1000, &gave(Some(0.5))).unwrap_err().to_string();
        assert!(error.contains("the device gave 500"), "{error}");
    }

    #[test]
    fn a_file_without_content_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let error = Target::unnamed(file, &std::env::temp_dir()).unwrap_err();
        assert!(error.to_string().contains("has 0 bytes"), "{error}");
    }
}
