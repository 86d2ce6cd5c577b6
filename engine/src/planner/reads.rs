//! What of a layer is read, in how many commands, and what that takes.

use emberflow_storage::limits::Limits;
use emberflow_storage::profile::Pattern;

use super::firing::{Absent, GROUP};
use super::pass::Pass;
use crate::memory::MemoryPlan;
use crate::store::regions::CLUSTER;

/// How much wider the number of needed neurons of a cluster spreads than that of neurons that fire
/// independently of each other: the variance of the bundled model's clusters over held-out text is
/// 3 to 4 times the binomial one.
pub(super) const SPREAD: f64 = 3.5;

/// Of what a layer misses, the share that a guess of the layer before names, and the share of such
/// guesses that are right: between what the synthetic 7B model (88 and 90 %) and a layer of the
/// bundled one (70 and 80 %) give.
const FORESEEN: f64 = 0.8;
const RIGHT: f64 = 0.85;

/// What is read of one layer.
#[derive(Default, Clone, Copy)]
pub(super) struct Reads {
    /// Reads, and nanoseconds of the device.
    pub count: f64,
    pub ns: f64,
    /// Bytes from the device, and those of them that the threads which compute check, and that
    /// the caller checks.
    pub bytes: f64,
    pub checked: f64,
    pub checked_alone: f64,
    /// Nanoseconds in which the I/O thread keeps its core from others.
    pub busy_ns: f64,
    /// Nanoseconds of processor time of the I/O thread.
    pub cpu_ns: f64,
    /// Nanoseconds until the first one is there.
    pub latency_ns: f64,
    /// Neurons that are needed outside the hot region, and those of them that miss.
    pub asked: f64,
    pub missed: f64,
}

impl Reads {
    /// As many as `times` of them, with what they cost and bring.
    fn times(self, times: f64) -> Self {
        Self {
            count: self.count * times,
            ns: self.ns * times,
            bytes: self.bytes * times,
            cpu_ns: self.cpu_ns * times,
            ..self
        }
    }

    /// Those of a layer that was looked ahead to: all that are made for it, and those that are
    /// asked for only when it is named. As the device is at work while everything else is computed,
    /// the I/O thread sleeps seldom, and takes its processor time from others and no more.
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
    /// What misses of the needed neurons behind the first `first` ones, cluster by cluster: one by
    /// one, or as a whole where the store (`ffn/store/costs.rs`) says that it is cheaper.
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

    /// `wanted` of `units` neurons one by one. The I/O thread joins neighbours with small gaps
    /// between them into one command.
    fn picks(&self, units: f64, len: u64, wanted: f64) -> Reads {
        if wanted <= 0.0 || units <= 0.0 {
            return Reads::default();
        }
        let limits = Limits::PRODUCTION;
        let stride = self.shape.stride.max(1);
        let reach = (u64::from(limits.gap) + len) / stride;
        let density = (wanted / units).min(1.0);
        // The next wanted neuron lies `n` further with the chance density × (1 - density)^(n - 1).
        let beyond = (1.0 - density).powf(reach as f64);
        // Pieces of memory limit a command: a gap is a piece, too.
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

    /// Nanoseconds in which a command of `len` bytes, which come every `ns`, keeps the I/O thread's
    /// core from others: its processor time, or all of it where the next one is there before a
    /// thread that sleeps is awake again.
    fn busy(&self, len: u64, ns: f64) -> f64 {
        self.device.cpu_ns(len).max(ns.min(self.machine.wake_ns))
    }

    /// `count` clusters as a whole, in the order in which they lie; without the time until the
    /// first one is there, which a scan does not see.
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

    /// Gate parts of all neurons that are not resident, then Up and Down of those that fire.
    pub(super) fn gates_first(&self, plan: &MemoryPlan, first: usize, fires: f64) -> Reads {
        let s = self.shape;
        let behind = (s.neurons - first) as f64;
        let all: f64 = s.neurons as f64 * s.layers as f64;
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

    /// Every cluster behind the first `first` neurons.
    pub(super) fn scan(&self, first: usize) -> Reads {
        let behind = (self.shape.neurons - first) as f64;
        Reads {
            asked: behind,
            missed: behind,
            ..self.whole(behind / CLUSTER as f64)
        }
    }
}

/// Of a number with this mean and standard deviation, and never below 0: the chance that it is
/// above `most`, and its mean where it is not, 0 where it is.
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
    fn clusters_come_whole_when_most_of_them_misses() {
        let (whole, rest) = split(5.0, 2.0, 20.0);
        assert!(whole < 1e-6 && (rest - 5.0).abs() < 1e-3, "{whole} {rest}");
        let (whole, rest) = split(40.0, 5.0, 20.0);
        assert!(whole > 0.999 && rest < 0.01, "{whole} {rest}");
        let (whole, rest) = split(20.5, 5.0, 20.0);
        assert!((whole - 0.5).abs() < 1e-9, "{whole}");
        // Half of the mean less 0.4 deviations.
        assert!((rest - (10.25 - 5.0 * 0.3989)).abs() < 1e-2, "{rest}");
        assert_eq!(split(0.0, 1.0, 5.0), (0.0, 0.0));
    }
}
