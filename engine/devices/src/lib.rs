//! GPUs and NPUs beside the engine's compute threads, behind its trait [`Lane`](emberflow_engine::lane::Lane).
//!
//! Devices hold the hottest neurons of each bank and compute them whole, while the CPU predicts, reads and computes the rest
//! (PowerInfer-2 §4.1). They are a memory tier too: their clusters are in no other region.
//!
//! | to understand or change | open |
//! |---|---|
//! | a new back end | `backend.rs`, then `cpu.rs`, the shortest one |
//! | OpenCL, NPUs by ONNX Runtime | `opencl.rs`, `npu.rs`; their drivers are the crates beside this one |
//! | the check against the CPU, saved verdicts | `check.rs` |
//! | what devices take of a layer, from offer to sums | `lane.rs` |
//! | several devices with one memory | `device_set.rs` |
//! | products of matrices, their timing and division | `products.rs`, `sharing.rs`, [`split`] |
//! | experts in groups of one capacity | `lane/groups.rs`, [`tiers`] |
//! | the share by measured times, plans | `plan.rs`; whether devices help at all: `trials.rs` |
//! | what a run reports | `lane/report.rs` |
#![forbid(unsafe_code)]

mod backend;
pub mod check;
mod choice;
mod cpu;
mod device;
mod device_set;
mod error;
mod experts;
mod host;
mod in_use;
mod lane;
mod left_out;
mod loads;
mod npu;
mod numbers;
mod open;
mod opencl;
mod order;
mod part;
mod plan;
mod products;
mod sharing;
pub mod split;
#[cfg(test)]
mod tests;
pub mod tiers;
mod times;
mod trials;
mod units;

pub use emberflow_engine::lane::{
    Input, NeuronRows, PickedTokens, ProductRoom, Room, SharedMatrix,
};
pub use emberflow_npu::{Listed as NpuLibrary, Provider, Wanted as WantedGraphs, list as list_npu};
pub use emberflow_opencl::{Dots, Form, HostBytes, Kernels, Listed, Order, Sums, Team, list};

pub(crate) use self::backend::token_bytes;
pub use self::backend::{
    Backend, Block, Clusters, DenseShape, Facts, PartKind, Program, Taken, Ticket, Work,
};
pub use self::check::{Entry, Found, Times, TokenScales, Verdict, Verdicts, checked};
pub use self::choice::{DeviceChoice, DeviceChoices};
pub use self::cpu::CpuDevice;
pub use self::device::{Device, Lease};
pub use self::error::{DeviceError, DeviceUse};
pub use self::experts::{ExpertGroup, ExpertRows, GraphRuns, GroupShape, MOST_EXPERTS};
pub use self::in_use::MOST_DEVICES;
pub use self::lane::{Computed, DeviceReport, DeviceWork, ExpertWork, Streamed, device_report};
pub use self::left_out::LeftOut;
pub use self::loads::Grouping;
pub use self::npu::{NpuDevice, TryOut};
pub use self::numbers::{DeviceNumbers, RowTimes};
pub use self::open::OnDevices;
pub use self::opencl::OpenCl;
pub use self::part::Part;
pub use self::plan::{DevicePlan, ExpertPlan, GroupPlan, LayerTime};
