//! What reads cost, for deciding how to read: a bundle in one piece or in two, a run as a whole or
//! only what is wanted of it.
//!
//! A cost is the time that one read keeps a busy device from others: its length over the measured
//! throughput. Between measured lengths it is interpolated log-log; below the first one it is
//! constant, as commands limit there, and above the last one proportional to the length.

use std::fs::File;
use std::path::Path;

use super::{DeviceProfile, FileFacts, Pattern};
use crate::io::{IoChoice, Profile, SimOptions};
use crate::limits::Limits;

/// A way that is more work has to save at least a tenth. Curves are that far from the truth, and a
/// second read waits for the first.
const WORTH: f64 = 0.9;

/// Lengths at which a simulated device is asked.
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

/// Where a cost model comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// `emberflow bench io` on this device.
    Measured,
    /// The device is simulated, and this is its model.
    Simulated(Profile),
    /// Nothing is known of the device; this one is like it in kind, and rather slower.
    Assumed(Profile),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Measured => f.write_str("measured"),
            Self::Simulated(profile) => write!(f, "simulated {profile}"),
            Self::Assumed(profile) => write!(f, "assumed to be like {profile}"),
        }
    }
}

/// How many reads bring a bundle in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// All of it at once.
    One,
    /// The Gate part first, and the rest only where the neuron fires.
    Two,
}

/// How some units of a run are brought in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetch {
    /// The whole run, sequentially.
    Scan,
    /// Those that are wanted.
    Pick,
}

/// Processor time of a read where it was not measured, in bytes and nanoseconds: about that of
/// io_uring on a slow core.
const CPU: (f64, f64) = (65_536.0, 4000.0);

/// Points of (bytes, nanoseconds), ascending in bytes.
pub(super) type Curve = Vec<(f64, f64)>;

/// What reads cost on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadCost {
    pub(super) random: Curve,
    pub(super) sequential: Curve,
    /// From asking for a read on an idle device to having it.
    pub(super) latency: Curve,
    /// Of the processor, for each read.
    pub(super) cpu: Curve,
    pub(super) origin: Origin,
}

impl ReadCost {
    /// The costs for reading `file` with `choice`, keeping `depth` commands on the device: the
    /// model itself of a simulated device, else what was measured and saved for the device under
    /// the file, else an assumption about its kind. The measured curve is that of the chosen
    /// engine where there is one. Nothing is measured here: that needs time and more memory than
    /// a budget may have. `path` is what to call the file.
    #[must_use]
    pub fn for_file(file: &File, path: &Path, choice: IoChoice, depth: u32) -> Self {
        let facts = FileFacts::of_open(file, path).ok();
        let range = facts.as_ref().map_or(u64::MAX, |f| f.len);
        if let IoChoice::Sim(options) = choice {
            return Self::simulated(&options, depth, range);
        }
        let engine = match choice {
            // Where io_uring could be measured, it is what `Auto` takes.
            IoChoice::Auto | IoChoice::Uring => Some("uring"),
            IoChoice::Pread => Some("pread"),
            IoChoice::Sim(_) => None,
        };
        (facts.as_ref().and_then(DeviceProfile::for_device))
            .and_then(|profile| profile.read_cost(engine, depth, range))
            .unwrap_or_else(|| Self::assumed(kind_of(facts.as_ref()), depth, range))
    }

    /// The model of a simulated device that reads are spread over `range` bytes of.
    #[must_use]
    pub fn simulated(options: &SimOptions, depth: u32, range: u64) -> Self {
        let model = options.profile.model();
        let (core, submitters) = (options.core, options.submitters);
        let curve = |sequential| {
            let ns = |len| {
                let service = model.service_ns(len, sequential, range, core, submitters);
                // Latencies of commands that are under way together pass together.
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

    /// The costs of a device that `profile` stands for.
    #[must_use]
    pub fn assumed(profile: Profile, depth: u32, range: u64) -> Self {
        Self {
            origin: Origin::Assumed(profile),
            ..Self::simulated(&SimOptions::new(profile, 0), depth, range)
        }
    }

    /// From points of bytes per read and throughput in 10^6 bytes per second. `None` without a
    /// random point, or with one that is not above zero. Without a sequential point sequential
    /// reads cost as much as random ones of the greatest length.
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

    /// Where the numbers come from.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Nanoseconds of a read of `len` bytes, one among many on a busy device. `Sequential` means
    /// that it goes on where the one before has ended; with a queue such a read is never slower
    /// than a random one.
    #[must_use]
    pub fn read_ns(&self, len: u64, pattern: Pattern) -> f64 {
        let random = along(&self.random, len);
        match pattern {
            Pattern::Random => random,
            Pattern::Sequential => random.min(along(&self.sequential, len)),
        }
    }

    /// Nanoseconds from asking an idle device for a read of `len` bytes to having it.
    #[must_use]
    pub fn latency_ns(&self, len: u64) -> f64 {
        along(&self.latency, len)
    }

    /// Nanoseconds of processor time that a read of `len` bytes takes.
    #[must_use]
    pub fn cpu_ns(&self, len: u64) -> f64 {
        along(&self.cpu, len)
    }

    /// Whether to read the Gate part of bundles first. `gate_read` and `whole_read` are the bytes
    /// that are read, with their padding; the rest of a bundle is read for the share `fires` of
    /// the neurons, 0 to 1. `Random` bundles lie apart; with `Sequential` all bundles of a run are
    /// looked at, so that one read each makes a scan and Gate parts alone are strided reads.
    #[must_use]
    pub fn reads_per_bundle(
        &self,
        gate_read: u64,
        whole_read: u64,
        fires: f64,
        pattern: Pattern,
    ) -> Reads {
        let rest = whole_read.saturating_sub(gate_read);
        // The I/O thread reads small gaps along, and strided Gate parts become the whole run.
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
        if two < one * WORTH {
            Reads::Two
        } else {
            Reads::One
        }
    }

    /// Whether to read `units` units of `unit_len` bytes that lie in a run as a whole, when
    /// `wanted` of them, spread evenly, are needed.
    #[must_use]
    pub fn scan_or_pick(&self, units: u64, unit_len: u64, wanted: u64) -> Fetch {
        let scan = self.read_ns(units.saturating_mul(unit_len), Pattern::Sequential);
        if self.picks_ns(units as f64, unit_len, wanted as f64) < scan * WORTH {
            Fetch::Pick
        } else {
            Fetch::Scan
        }
    }

    /// Nanoseconds for reading `wanted` of `units` units, expected numbers. Neighbours go into one
    /// command: `m` units drawn from `n` form `m (n - m + 1) / n` runs.
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

    /// Nanoseconds that `len` bytes take as a part of a long scan.
    fn scan_ns(&self, len: u64) -> f64 {
        let best = (self.sequential.iter().chain(&self.random)).map(|(len, ns)| ns / len);
        best.fold(f64::INFINITY, f64::min) * len as f64
    }
}

/// Log-log between points; constant below the first, proportional above the last.
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

/// The device that is most like the one under a file. Phones name their UFS like other disks.
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
        // Published as 450 MB/s, but from one read at a time.
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
        // A disk whose small reads are as fast as large ones counts bytes alone.
        let flat = ReadCost::from_throughput(&[(8 * KIB, 1000.0)], &[]).unwrap();
        assert_eq!(wide(&flat, 0.5), Two); // 12 + 12 of 36
        assert_eq!(wide(&flat, 0.9), One); // 33.6 of 36
        // A gap of 4 KiB is read along, so the second half comes whether wanted or not.
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
        // All of it is one run.
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
        // One at a time the latency of 60 µs counts.
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
