//! Where and on what was measured.

use std::path::{Path, PathBuf};

use emberflow_kernels::Cpu;
use emberflow_storage::profile::{FileFacts, Machine};
use serde::Serialize;

use crate::Failure;
use crate::cli::{ModelArg, Named};
use crate::size;

/// The machine, and the file whose neurons are read.
#[derive(Debug, Clone, Serialize)]
pub struct Facts {
    /// The machine.
    #[serde(flatten)]
    pub machine: Machine,
    /// Instruction set of the kernels.
    pub isa: &'static str,
    /// The file that is read and the disk it is on; absent where only the machine is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<FileFacts>,
}

impl Facts {
    /// This machine and the file of `model`.
    pub fn of(model: &ModelArg) -> Result<Self, Failure> {
        Ok(Self {
            file: Some(FileFacts::of(&file_of(model)?)?),
            ..Self::here()
        })
    }

    /// This machine.
    pub fn here() -> Self {
        Self {
            machine: Machine::here(),
            isa: Cpu::detect().name(),
            file: None,
        }
    }

    /// The machine's name as that of a folder: words of the processor's name, and the cores.
    pub fn folder_name(&self) -> String {
        let m = &self.machine;
        let name = if m.cpu.is_empty() { &m.arch } else { &m.cpu };
        let name = name.to_lowercase().replace("(r)", " ").replace("(tm)", " ");
        let words = name.split(|c: char| !c.is_ascii_alphanumeric() && c != '.');
        let mut words: Vec<&str> = words
            .filter(|w| !["", "processor", "cpu", "with"].contains(w))
            .collect();
        let cores = format!("{}c", m.cores);
        words.push(&cores);
        words.join("-")
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let m = &self.machine;
        let file = self.file.as_ref().map(|f| {
            let len = size::show(f.len);
            format!("; file on {} ({}), {len}", f.device, f.fs)
        });
        format!(
            "{}, {} cores, {}, Linux {}, {} of memory{}",
            m.cpu,
            m.cores,
            self.isa,
            m.kernel,
            size::show(m.memory),
            file.unwrap_or_default(),
        )
    }
}

/// The file that holds the neurons of `model`: the program itself for the bundled one.
pub fn file_of(model: &ModelArg) -> Result<PathBuf, Failure> {
    match model.named() {
        Named::File(path) => Ok(path.to_owned()),
        Named::Bundled(demo) => {
            // Found out whether it can be read at all.
            demo.locate()?;
            let exe = Path::new("/proc/self/exe");
            Ok(exe.canonicalize().unwrap_or_else(|_| exe.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_give_names_of_folders() {
        let named = |cpu: &str| {
            let machine = Machine {
                cpu: cpu.into(),
                arch: "aarch64".into(),
                cores: 2,
                ..Machine::default()
            };
            let facts = Facts {
                machine,
                ..Facts::here()
            };
            facts.folder_name()
        };
        let name = named("Intel(R) Xeon(R) Processor @ 2.10GHz");
        assert_eq!(name, "intel-xeon-2.10ghz-2c");
        assert_eq!(named(""), "aarch64-2c");
        assert_eq!(named("../x"), "..-x-2c");
    }
}
