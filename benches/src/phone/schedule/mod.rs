//! Order in which processors run the operations of a graph, such as the subgraphs of a prompt (llm.npu, §3.4).
//!
//! ```text
//! graph + scheduler ─▶ Execution ─▶ simulate     in simulated time
//! ```
//!
//! A [`Scheduler`] decides which operation an idle processor begins. [`plan`] compares the rules for any graph;
//! [`PartOrder`] does so for a pass in parts ([`PartGraph`]), with a search that knows that each part is a chain.

mod bounds;
mod chains;
mod graph;
mod part_graph;
mod part_order;
mod rules;
mod search;
mod simulate;
#[cfg(test)]
mod tests;

pub use self::bounds::Bounds;
pub use self::graph::{Execution, GraphState, Operation, Scheduler, followers};
pub use self::part_graph::{PartGraph, PartPlace, PartStep, part_rows};
pub use self::part_order::PartOrder;
pub use self::rules::{ByStalls, InOrder, Planned, Rule, Timetable, by_rule, plan, scheduler};
pub use self::simulate::{Processors, Slot, busy, makespan, simulate};
