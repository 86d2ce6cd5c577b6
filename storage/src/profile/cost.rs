//! Cost model for reads: decides between one or two reads per bundle, and between scanning a run
//! and picking from it.
//!
//! The cost of a read is its device time under load: its length over the measured throughput. It is
//! interpolated log-log between measured lengths, constant below the first one (the command rate
//! limits there), and proportional to the length above the last one.

use std::fs::File;
use std::path::Path;

use super::{DeviceProfile, FileFacts, Pattern};
use crate::io::{IoChoice, Profile, SimOptions};
use crate::limits::Limits;

/// The option with more work must save at least 10 %: the curves are that inaccurate, and a second
/// read waits for the first.
const MIN_SAVING: f64 = 0.9;

/// Lengths sampled from a simulated device.
const LENGTHS: [u64; 9] = [
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
];

/// Origin of a cost model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// `emberflow bench io` on this device.
    Measured,
    /// A few reads on this device, as `emberflow plan` does.
    Brief,
    /// As measured, but with load from others, or with rounds that disagree.
    Doubtful,
    /// Model of a simulated device.
    Simulated(Profile),
    /// Nothing is known about the device; assume one of the same kind, on the slow side.
    Assumed(Profile),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Measured => f.write_str("measured"),
            Self::Brief => f.write_str("measured by a few reads"),
            Self::Doubtful => f.write_str("measured under load"),
            Self::Simulated(profile) => write!(f, "simulated {profile}"),
            Self::Assumed(profile) => write!(f, "assumed to be like {profile}"),
        }
    }
}

/// Reads per bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// The whole bundle at once.
    One,
    /// The Gate part first, the rest only if the neuron fires.
    Two,
}

/// How to fetch some units of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetch {
    /// Read the whole run sequentially.
    Scan,
    /// Read only the wanted units.
    Pick,
}

/// CPU time of a read if not measured, as (bytes, nanoseconds): about that of io_uring on a slow
/// core.
const CPU: (f64, f64) = (65_536.0, 4000.0);

/// Points of (bytes, nanoseconds), ascending in bytes.
pub(super) type Curve = Vec<(f64, f64)>;

/// Cost of reads on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadCost {
    pub(super) random: Curve,
    pub(super) sequential: Curve,
    /// From submission on an idle device to completion.
    pub(super) latency: Curve,
    /// CPU time per read.
    pub(super) cpu: Curve,
    pub(super) origin: Origin,
}

impl ReadCost {
    /// Costs of reading `file` with `choice` at queue depth `depth`: the model of a simulated
    /// device, else the saved measurement of the file's device, else an assumption by its kind.
    /// Uses the curve of the chosen engine if measured. Measures nothing, as that takes time and
    /// may exceed the budget. `path` names the file.
    #[must_use]
    pub fn for_file(file: &File, path: &Path, choice: IoChoice, depth: u32) -> Self {
        let facts = FileFacts::of_open(file, path).ok();
        let range = facts.as_ref().map_or(u64::MAX, |f| f.len);
        if let IoChoice::Sim(options) = choice {
            return Self::simulated(&options, depth, range);
        }
        let engine = match choice {
            // If io_uring could be measured, `Auto` uses it.
            IoChoice::Auto | IoChoice::Uring => Some("uring"),
            IoChoice::Pread => Some("pread"),
            IoChoice::Sim(_) => None,
        };
        (facts.as_ref().and_then(DeviceProfile::for_device))
            .and_then(|profile| profile.read_cost(engine, depth, range))
            .unwrap_or_else(|| Self::assumed(kind_of(facts.as_ref()), depth, range))
    }

    /// Costs of a simulated device, for reads spread over `range` bytes.
    #[must_use]
    pub fn simulated(options: &SimOptions, depth: u32, range: u64) -> Self {
        let model = options.profile.model();
        let (core, submitters) = (options.core, options.submitters);
        let curve = |sequential| {
            let ns = |len| {
                let service = model.service_ns(len, sequential, range, core, submitters);
                // Latencies of commands in flight overlap.
                let turn = (model.latency_ns + service) / u64::from(depth.max(1));
                service.max(turn) as f64
            };
            LENGTHS.map(|len| (len as f64, ns(len))).to_vec()
        };
        let latency = |len| {
            let service = model.service_ns(len, false, range, core, submitters);
            (len as f64, (model.latency_ns + service) as f64)
        };
        Self {
            random: curve(false),
            sequential: curve(true),
            latency: LENGTHS.map(latency).to_vec(),
            cpu: vec![CPU],
            origin: Origin::Simulated(options.profile),
        }
    }

    /// Assumed costs of a device like `profile`.
    #[must_use]
    pub fn assumed(profile: Profile, depth: u32, range: u64) -> Self {
        Self {
            origin: Origin::Assumed(profile),
            ..Self::simulated(&SimOptions::new(profile, 0), depth, range)
        }
    }

    /// Costs from points of (bytes per read, throughput in 10^6 bytes per second). `None` without a
    /// random point, or if one is not above zero. Without a sequential point, sequential reads cost
    /// as much as the longest random ones.
    #[must_use]
    pub fn from_throughput(random: &[(u32, f64)], sequential: &[(u32, f64)]) -> Option<Self> {
        let curve = |points: &[(u32, f64)]| -> Option<Curve> {
            let mut curve = Vec::with_capacity(points.len());
            for &(len, mb_per_s) in points {
                let ns = f64::from(len) * 1000.0 / mb_per_s;
                if !(ns.is_finite() && ns > 0.0) {
                    return None;
                }
                curve.push((f64::from(len), ns));
            }
            curve.sort_by(|a, b| a.0.total_cmp(&b.0));
            Some(curve)
        };
        let (random, mut sequential) = (curve(random)?, curve(sequential)?);
        let last = *random.last()?;
        if sequential.is_empty() {
            sequential.push(last);
        }
        Some(Self {
            latency: random.clone(),
            cpu: vec![CPU],
            random,
            sequential,
            origin: Origin::Measured,
        })
    }

    /// Origin of the numbers.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Nanoseconds of a read of `len` bytes on a busy device. `Sequential` continues where the
    /// previous read ended; with a deep queue it is never slower than a random read.
    #[must_use]
    pub fn read_ns(&self, len: u64, pattern: Pattern) -> f64 {
        let random = along(&self.random, len);
        match pattern {
            Pattern::Random => random,
            Pattern::Sequential => random.min(along(&self.sequential, len)),
        }
    }

    /// Latency of a read of `len` bytes on an idle device, in nanoseconds.
    #[must_use]
    pub fn latency_ns(&self, len: u64) -> f64 {
        along(&self.latency, len)
    }

    /// CPU time of a read of `len` bytes, in nanoseconds.
    #[must_use]
    pub fn cpu_ns(&self, len: u64) -> f64 {
        along(&self.cpu, len)
    }

    /// Whether to read the Gate part of bundles first. `gate_read` and `whole_read` are the bytes
    /// read, with padding; the rest of a bundle is read for the share `fires` (0 to 1) of the
    /// neurons. `Random` bundles are scattered. With `Sequential` every bundle of a run is read, so
    /// one read each is a scan, and Gate parts alone are strided reads.
    #[must_use]
    pub fn reads_per_bundle(
        &self,
        gate_read: u64,
        whole_read: u64,
        fires: f64,
        pattern: Pattern,
    ) -> Reads {
        let rest = whole_read.saturating_sub(gate_read);
        // The I/O thread merges reads over small gaps, so strided Gate parts become the whole run.
        let swallowed = pattern == Pattern::Sequential && rest <= u64::from(Limits::default().gap);
        if gate_read == 0 || rest == 0 || swallowed {
            return Reads::One;
        }
        let one = match pattern {
            Pattern::Random => self.read_ns(whole_read, pattern),
            Pattern::Sequential => self.scan_ns(whole_read),
        };
        let two = self.read_ns(gate_read, Pattern::Random)
            + fires.clamp(0.0, 1.0) * self.read_ns(rest, Pattern::Random);
        if two < one * MIN_SAVING {
            Reads::Two
        } else {
            Reads::One
        }
    }

    /// Whether to read a whole run of `units` units of `unit_len` bytes, if `wanted` of them,
    /// evenly spread, are needed.
    #[must_use]
    pub fn scan_or_pick(&self, units: u64, unit_len: u64, wanted: u64) -> Fetch {
        let scan = self.read_ns(units.saturating_mul(unit_len), Pattern::Sequential);
        if self.picks_ns(units as f64, unit_len, wanted as f64) < scan * MIN_SAVING {
            Fetch::Pick
        } else {
            Fetch::Scan
        }
    }

    /// Nanoseconds to read `wanted` of `units` units, in expectation. Adjacent units merge: `m`
    /// units drawn from `n` form `m (n - m + 1) / n` runs.
    #[must_use]
    pub fn picks_ns(&self, units: f64, unit_len: u64, wanted: f64) -> f64 {
        let (n, m) = (units, wanted.min(units));
        if m <= 0.0 {
            return 0.0;
        }
        let runs = (m * (n - m + 1.0) / n).min(m);
        let len = m * unit_len as f64 / runs;
        runs * self.read_ns(len as u64, Pattern::Random)
    }

    /// Nanoseconds of `len` bytes as part of a long scan.
    fn scan_ns(&self, len: u64) -> f64 {
        let best = (self.sequential.iter().chain(&self.random)).map(|(len, ns)| ns / len);
        best.fold(f64::INFINITY, f64::min) * len as f64
    }
}

/// Interpolates log-log between points; constant below the first, proportional above the last.
fn along(curve: &[(f64, f64)], len: u64) -> f64 {
    let x = len as f64;
    let above = curve.iter().position(|&(at, _)| at >= x);
    match (above, curve) {
        _ if len == 0 => 0.0,
        (Some(0), [first, ..]) => first.1,
        (Some(i), _) => between(curve[i - 1].into(), curve[i].into(), x),
        (None, [.., last]) => last.1 * x / last.0,
        (None, []) => 0.0,
    }
}

/// A point of a curve.
#[derive(Clone, Copy)]
pub(super) struct Knot {
    pub x: f64,
    pub y: f64,
}

impl From<(f64, f64)> for Knot {
    fn from((x, y): (f64, f64)) -> Self {
        Self { x, y }
    }
}

/// The value at `x` between two points, on a straight line where both axes are logarithmic.
pub(super) fn between(a: Knot, b: Knot, x: f64) -> f64 {
    if a.x == b.x {
        return b.y;
    }
    let share = (x / a.x).ln() / (b.x / a.x).ln();
    (a.y.ln() + (b.y / a.y).ln() * share).exp()
}

/// The profile most like the device of a file. Phones name UFS like other disks.
fn kind_of(facts: Option<&FileFacts>) -> Profile {
    let device = facts.map_or("", |f| f.device.as_str());
    let name = device.rsplit('/').next().unwrap_or_default();
    if name.starts_with("mmcblk") {
        Profile::Emmc
    } else if cfg!(target_os = "android") && !name.starts_with("nvme") {
        Profile::Ufs31
    } else {
        Profile::Nvme
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u32 = 1 << 10;

    /// UFS 4.0 as published: random 1 GB/s at 4 KiB and 3.5 at 512 KiB, sequential 4 GB/s.
    fn ufs4() -> ReadCost {
        let random = [(4 * KIB, 1000.0), (512 * KIB, 3500.0)];
        let sequential = [(4 * KIB, 450.0), (512 * KIB, 4000.0)];
        ReadCost::from_throughput(&random, &sequential).unwrap()
    }

    /// A cloud machine's NVMe with our own engine on huge pages.
    fn nvme() -> ReadCost {
        let random = [
            (4 * KIB, 505.0),
            (8 * KIB, 840.0),
            (24 * KIB, 1507.0),
            (64 * KIB, 2262.0),
            (512 * KIB, 2678.0),
        ];
        ReadCost::from_throughput(&random, &[(1024 * KIB, 2142.0)]).unwrap()
    }

    fn near(got: f64, want: f64) {
        assert!((got / want - 1.0).abs() < 0.002, "{got} is not near {want}");
    }

    #[test]
    fn curves_are_straight_on_log_paper() {
        let c = ufs4();
        let random = |kib: u32| c.read_ns((kib * KIB).into(), Pattern::Random);
        // 4096 B at 1 B/ns; 524288 B at 3.5 B/ns.
        near(random(4), 4096.0);
        near(random(512), 149_797.0);
        // Exponent ln(149797 / 4096) / ln(128) = 0.7418: a double length costs 1.672 times as much.
        near(random(8), 4096.0 * 1.6722);
        near(random(24), 4096.0 * 3.778);
        assert_eq!(random(1), random(4), "commands limit small reads");
        near(random(1024), 2.0 * 149_797.0);
        assert_eq!(random(0), 0.0);
        // Published as 450 MB/s, but at queue depth 1.
        assert_eq!(c.read_ns(4096, Pattern::Sequential), random(4));
        near(c.read_ns(512 << 10, Pattern::Sequential), 131_072.0);
    }

    #[test]
    fn points_that_say_nothing_are_refused() {
        let make = ReadCost::from_throughput;
        assert_eq!(make(&[], &[(4096, 1.0)]), None);
        assert_eq!(make(&[(4096, 0.0)], &[]), None);
        assert_eq!(make(&[(4096, f64::NAN)], &[]), None);
        assert_eq!(make(&[(0, 5.0)], &[]), None);
        let c = make(&[(8192, 100.0), (4096, 100.0)], &[]).unwrap();
        near(c.read_ns(1 << 20, Pattern::Sequential), 10_485_760.0);
    }

    #[test]
    fn bundles_of_scattered_neurons() {
        use Pattern::Random;
        use Reads::{One, Two};
        // Q4, 7B: 8 KiB, halves of 4 KiB. One read 6849 ns; two 4096 + p * 4096.
        let q4 = |c: &ReadCost, p| c.reads_per_bundle(4 << 10, 8 << 10, p, Random);
        assert_eq!(q4(&ufs4(), 0.1), Two); // 4506
        assert_eq!(q4(&ufs4(), 0.45), Two); // 5939, below 0.9 * 6849 = 6164
        assert_eq!(q4(&ufs4(), 0.55), One); // 6349
        // f16, 7B: 24 KiB, 8 and 16. One read 15475; two 6849 + p * 11453.
        let f16 = |c: &ReadCost, p| c.reads_per_bundle(8 << 10, 24 << 10, p, Random);
        assert_eq!(f16(&ufs4(), 0.1), Two); // 7994
        assert_eq!(f16(&ufs4(), 0.7), One); // 14866, above 13928
        // Here a second command costs almost as much as the whole bundle: 8192 / 0.84 = 9752 for
        // one, 4096 / 0.505 = 8111 for half of it.
        assert_eq!(q4(&nvme(), 0.1), One); // 8922, above 8777
        assert_eq!(q4(&nvme(), 0.05), Two); // 8517
        assert_eq!(f16(&nvme(), 0.1), Two); // 9752 + 0.1 * 13199 = 11072, below 14678
        assert_eq!(f16(&nvme(), 0.5), One); // 16352
    }

    #[test]
    fn bundles_of_a_whole_layer() {
        use Pattern::Sequential;
        use Reads::{One, Two};
        // A scan at 4 GB/s takes 6144 ns for 24 KiB, a strided read of 8 KiB alone 6849.
        let f16 = |c: &ReadCost, p| c.reads_per_bundle(8 << 10, 24 << 10, p, Sequential);
        assert_eq!(f16(&ufs4(), 0.0), One);
        // 24576 / 2.678 = 9177 against 9752: strided reads never pay.
        assert_eq!(f16(&nvme(), 0.0), One);
        // 36 KiB, 12 and 24: 36864 / 2.678 = 13766, against 11790 for the strided part.
        let wide = |c: &ReadCost, p| c.reads_per_bundle(12 << 10, 36 << 10, p, Sequential);
        assert_eq!(wide(&nvme(), 0.02), Two); // 12116, below 12389
        assert_eq!(wide(&nvme(), 0.1), One); // 13421
        // On a disk whose small reads are as fast as large ones, only bytes count.
        let flat = ReadCost::from_throughput(&[(8 * KIB, 1000.0)], &[]).unwrap();
        assert_eq!(wide(&flat, 0.5), Two); // 12 + 12 of 36
        assert_eq!(wide(&flat, 0.9), One); // 33.6 of 36
        // A gap of 4 KiB is merged over, so the second half is read anyway.
        assert_eq!(
            flat.reads_per_bundle(4 << 10, 8 << 10, 0.0, Sequential),
            One
        );
        assert_eq!(flat.reads_per_bundle(0, 8 << 10, 0.0, Sequential), One);
    }

    #[test]
    fn a_run_is_scanned_when_enough_of_it_is_wanted() {
        let c = ufs4();
        // 8 MiB at 4 GB/s: 2,097 µs.
        let fetch = |wanted| c.scan_or_pick(1024, 8 << 10, wanted);
        assert_eq!(fetch(0), Fetch::Pick);
        // 100 units in 90.3 runs of 9069 B, 7389 ns each: 667 µs.
        near(c.picks_ns(1024.0, 8 << 10, 100.0), 667_500.0);
        assert_eq!(fetch(100), Fetch::Pick);
        // 250 in 189.2 runs of 10824 B, 8422 ns each: 1,594 µs.
        near(c.picks_ns(1024.0, 8 << 10, 250.0), 1_593_600.0);
        assert_eq!(fetch(250), Fetch::Pick);
        // 320 in 220.3 runs of 11899 B, 9035 ns each: 1,990 µs, not a tenth less.
        near(c.picks_ns(1024.0, 8 << 10, 320.0), 1_990_500.0);
        assert_eq!(fetch(320), Fetch::Scan);
        assert_eq!(fetch(1024), Fetch::Scan);
        // All units form one run.
        let all = c.read_ns(8 << 20, Pattern::Random);
        near(c.picks_ns(1024.0, 8 << 10, 5000.0), all);
        // Slow small reads. All of it: 14.6 ms. 100 units in 90.1 runs: 9.8 ms; 150 in 127.7: 14.4.
        let emmc = [(4 * KIB, 40.0), (512 * KIB, 250.0)];
        let emmc = ReadCost::from_throughput(&emmc, &[(512 * KIB, 280.0)]).unwrap();
        assert_eq!(emmc.scan_or_pick(1000, 4096, 100), Fetch::Pick);
        assert_eq!(emmc.scan_or_pick(1000, 4096, 150), Fetch::Scan);
    }

    #[test]
    fn a_simulated_device_costs_what_it_takes() {
        let options = SimOptions::new(Profile::Ufs4, 0);
        let c = ReadCost::simulated(&options, 64, 128 << 20);
        near(c.read_ns(4096, Pattern::Random), 4096.0 / 1.076);
        near(c.read_ns(512 << 10, Pattern::Sequential), 131_072.0);
        assert_eq!(c.origin(), Origin::Simulated(Profile::Ufs4));
        // At queue depth 1 the latency of 60 µs counts.
        let alone = ReadCost::simulated(&options, 1, 128 << 20);
        near(alone.read_ns(4096, Pattern::Random), 60_000.0 + 3806.0);
        let little = SimOptions {
            submitters: 2,
            ..options
        };
        let slow = ReadCost::simulated(&little, 64, 128 << 20);
        near(slow.read_ns(4096, Pattern::Random), 4096.0 / 1.076 / 0.6);
    }

    #[test]
    fn every_file_gets_a_cost_model() {
        let sim = SimOptions::new(Profile::Emmc, 0);
        let (file, nowhere) = (File::open("Cargo.toml").unwrap(), Path::new("a label"));
        let cost = ReadCost::for_file(&file, nowhere, IoChoice::Sim(sim), 32);
        assert_eq!(cost.origin().to_string(), "simulated emmc");
        let cost = ReadCost::assumed(kind_of(None), 32, u64::MAX);
        assert!(matches!(cost.origin(), Origin::Assumed(_)), "{cost:?}");
        assert!(cost.latency_ns(4096) >= cost.read_ns(4096, Pattern::Random));
        assert!(cost.cpu_ns(4096) > 0.0);
        let on = |device: &str| {
            kind_of(Some(&FileFacts {
                device: device.into(),
                ..FileFacts::default()
            }))
        };
        assert_eq!(on("/dev/mmcblk0p3"), Profile::Emmc);
        assert_eq!(on("/dev/nvme0n1p1"), Profile::Nvme);
    }
}
