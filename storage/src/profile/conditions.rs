//! Disturbances of a measurement: other programs, other reads, a drifting device.
//!
//! A profile measured under load differs from the idle machine, and a profile measured during a
//! device's burst differs from its sustained rate. Kernel counters reveal both.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::io::process_cpu_ns;

/// Processor time of others, in cores, from which on a measurement counts as made under load.
const BUSY: f64 = 0.4;

/// Spread between rounds from which on they disagree.
const APART: f64 = 0.3;

/// Bytes from the device per byte read here, from which on other programs are reading, too.
const OTHERS_READ: f64 = 1.25;

/// Ticks per second in `/proc/stat`, which Linux fixes for programs.
const TICKS: f64 = 100.0;

/// Conditions of a measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Processor time used by others, in cores; `None` if the system does not report it.
    pub others_cores: Option<f64>,
    /// The system's load average of the last minute, at the start.
    pub load: Option<f64>,
    /// Bytes delivered by the device per byte read; `None` if they are not counted.
    pub device_bytes: Option<f64>,
    /// Difference between the fastest and the slowest round as a share of the median; the median
    /// over all points; 0 with one round.
    pub spread: f64,
    /// Rate of the device in long reads at the start, and later: a lower rate later indicates a
    /// burst. 10^6 bytes per second; 0 if not measured.
    pub first_mb_per_s: f64,
    /// See `first_mb_per_s`.
    pub settled_mb_per_s: f64,
}

impl Conditions {
    /// Why the numbers may not be those of an idle machine; `None` if there is no reason for doubt.
    #[must_use]
    pub fn doubt(&self) -> Option<String> {
        let mut reasons = Vec::new();
        if let Some(cores) = self.others_cores.filter(|&c| c > BUSY) {
            reasons.push(format!("other programs took {cores:.1} cores"));
        }
        if let Some(times) = self.device_bytes.filter(|&t| t > OTHERS_READ) {
            let more = 100.0 * (times - 1.0);
            reasons.push(format!("others read {more:.0} % as much from the device"));
        }
        if self.spread > APART {
            let percent = 100.0 * self.spread;
            reasons.push(format!("the rounds differ by {percent:.0} %"));
        }
        (!reasons.is_empty()).then(|| reasons.join(", "))
    }
}

/// Observes from its creation on.
pub struct Watch {
    start: Instant,
    own_ns: u64,
    all: Option<f64>,
    load: Option<f64>,
    /// Counter of a device in bytes.
    device: Option<u64>,
}

impl Watch {
    /// Begins. `device`: the result of [`super::Target::device_bytes`].
    #[must_use]
    pub fn start(device: Option<u64>) -> Self {
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        Self {
            start: Instant::now(),
            own_ns: process_cpu_ns(),
            all: busy_s(),
            load: load.and_then(|l| l.split(' ').next()?.parse().ok()),
            device,
        }
    }

    /// Ends after `read` bytes, with the device's counter at that time.
    #[must_use]
    pub fn end(self, read: u64, device: Option<u64>) -> Conditions {
        let seconds = self
            .start
            .elapsed()
            .max(Duration::from_millis(1))
            .as_secs_f64();
        let own = process_cpu_ns().saturating_sub(self.own_ns) as f64 / 1e9;
        let others = |(before, after): (f64, f64)| ((after - before - own) / seconds).max(0.0);
        let given = (self.device.zip(device)).filter(|_| read > 0);
        Conditions {
            others_cores: self.all.zip(busy_s()).map(others),
            load: self.load,
            device_bytes: given.map(|(from, to)| to.saturating_sub(from) as f64 / read as f64),
            ..Conditions::default()
        }
    }
}

/// Seconds that all processors spent on programs, on the running system. Interrupts, which reads
/// cause, do not count.
fn busy_s() -> Option<f64> {
    busy_of(&std::fs::read_to_string("/proc/stat").ok()?)
}

/// See [`busy_s`]: user, nice, system and stolen time of the first line.
fn busy_of(stat: &str) -> Option<f64> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<f64> = line
        .split_whitespace()
        .map_while(|n| n.parse().ok())
        .collect();
    let busy: f64 = [0, 1, 2, 7].iter().filter_map(|&i| ticks.get(i)).sum();
    (ticks.len() >= 4).then_some(busy / TICKS)
}

/// Difference between the largest and the smallest value as a share of the median; 0 for fewer than
/// two values.
pub(super) fn spread(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match (values.first(), values.last(), values.get(values.len() / 2)) {
        (Some(least), Some(most), Some(middle)) => (most - least) / middle.max(1e-9),
        _ => 0.0,
    }
}

/// The median of the spreads of all points over the rounds of a measurement.
#[must_use]
pub fn spread_of_rounds(rounds: &[Vec<super::Point>]) -> f64 {
    let points = rounds.iter().map(Vec::len).min().unwrap_or(0);
    let mut all: Vec<f64> = (0..points)
        .map(|i| {
            let mut same: Vec<f64> = rounds.iter().map(|round| round[i].mb_per_s).collect();
            spread(&mut same)
        })
        .collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_under_load_is_recognised() {
        let good = Conditions {
            others_cores: Some(0.1),
            device_bytes: Some(1.02),
            spread: 0.1,
            ..Conditions::default()
        };
        assert_eq!(good.doubt(), None);
        assert_eq!(Conditions::default().doubt(), None);
        let doubt = |c: Conditions| c.doubt().unwrap();
        let loaded = Conditions {
            others_cores: Some(1.3),
            ..good
        };
        assert_eq!(doubt(loaded), "other programs took 1.3 cores");
        let shared = Conditions {
            device_bytes: Some(1.5),
            spread: 0.5,
            ..good
        };
        let said = doubt(shared);
        assert!(said.contains("others read 50 %"), "{said}");
        assert!(said.contains("differ by 50 %"), "{said}");
    }

    #[test]
    fn ticks_are_counted_without_interrupts_and_idle_time() {
        let stat = "cpu  100 10 50 999 888 7 8 40 0 0\ncpu0 1 2 3\n";
        assert_eq!(busy_of(stat), Some(2.0));
        assert_eq!(busy_of("cpu  1 2\n"), None);
        assert_eq!(busy_of("nonsense"), None);
        assert!(busy_s().unwrap() > 0.0);
    }

    #[test]
    fn a_watch_sees_the_work_of_others_only() {
        let own = process_cpu_ns();
        let watch = Watch::start(Some(1000));
        // until it has used half a core-second, whatever share the system gives it
        while process_cpu_ns() - own < 500_000_000 {
            std::hint::black_box(own);
        }
        let own = 0.5 / watch.start.elapsed().as_secs_f64();
        let seen = watch.end(500, Some(1750));
        // the test's own time is not counted, whatever else is running
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        assert!(seen.others_cores.unwrap() < cores - 0.8 * own, "{seen:?}");
        assert_eq!(seen.device_bytes, Some(1.5));
    }

    #[test]
    fn spreads_are_shares_of_the_median() {
        assert_eq!(spread(&mut [200.0, 100.0, 150.0]), 100.0 / 150.0);
        assert_eq!(spread(&mut [7.0]), 0.0);
        assert_eq!(spread_of_rounds(&[]), 0.0);
    }
}
