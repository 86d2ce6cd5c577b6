//! Where and on what was measured.

use std::path::{Path, PathBuf};

use emberflow_kernels::Cpu;
use emberflow_models::demo;
use emberflow_storage::profile::{FileFacts, Machine};
use serde::Serialize;

use crate::Failure;
use crate::cli::ModelArg;
use crate::size;

/// The machine, and the file whose neurons are read.
#[derive(Debug, Clone, Serialize)]
pub struct Facts {
    /// The machine.
    #[serde(flatten)]
    pub machine: Machine,
    /// Instruction set of the kernels.
    pub isa: &'static str,
    /// The model's file and the disk it is on.
    pub file: FileFacts,
}

impl Facts {
    /// This machine and the file of `model`.
    pub fn of(model: &ModelArg) -> Result<Self, Failure> {
        Ok(Self {
            machine: Machine::here(),
            isa: Cpu::detect().name(),
            file: FileFacts::of(&file_of(model)?)?,
        })
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let (m, f) = (&self.machine, &self.file);
        format!(
            "{}, {} cores, {}, Linux {}, {} of memory; model on {} ({}), {}",
            m.cpu,
            m.cores,
            self.isa,
            m.kernel,
            size::show(m.memory),
            f.device,
            f.fs,
            size::show(f.len),
        )
    }
}

/// The file that holds the neurons of `model`: the program itself for the bundled one.
pub fn file_of(model: &ModelArg) -> Result<PathBuf, Failure> {
    match &model.model {
        Some(path) => Ok(path.clone()),
        None => {
            // Found out whether it can be read at all.
            demo::locate()?;
            let exe = Path::new("/proc/self/exe");
            Ok(exe.canonicalize().unwrap_or_else(|_| exe.to_owned()))
        }
    }
}
