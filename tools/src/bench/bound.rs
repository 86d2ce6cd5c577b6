//! Lower bound of the time of a token: max(bytes computed / memory bandwidth, bytes missed / disk throughput).

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

/// Queue depths at which the device is measured.
const DEPTHS: [u32; 2] = [32, 128];

/// Explanation of the bound.
pub const NOTE: &str = "bound: the greater of bytes computed / memory bandwidth, measured in the run, and bytes \
     missed / disk throughput at that read length, measured before each round (omitted if a run \
     was faster: then the disk was slow while it was measured)";

/// The storage device of a model, real or simulated.
pub struct Device {
    source: DeviceSource,
    len: u64,
}

enum DeviceSource {
    /// Measured before every round, since shared disks vary.
    Real {
        target: Box<Target>,
        engine: IoChoice,
        points: Vec<Point>,
        quick: bool,
    },
    /// A model, which needs no measurement.
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
                DeviceSource::Simulated(Box::new(ReadCost::simulated(&options, depth, len)))
            }
            // What `auto` chooses if available.
            IoChoice::Auto if target.works(IoChoice::Uring).is_ok() => {
                real(target, IoChoice::Uring, quick)
            }
            IoChoice::Auto => real(target, IoChoice::Pread, quick),
            _ => real(target, choice, quick),
        };
        Ok(Self { source, len })
    }

    /// Whether reads come from the page cache, paced by a model.
    pub fn is_simulated(&self) -> bool {
        matches!(self.source, DeviceSource::Simulated(_))
    }

    /// Measures a real device for about a second. The fastest measurement of a benchmark counts.
    pub fn measure(&mut self) -> Result<(), Failure> {
        let DeviceSource::Real {
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

    /// Throughput of random reads of `bytes` bytes at high queue depth, in MB/s.
    pub fn random_mb_per_s(&self, bytes: f64) -> f64 {
        let bytes = bytes.clamp(512.0, f64::from(1 << 20));
        match &self.source {
            DeviceSource::Real { points, .. } => {
                let engine = points.first().map_or("", |p| p.engine.as_str()).to_owned();
                let profile = self.profile(points);
                let rate = profile.random_mb_per_s(&engine, bytes as u32, self.len);
                rate.unwrap_or_default()
            }
            DeviceSource::Simulated(cost) => {
                bytes * 1e3 / cost.read_ns(bytes as u64, Pattern::Random).max(1e-9)
            }
        }
    }

    /// Throughput of sequential reads, in MB/s.
    pub fn sequential_mb_per_s(&self) -> f64 {
        const LEN: u64 = 1 << 20;
        match &self.source {
            DeviceSource::Real { points, .. } => {
                let engine = points.first().map_or("", |p| p.engine.as_str()).to_owned();
                let rate = self.profile(points).sequential_mb_per_s(&engine);
                rate.unwrap_or_default()
            }
            DeviceSource::Simulated(cost) => {
                LEN as f64 * 1e3 / cost.read_ns(LEN, Pattern::Sequential).max(1e-9)
            }
        }
    }

    fn profile(&self, points: &[Point]) -> DeviceProfile {
        let file = match &self.source {
            DeviceSource::Real { target, .. } => target.facts().clone(),
            DeviceSource::Simulated(_) => Default::default(),
        };
        DeviceProfile::new(Machine::default(), file, points.to_vec())
    }
}

fn real(target: Target, engine: IoChoice, quick: bool) -> DeviceSource {
    DeviceSource::Real {
        target: Box::new(target),
        engine,
        points: Vec::new(),
        quick,
    }
}

/// Lower bound of the time of a token, and the measured time relative to it.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Bound {
    /// Bytes of weights, keys and values that a token is computed from.
    pub computed_bytes: f64,
    /// Memory bandwidth in GB/s.
    pub memory_gb_per_s: f64,
    /// computed_bytes / memory bandwidth, in milliseconds; 0 if the bandwidth was not measured.
    pub memory_ms: f64,
    /// Bytes read per token.
    pub read_bytes: f64,
    /// Mean read length in bytes.
    pub read_len: f64,
    /// Disk throughput at that length in MB/s; 0 if the run was faster.
    pub disk_mb_per_s: f64,
    /// read_bytes / disk throughput, in milliseconds.
    pub disk_ms: f64,
    /// The maximum of both times.
    pub ms: f64,
    /// Measured token time / bound; 0 if unknown.
    pub ratio: f64,
}

impl Bound {
    /// The bound for `run`. `memory` is the memory bandwidth in GB/s for runs without a hot region, which cannot
    /// measure it.
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
            // Only the reads at the start are ours; the others are page faults.
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
        // If the run was faster than the measurement, the disk was slow during the measurement.
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

    /// The last cells of a table row: milliseconds, limit, and measured / bound.
    pub fn cells(&self, of_bound: crate::stats::Range) -> [String; 3] {
        [
            format!("{:.2}", self.ms),
            self.limit().to_owned(),
            of_bound.show(2),
        ]
    }

    /// The limiting resource.
    pub fn limit(&self) -> &'static str {
        if self.disk_ms > self.memory_ms {
            "disk"
        } else {
            "memory"
        }
    }
}
