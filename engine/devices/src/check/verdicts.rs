//! Verdicts on devices, saved in a file of the cache folder, so that each driver and kernel is tried once: wrong
//! ones stay refused, and the times of right ones do not vary from start to start.
//!
//! The file is untrusted: if it is damaged, has another version or impossible numbers, it is ignored and devices
//! are measured again.

use std::path::{Path, PathBuf};

use emberflow_kernels::{Cpu, DType};
use emberflow_storage::profile::{DeviceProfile, load_json, save_json};
use serde::{Deserialize, Serialize};

use super::{TokenScales, Verdict};
use crate::left_out::LeftOut;
use crate::times::{Sample, Samples};
use crate::{DenseShape, DeviceError, Facts};

/// Version of the file's form; others are ignored.
const VERSION: u32 = 7;

/// Most verdicts of a file; the oldest make room.
const MOST: usize = 1024;

/// Starts that begin with the outcome of a trial before passes are tried again: the machine may have been loaded.
const STARTS: u32 = 16;

/// Result for a kernel on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// It computes wrong results: how wrong.
    Wrong(String),
    /// Sums of the FFN.
    Sums(Verdict),
    /// Products of matrices have the CPU's results.
    Right,
    /// How fast they are beside the CPU's.
    Products(Times),
    /// Passes of a model with and without devices.
    Passes {
        /// Whether they are faster without.
        left_out: Option<LeftOut>,
        /// Starts that have begun with that.
        starts: u32,
    },
}

/// Times of products.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// The CPU's.
    pub(crate) cpu: Samples,
    /// The device's.
    pub(crate) device: Samples,
}

/// A verdict with its device and kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Name of the device.
    pub device: String,
    /// Version of its driver.
    pub driver: String,
    /// Version of this program and of its kernels, and the instructions of the CPU that it was compared with.
    pub program: String,
    /// Description of the kernels.
    pub kernels: String,
    /// The result.
    pub found: Found,
}

/// The file.
#[derive(Default, Serialize, Deserialize)]
struct File {
    version: u32,
    verdicts: Vec<Entry>,
}

/// A file of verdicts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdicts(PathBuf);

/// Version of everything that a verdict depends on, in addition to device and driver.
fn program() -> String {
    format!(
        "{} {:016x} {}",
        env!("CARGO_PKG_VERSION"),
        emberflow_opencl::KERNELS,
        Cpu::detect().name()
    )
}

/// The name of the kernels of an FFN.
pub(super) fn of_sums(device: &Facts, shape: &DenseShape, scales: TokenScales) -> String {
    let kind = shape.kind;
    let more = [
        (kind.ungated, ", ungated"),
        (kind.relu_on_up, ", ReLU on Up"),
    ];
    let more: String = more.iter().filter(|m| m.0).map(|m| m.1).collect();
    let (dtype, d, activation) = (shape.dtype, shape.d, kind.activation);
    let (kernels, tokens) = (device.kernels(dtype), scales.of_kernels(dtype));
    format!("FFN of {dtype}, width {d}, {activation:?}{more}{tokens}; {kernels}")
}

/// Products that are compared.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OfProducts {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// Of the CPU.
    pub threads: usize,
    /// Most tokens.
    pub tokens: usize,
}

impl OfProducts {
    pub(super) fn name(self) -> String {
        let Self {
            dtype,
            rows,
            cols,
            threads,
            tokens,
        } = self;
        format!("products of {dtype}, {rows} x {cols}, up to {tokens} tokens, {threads} threads")
    }
}

impl Found {
    /// Whether such numbers can be.
    fn is_sound(&self) -> bool {
        let time = |t: f64| t.is_finite() && t >= 0.0;
        let samples = |s: &Samples| {
            let ascends = s.0.windows(2).all(|two| two[0].n < two[1].n);
            let each = |s: &Sample| s.n > 0 && time(s.launch) && time(s.weight) && s.weight > 0.0;
            ascends && !s.0.is_empty() && s.0.iter().all(each)
        };
        match self {
            Self::Wrong(_) | Self::Right => true,
            Self::Sums(v) => {
                let speed = |s: super::Speed| time(s.launch) && time(s.neuron) && s.neuron > 0.0;
                let mut all = [v.speed, v.cpu].into_iter().chain(v.wide);
                v.worst.is_finite() && time(v.copy) && all.all(speed)
            }
            Self::Products(times) => samples(&times.cpu) && samples(&times.device),
            Self::Passes { left_out, .. } => {
                left_out.is_none_or(|of| time(of.with_ms) && time(of.without_ms))
            }
        }
    }
}

impl Verdicts {
    /// Verdicts in this file.
    pub fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// Verdicts in `emberflow/devices.json` of the cache folder. `None` without one.
    pub fn here() -> Option<Self> {
        Some(Self(
            DeviceProfile::default_path()?.with_file_name("devices.json"),
        ))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// All verdicts of this program's version; empty where there is no file, or not one of these.
    pub fn all(&self) -> Vec<Entry> {
        let mut all = self.load();
        all.retain(|entry| entry.program == program());
        all
    }

    /// Removes all verdicts, so that devices are tried anew.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn forget(&self) -> std::io::Result<()> {
        match std::fs::remove_file(&self.0) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    fn load(&self) -> Vec<Entry> {
        match load_json::<File>(&self.0, VERSION, "emberflow doctor") {
            Ok(file) => {
                let sound = |e: &Entry| e.found.is_sound();
                file.verdicts.into_iter().filter(sound).collect()
            }
            Err(e) => {
                tracing::debug!(reason = %e, "no verdicts on devices");
                Vec::new()
            }
        }
    }

    /// The verdict on a device's kernels.
    ///
    /// # Errors
    /// They compute wrong results.
    pub(super) fn find(&self, device: &Facts, kernels: &str) -> Result<Option<Found>, DeviceError> {
        let same = |e: &Entry| {
            e.device == device.name && e.driver == device.driver && e.kernels == kernels
        };
        match self.all().into_iter().rev().find(same).map(|e| e.found) {
            Some(Found::Wrong(how)) => Err(DeviceError {
                device: device.name.clone(),
                what: format!(
                    "computed wrong results before and is not tried again: {how} ({kernels}; saved in {}); \
                     `emberflow doctor --retry-devices` tries it anew",
                    self.0.display()
                ),
            }),
            found => Ok(found),
        }
    }

    /// The saved outcome of a trial of passes, unless they are to be tried again. Counts the start.
    pub(crate) fn trial_before(&self, device: &Facts, of: &str) -> Option<Option<LeftOut>> {
        match self.find(device, of) {
            Ok(Some(Found::Passes { left_out, starts })) if starts < STARTS => {
                let starts = starts + 1;
                self.put(device, of, Found::Passes { left_out, starts });
                Some(left_out)
            }
            _ => None,
        }
    }

    /// Saves the outcome of a trial of passes.
    pub(crate) fn save_trial(&self, device: &Facts, of: &str, left_out: Option<LeftOut>) {
        let starts = 0;
        self.put(device, of, Found::Passes { left_out, starts });
    }

    /// Saves a verdict. Where it cannot be saved, the next start measures again.
    pub(super) fn put(&self, device: &Facts, kernels: &str, found: Found) {
        let mut verdicts = self.load();
        verdicts.retain(|e| {
            e.device != device.name || e.driver != device.driver || e.kernels != kernels
        });
        let over = (verdicts.len() + 1).saturating_sub(MOST);
        verdicts.drain(..over);
        verdicts.push(Entry {
            device: device.name.clone(),
            driver: device.driver.clone(),
            program: program(),
            kernels: kernels.into(),
            found,
        });
        let version = VERSION;
        if let Err(e) = save_json(&self.0, &File { version, verdicts }) {
            tracing::warn!(error = %e, "the verdict on the device is not saved");
        }
    }
}

#[cfg(test)]
mod tests {
    use emberflow_models::config::{Activation, FfnKind};

    use super::*;
    use crate::checked;
    use crate::{CpuDevice, Device};

    fn shape() -> DenseShape {
        DenseShape {
            dtype: DType::Q4,
            d: 96,
            kind: FfnKind {
                activation: Activation::Relu,
                relu_on_up: false,
                ungated: false,
            },
        }
    }

    fn facts() -> Facts {
        Device::new(Box::new(CpuDevice::new())).facts().clone()
    }

    fn verdict() -> Verdict {
        let speed = super::super::Speed {
            launch: 1e-3,
            neuron: 1e-6,
        };
        Verdict {
            same_bits: true,
            worst: 0.0,
            speed,
            wide: [speed; super::super::WIDTHS.len()],
            cpu: speed,
            copy: 0.0,
        }
    }

    #[test]
    fn verdicts_come_back_and_each_has_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = Verdicts::at(dir.path().join("cache").join("devices.json"));
        let facts = facts();
        let name = of_sums(&facts, &shape(), TokenScales::ByGroup);
        assert_eq!(file.find(&facts, &name), Ok(None));
        file.put(&facts, &name, Found::Sums(verdict()));
        file.put(&facts, "others", Found::Wrong("by 0.1".into()));
        assert_eq!(file.find(&facts, &name), Ok(Some(Found::Sums(verdict()))));
        let wrong = file.find(&facts, "others").unwrap_err().to_string();
        assert!(
            wrong.contains("by 0.1") && wrong.contains("--retry-devices"),
            "{wrong}"
        );
        // Another driver is another device.
        let updated = Facts {
            driver: "2".into(),
            ..facts.clone()
        };
        assert_eq!(file.find(&updated, "others"), Ok(None));
        file.put(&facts, &name, Found::Wrong("since then".into()));
        assert_eq!(file.all().len(), 2);
        file.forget().unwrap();
        file.forget().unwrap();
        assert_eq!(file.find(&facts, "others"), Ok(None));
    }

    #[test]
    fn damaged_files_and_numbers_that_cannot_be_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let file = Verdicts::at(dir.path().join("devices.json"));
        let facts = facts();
        let name = of_sums(&facts, &shape(), TokenScales::ByGroup);
        file.put(&facts, &name, Found::Sums(verdict()));
        let text = std::fs::read_to_string(file.path()).unwrap();
        for len in 0..text.len() - 2 {
            std::fs::write(file.path(), &text[..len]).unwrap();
            assert_eq!(file.find(&facts, &name), Ok(None), "{len} bytes");
        }
        for (from, to) in [
            ("0.001", "-1.0"),
            ("1e-6", "0"),
            ("\"version\": 7", "\"version\": 6"),
            ("\"sums\": {", "\"other\": {"),
        ] {
            let changed = text.replace(from, to);
            assert!(changed != text, "{from} in {text}");
            std::fs::write(file.path(), changed).unwrap();
            assert_eq!(file.find(&facts, &name), Ok(None), "{to}");
        }
        // And replaced.
        file.put(&facts, &name, Found::Sums(verdict()));
        assert!(file.find(&facts, &name).unwrap().is_some());
    }

    #[test]
    fn files_do_not_grow_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = Verdicts::at(dir.path().join("devices.json"));
        let entry = |n: usize| Entry {
            device: "d".into(),
            driver: "1".into(),
            program: program(),
            kernels: n.to_string(),
            found: Found::Wrong("x".into()),
        };
        let verdicts = (0..2 * MOST).map(entry).collect();
        let version = VERSION;
        save_json(file.path(), &File { version, verdicts }).unwrap();
        file.put(&facts(), "new", Found::Sums(verdict()));
        let all = file.all();
        assert_eq!(all.len(), MOST);
        assert_eq!(all[MOST - 1].kernels, "new");
        assert_eq!(all[0].kernels, (MOST + 1).to_string());
    }

    /// Where launching takes no time, rounding must not make it negative: such a verdict would be measured at each start.
    #[test]
    fn times_of_devices_without_a_launch_are_sound() {
        for microseconds in 1..2000 {
            let all = f64::from(microseconds) * 1e-6;
            let verdict = Verdict {
                speed: super::super::Speed::of(960, all, 0.0),
                ..verdict()
            };
            assert!(Found::Sums(verdict).is_sound(), "{:?}", verdict.speed);
        }
    }

    /// A machine is not always as loaded as in the first run.
    #[test]
    fn the_outcome_of_a_trial_is_used_for_some_starts() {
        let dir = tempfile::tempdir().unwrap();
        let file = Verdicts::at(dir.path().join("devices.json"));
        let (facts, m) = (facts(), "a model");
        let left_out = Some(LeftOut {
            prompt: false,
            rows: 1,
            with_ms: 70.0,
            without_ms: 38.0,
        });
        for outcome in [left_out, None] {
            assert_eq!(file.trial_before(&facts, m), None);
            file.save_trial(&facts, m, outcome);
            for _ in 0..STARTS {
                assert_eq!(file.trial_before(&facts, m), Some(outcome));
            }
        }
        assert_eq!(file.trial_before(&facts, "another"), None);
        // Another driver is another device.
        let updated = Facts {
            driver: "2".into(),
            ..facts.clone()
        };
        file.save_trial(&facts, m, left_out);
        assert_eq!(file.trial_before(&updated, m), None);
    }

    #[test]
    fn a_saved_verdict_decides() {
        let dir = tempfile::tempdir().unwrap();
        let file = Verdicts::at(dir.path().join("devices.json"));
        let device = Device::new(Box::new(CpuDevice::new())).with_verdicts(Some(file.clone()));
        let first = checked(&device.lease().unwrap(), &shape(), TokenScales::ByGroup).unwrap();
        // Its times are those of the first check, as JSON has them.
        let second = checked(&device.lease().unwrap(), &shape(), TokenScales::ByGroup).unwrap();
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
        assert!(close(second.speed.neuron, first.speed.neuron), "{second:?}");
        assert!(close(second.cpu.launch, first.cpu.launch), "{second:?}");
        // A class of numerics stays one.
        let other = Verdict {
            same_bits: false,
            worst: 1e-6,
            ..first
        };
        let name = of_sums(device.facts(), &shape(), TokenScales::ByGroup);
        file.put(device.facts(), &name, Found::Sums(other));
        assert!(
            !checked(&device.lease().unwrap(), &shape(), TokenScales::ByGroup)
                .unwrap()
                .same_bits
        );
        // A wrong one is not tried.
        file.put(device.facts(), &name, Found::Wrong("by 1".into()));
        let refused =
            checked(&device.lease().unwrap(), &shape(), TokenScales::ByGroup).unwrap_err();
        assert!(refused.to_string().contains("not tried again"), "{refused}");
    }
}
