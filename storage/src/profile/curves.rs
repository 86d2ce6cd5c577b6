//! From the points of a measured device to the cost of a read.

use std::path::Path;
use std::sync::Mutex;

use super::cost::{Curve, between};
use super::{DeviceProfile, FileFacts, Origin, Pattern, Point, ReadCost, distinct};

/// The profile measured by this process, which may not be saved.
static REMEMBERED: Mutex<Option<DeviceProfile>> = Mutex::new(None);

impl DeviceProfile {
    /// The profile of the device in `facts`: remembered, or saved at [`DeviceProfile::default_path`].
    /// `None` if there is none, it cannot be read, or it is for another device.
    #[must_use]
    pub fn for_device(facts: &FileFacts) -> Option<Self> {
        let remembered = REMEMBERED.lock().unwrap_or_else(|e| e.into_inner());
        let ours = remembered.clone().filter(|profile| profile.is_of(facts));
        drop(remembered);
        ours.or_else(|| Self::for_device_at(facts, &Self::default_path()?))
    }

    /// Makes this process use the profile, even if it cannot be saved.
    pub fn remember(self) {
        let mut remembered = REMEMBERED.lock().unwrap_or_else(|e| e.into_inner());
        *remembered = Some(self);
    }

    /// Whether a saved profile says more, so that this one must not replace it: it was measured thoroughly, or has points of
    /// the same device that this one lacks.
    #[must_use]
    pub fn is_poorer_than(&self, saved: &Self) -> bool {
        let has = |point: &Point| self.points.iter().any(|p| p.subject() == point.subject());
        let lacks = self.is_of(&saved.file) && !saved.points.iter().all(has);
        self.brief && (!saved.brief || lacks)
    }

    pub(super) fn is_of(&self, facts: &FileFacts) -> bool {
        self.file.device == facts.device && self.file.fs == facts.fs
    }

    fn for_device_at(facts: &FileFacts, saved: &Path) -> Option<Self> {
        let profile = Self::load(saved)
            .map_err(|e| tracing::debug!(reason = %e, "no device profile"))
            .ok()?;
        let same = profile.is_of(facts);
        if !same {
            tracing::debug!(measured = %profile.file.device, here = %facts.device,
                "the saved device profile is of another device");
        }
        same.then_some(profile)
    }

    /// Nanoseconds per read of `len` bytes at queue depth `depth`, over the whole measured file,
    /// with the best engine. `None` without measurements.
    #[must_use]
    pub fn read_ns(&self, len: u64, depth: u32, pattern: Pattern) -> Option<f64> {
        let cost = self.read_cost(None, depth, self.file.len)?;
        Some(cost.read_ns(len, pattern))
    }

    /// The cost model of an engine, or of the best one if it is not named or not measured.
    /// Interpolates log-log between measured depths; uses the smallest measured range of at least
    /// `range`. `None` without random reads.
    #[must_use]
    pub fn read_cost(&self, engine: Option<&str>, depth: u32, range: u64) -> Option<ReadCost> {
        let named = engine.filter(|name| self.points.iter().any(|p| p.engine == *name));
        let engine = named.or(self.best.as_ref().map(|b| b.engine.as_str()))?;
        let throughput = |pattern: Pattern| -> Vec<(u32, f64)> {
            let here =
                || (self.points.iter()).filter(|p| p.engine == engine && p.pattern == pattern);
            let above = here().map(|p| p.range).filter(|&r| r >= range).min();
            let Some(range) = above.or_else(|| here().map(|p| p.range).max()) else {
                return Vec::new();
            };
            let sizes = distinct(here().map(|p| p.size));
            let at = |size| {
                let mut curve: Curve = here()
                    .filter(|p| p.size == size && p.range == range && p.mb_per_s > 0.0)
                    .map(|p| (f64::from(p.depth), p.mb_per_s))
                    .collect();
                curve.sort_by(|a, b| a.0.total_cmp(&b.0));
                let (first, last) = (*curve.first()?, *curve.last()?);
                let x = f64::from(depth).clamp(first.0, last.0);
                let above = curve.iter().position(|&(d, _)| d >= x)?;
                let below = curve[above.saturating_sub(1)];
                Some((size, between(below.into(), curve[above].into(), x)))
            };
            sizes.into_iter().filter_map(at).collect()
        };
        let cost = ReadCost::from_throughput(
            &throughput(Pattern::Random),
            &throughput(Pattern::Sequential),
        )?;
        // Random reads of each length, at depth 1 and at the depth nearest to `depth`.
        let random = |p: &&Point| p.engine == engine && p.pattern == Pattern::Random;
        let ranges = || self.points.iter().filter(random).map(|p| p.range);
        let range = ranges()
            .filter(|&r| r >= range)
            .min()
            .or_else(|| ranges().max());
        let curve = |depth: u32, ns: &dyn Fn(&Point) -> f64| -> Curve {
            let here = || {
                self.points
                    .iter()
                    .filter(random)
                    .filter(|p| Some(p.range) == range)
            };
            let at = |size| {
                let same = here().filter(|p| p.size == size);
                let nearest = same.min_by_key(|p| p.depth.abs_diff(depth))?;
                Some((f64::from(size), ns(nearest)))
            };
            distinct(here().map(|p| p.size))
                .into_iter()
                .filter_map(at)
                .collect()
        };
        let origin = match self.doubt() {
            Some(_) => Origin::Doubtful,
            None if self.brief => Origin::Brief,
            None => Origin::Measured,
        };
        Some(ReadCost {
            origin,
            latency: curve(1, &|p| p.p50_us * 1000.0),
            cpu: curve(depth, &|p| p.cpu_us_per_read * 1000.0),
            ..cost
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Machine;
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-3 * b, "{a}, expected {b}");
    }

    fn point(engine: &str, pattern: Pattern, size: u32, depth: u32, mb_per_s: f64) -> Point {
        Point {
            engine: engine.into(),
            pattern,
            size,
            depth,
            range: 1 << 30,
            mb_per_s,
            iops: 1.0,
            io_cpu_us_per_read: 1.0,
            cpu_us_per_read: 1.0,
            p50_us: 1000.0 / mb_per_s,
            p99_us: 1.0,
            reads: 1,
        }
    }

    #[test]
    fn a_measured_device_answers_for_engine_and_depth() {
        use Pattern::{Random, Sequential};
        let points = vec![
            point("uring", Random, 4096, 1, 100.0),
            point("uring", Random, 4096, 16, 400.0),
            point("uring", Sequential, 1 << 20, 16, 1000.0),
            point("pread", Random, 4096, 16, 200.0),
        ];
        let p = DeviceProfile::new(Machine::default(), FileFacts::default(), points);
        near(p.read_ns(4096, 1, Random).unwrap(), 40_960.0);
        near(p.read_ns(4096, 64, Random).unwrap(), 10_240.0);
        // Halfway in the logarithm: 200 MB/s.
        near(p.read_ns(4096, 4, Random).unwrap(), 20_480.0);
        near(p.read_ns(2 << 20, 16, Sequential).unwrap(), 2_097_152.0);
        let pread = p.read_cost(Some("pread"), 16, 0).unwrap();
        near(pread.read_ns(4096, Random), 20_480.0);
        near(pread.latency_ns(4096), 5000.0);
        near(pread.cpu_ns(4096), 1000.0);
        let other = p.read_cost(Some("sim"), 16, 0).unwrap();
        near(other.read_ns(4096, Random), 10_240.0);
        let empty = DeviceProfile::new(Machine::default(), FileFacts::default(), Vec::new());
        assert_eq!(empty.read_ns(4096, 1, Random), None);
    }

    #[test]
    fn a_saved_profile_is_used_on_its_own_device_only() {
        let dir = tempfile::tempdir().unwrap();
        let (saved, model) = (dir.path().join("device.json"), dir.path().join("model"));
        std::fs::write(&model, "x").unwrap();
        let facts = FileFacts::of(&model).unwrap();
        assert_eq!(DeviceProfile::for_device_at(&facts, &saved), None);
        let points = vec![point("uring", Pattern::Random, 4096, 1, 100.0)];
        let mut profile = DeviceProfile::new(Machine::default(), facts.clone(), points);
        profile.save(&saved).unwrap();
        assert_eq!(
            DeviceProfile::for_device_at(&facts, &saved),
            Some(profile.clone())
        );
        profile.file.device = "/dev/other".into();
        profile.save(&saved).unwrap();
        assert_eq!(DeviceProfile::for_device_at(&facts, &saved), None);
    }
}
