//! Expected reads of a layer: number, commands, time.

use emberflow_storage::limits::Limits;
use emberflow_storage::profile::Pattern;

use super::firing::{Absent, GROUP};
use super::pass::Pass;
use crate::cluster::CLUSTER;
use crate::memory::MemoryPlan;

/// Overdispersion of the needed neurons per cluster: their variance is 3 to 4 times the binomial
/// one (bundled model, held-out text).
pub(super) const SPREAD: f64 = 3.5;

/// Recall and precision of speculative reads on a layer's misses: between the synthetic 7B model
/// (88 and 90 %) and a layer of the bundled one (70 and 80 %).
const FORESEEN: f64 = 0.8;
const RIGHT: f64 = 0.85;

/// Expected reads of one layer.
#[derive(Default, Clone, Copy)]
pub(super) struct Reads {
    /// Number of reads, and device time.
    pub count: f64,
    pub ns: f64,
    /// Bytes read, and those verified by compute threads and by the calling thread.
    pub bytes: f64,
    pub checked: f64,
    pub checked_alone: f64,
    /// Nanoseconds for which the I/O thread occupies its core.
    pub busy_ns: f64,
    /// CPU time of the I/O thread in nanoseconds.
    pub cpu_ns: f64,
    /// Latency of the first read.
    pub latency_ns: f64,
    /// Needed neurons outside the hot region, and misses.
    pub asked: f64,
    pub missed: f64,
}

impl Reads {
    /// Scales number, time and bytes by `times`.
    fn times(self, times: f64) -> Self {
        Self {
            count: self.count * times,
            ns: self.ns * times,
            bytes: self.bytes * times,
            cpu_ns: self.cpu_ns * times,
            ..self
        }
    }

    /// With speculation: all reads of the layer, and the late ones for misses that were not
    /// predicted. The device stays busy, so the I/O thread rarely sleeps and costs only its CPU
    /// time.
    pub(super) fn foreseen(self) -> (Self, Self) {
        let all = self.times(1.0 - FORESEEN + FORESEEN / RIGHT);
        let all = Self {
            busy_ns: all.cpu_ns,
            ..all
        };
        (all, self.times(1.0 - FORESEEN))
    }

    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.ns += other.ns;
        self.bytes += other.bytes;
        self.checked += other.checked;
        self.checked_alone += other.checked_alone;
        self.busy_ns += other.busy_ns;
        self.cpu_ns += other.cpu_ns;
        self.latency_ns = self.latency_ns.max(other.latency_ns);
        self.asked += other.asked;
        self.missed += other.missed;
    }
}

impl Pass<'_> {
    /// Expected reads for misses behind neuron `first`, cluster by cluster: single reads, or the
    /// whole cluster where that is cheaper (`store/costs.rs`).
    pub(super) fn on_demand(
        &self,
        layer: usize,
        first: usize,
        tokens: usize,
        absent: &Absent,
        bundles: bool,
    ) -> Reads {
        let s = self.shape;
        let (len, named) = match bundles {
            true => (s.gate_read + s.rest_read, self.predictor.named.max(1.0)),
            false => (s.rest_read, 1.0),
        };
        let whole_ns = self.device.read_ns(s.cluster_read, Pattern::Sequential);
        let most = whole_ns / self.device.read_ns(len, Pattern::Random).max(1e-3);
        let groups: Vec<(f64, f64)> = self.firing.groups(layer, first).collect();
        let mut sum = Reads::default();
        for cluster in groups.chunks(CLUSTER / GROUP) {
            let neurons: f64 = cluster.iter().map(|g| g.0).sum();
            let (mut asked, mut missed, mut varies) = (0.0, 0.0, 0.0);
            for &(count, often) in cluster {
                let fires = self.firing.touched(often, tokens);
                let chance = fires * absent.at(often);
                asked += count * fires;
                missed += count * chance;
                varies += count * chance * (1.0 - chance);
            }
            let [asked, missed] = [asked, missed].map(|n| (n * named).min(neurons));
            let (whole, singles) = split(missed, (SPREAD * varies * named).sqrt(), most);
            let mut reads = self.picks(neurons * (1.0 - whole), len, singles);
            let latency_ns = match whole > 0.5 {
                true => self.device.latency_ns(s.cluster_read),
                false => 0.0,
            };
            reads.add(Reads {
                latency_ns,
                ..self.whole(whole)
            });
            sum.add(Reads {
                asked,
                missed,
                ..reads
            });
        }
        sum
    }

    /// Single reads of `wanted` out of `units` neurons. The I/O thread merges neighbours with small
    /// gaps into one command.
    fn picks(&self, units: f64, len: u64, wanted: f64) -> Reads {
        if wanted <= 0.0 || units <= 0.0 {
            return Reads::default();
        }
        let limits = Limits::PRODUCTION;
        let stride = self.shape.stride.max(1);
        let reach = (u64::from(limits.gap) + len) / stride;
        let density = (wanted / units).min(1.0);
        // The gap to the next wanted neuron is geometric: P(n) = density × (1 − density)^(n − 1).
        let beyond = (1.0 - density).powf(reach as f64);
        // A command has a limited number of memory pieces; a gap takes one, too.
        let most = limits.pieces as f64 / 2.0;
        let commands = wanted * beyond.max(1.0 / most);
        let joined = wanted - commands;
        let mut gap = 0.0;
        for n in 1..=reach {
            let chance = density * (1.0 - density).powf(n as f64 - 1.0) / (1.0 - beyond).max(1e-9);
            gap += chance * (n * stride).saturating_sub(len) as f64;
        }
        let bytes = wanted * len as f64 + joined * gap;
        let each = (bytes / commands) as u64;
        let ns = self.device.read_ns(each, Pattern::Random);
        Reads {
            count: wanted,
            ns: commands * ns,
            bytes,
            checked: wanted * len as f64,
            busy_ns: commands * self.busy(each, ns),
            cpu_ns: commands * self.device.cpu_ns(each),
            latency_ns: self.device.latency_ns(each),
            ..Reads::default()
        }
    }

    /// Nanoseconds for which a command of `len` bytes, arriving every `ns`, occupies the I/O
    /// thread's core: its CPU time, or the whole interval if that is shorter than a wake-up.
    fn busy(&self, len: u64, ns: f64) -> f64 {
        self.device.cpu_ns(len).max(ns.min(self.machine.wake_ns))
    }

    /// `count` sequential reads of whole clusters, without the first read's latency, which a scan
    /// hides.
    fn whole(&self, count: f64) -> Reads {
        if count <= 0.0 {
            return Reads::default();
        }
        let len = self.shape.cluster_read;
        let bytes = count * len as f64;
        let ns = self.stream.read_ns(len, Pattern::Sequential);
        Reads {
            count,
            ns: count * ns,
            bytes,
            checked_alone: bytes,
            busy_ns: count * self.busy(len, ns),
            cpu_ns: count * self.device.cpu_ns(len),
            ..Reads::default()
        }
    }

    /// Two-phase loading: Gate parts of all missing neurons, then Up and Down of those that fire.
    pub(super) fn gates_first(&self, plan: &MemoryPlan, first: usize, fires: f64) -> Reads {
        let s = self.shape;
        let behind = (s.neurons - first) as f64;
        let all: f64 = s.neurons as f64 * s.layers as f64 / s.visited.min(1.0);
        let held = (plan.slots as f64 / all.max(1.0)).min(1.0);
        let missing = behind * (1.0 - held);
        let mut reads = self.picks(behind, s.gate_read, missing);
        reads.add(self.picks(behind, s.rest_read, fires * (1.0 - held)));
        Reads {
            latency_ns: 2.0 * reads.latency_ns,
            asked: behind,
            missed: missing,
            ..reads
        }
    }

    /// Every cluster behind neuron `first`. Those of experts are known only once the router has
    /// chosen, so that the first read is waited for.
    pub(super) fn scan(&self, first: usize) -> Reads {
        let behind = (self.shape.neurons - first) as f64;
        let whole = self.whole(behind / CLUSTER as f64);
        Reads {
            asked: behind,
            missed: behind,
            checked: whole.bytes,
            checked_alone: 0.0,
            latency_ns: match self.shape.visited < 1.0 {
                true => self.device.latency_ns(self.shape.cluster_read),
                false => 0.0,
            },
            ..whole
        }
    }
}

/// For a normal number with this mean and deviation: `P(x > most)` and `E[x; x ≤ most]`, clamped to
/// [0, mean].
fn split(mean: f64, deviation: f64, most: f64) -> (f64, f64) {
    if mean <= 0.0 {
        return (0.0, 0.0);
    }
    let z = (most + 0.5 - mean) / deviation.max(1e-3);
    let below = 0.5 * (1.0 + libm::erf(z / std::f64::consts::SQRT_2));
    let density = (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let rest = (mean * below - deviation * density).clamp(0.0, mean);
    (1.0 - below, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_are_read_whole_when_most_neurons_miss() {
        let (whole, rest) = split(5.0, 2.0, 20.0);
        assert!(whole < 1e-6 && (rest - 5.0).abs() < 1e-3, "{whole} {rest}");
        let (whole, rest) = split(40.0, 5.0, 20.0);
        assert!(whole > 0.999 && rest < 0.01, "{whole} {rest}");
        let (whole, rest) = split(20.5, 5.0, 20.0);
        assert!((whole - 0.5).abs() < 1e-9, "{whole}");
        // Half of the mean minus 0.4 standard deviations.
        assert!((rest - (10.25 - 5.0 * 0.3989)).abs() < 1e-2, "{rest}");
        assert_eq!(split(0.0, 1.0, 5.0), (0.0, 0.0));
    }
}
