//! The program, as users run it. One binary, because linking many takes longer than running them.

mod bench_commands;
mod best_of;
mod calibrate;
mod call_templates;
mod charts;
mod chat;
mod cli;
mod common;
mod containers;
mod cut_calls;
mod demo_moe;
mod device;
#[cfg(feature = "devices")]
mod devices;
mod endpoints;
mod experts;
mod export;
mod families;
mod faults;
mod fields;
mod first_hour;
mod hashes;
mod hub;
mod interrupt;
mod loops;
#[cfg(feature = "devices")]
mod npu;
mod ollama;
mod outputs;
mod peers;
mod pipes;
mod plan;
mod profile;
mod prune_outliers;
mod real_model;
mod responses;
mod run;
mod seccomp;
mod serve;
mod serve_edges;
mod serve_limits;
mod serve_rules;
mod states;
mod templates;
mod verify;
