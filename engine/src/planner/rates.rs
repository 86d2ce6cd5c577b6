//! How fast this machine computes: what the planner knows of it, and the file that keeps it.
//!
//! The storage device has a profile of its own
//! ([`DeviceProfile`]): disks change without the
//! processor and the other way round.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use emberflow_kernels::{Cpu, DType};
use emberflow_storage::profile::{DeviceProfile, Machine, ProfileError, load_json, save_json};
use serde::{Deserialize, Serialize};

/// Version of the saved form; others are refused.
pub const VERSION: u32 = 3;

/// Gigabytes per second out of working sets of some sizes: caches end somewhere.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Nanoseconds that each row costs beside its bytes.
    pub row_ns: f64,
    /// (bytes that are walked through, 10^9 bytes per second), ascending.
    pub gb_per_s: Vec<(u64, f64)>,
}

impl Speed {
    /// Nanoseconds for `rows` rows of `bytes` in all, which are a part of `working_set` bytes
    /// that are walked through again and again.
    pub fn ns(&self, rows: f64, bytes: f64, working_set: f64) -> f64 {
        rows * self.row_ns + bytes / self.at(working_set)
    }

    /// 10^9 bytes per second out of a working set; between measured ones along the logarithm.
    pub fn at(&self, working_set: f64) -> f64 {
        let points = &self.gb_per_s;
        let above = points.iter().position(|p| p.0 as f64 >= working_set);
        let speed = match (above, points.as_slice()) {
            (Some(0), [first, ..]) => first.1,
            (Some(i), _) => {
                let (a, b) = (points[i - 1], points[i]);
                let share = (working_set / a.0 as f64).ln() / (b.0 as f64 / a.0 as f64).ln();
                a.1 + (b.1 - a.1) * share
            }
            (None, [.., last]) => last.1,
            (None, []) => 1.0,
        };
        speed.max(1e-3)
    }
}

/// Kernels of one block format with one number of threads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelRates {
    /// Name of the format.
    pub dtype: String,
    /// Rows that follow each other times one token: attention, head, Gate rows.
    pub dot: Speed,
    /// Scattered neurons of one token: the product with the Up row and the addition of the Down
    /// column. Rows and bytes are those of both.
    pub neuron: Speed,
    /// (tokens, 10^9 multiply-adds per second) of matrix products.
    pub gemm: Vec<(u32, f64)>,
}

impl KernelRates {
    /// 10^9 multiply-adds per second of products with `tokens` tokens.
    pub fn gemm_at(&self, tokens: f64) -> f64 {
        let curve = Speed {
            row_ns: 0.0,
            gb_per_s: self.gemm.iter().map(|p| (u64::from(p.0), p.1)).collect(),
        };
        curve.at(tokens)
    }
}

/// What a number of threads achieves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ThreadRates {
    /// Threads, the caller's included.
    pub threads: u32,
    /// Nanoseconds of a parallel section that does nothing.
    pub section_ns: f64,
    /// Nanoseconds that a layer takes of a token beyond what the other rates name: what the bundled
    /// model was seen to take, all in memory.
    pub layer_ns: f64,
    /// A plain read of memory.
    pub read: Speed,
    /// By block format.
    pub kernels: Vec<KernelRates>,
}

impl ThreadRates {
    /// The rates of a format.
    pub fn kernel(&self, dtype: DType) -> Option<&KernelRates> {
        self.kernels.iter().find(|k| k.dtype == dtype.name())
    }
}

/// What was measured for this process and may be kept nowhere else.
static REMEMBERED: Mutex<Option<Rates>> = Mutex::new(None);

/// A measured machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// [`VERSION`] of this form.
    pub version: u32,
    /// The machine.
    pub machine: Machine,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Whether the numbers were measured; else they are a guess.
    pub measured: bool,
    /// 10^9 bytes per second of checksums, by one thread.
    pub check_gb_per_s: f64,
    /// Nanoseconds to find a neuron in the cold region and to release it.
    pub lookup_ns: f64,
    /// Nanoseconds to evict a neuron for another one and to admit that.
    pub replace_ns: f64,
    /// Nanoseconds to look at a neuron's gate and, if it fires, to note it.
    pub name_ns: f64,
    /// Nanoseconds from handing something to a thread that sleeps to its having it.
    pub wake_ns: f64,
    /// Nanoseconds that this takes the one who hands it over.
    pub tell_ns: f64,
    /// Nanoseconds of one thread for an element of the residual stream that is normalised and
    /// quantised.
    pub element_ns: f64,
    /// By number of threads, ascending.
    pub threads: Vec<ThreadRates>,
}

impl Rates {
    /// Where they are kept: beside the profile of the storage device. `None` when no cache folder
    /// is known.
    pub fn default_path() -> Option<PathBuf> {
        Some(DeviceProfile::default_path()?.with_file_name("machine.json"))
    }

    /// What was measured on this machine and remembered or saved. `None` when nothing was, or on
    /// another one.
    pub fn saved() -> Option<Self> {
        let remembered = REMEMBERED.lock().unwrap_or_else(|e| e.into_inner());
        let saved = || Self::saved_at(&Self::default_path()?, &Machine::here());
        remembered.clone().or_else(saved)
    }

    /// Has this process plan with them from now on, where they may not be saved.
    pub fn remember(self) {
        let mut remembered = REMEMBERED.lock().unwrap_or_else(|e| e.into_inner());
        *remembered = Some(self);
    }

    fn saved_at(path: &Path, here: &Machine) -> Option<Self> {
        let rates: Self = load_json(path, VERSION, "emberflow bench device")
            .map_err(|e| tracing::debug!(reason = %e, "no machine profile"))
            .ok()?;
        let same = rates.is_of(here) && rates.isa == Cpu::detect().name();
        if !same {
            tracing::debug!(measured = %rates.machine.cpu, here = %here.cpu,
                "the saved machine profile is of another machine");
        }
        (same && !rates.threads.is_empty()).then_some(rates)
    }

    /// Saves them so that a reader finds the old ones or the new ones, never a part.
    ///
    /// # Errors
    /// The path that could not be written.
    pub fn save(&self, path: &Path) -> Result<(), ProfileError> {
        save_json(path, self)
    }

    /// Whether they were measured on a machine like `here`. A new kernel or more memory change
    /// nothing.
    fn is_of(&self, here: &Machine) -> bool {
        let same = |m: &Machine| (m.arch.clone(), m.cpu.clone(), m.cores);
        same(&self.machine) == same(here)
    }

    /// A guess for a machine that was not measured: 8 GB/s for each of up to 4 threads, which a
    /// phone of the middle class has.
    pub fn assumed(cores: u32) -> Self {
        let speed = |gb: f64, row_ns: f64| Speed {
            row_ns,
            gb_per_s: vec![(1 << 22, gb * 2.0), (1 << 27, gb)],
        };
        let threads = |threads: u32| {
            let gb = 8.0 * f64::from(threads.min(4));
            let kernel = |dtype: &DType| KernelRates {
                dtype: dtype.name().to_owned(),
                dot: speed(gb * 0.8, 5.0 / f64::from(threads)),
                neuron: speed(gb * 0.6, 20.0 / f64::from(threads)),
                gemm: vec![
                    (4, 10.0 * f64::from(threads)),
                    (64, 20.0 * f64::from(threads)),
                ],
            };
            ThreadRates {
                threads,
                section_ns: if threads > 1 { 3000.0 } else { 100.0 },
                layer_ns: 10_000.0,
                read: speed(gb, 0.0),
                kernels: FORMATS.iter().map(kernel).collect(),
            }
        };
        Self {
            version: VERSION,
            machine: Machine::default(),
            isa: Cpu::detect().name().to_owned(),
            measured: false,
            check_gb_per_s: 4.0,
            lookup_ns: 60.0,
            replace_ns: 250.0,
            name_ns: 2.0,
            wake_ns: 20_000.0,
            tell_ns: 5_000.0,
            element_ns: 0.5,
            threads: counts(cores).into_iter().map(threads).collect(),
        }
    }

    /// The rates of the measured number of threads that is nearest to `threads`.
    pub fn with_threads(&self, threads: usize) -> Option<&ThreadRates> {
        let distance = |t: &&ThreadRates| (t.threads as usize).abs_diff(threads);
        self.threads.iter().min_by_key(distance)
    }
}

/// Block formats whose kernels are measured.
pub const FORMATS: [DType; 4] = [DType::Q4, DType::Q8, DType::F16, DType::F32];

/// Numbers of threads that are looked at: each up to 4, then every second power of two, and all.
pub fn counts(cores: u32) -> Vec<u32> {
    let cores = cores.max(1);
    let mut all: Vec<u32> = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64]
        .into_iter()
        .filter(|&n| n < cores)
        .collect();
    all.push(cores);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_lies_between_measured_working_sets() {
        let speed = Speed {
            row_ns: 2.0,
            gb_per_s: vec![(1 << 20, 40.0), (1 << 24, 20.0)],
        };
        assert_eq!(speed.at(1.0), 40.0);
        assert!((speed.at(f64::from(1 << 22)) - 30.0).abs() < 1e-9);
        assert_eq!(speed.at(1e12), 20.0);
        assert_eq!(speed.ns(3.0, 400.0, 1.0), 16.0);
    }

    #[test]
    fn thread_counts_end_with_all_cores() {
        assert_eq!(counts(0), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(10), [1, 2, 3, 4, 6, 8, 10]);
    }

    #[test]
    fn the_profile_of_another_machine_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine.json");
        let here = Machine::here();
        let rates = Rates {
            machine: here.clone(),
            ..Rates::assumed(2)
        };
        rates.save(&path).unwrap();
        assert_eq!(Rates::saved_at(&path, &here).as_ref(), Some(&rates));
        let newer_kernel = Machine {
            kernel: "99".into(),
            ..here.clone()
        };
        assert!(Rates::saved_at(&path, &newer_kernel).is_some());
        let other = Machine {
            cores: here.cores + 1,
            ..here.clone()
        };
        assert_eq!(Rates::saved_at(&path, &other), None);
        std::fs::write(&path, "{\"version\": 7}").unwrap();
        assert_eq!(Rates::saved_at(&path, &here), None);
    }
}
