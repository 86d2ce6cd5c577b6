//! The laboratory, as its users run it. One binary, because linking many takes longer than running them.

mod bench_commands;
mod charts;
mod cli;
mod common;
mod energy;
mod interrupt;
mod policies;
mod report;
mod synth;
mod timeline;
mod traces;
