//! Options of measurements, which no user needs: those of the hidden command `point` and of the
//! laboratory.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use emberflow_engine::{Ablation, Lab};
use emberflow_storage::io::IoChoice;

use super::{EngineArgs, Record, RunArgs, ablation_names, parse_io};

/// Whether experts are read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReadAheadArg {
    /// While most guesses are right.
    #[value(alias = "auto")]
    On,
    /// Never.
    Off,
}

/// How an engine is measured.
#[derive(Debug, Clone, Args)]
pub struct LabArgs {
    /// Which mechanisms are at work; every one gives the same answers.
    #[arg(long, value_name = "NAME", value_parser = ablation_names())]
    pub ablation: Option<Ablation>,
    /// Whether the experts of the next layer are read before its router has chosen them, by a guess,
    /// behind what this layer needs.
    #[arg(long, value_enum, default_value = "on")]
    pub read_ahead: ReadAheadArg,
    /// How to read from flash; sim plays a device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = parse_io())]
    pub io: IoChoice,
    /// Core to pin the I/O thread to; default: a strong one where cores differ, else none.
    #[arg(long, value_name = "CORE")]
    pub io_core: Option<usize>,
    /// Prompt tokens computed at once; default: the longest chunk that the budget can well afford.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub chunk: Option<u16>,
    /// Where the system shows its sensors of energy; another folder is for tests.
    #[arg(long, value_name = "DIR", default_value = "/sys", hide = true)]
    pub sysfs: PathBuf,
}

impl LabArgs {
    /// Sets what the engine is to be measured with.
    pub fn apply(&self, engine: &mut EngineArgs) {
        engine.lab = Lab {
            ablation: self.ablation.unwrap_or_default(),
            read_ahead: self.read_ahead == ReadAheadArg::On,
            io: self.io,
            io_core: self.io_core,
            chunk: self.chunk.unwrap_or(0).into(),
            sysfs: self.sysfs.clone(),
            ..Lab::default()
        };
    }
}

/// One run of a benchmark: `run` with the options of measurements.
#[derive(Debug, Args)]
pub struct PointArgs {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    lab: LabArgs,
    #[command(flatten)]
    record: Record,
}

impl PointArgs {
    /// The run that is asked for.
    pub fn into_run(self) -> RunArgs {
        let mut run = self.run;
        self.lab.apply(&mut run.engine);
        run.policy = self.lab.ablation.unwrap_or(run.policy);
        run.record = self.record;
        run
    }
}
