//! Options for measurements: those of the hidden command `point` and of the laboratory.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use emberflow_engine::{Ablation, Lab};
use emberflow_storage::io::IoChoice;

use super::{EngineArgs, Record, RunArgs, ablation_names, parse_io};

/// Expert read-ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReadAheadArg {
    /// While most predictions are right.
    #[value(alias = "auto")]
    On,
    /// Never.
    Off,
}

/// Engine options for measurements.
#[derive(Debug, Clone, Args)]
pub struct LabArgs {
    /// Ablation: which mechanisms are active. All give the same output.
    #[arg(long, value_name = "NAME", value_parser = ablation_names())]
    pub ablation: Option<Ablation>,
    /// Whether to predict the next layer's experts and read them after the reads of the current layer.
    #[arg(long, value_enum, default_value = "on")]
    pub read_ahead: ReadAheadArg,
    /// I/O engine; sim:NAME simulates a storage device.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = parse_io())]
    pub io: IoChoice,
    /// Core to pin the I/O thread to; default: a big core on big.LITTLE CPUs, otherwise none.
    #[arg(long, value_name = "CORE")]
    pub io_core: Option<usize>,
    /// Prefill chunk in tokens; default: chosen from the budget.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub chunk: Option<u16>,
    /// Root of sysfs, for the energy sensors; tests use another folder.
    #[arg(long, value_name = "DIR", default_value = "/sys", hide = true)]
    pub sysfs: PathBuf,
}

impl LabArgs {
    /// Copies the options to `engine`.
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

/// One run of a benchmark: `run` with the options for measurements.
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
    /// The arguments as those of `run`.
    pub fn into_run(self) -> RunArgs {
        let mut run = self.run;
        self.lab.apply(&mut run.engine);
        run.policy = self.lab.ablation.unwrap_or(run.policy);
        run.record = self.record;
        run
    }
}
