//! The lower bound of a token's time: the weights it is computed with must come from memory, and
//! those that are missing from the device.

use std::time::Duration;

use emberflow_storage::io::IoChoice;
use emberflow_storage::profile::{
    DeviceProfile, Machine, MeasurePlan, Pattern, Point, ReadCost, Target, measure,
};
use serde::Serialize;

use super::child::{Run, mean};
use super::facts::file_of;
use crate::Failure;
use crate::cli::ModelArg;

/// Reads under way at which a device is asked for its speed.
const DEPTHS: [u32; 2] = [32, 128];

/// What a reader should know of the bound.
pub const NOTE: &str = "bound: the greater of bytes computed / speed of memory, measured in the run, and bytes \
     missed / speed of the disk at that read length, measured before each round (left out where a run \
     was faster: then the disk was measured in a slow moment)";

/// The device under a model, measured or simulated.
pub struct Device {
    source: Source,
    len: u64,
}

enum Source {
    /// Measured before every round, as shared disks change their speed.
    Real {
        target: Box<Target>,
        engine: IoChoice,
        points: Vec<Point>,
        quick: bool,
    },
    /// A model is as fast as it says.
    Simulated(Box<ReadCost>),
}

impl Device {
    /// The device that runs of `model` with `--io CHOICE` read from.
    pub fn open(model: &ModelArg, io: &str, quick: bool) -> Result<Self, Failure> {
        let choice: IoChoice = io.parse().map_err(Failure::usage)?;
        let path = file_of(model)?;
        let target = Target::open(&path)?;
        let len = target.facts().len;
        let source = match choice {
            IoChoice::Sim(options) => {
                let depth = DEPTHS[DEPTHS.len() - 1];
                Source::Simulated(Box::new(ReadCost::simulated(&options, depth, len)))
            }
            // What `auto` takes where it can.
            IoChoice::Auto if target.works(IoChoice::Uring).is_ok() => {
                real(target, IoChoice::Uring, quick)
            }
            IoChoice::Auto => real(target, IoChoice::Pread, quick),
            _ => real(target, choice, quick),
        };
        Ok(Self { source, len })
    }

    /// Whether reads come from the page cache, at the pace of a model.
    pub fn is_simulated(&self) -> bool {
        matches!(self.source, Source::Simulated(_))
    }

    /// Measures a real device, about a second; the best that was seen in a benchmark counts, as a
    /// slow moment is no bound.
    pub fn measure(&mut self) -> Result<(), Failure> {
        let Source::Real {
            target,
            engine,
            points,
            quick,
        } = &mut self.source
        else {
            return Ok(());
        };
        let mut plan = MeasurePlan::quick(vec![*engine]);
        plan.depths = DEPTHS.to_vec();
        plan.time = Duration::from_millis(50);
        if *quick {
            plan.depths.truncate(1);
            plan.time = Duration::from_millis(20);
        }
        points.extend(measure(target, &plan, |_| {})?.points);
        Ok(())
    }

    /// 10^6 bytes per second of random reads of this length, many at once.
    pub fn random_mb_per_s(&self, bytes: f64) -> f64 {
        let bytes = bytes.clamp(512.0, f64::from(1 << 20));
        match &self.source {
            Source::Real { points, .. } => {
                let engine = points.first().map_or("", |p| p.engine.as_str()).to_owned();
                let profile = self.profile(points);
                let rate = profile.random_mb_per_s(&engine, bytes as u32, self.len);
                rate.unwrap_or_default()
            }
            Source::Simulated(cost) => {
                bytes * 1e3 / cost.read_ns(bytes as u64, Pattern::Random).max(1e-9)
            }
        }
    }

    /// 10^6 bytes per second of sequential reads.
    pub fn sequential_mb_per_s(&self) -> f64 {
        const LEN: u64 = 1 << 20;
        match &self.source {
            Source::Real { points, .. } => {
                let engine = points.first().map_or("", |p| p.engine.as_str()).to_owned();
                let rate = self.profile(points).sequential_mb_per_s(&engine);
                rate.unwrap_or_default()
            }
            Source::Simulated(cost) => {
                LEN as f64 * 1e3 / cost.read_ns(LEN, Pattern::Sequential).max(1e-9)
            }
        }
    }

    fn profile(&self, points: &[Point]) -> DeviceProfile {
        let file = match &self.source {
            Source::Real { target, .. } => target.facts().clone(),
            Source::Simulated(_) => Default::default(),
        };
        DeviceProfile::new(Machine::default(), file, points.to_vec())
    }
}

fn real(target: Target, engine: IoChoice, quick: bool) -> Source {
    Source::Real {
        target: Box::new(target),
        engine,
        points: Vec::new(),
        quick,
    }
}

/// What a token has to take, and what it takes of that.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Bound {
    /// Bytes of weights, keys and values that a token is computed from.
    pub computed_bytes: f64,
    /// 10^9 bytes per second of the memory they are in.
    pub memory_gb_per_s: f64,
    /// Milliseconds of a token for that; 0 where the memory was not measured.
    pub memory_ms: f64,
    /// Bytes that a token misses.
    pub read_bytes: f64,
    /// Mean length of its reads, in bytes.
    pub read_len: f64,
    /// 10^6 bytes per second of the device at that length; 0 where the run itself was faster.
    pub disk_mb_per_s: f64,
    /// Milliseconds of a token for that.
    pub disk_ms: f64,
    /// The greater of both times.
    pub ms: f64,
    /// What the token took, as a multiple of that; 0 where nothing is known.
    pub ratio: f64,
}

impl Bound {
    /// The bound of the decoding of `run`. `memory` is the speed of memory in 10^9 bytes per
    /// second where the run has no hot region to measure it with.
    pub fn of(run: &Run, device: &Device, memory: f64) -> Self {
        let d = &run.details;
        let passes = d.ms.len().max(1) as f64;
        let per_pass = |values: &[u64]| values.iter().sum::<u64>() as f64 / passes;
        let texts = run.best_of.as_ref().map_or(1, |b| b.samples.len());
        let positions = texts as f64 * (run.prompt_tokens as f64 + passes / 2.0);
        let computed_bytes = d.dense_bytes as f64
            + positions * d.kv_bytes_per_position as f64
            + per_pass(&d.ffn_bytes);
        let own = d.memory_gb_per_s;
        let memory_gb_per_s = if own > 0.0 { own } else { memory };
        let (read_bytes, reads) = match run.policy.as_str() {
            // Its reads are the system's; ours are those of the start.
            "mmap" => (0.0, 0.0),
            _ => (per_pass(&d.bytes_read), per_pass(&d.reads)),
        };
        let read_len = if reads > 0.0 { read_bytes / reads } else { 0.0 };
        let disk_mb_per_s = if reads > 0.0 {
            device.random_mb_per_s(read_len)
        } else {
            0.0
        };
        let time = |bytes: f64, rate: f64| if rate > 0.0 { bytes / rate } else { 0.0 };
        let memory_ms = time(computed_bytes / 1e6, memory_gb_per_s);
        let disk_ms = 1e3 * time(read_bytes / 1e6, disk_mb_per_s);
        // A disk that gave more than was measured of it was measured in a slow moment.
        let refuted = disk_ms > mean(&d.ms);
        let [disk_mb_per_s, disk_ms] =
            [disk_mb_per_s, disk_ms].map(|v| if refuted { 0.0 } else { v });
        let ms = memory_ms.max(disk_ms);
        Self {
            computed_bytes,
            memory_gb_per_s,
            memory_ms,
            read_bytes,
            read_len,
            disk_mb_per_s,
            disk_ms,
            ms,
            ratio: time(mean(&d.ms), ms),
        }
    }

    /// The last cells of a table for people: milliseconds, what limits, and how far off a run is.
    pub fn cells(&self, of_bound: crate::stats::Range) -> [String; 3] {
        [
            format!("{:.2}", self.ms),
            self.limit().to_owned(),
            of_bound.show(2),
        ]
    }

    /// What limits.
    pub fn limit(&self) -> &'static str {
        if self.disk_ms > self.memory_ms {
            "disk"
        } else {
            "memory"
        }
    }
}
