//! Performance models of the devices that `sim` simulates.
//!
//! A model has three parts: bandwidth by block size, for random and sequential access; the loss
//! over a wide address range; and the loss from the submitting core and from several submitters.
//! Values between the published points are interpolated over the logarithm of the size.

use std::fmt;
use std::str::FromStr;

/// A device that can be simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Profile {
    /// UFS 4.0 as PowerInfer-2 §2.3.2 measured it on a Snapdragon 8 Gen 3 phone.
    Ufs4,
    /// UFS 3.1: assumed at half of UFS 4.0, as its interface has half the rate, with a longer
    /// latency. Not measured.
    Ufs31,
    /// An NVMe disk in a small cloud machine, measured with fio and io_uring.
    Nvme,
    /// eMMC 5.1, from its bus limit (400 MB/s) and typical data sheets. Not measured.
    Emmc,
}

impl Profile {
    /// All profiles.
    pub const ALL: [Self; 4] = [Self::Ufs4, Self::Ufs31, Self::Nvme, Self::Emmc];

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ufs4 => "ufs4",
            Self::Ufs31 => "ufs31",
            Self::Nvme => "nvme",
            Self::Emmc => "emmc",
        }
    }

    pub(crate) fn model(self) -> &'static Model {
        match self {
            Self::Ufs4 => &UFS4,
            Self::Ufs31 => &UFS31,
            Self::Nvme => &NVME,
            Self::Emmc => &EMMC,
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|p| p.name() == text)
            .ok_or_else(|| {
                format!("unknown device profile \"{text}\", known are ufs4, ufs31, nvme, emmc")
            })
    }
}

/// The submitting core. On phones the driver runs on it and limits small reads (PowerInfer-2, Table
/// 1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Core {
    /// The fastest core.
    #[default]
    Big,
    /// A middle core.
    Mid,
    /// A small core.
    Little,
}

/// Bandwidth in MB/s (10^6) by block size in bytes, ascending.
type Curve = [(u64, f64)];

pub(crate) struct Model {
    /// Latency of a command beyond its share of the bandwidth, in nanoseconds. Commands in flight
    /// overlap their latencies.
    pub(crate) latency_ns: u64,
    random: &'static Curve,
    sequential: &'static Curve,
    /// Factor on 4 KiB random reads by address range in bytes.
    range: &'static Curve,
    /// Factor by submitting core: big, mid, little.
    cores: [f64; 3],
    /// Factor with more than one submitter.
    contended: f64,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// 1,076 MB/s at 128 MiB and below 850 at 512 MiB. Each further doubling is assumed to cost half as
/// much as these two, down to half the speed.
const UFS_RANGE: &Curve = &[(128 * MIB, 1.0), (512 * MIB, 0.79), (8192 * MIB, 0.5)];
const UFS_CORES: [f64; 3] = [1.0, 1007.95 / 1076.10, 761.87 / 1076.10];

const UFS: Model = Model {
    latency_ns: 60_000,
    random: &[(4 * KIB, 1076.0), (512 * KIB, 3500.0)],
    sequential: &[(4 * KIB, 450.0), (512 * KIB, 4000.0)],
    range: UFS_RANGE,
    cores: UFS_CORES,
    contended: 0.6,
};

static UFS4: Model = UFS;

static UFS31: Model = Model {
    latency_ns: 90_000,
    random: &[(4 * KIB, 538.0), (512 * KIB, 1750.0)],
    sequential: &[(4 * KIB, 225.0), (512 * KIB, 2000.0)],
    ..UFS
};

static NVME: Model = Model {
    latency_ns: 40_000,
    random: &[
        (4 * KIB, 342.0),
        (8 * KIB, 532.0),
        (24 * KIB, 844.0),
        (64 * KIB, 1083.0),
        (512 * KIB, 1110.0),
    ],
    sequential: &[(64 * KIB, 1083.0), (MIB, 1250.0)],
    range: &[(128 * MIB, 1.0)],
    cores: [1.0; 3],
    contended: 1.0,
};

static EMMC: Model = Model {
    latency_ns: 150_000,
    random: &[(4 * KIB, 40.0), (512 * KIB, 250.0)],
    sequential: &[(4 * KIB, 100.0), (512 * KIB, 280.0)],
    range: UFS_RANGE,
    cores: [1.0; 3],
    contended: 0.6,
};

impl Model {
    /// Time the device is busy with one command, in nanoseconds.
    pub(crate) fn service_ns(
        &self,
        len: u64,
        sequential: bool,
        range: u64,
        core: Core,
        submitters: u32,
    ) -> u64 {
        // How much the command rate, not bandwidth, limits this block size: 1 at 4 KiB, 0 from 512
        // KiB.
        let small = 1.0 - ((len.max(1) as f64 / 4096.0).log2() / 7.0).clamp(0.0, 1.0);
        let weigh = |factor: f64| 1.0 - (1.0 - factor) * small;
        let random = at(self.random, len) * weigh(at(self.range, range));
        // Published sequential rates of small blocks are at queue depth 1. With a deeper queue a
        // sequential read is never slower than a random one.
        let mut speed = if sequential {
            random.max(at(self.sequential, len))
        } else {
            random
        };
        speed *= weigh(self.cores[core as usize]);
        if submitters > 1 {
            speed *= self.contended;
        }
        // Below the first point the command rate limits: use the time of the first point.
        let bytes = len.max(self.random[0].0) as f64;
        (bytes * 1000.0 / speed) as u64
    }
}

/// Value of a curve at `x`, constant beyond its end points.
fn at(curve: &Curve, x: u64) -> f64 {
    let Some(above) = curve.iter().position(|&(size, _)| size >= x) else {
        return curve[curve.len() - 1].1;
    };
    let (size, value) = curve[above];
    if above == 0 || size == x {
        return value;
    }
    let (size0, value0) = curve[above - 1];
    let share = (x as f64 / size0 as f64).ln() / (size as f64 / size0 as f64).ln();
    value0 + (value - value0) * share
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mb_per_s(p: Profile, len: u64, seq: bool, range: u64, core: Core, n: u32) -> f64 {
        len as f64 * 1000.0 / p.model().service_ns(len, seq, range, core, n) as f64
    }

    fn near(got: f64, want: f64) {
        assert!((got / want - 1.0).abs() < 0.01, "{got} is not near {want}");
    }

    #[test]
    fn ufs4_shows_the_published_numbers() {
        use Core::{Big, Little, Mid};
        let u = Profile::Ufs4;
        near(mb_per_s(u, 4096, false, 128 * MIB, Big, 1), 1076.1);
        near(mb_per_s(u, 4096, false, 128 * MIB, Mid, 1), 1007.95);
        near(mb_per_s(u, 4096, false, 128 * MIB, Little, 1), 761.87);
        near(mb_per_s(u, 4096, false, 512 * MIB, Big, 1), 850.0);
        near(mb_per_s(u, 512 * KIB, false, 8192 * MIB, Little, 1), 3500.0);
        near(mb_per_s(u, 512 * KIB, true, 128 * MIB, Big, 1), 4000.0);
        near(mb_per_s(u, 4096, false, 128 * MIB, Big, 4), 1076.1 * 0.6);
    }

    #[test]
    fn nvme_shows_the_measured_numbers() {
        for (len, want) in [
            (4096, 342.0),
            (8192, 532.0),
            (24576, 844.0),
            (65536, 1083.0),
        ] {
            near(mb_per_s(Profile::Nvme, len, false, MIB, Core::Big, 8), want);
        }
        // At queue depth 1 the latency adds to the service time.
        let one = NVME.latency_ns + NVME.service_ns(4096, false, MIB, Core::Big, 1);
        near(4096.0 * 1000.0 / one as f64, 79.0);
    }

    #[test]
    fn curves_are_interpolated_between_their_points_and_flat_outside() {
        let c: &Curve = &[(4096, 100.0), (16384, 300.0)];
        assert_eq!(at(c, 512), 100.0);
        near(at(c, 8192), 200.0);
        assert_eq!(at(c, 1 << 30), 300.0);
    }

    #[test]
    fn names_read_back() {
        for p in Profile::ALL {
            assert_eq!(p.name().parse(), Ok(p));
        }
        assert!("floppy".parse::<Profile>().unwrap_err().contains("floppy"));
    }
}
