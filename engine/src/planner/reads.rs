//! Expected reads of a layer: number, commands, time.

use emberflow_storage::limits::Limits;
use emberflow_storage::profile::Pattern;

use super::firing::{Absent, GROUP};
use super::pass::CostModel;
use crate::cluster::CLUSTER;
use crate::memory::MemoryPlan;

/// Overdispersion: the variance of the needed neurons per cluster is 3 to 4 times the binomial one
/// (bundled model, held-out text).
pub(super) const VARIANCE_RATIO: f64 = 3.5;

/// Recall of prefetches on a layer's misses: between the synthetic 7B model (0.88) and a layer of the
/// bundled model (0.70).
const RECALL: f64 = 0.8;

/// Precision of prefetches: between the same two (0.90 and 0.80).
const PRECISION: f64 = 0.85;

/// Expected reads of one layer.
#[derive(Default, Clone, Copy)]
pub(super) struct LayerReads {
    /// Number of reads; device time in nanoseconds (`ns`).
    pub count: f64,
    pub ns: f64,
    /// Bytes read; bytes verified by all compute threads (`checked`) and by the calling thread
    /// alone.
    pub bytes: f64,
    pub checked: f64,
    pub checked_alone: f64,
    /// Nanoseconds for which the I/O thread occupies its core.
    pub busy_ns: f64,
    /// CPU time of the I/O thread in nanoseconds.
    pub cpu_ns: f64,
    /// Latency of the first read.
    pub latency_ns: f64,
    /// Needed neurons outside the hot region (`asked`); the misses among them (`missed`).
    pub asked: f64,
    pub missed: f64,
}

impl LayerReads {
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

    /// With prefetching: (all reads of the layer, late reads of misses that were not predicted).
    /// The storage device stays busy, so the I/O thread rarely sleeps and costs only its CPU time.
    pub(super) fn foreseen(self) -> (Self, Self) {
        let all = self.times(1.0 - RECALL + RECALL / PRECISION);
        let all = Self {
            busy_ns: all.cpu_ns,
            ..all
        };
        (all, self.times(1.0 - RECALL))
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

impl CostModel<'_> {
    /// Expected reads of misses from neuron `first` on, cluster by cluster: single neurons, or the
    /// whole cluster if that is cheaper (`store/costs.rs`).
    pub(super) fn on_demand(
        &self,
        layer: usize,
        first: usize,
        tokens: usize,
        absent: &Absent,
        bundles: bool,
    ) -> LayerReads {
        let s = self.shape;
        let (len, named) = if bundles {
            (s.gate_read + s.rest_read, self.predictor.named.max(1.0))
        } else {
            (s.rest_read, 1.0)
        };
        let whole_ns = self.storage.read_ns(s.cluster_read, Pattern::Sequential);
        let most = whole_ns / self.storage.read_ns(len, Pattern::Random).max(1e-3);
        let groups: Vec<(f64, f64)> = self.firing.groups(layer, first).collect();
        let mut sum = LayerReads::default();
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
            let (whole, singles) = split(missed, (VARIANCE_RATIO * varies * named).sqrt(), most);
            let mut reads = self.picks(neurons * (1.0 - whole), len, singles);
            let latency_ns = if whole > 0.5 {
                self.storage.latency_ns(s.cluster_read)
            } else {
                0.0
            };
            reads.add(LayerReads {
                latency_ns,
                ..self.whole(whole)
            });
            sum.add(LayerReads {
                asked,
                missed,
                ..reads
            });
        }
        sum
    }

    /// Single reads of `wanted` out of `units` neurons. The I/O thread merges neighbours separated
    /// by small gaps into one command.
    fn picks(&self, units: f64, len: u64, wanted: f64) -> LayerReads {
        if wanted <= 0.0 || units <= 0.0 {
            return LayerReads::default();
        }
        let limits = Limits::PRODUCTION;
        let stride = self.shape.stride.max(1);
        let reach = (u64::from(limits.gap) + len) / stride;
        let density = (wanted / units).min(1.0);
        // The gap to the next wanted neuron is geometric: P(n) = density × (1 − density)^(n − 1).
        let beyond = (1.0 - density).powf(reach as f64);
        // A command has a limited number of memory segments; a gap uses one as well.
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
        let ns = self.storage.read_ns(each, Pattern::Random);
        LayerReads {
            count: wanted,
            ns: commands * ns,
            bytes,
            checked: wanted * len as f64,
            busy_ns: commands * self.busy(each, ns),
            cpu_ns: commands * self.storage.cpu_ns(each),
            latency_ns: self.storage.latency_ns(each),
            ..LayerReads::default()
        }
    }

    /// Nanoseconds for which a command of `len` bytes, one every `ns`, occupies the I/O thread's
    /// core: its CPU time, or the whole interval if that is shorter than a wake-up.
    fn busy(&self, len: u64, ns: f64) -> f64 {
        self.storage.cpu_ns(len).max(ns.min(self.machine.wake_ns))
    }

    /// `count` sequential reads of whole clusters. The latency of the first read is not included: a
    /// scan hides it.
    fn whole(&self, count: f64) -> LayerReads {
        if count <= 0.0 {
            return LayerReads::default();
        }
        let len = self.shape.cluster_read;
        let bytes = count * len as f64;
        let ns = self.stream.read_ns(len, Pattern::Sequential);
        LayerReads {
            count,
            ns: count * ns,
            bytes,
            checked_alone: bytes,
            busy_ns: count * self.busy(len, ns),
            cpu_ns: count * self.storage.cpu_ns(len),
            ..LayerReads::default()
        }
    }

    /// Two-phase loading: Gate rows of all missing neurons, then Up and Down of those that fire.
    pub(super) fn gates_first(&self, plan: &MemoryPlan, first: usize, fires: f64) -> LayerReads {
        let s = self.shape;
        let behind = (s.neurons - first) as f64;
        let all: f64 = s.neurons as f64 * s.layers as f64 / s.visited.min(1.0);
        let held = (plan.slots as f64 / all.max(1.0)).min(1.0);
        let missing = behind * (1.0 - held);
        let mut reads = self.picks(behind, s.gate_read, missing);
        reads.add(self.picks(behind, s.rest_read, fires * (1.0 - held)));
        LayerReads {
            latency_ns: 2.0 * reads.latency_ns,
            asked: behind,
            missed: missing,
            ..reads
        }
    }

    /// Reads of every cluster from neuron `first` on. Experts are known only after the router has
    /// run, so the latency of their first read is not hidden.
    pub(super) fn scan(&self, first: usize) -> LayerReads {
        let behind = (self.shape.neurons - first) as f64;
        let whole = self.whole(behind / CLUSTER as f64);
        LayerReads {
            asked: behind,
            missed: behind,
            checked: whole.bytes,
            checked_alone: 0.0,
            latency_ns: if self.shape.visited < 1.0 {
                self.storage.latency_ns(self.shape.cluster_read)
            } else {
                0.0
            },
            ..whole
        }
    }
}

/// For a normal variable with this mean and deviation: `P(x > most)` and `E[x; x ≤ most]`, clamped
/// to [0, mean].
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
