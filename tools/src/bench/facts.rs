//! The machine and the file that were measured.

use std::path::{Path, PathBuf};

use emberflow_kernels::Cpu;
use emberflow_storage::profile::{FileFacts, Machine};
use serde::Serialize;

use crate::Failure;
use crate::cli::{ModelArg, Named};
use crate::size;

/// The machine, and the file from which neurons are read.
#[derive(Debug, Clone, Serialize)]
pub struct Facts {
    /// The machine.
    #[serde(flatten)]
    pub machine: Machine,
    /// Instruction set used by the kernels.
    pub isa: &'static str,
    /// The file and its disk; absent if only the machine is measured.
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

    /// The machine's name as a folder name: words of the CPU's name, and the number of cores.
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

    /// One line of text.
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

/// The file that holds the neurons of `model`: the executable for a bundled one.
pub fn file_of(model: &ModelArg) -> Result<PathBuf, Failure> {
    match model.named() {
        Named::File(path) => Ok(path.to_owned()),
        Named::Bundled(demo) => {
            // Check that it can be read from the executable.
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
