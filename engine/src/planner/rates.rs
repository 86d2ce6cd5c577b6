//! Compute rates of this machine, and the file that stores them.
//!
//! The storage device has its own profile ([`DeviceProfile`]), because disks and processors change
//! independently.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use emberflow_kernels::{Block, Cpu, DType, Isa};
use emberflow_storage::profile::{DeviceProfile, Machine, ProfileError, load_json, save_json};
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Version of the file format; others are rejected.
pub const VERSION: u32 = 4;

/// Bounds of what a thread's kernels can read in GB/s: a core loads at most two vectors of 64 bytes a cycle, at less than
/// 6 GHz; and a slow one with other load reads 10 MB/s.
const GB_PER_S: [f64; 2] = [0.01, 768.0];
/// Most 10^9 multiply-adds per second of a thread: 1024 a cycle in matrix units, at less than 6 GHz.
const MOST_PRODUCTS: f64 = 6144.0;
/// Most nanoseconds of what is counted in them: a second, longer than a scheduler lets a thread wait.
const MOST_NS: f64 = 1e9;

/// Bytes of the row by which measurements are compared: 4096 elements in 8 bits.
const ROW: f64 = 4096.0;

fn is_time(ns: f64) -> bool {
    (0.0..=MOST_NS).contains(&ns)
}

/// Throughput by working-set size: a cost per row and a bandwidth curve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Nanoseconds per row in addition to its bytes.
    pub row_ns: f64,
    /// (working set in bytes, GB/s), ascending.
    pub gb_per_s: Vec<(u64, f64)>,
}

impl Throughput {
    /// `rows × row_ns + bytes / bandwidth(working_set)`, in nanoseconds.
    pub fn ns(&self, rows: f64, bytes: f64, working_set: f64) -> f64 {
        rows * self.row_ns + bytes / self.at(working_set)
    }

    /// See [`Rates::best_of`]. Both numbers of a measurement follow from the same times: the cost per row of one beside the
    /// bandwidth of the other would promise what was never measured. So bandwidths are those with which a row of [`ROW`] bytes
    /// takes as long as it was measured to.
    fn take_best(&mut self, other: &Self) {
        let row_ns = self.row_ns.min(other.row_ns);
        let theirs = other.beside(row_ns);
        *self = Self {
            row_ns,
            gb_per_s: self.beside(row_ns),
        };
        best_points(&mut self.gb_per_s, &theirs);
    }

    /// The bandwidths for a cost per row of `row_ns`, at most that of this measurement.
    fn beside(&self, row_ns: f64) -> Vec<(u64, f64)> {
        let more = self.row_ns - row_ns;
        let speed = |&(set, gb): &(u64, f64)| match more > 0.0 {
            true => (set, ROW / (ROW / gb + more)),
            false => (set, gb),
        };
        self.gb_per_s.iter().map(speed).collect()
    }

    /// Whether `threads` threads can be as fast.
    fn is_plausible(&self, threads: f64) -> bool {
        let [least, most] = GB_PER_S;
        let can_be = |gb: f64| (least..=most * threads).contains(&gb);
        is_time(self.row_ns)
            && !self.gb_per_s.is_empty()
            && self.gb_per_s.iter().all(|point| can_be(point.1))
    }

    /// GB/s for a working set; interpolates over its logarithm.
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

/// The higher rate of each point, and the points of both, in order.
fn best_points<K: Copy + Ord>(ours: &mut Vec<(K, f64)>, theirs: &[(K, f64)]) {
    for &(at, speed) in theirs {
        match ours.iter_mut().find(|point| point.0 == at) {
            Some(point) => point.1 = point.1.max(speed),
            None => ours.push((at, speed)),
        }
    }
    ours.sort_by_key(|point| point.0);
}

/// Kernel rates of one block format with one thread count.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelRates {
    /// Name of the format.
    pub dtype: String,
    /// Contiguous rows times one token: attention, head, Gate rows.
    pub dot: Throughput,
    /// Scattered neurons of one token: Up dot product and Down accumulation; counts the rows and
    /// bytes of both.
    pub neuron: Throughput,
    /// Matrix products: (tokens, 10^9 multiply-adds per second).
    pub gemm: Vec<(u32, f64)>,
}

impl KernelRates {
    /// 10^9 multiply-adds per second for `tokens` tokens.
    pub fn gemm_at(&self, tokens: f64) -> f64 {
        let curve = Throughput {
            row_ns: 0.0,
            gb_per_s: self.gemm.iter().map(|p| (u64::from(p.0), p.1)).collect(),
        };
        curve.at(tokens)
    }
}

/// Rates with one thread count.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ThreadRates {
    /// Threads, the caller included.
    pub threads: u32,
    /// Nanoseconds of an empty parallel section.
    pub section_ns: f64,
    /// Nanoseconds per layer and token that the other rates do not explain: the residual on the
    /// bundled model, fully resident.
    pub layer_ns: f64,
    /// Sequential memory read.
    pub read: Throughput,
    /// By block format.
    pub kernels: Vec<KernelRates>,
}

impl ThreadRates {
    /// See [`Rates::best_of`].
    fn take_best(&mut self, other: Self) {
        self.section_ns = self.section_ns.min(other.section_ns);
        self.layer_ns = self.layer_ns.min(other.layer_ns);
        self.read.take_best(&other.read);
        for theirs in other.kernels {
            let Some(ours) = self.kernels.iter_mut().find(|k| k.dtype == theirs.dtype) else {
                self.kernels.push(theirs);
                continue;
            };
            ours.dot.take_best(&theirs.dot);
            ours.neuron.take_best(&theirs.neuron);
            best_points(&mut ours.gemm, &theirs.gemm);
        }
    }

    /// Whether numbers can be as they are.
    fn is_plausible(&self) -> bool {
        let threads = f64::from(self.threads);
        let of_kernel = |k: &KernelRates| {
            let most = MOST_PRODUCTS * threads;
            let product = |point: &(u32, f64)| point.1 > 0.0 && point.1 <= most;
            k.dot.is_plausible(threads)
                && k.neuron.is_plausible(threads)
                && k.gemm.iter().all(product)
        };
        is_time(self.section_ns)
            && is_time(self.layer_ns)
            && self.read.is_plausible(threads)
            && self.kernels.iter().all(of_kernel)
    }

    /// The rates of a format; if its own were not measured, those of one with about as many bytes.
    pub fn kernel(&self, dtype: DType) -> Option<&KernelRates> {
        self.measured(measured_as(dtype))
            .or_else(|| self.measured(similar(dtype)))
    }

    fn measured(&self, dtype: DType) -> Option<&KernelRates> {
        self.kernels.iter().find(|k| k.dtype == dtype.name())
    }
}

/// The format whose measurement counts for this one: of those with the same kernels, or nearly the same work, one is measured.
pub fn measured_as(dtype: DType) -> DType {
    match dtype {
        DType::Mxfp4 | DType::Q4c => DType::Q4,
        DType::Q8c => DType::Q8,
        measured => measured,
    }
}

/// One of [`FORMATS`] with about as many bytes.
fn similar(dtype: DType) -> DType {
    match dtype {
        DType::Block(Block::Q8_0) => DType::Q8,
        DType::Block(block) if block.elements() == 256 => DType::Q4k,
        DType::Block(_) => DType::Q4,
        other => measured_as(other),
    }
}

/// Assumed 10^9 multiply-adds per second of a thread, for few tokens and for many: about 60 % of a server core's at
/// 3 GHz. Formats without groups have no byte dot products. A rate that is far too low hides what a longer chunk saves in
/// reads.
fn assumed_products(isa: Isa, dtype: DType) -> [(u32, f64); 2] {
    let (few, many) = match (isa, dtype.is_grouped()) {
        (Isa::Scalar, true) => (4.0, 4.0),
        (Isa::Scalar, false) => (1.0, 1.0),
        (Isa::Neon, _) | (_, false) => (10.0, 20.0),
        (Isa::NeonDotprod, true) => (25.0, 50.0),
        (Isa::NeonI8mm, true) => (30.0, 90.0),
        (Isa::Avx2 | Isa::Avx512, true) => (45.0, 70.0),
        (Isa::Avx2Vnni | Isa::Avx512Vnni, true) => (80.0, 180.0),
    };
    [(4, few), (64, many)]
}

/// Rates measured by this process, which may not be saved.
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
    /// Whether the numbers were measured or assumed.
    pub measured: bool,
    /// Why the numbers may not be those of the idle machine, if there is a reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doubt: Option<String>,
    /// Checksum GB/s of one thread.
    pub check_gb_per_s: f64,
    /// Nanoseconds to look up and release a cold neuron.
    pub lookup_ns: f64,
    /// Nanoseconds to evict a neuron and admit another.
    pub replace_ns: f64,
    /// Nanoseconds to test a neuron's gate and record it if it fires.
    pub name_ns: f64,
    /// Nanoseconds to wake a sleeping thread.
    pub wake_ns: f64,
    /// Nanoseconds that this takes on the waking thread.
    pub tell_ns: f64,
    /// Nanoseconds of one thread to normalize and quantize one element of the residual stream.
    pub element_ns: f64,
    /// By thread count, ascending.
    pub threads: Vec<ThreadRates>,
}

impl Rates {
    /// The error of rates without any thread count.
    pub(super) fn missing(&self) -> Error {
        Error::NoRates {
            thread_counts: self.threads.len(),
        }
    }

    /// Default path, next to the device profile. `None` without a cache folder.
    pub fn default_path() -> Option<PathBuf> {
        Some(DeviceProfile::default_path()?.with_file_name("machine.json"))
    }

    /// Memory bandwidth of all threads in bytes per second: the best measured rate, of q4 rows or
    /// of plain reads, because other processes may have disturbed a measurement. `None` if nothing
    /// was measured.
    pub fn of_memory(&self) -> Option<f64> {
        let far = |speed: &Throughput| speed.at(1e12);
        let of = |with: &ThreadRates| {
            let rows = with
                .kernel(DType::Q4)
                .map_or(0.0, |kernel| far(&kernel.dot));
            far(&with.read).max(rows)
        };
        let best = self.threads.iter().map(of).fold(0.0, f64::max);
        (self.measured && best > 0.0).then_some(1e9 * best)
    }

    /// Whether kernels of these formats were measured.
    pub fn has(&self, formats: &[DType]) -> bool {
        let mut formats = formats.iter().map(|&format| measured_as(format));
        formats.all(|format| self.threads.iter().all(|t| t.measured(format).is_some()))
    }

    /// The rates of the same machine from two measurements: in each the best ones, since whatever
    /// disturbs a measurement makes it slower. Formats and thread counts of either.
    pub fn best_of(mut self, other: Self) -> Self {
        for theirs in other.threads {
            match self
                .threads
                .iter_mut()
                .find(|t| t.threads == theirs.threads)
            {
                Some(ours) => ours.take_best(theirs),
                None => self.threads.push(theirs),
            }
        }
        self.threads.sort_by_key(|t| t.threads);
        self.check_gb_per_s = self.check_gb_per_s.max(other.check_gb_per_s);
        for (ours, theirs) in [
            (&mut self.lookup_ns, other.lookup_ns),
            (&mut self.replace_ns, other.replace_ns),
            (&mut self.name_ns, other.name_ns),
            (&mut self.wake_ns, other.wake_ns),
            (&mut self.tell_ns, other.tell_ns),
            (&mut self.element_ns, other.element_ns),
        ] {
            *ours = ours.min(theirs);
        }
        self.doubt = self.doubt.or(other.doubt);
        self
    }

    /// New rates and those that were saved: nothing that was measured is lost. Doubt about saved ones ends when all of their
    /// formats have been measured again without.
    pub fn completed_by(self, saved: Self) -> Self {
        let sure = self.doubt.is_none() && self.has(&saved.formats());
        let both = self.best_of(saved);
        Self {
            doubt: both.doubt.filter(|_| !sure),
            ..both
        }
    }

    /// The formats whose kernels were measured.
    pub fn formats(&self) -> Vec<DType> {
        let has = |&format: &DType| self.threads.iter().any(|t| t.measured(format).is_some());
        DType::all().filter(has).collect()
    }

    /// Remembered or saved rates of this machine; `None` if there are none.
    pub fn saved() -> Option<Self> {
        let remembered = REMEMBERED.lock().unwrap_or_else(|e| e.into_inner());
        let saved = || Self::saved_at(&Self::default_path()?, &Machine::here());
        remembered.clone().or_else(saved)
    }

    /// Makes this process use these rates, even if they cannot be saved.
    pub fn remember(self) {
        let mut remembered = REMEMBERED.lock().unwrap_or_else(|e| e.into_inner());
        *remembered = Some(self);
    }

    fn saved_at(path: &Path, here: &Machine) -> Option<Self> {
        let rates: Self = load_json(path, VERSION, "emberflow bench io")
            .map_err(|e| tracing::debug!(reason = %e, "no machine profile"))
            .ok()?;
        let same = rates.is_of(here) && rates.isa == Cpu::detect().name();
        if !same {
            tracing::debug!(measured = %rates.machine.cpu, here = %here.cpu,
                "the saved machine profile is of another machine");
        }
        let plausible = rates.is_plausible();
        if !plausible {
            tracing::info!("the saved machine profile has numbers that cannot be: ignored");
        }
        (same && plausible && !rates.threads.is_empty()).then_some(rates)
    }

    /// Whether numbers can be as they are. Load while they were measured may spoil them.
    pub fn is_plausible(&self) -> bool {
        let times = [
            self.lookup_ns,
            self.replace_ns,
            self.name_ns,
            self.wake_ns,
            self.tell_ns,
            self.element_ns,
        ];
        let [least, most] = GB_PER_S;
        times.into_iter().all(is_time)
            && (least..=most).contains(&self.check_gb_per_s)
            && self.threads.iter().all(ThreadRates::is_plausible)
    }

    /// Saves the rates atomically.
    ///
    /// # Errors
    /// The path that could not be written.
    pub fn save(&self, path: &Path) -> Result<(), ProfileError> {
        save_json(path, self)
    }

    /// Whether the rates were measured on a machine like `here`. OS kernel and memory size do not
    /// matter.
    fn is_of(&self, here: &Machine) -> bool {
        let same = |m: &Machine| (m.arch.clone(), m.cpu.clone(), m.cores);
        same(&self.machine) == same(here)
    }

    /// Assumed rates: 8 GB/s for each of up to 4 threads, as on a mid-range phone, and products of `isa`.
    pub fn assumed(cores: u32, isa: Isa) -> Self {
        let speed = |gb: f64, row_ns: f64| Throughput {
            row_ns,
            gb_per_s: vec![(1 << 22, gb * 2.0), (1 << 27, gb)],
        };
        let threads = |threads: u32| {
            let gb = 8.0 * f64::from(threads.min(4));
            let kernel = |dtype: &DType| KernelRates {
                dtype: dtype.name().to_owned(),
                dot: speed(gb * 0.8, 5.0 / f64::from(threads)),
                neuron: speed(gb * 0.6, 20.0 / f64::from(threads)),
                gemm: assumed_products(isa, *dtype)
                    .map(|(tokens, rate)| (tokens, rate * f64::from(threads)))
                    .to_vec(),
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
            isa: isa.name().to_owned(),
            measured: false,
            doubt: None,
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

    /// Rates of the measured thread count closest to `threads`.
    pub fn with_threads(&self, threads: usize) -> Option<&ThreadRates> {
        let distance = |t: &&ThreadRates| (t.threads as usize).abs_diff(threads);
        self.threads.iter().min_by_key(distance)
    }
}

/// Formats whose kernels are measured for all models; blocks of GGUF files are when a model has them.
pub const FORMATS: [DType; 5] = [DType::Q4, DType::Q4k, DType::Q8, DType::F16, DType::F32];

/// Thread counts to measure: up to 4, then a few larger ones, and all cores.
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
        let speed = Throughput {
            row_ns: 2.0,
            gb_per_s: vec![(1 << 20, 40.0), (1 << 24, 20.0)],
        };
        assert_eq!(speed.at(1.0), 40.0);
        assert!((speed.at(f64::from(1 << 22)) - 30.0).abs() < 1e-9);
        assert_eq!(speed.at(1e12), 20.0);
        assert_eq!(speed.ns(3.0, 400.0, 1.0), 16.0);
    }

    #[test]
    fn two_measurements_together_have_the_best_of_each() {
        let all = Rates::assumed(2, Isa::Neon);
        let (mut slow, mut partial) = (all.clone(), all.clone());
        for t in &mut slow.threads {
            t.read.gb_per_s[1].1 /= 4.0;
            t.kernels[0].gemm[0].1 /= 2.0;
        }
        slow.wake_ns *= 3.0;
        slow.doubt = Some("others".into());
        partial.threads.remove(0);
        partial.threads[0].kernels.truncate(1);
        partial.check_gb_per_s /= 2.0;
        assert!(slow.has(&FORMATS) && partial.has(&[DType::Mxfp4]) && !partial.has(&FORMATS));
        let in_doubt = Rates {
            doubt: slow.doubt.clone(),
            ..all.clone()
        };
        assert_eq!(slow.clone().best_of(all.clone()), in_doubt);
        assert_eq!(partial.clone().best_of(all.clone()), all);
        let mut wanted = slow.clone();
        wanted.wake_ns = all.wake_ns;
        wanted.threads[1].read = all.threads[1].read.clone();
        wanted.threads[1].kernels[0] = all.threads[1].kernels[0].clone();
        assert_eq!(slow.best_of(partial), wanted);
    }

    /// One round has a cost per row, another none: its bandwidth belongs to its cost.
    #[test]
    fn the_best_of_two_measurements_is_no_faster_than_each() {
        let of = |row_ns, gb: f64| Throughput {
            row_ns,
            gb_per_s: vec![(1 << 20, gb)],
        };
        let row = |of: &Throughput| of.ns(1.0, ROW, 1.0);
        // 4096 bytes in 1024 ns, nearly all of it per row; and in 2048 ns.
        let [fitted, plain] = [of(1023.9, 40_960.0), of(0.0, 2.0)];
        for (one, other) in [(&fitted, &plain), (&plain, &fitted)] {
            let mut best = one.clone();
            best.take_best(other);
            assert_eq!(best.row_ns, 0.0);
            assert!((row(&best) - 1024.0).abs() < 1e-6, "{best:?}");
            assert!((best.at(1.0) - 4.0).abs() < 1e-6, "{best:?}");
        }
        let mut same = of(2.0, 5.0);
        same.take_best(&of(2.0, 7.0));
        assert_eq!(same, of(2.0, 7.0));
    }

    #[test]
    fn saved_rates_are_completed_and_doubt_ends_with_the_last_format() {
        let all = Rates::assumed(4, Isa::Neon);
        let doubtful = Rates {
            doubt: Some("others".into()),
            ..all.clone()
        };
        // A brief measurement: fewer thread counts and formats.
        let brief = |formats: usize| {
            let mut of = all.clone();
            of.threads.retain(|t| t.threads != 3);
            (of.threads.iter_mut()).for_each(|t| t.kernels.truncate(formats));
            of
        };
        let some = brief(1).completed_by(doubtful.clone());
        assert_eq!(some, doubtful, "four formats are still in doubt");
        assert_eq!(brief(FORMATS.len()).completed_by(doubtful), all);
        assert_eq!(brief(1).completed_by(all.clone()), all);
        assert_eq!(brief(2).formats(), [DType::Q4, DType::Q4k]);
    }

    #[test]
    fn blocks_have_their_own_rates_once_these_are_measured() {
        let mut rates = Rates::assumed(2, Isa::Neon);
        let [mine, other] = [Block::Q6K, Block::Q8_0].map(DType::Block);
        let of = |rates: &Rates, format| rates.threads[0].kernel(format).unwrap().dtype.clone();
        assert_eq!(
            (of(&rates, mine), of(&rates, other)),
            ("q4k".into(), "q8".into())
        );
        assert!(!rates.has(&[mine]) && rates.has(&[DType::Q4c]));
        for with in &mut rates.threads {
            let measured = KernelRates {
                dtype: mine.name().into(),
                ..with.kernels[0].clone()
            };
            with.kernels.push(measured);
        }
        assert_eq!(
            (of(&rates, mine), of(&rates, other)),
            (mine.name().into(), "q8".into())
        );
        assert!(rates.has(&[mine, DType::Q4]) && !rates.has(&[other]));
        assert_eq!(rates.formats().last(), Some(&mine));
    }

    #[test]
    fn thread_counts_end_with_all_cores() {
        assert_eq!(counts(0), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(10), [1, 2, 3, 4, 6, 8, 10]);
    }

    #[test]
    fn a_profile_of_another_machine_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine.json");
        let here = Machine::here();
        let rates = Rates {
            machine: here.clone(),
            ..Rates::assumed(2, Cpu::detect().isa())
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
        // Numbers that cannot be are not used.
        let spoiled: [fn(&mut Rates); 5] = [
            |r| r.threads[0].kernels[0].dot.gb_per_s[1].1 = 2_304_000.0,
            |r| r.threads[1].read.gb_per_s[0].1 = 0.0,
            |r| r.threads[0].kernels[1].neuron.row_ns = -1.0,
            |r| r.threads[1].kernels[0].gemm[0].1 = 1e6,
            |r| r.wake_ns = 1e12,
        ];
        for spoil in spoiled {
            let mut spoiled = rates.clone();
            spoil(&mut spoiled);
            spoiled.save(&path).unwrap();
            assert_eq!(Rates::saved_at(&path, &here), None, "{spoiled:?}");
        }
    }
}
