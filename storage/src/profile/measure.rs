//! Measurement loop: keeps the I/O thread supplied with reads and counts completions.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{FileFacts, Pattern, Point, ProfileError};
use crate::arena::{Arena, ArenaOptions, Slot};
use crate::io::{
    Completion, FileSource, IoChoice, IoError, IoOptions, IoThread, Read, process_cpu_ns,
};
use crate::limits::Limits;
use crate::random::Random;

/// Bytes that may be queued behind those in flight.
const AHEAD: u32 = 4 << 20;

/// Alignment of slots, which satisfies every direct I/O in use.
const ALIGN: u32 = 4096;

/// Sizes of random reads: one page, bundles of small and large models, and a large block.
const RANDOM: [u32; 5] = [4 << 10, 8 << 10, 24 << 10, 64 << 10, 512 << 10];
const SEQUENTIAL: u32 = 1 << 20;

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
    /// Address ranges in bytes besides the whole file; those larger than the file are skipped.
    pub ranges: Vec<u64>,
    /// Time per point, plus a quarter for latency.
    pub time: Duration,
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
        }
    }

    /// A few seconds; the whole file only.
    #[must_use]
    pub fn quick(engines: Vec<IoChoice>) -> Self {
        Self {
            engines,
            random: RANDOM.to_vec(),
            sequential: vec![SEQUENTIAL],
            depths: vec![1, 8, 32],
            ranges: Vec::new(),
            time: Duration::from_millis(50),
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

/// The file to read.
#[derive(Debug)]
pub struct Target {
    file: File,
    facts: FileFacts,
}

impl Target {
    /// An existing file, opened read-only.
    ///
    /// # Errors
    /// [`ProfileError::File`] if it cannot be opened, [`ProfileError::Small`] below 4 KiB.
    pub fn open(path: &Path) -> Result<Self, ProfileError> {
        let file = File::open(path).map_err(ProfileError::file(path))?;
        let facts = FileFacts::of(path)?;
        Self::with(file, facts)
    }

    /// A file that is already open and may be unlinked; `dir` is where it was created.
    ///
    /// # Errors
    /// As [`Target::open`].
    pub fn unnamed(file: File, dir: &Path) -> Result<Self, ProfileError> {
        let meta = file.metadata().map_err(ProfileError::file(dir))?;
        let facts = FileFacts {
            path: PathBuf::from("temporary file"),
            len: meta.len(),
            ..FileFacts::of(dir)?
        };
        Self::with(file, facts)
    }

    fn with(file: File, mut facts: FileFacts) -> Result<Self, ProfileError> {
        let needed = u64::from(RANDOM[0]);
        if facts.len < needed {
            return Err(ProfileError::Small {
                path: facts.path,
                len: facts.len,
                needed,
            });
        }
        let label = facts.path.display().to_string();
        let copy = file.try_clone().map_err(ProfileError::file(&facts.path))?;
        let align = FileSource::from_file(copy, label, 0).dio_align();
        facts.sector = align.map(|a| a.offset);
        facts.memory_align = align.map(|a| a.mem);
        Ok(Self { file, facts })
    }

    /// Facts about the file.
    #[must_use]
    pub fn facts(&self) -> &FileFacts {
        &self.facts
    }

    /// Whether an engine can be opened on the file.
    ///
    /// # Errors
    /// The reason if it cannot.
    pub fn works(&self, engine: IoChoice) -> Result<(), ProfileError> {
        IoThread::spawn(self.source()?, engine, IoOptions::default())?;
        Ok(())
    }

    fn source(&self) -> Result<FileSource, ProfileError> {
        let path = &self.facts.path;
        let file = self.file.try_clone().map_err(ProfileError::file(path))?;
        let label = path.display().to_string();
        Ok(match self.facts.sector {
            Some(_) => FileSource::from_file(file, label, 0),
            None => FileSource::buffered_only(file, label, 0),
        })
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

/// Measures all points of `plan`; calls `tick` after each. The caller must leave out engines that
/// do not work here.
///
/// # Errors
/// The first failure of an engine or a read.
pub fn measure(
    target: &Target,
    plan: &MeasurePlan,
    mut tick: impl FnMut(&Point),
) -> Result<Vec<Point>, ProfileError> {
    let work = plan.work(target.facts.len);
    let mut points = Vec::with_capacity(work.len());
    for group in work.chunk_by(|a, b| a.size == b.size) {
        let slots = group.iter().map(|w| w.supply().1).max().unwrap_or(1);
        let size = group.first().map_or(ALIGN, |w| w.size);
        let huge = ArenaOptions {
            huge_pages: true,
            ..ArenaOptions::default()
        };
        let mut arena = Arena::new(slots, size as usize, ALIGN as usize, huge)?;
        let mut slots: Vec<Slot> = std::iter::from_fn(|| arena.take()).collect();
        for slot in &mut slots {
            // Fault pages in before the clock starts.
            slot.as_mut_slice().fill(1);
        }
        for &work in group {
            let point = one(target, work, plan.time, &mut slots)?;
            tick(&point);
            points.push(point);
        }
    }
    Ok(points)
}

fn one(
    target: &Target,
    work: Work,
    time: Duration,
    slots: &mut Vec<Slot>,
) -> Result<Point, ProfileError> {
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
    Ok(Point {
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
    })
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
        // 100 KiB have no room for 512 KiB or 1 MiB.
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
        let points = measure(&target(2 << 20), &plan, |_| ticks += 1).unwrap();
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
        let points = measure(&target(1 << 20), &plan, |_| ()).unwrap();
        assert_eq!(points.len(), 6 * 3 * 2);
        assert!(points.iter().all(|p| p.iops > 0.0 && p.p50_us > 0.0));
    }

    #[test]
    fn a_file_without_content_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let error = Target::unnamed(file, &std::env::temp_dir()).unwrap_err();
        assert!(error.to_string().contains("has 0 bytes"), "{error}");
    }
}
