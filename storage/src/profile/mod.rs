//! Storage device profiles, measured through our own read path and saved for the planner.
//!
//! A [`DeviceProfile`] is a set of points: throughput by read size, queue depth, address range and
//! engine. PowerInfer-2 §2.3.2 shows that all four matter on phones; [`measure()`] measures them.
//! [`ReadCost`] derives decisions from such a curve, and from assumptions if nothing was measured.

mod conditions;
mod cost;
mod curves;
mod machine;
mod measure;
mod target;

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use conditions::{Conditions, Watch, spread_of_rounds};
pub use cost::{Fetch, Origin, ReadCost, Reads};
pub use machine::{FileFacts, Machine};
pub use measure::{MeasurePlan, Round, Settled, measure, settle};
pub use target::Target;

/// Version of the file format; others are rejected.
pub const VERSION: u32 = 1;

/// The fastest reads that can be, in 10^6 bytes per second: several times a machine's memory bandwidth, which limits reads from
/// the page cache too.
const FASTEST: f64 = 4e6;

/// A depth that reaches this share of the highest throughput is enough: more only adds latency.
const ENOUGH: f64 = 0.97;

/// Why a profile could not be measured, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A read or an engine failed.
    #[error(transparent)]
    Io(#[from] crate::io::IoError),
    /// Memory for reads could not be allocated.
    #[error(transparent)]
    Arena(#[from] crate::arena::ArenaError),
    /// A file could not be read, written or queried.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The file is too small for a single measurement.
    #[error("{} has {len} bytes, at least {needed} are needed to measure with", path.display())]
    Small {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// Required length in bytes.
        needed: u64,
    },
    /// Parts of the file are not on the device.
    #[error(
        "{} is {len} bytes long and {held} of them are on the device: holes are not read; measure \
         with another file, or fill it (cp --sparse=never)", path.display()
    )]
    Holes {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// Allocated bytes.
        held: u64,
    },
    /// Reads were not answered by the device.
    #[error(
        "{read} bytes of {} were read and the device gave {given}: the rest came from a cache or \
         was never written, so this measures no device; take another file, or none", path.display()
    )]
    NotRead {
        /// The file.
        path: PathBuf,
        /// Bytes read.
        read: u64,
        /// Bytes that the device counted.
        given: u64,
    },
    /// A saved profile is invalid.
    #[error("{} is no profile: {reason}; measure again with `{how}`", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// The command that creates a new one.
        how: &'static str,
    },
}

impl ProfileError {
    fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}

/// Access pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Random multiples of the size in the range.
    Random,
    /// Consecutive.
    Sequential,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// `uring`, `pread` or `sim`.
    pub engine: String,
    /// Access pattern.
    pub pattern: Pattern,
    /// Bytes per read.
    pub size: u32,
    /// Queue depth.
    pub depth: u32,
    /// Address range of the reads in bytes.
    pub range: u64,
    /// Throughput in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// Reads per second.
    pub iops: f64,
    /// CPU time of the I/O thread per read, in microseconds.
    pub io_cpu_us_per_read: f64,
    /// CPU time of the whole process per read, in microseconds: includes the submitting thread and,
    /// for `pread`, the reading threads.
    pub cpu_us_per_read: f64,
    /// Median latency from submission to completion with exactly `depth` reads outstanding, in
    /// microseconds, as seen by the submitting thread.
    pub p50_us: f64,
    /// 99th percentile of that latency.
    pub p99_us: f64,
    /// Number of reads counted.
    pub reads: u64,
}

impl Point {
    /// Whether a device can be as fast.
    fn is_plausible(&self) -> bool {
        (0.0..=FASTEST).contains(&self.mb_per_s)
    }

    /// What it is a measurement of.
    fn subject(&self) -> (&str, Pattern, u32, u32) {
        (&self.engine, self.pattern, self.size, self.depth)
    }
}

/// Recommended settings for the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Engine with the highest throughput over all sizes (geometric mean of each size's best).
    pub engine: String,
    /// Smallest depth at which random reads of every size reach 97 % of that engine's best.
    pub depth: u32,
    /// Highest random throughput in 10^6 bytes per second.
    pub random_mb_per_s: f64,
    /// Highest sequential throughput in 10^6 bytes per second; absent if it was not measured.
    #[serde(default, deserialize_with = "measured")]
    pub sequential_mb_per_s: Option<f64>,
}

/// A speed. Older profiles have 0 for those that were not measured.
fn measured<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.filter(|speed| *speed > 0.0))
}

/// A measured device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// [`VERSION`] of the file format.
    pub version: u32,
    /// The machine.
    pub machine: Machine,
    /// The file that was read, and its device.
    pub file: FileFacts,
    /// All measurements.
    pub points: Vec<Point>,
    /// The recommendation; absent without measurements.
    pub best: Option<Best>,
    /// Conditions of the measurement; absent in profiles of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Conditions>,
    /// Measured by a few reads ([`MeasurePlan::brief`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub brief: bool,
}

impl DeviceProfile {
    /// A profile from its measurements.
    #[must_use]
    pub fn new(machine: Machine, file: FileFacts, points: Vec<Point>) -> Self {
        let best = best(&points);
        Self {
            version: VERSION,
            machine,
            file,
            points,
            best,
            conditions: None,
            brief: false,
        }
    }

    /// Why the profile may not be that of the device alone; `None` if there is no reason for doubt.
    #[must_use]
    pub fn doubt(&self) -> Option<String> {
        self.conditions?.doubt()
    }

    /// Highest random throughput of the best engine over the widest range, by bytes per read,
    /// ascending: (bytes, 10^6 bytes per second).
    #[must_use]
    pub fn random_by_size(&self) -> Vec<(u32, f64)> {
        let range = self.points.iter().map(|p| p.range).max();
        let engine = self.best.as_ref().map(|best| best.engine.as_str());
        let here = || {
            self.points.iter().filter(|p| {
                p.pattern == Pattern::Random
                    && Some(p.range) == range
                    && Some(p.engine.as_str()) == engine
            })
        };
        let speed = |size| {
            let same = here().filter(|p| p.size == size);
            same.map(|p| p.mb_per_s).fold(0.0, f64::max)
        };
        let sizes = distinct(here().map(|p| p.size));
        sizes.into_iter().map(|size| (size, speed(size))).collect()
    }

    /// Random throughput in 10^6 bytes per second for reads of `size` bytes over `range` bytes, at
    /// the best depth. Interpolates between measured sizes over their logarithm; uses the smallest
    /// measured range of at least `range`. `None` without such measurements.
    #[must_use]
    pub fn random_mb_per_s(&self, engine: &str, size: u32, range: u64) -> Option<f64> {
        let random = |p: &&Point| p.engine == engine && p.pattern == Pattern::Random;
        let ranges = self.points.iter().filter(random).map(|p| p.range);
        let above = ranges.clone().filter(|&r| r >= range).min();
        let range = above.or_else(|| ranges.max())?;
        let here = || (self.points.iter().filter(random)).filter(move |p| p.range == range);
        let at = |size: u32| {
            here()
                .filter(|p| p.size == size)
                .map(|p| p.mb_per_s)
                .reduce(f64::max)
        };
        let below = here().map(|p| p.size).filter(|&s| s <= size).max();
        let above = here().map(|p| p.size).filter(|&s| s >= size).min();
        match (below, above) {
            (Some(a), Some(b)) if a < b => {
                let share =
                    (f64::from(size) / f64::from(a)).ln() / (f64::from(b) / f64::from(a)).ln();
                let (low, high) = (at(a)?, at(b)?);
                Some(low + (high - low) * share)
            }
            // Below the first size the command rate limits, not the bytes.
            (None, Some(b)) => Some(at(b)? * f64::from(size) / f64::from(b)),
            (Some(a), _) => at(a),
            (None, None) => None,
        }
    }

    /// Sequential throughput in 10^6 bytes per second at the best depth.
    #[must_use]
    pub fn sequential_mb_per_s(&self, engine: &str) -> Option<f64> {
        peak(&self.points, |p| {
            p.engine == engine && p.pattern == Pattern::Sequential
        })
    }

    /// Default location: `emberflow/device.json` in `$XDG_CACHE_HOME`, else in `~/.cache`. `None`
    /// if neither is known.
    #[must_use]
    pub fn default_path() -> Option<PathBuf> {
        let absolute = |name: &str| {
            let path = PathBuf::from(std::env::var_os(name)?);
            path.is_absolute().then_some(path)
        };
        let cache =
            absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(cache.join("emberflow").join("device.json"))
    }

    /// Reads a saved profile.
    ///
    /// # Errors
    /// [`ProfileError::File`] if it cannot be read, [`ProfileError::Format`] if it is not a profile
    /// of this version.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        const HOW: &str = "emberflow bench io";
        let profile: Self = load_json(path, VERSION, HOW)?;
        match profile.points.iter().find(|point| !point.is_plausible()) {
            None => Ok(profile),
            Some(point) => Err(ProfileError::Format {
                path: path.to_owned(),
                reason: format!("no device reads {:.0} MB/s", point.mb_per_s),
                how: HOW,
            }),
        }
    }

    /// Writes the profile atomically and creates missing folders.
    ///
    /// # Errors
    /// [`ProfileError::File`] with the path that could not be written.
    pub fn save(&self, path: &Path) -> Result<(), ProfileError> {
        save_json(path, self)
    }
}

/// Reads a profile of any type: JSON with a field `version`. `how` is the command that creates one.
///
/// # Errors
/// [`ProfileError::File`] if it cannot be read, [`ProfileError::Format`] if it has another version
/// or other fields.
pub fn load_json<T: DeserializeOwned>(
    path: &Path,
    version: u32,
    how: &'static str,
) -> Result<T, ProfileError> {
    let text = std::fs::read(path).map_err(ProfileError::file(path))?;
    let bad = |reason: String| ProfileError::Format {
        path: path.to_owned(),
        reason,
        how,
    };
    let value: serde_json::Value = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    match value.get("version").and_then(serde_json::Value::as_u64) {
        Some(v) if v == u64::from(version) => {}
        Some(v) => return Err(bad(format!("version {v}, expected {version}"))),
        None => return Err(bad("it has no version".into())),
    }
    serde_json::from_value(value).map_err(|e| bad(e.to_string()))
}

/// Writes a profile of any type atomically and creates missing folders.
///
/// # Errors
/// [`ProfileError::File`] with the path that could not be written.
pub fn save_json(path: &Path, profile: &impl Serialize) -> Result<(), ProfileError> {
    if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(ProfileError::file(dir))?;
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = PathBuf::from(partial);
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::File::create(&partial)?;
        serde_json::to_writer_pretty(&mut file, profile)?;
        file.write_all(b"\n")?;
        crate::durable::sync_all(&file, &partial)?;
        std::fs::rename(&partial, path)
    };
    write().map_err(|e| {
        let _ = std::fs::remove_file(&partial);
        ProfileError::file(path)(e)
    })
}

fn peak(points: &[Point], mut wanted: impl FnMut(&Point) -> bool) -> Option<f64> {
    let speeds = points.iter().filter(|p| wanted(p)).map(|p| p.mb_per_s);
    speeds.reduce(f64::max)
}

fn distinct<T: Ord>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut all: Vec<T> = all.collect();
    all.sort();
    all.dedup();
    all
}

/// Derives the recommendation from random reads over the widest range, which is how a model reads.
fn best(points: &[Point]) -> Option<Best> {
    let range = points.iter().map(|p| p.range).max()?;
    let wide: Vec<&Point> = (points.iter())
        .filter(|p| p.pattern == Pattern::Random && p.range == range)
        .collect();
    let sizes = distinct(wide.iter().map(|p| p.size));
    let top = |engine: &str, size: u32| {
        let here = wide.iter().filter(|p| p.engine == engine && p.size == size);
        here.map(|p| p.mb_per_s).reduce(f64::max)
    };
    let score = |engine: &str| -> f64 {
        let logs = sizes.iter().filter_map(|&s| top(engine, s));
        logs.map(|speed| speed.max(1e-9).ln()).sum()
    };
    let engines = distinct(wide.iter().map(|p| p.engine.as_str()));
    let engine = (engines.into_iter()).max_by(|a, b| score(a).total_cmp(&score(b)))?;
    let enough = |size: u32| {
        let most = top(engine, size)?;
        (wide.iter())
            .filter(|p| p.engine == engine && p.size == size && p.mb_per_s >= ENOUGH * most)
            .map(|p| p.depth)
            .min()
    };
    let mine = |p: &Point, pattern| p.engine == engine && p.pattern == pattern;
    Some(Best {
        engine: engine.to_owned(),
        depth: sizes.iter().filter_map(|&s| enough(s)).max()?,
        random_mb_per_s: peak(points, |p| mine(p, Pattern::Random))?,
        sequential_mb_per_s: peak(points, |p| mine(p, Pattern::Sequential)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(engine: &str, size: u32, depth: u32, range: u64, mb_per_s: f64) -> Point {
        Point {
            engine: engine.into(),
            pattern: Pattern::Random,
            size,
            depth,
            range,
            mb_per_s,
            iops: mb_per_s * 1e6 / f64::from(size),
            io_cpu_us_per_read: 1.0,
            cpu_us_per_read: 2.0,
            p50_us: 3.0,
            p99_us: 4.0,
            reads: 5,
        }
    }

    fn profile() -> DeviceProfile {
        let mut points = vec![
            point("uring", 4096, 1, 1000, 50.0),
            point("uring", 4096, 8, 1000, 390.0),
            point("uring", 4096, 32, 1000, 400.0),
            point("uring", 65536, 1, 1000, 795.0),
            point("uring", 65536, 8, 1000, 800.0),
            point("pread", 4096, 8, 1000, 300.0),
            point("pread", 65536, 8, 1000, 900.0),
            point("uring", 4096, 8, 100, 500.0),
        ];
        let mut seq = point("uring", 1 << 20, 4, 1000, 1500.0);
        seq.pattern = Pattern::Sequential;
        points.push(seq);
        DeviceProfile::new(Machine::default(), FileFacts::default(), points)
    }

    #[test]
    fn the_conclusion_prefers_the_engine_that_wins_over_all_sizes() {
        // 400 * 800 > 300 * 900; 4 KiB needs depth 8 for 97 %, 64 KiB only 1.
        let best = profile().best.unwrap();
        assert_eq!((best.engine.as_str(), best.depth), ("uring", 8));
        assert_eq!(best.random_mb_per_s, 800.0);
        assert_eq!(best.sequential_mb_per_s, Some(1500.0));
        assert_eq!(super::best(&[]), None);
    }

    /// Also in profiles of older versions, which had 0.
    #[test]
    fn what_was_not_measured_has_no_speed() {
        let mut p = profile();
        p.points.retain(|p| p.pattern == Pattern::Random);
        let found = best(&p.points).unwrap();
        assert_eq!(found.sequential_mb_per_s, None);
        let read = |text: String| serde_json::from_str::<Best>(&text).unwrap();
        let text = serde_json::to_string(&found).unwrap();
        assert_eq!(read(text.clone()), found);
        assert_eq!(read(text.replace("null", "0.0")), found);
    }

    #[test]
    fn a_poorer_profile_is_known() {
        let brief = |points: usize| {
            let mut p = profile();
            p.points.drain(points..);
            DeviceProfile { brief: true, ..p }
        };
        let [all, few] = [9, 5].map(brief);
        assert!(few.is_poorer_than(&all) && few.is_poorer_than(&profile()));
        assert!(all.is_poorer_than(&profile()), "of a few reads");
        assert!(!all.is_poorer_than(&few) && !all.is_poorer_than(&all));
        assert!(!profile().is_poorer_than(&profile()));
        let mut other = all.clone();
        other.file.device = "/dev/other".into();
        assert!(!few.is_poorer_than(&other), "it says nothing of this one");
    }

    #[test]
    fn throughput_between_sizes_is_interpolated() {
        let p = profile();
        assert_eq!(p.random_mb_per_s("uring", 4096, 500), Some(400.0));
        assert_eq!(p.random_mb_per_s("uring", 4096, 100), Some(500.0));
        assert_eq!(p.random_mb_per_s("uring", 4096, 9999), Some(400.0));
        assert_eq!(p.random_mb_per_s("uring", 2048, 1000), Some(200.0));
        assert_eq!(p.random_mb_per_s("uring", 1 << 20, 1000), Some(800.0));
        let half = p.random_mb_per_s("uring", 16384, 1000).unwrap();
        assert!((half - 600.0).abs() < 1e-9, "{half}");
        assert_eq!(p.random_mb_per_s("sim", 4096, 1000), None);
        assert_eq!(p.sequential_mb_per_s("uring"), Some(1500.0));
        assert_eq!(p.sequential_mb_per_s("pread"), None);
    }

    #[test]
    fn a_saved_profile_comes_back_and_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/device.json");
        let p = profile();
        p.save(&path).unwrap();
        assert_eq!(DeviceProfile::load(&path).unwrap(), p);
        let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "the partial file is still there");
        for (text, said) in [
            ("{\"version\": 99}", "version 99, expected 1"),
            ("{}", "no version"),
            ("nonsense", "is no profile"),
            ("{\"version\": 1}", "missing field"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = DeviceProfile::load(&path).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let mut absurd = p.clone();
        absurd.points[0].mb_per_s = 2.3e9;
        absurd.save(&path).unwrap();
        let error = DeviceProfile::load(&path).unwrap_err().to_string();
        assert!(error.contains("no device reads 2300000000 MB/s"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let error = DeviceProfile::load(&path).unwrap_err().to_string();
        assert!(error.contains("device.json"), "{error}");
    }
}
