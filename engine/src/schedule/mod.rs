//! Order in which processors run the operations of a graph, such as the subgraphs of a prompt (llm.npu, §3.4).
//!
//! ```text
//! graph + scheduler ─▶ Execution ─▶ simulate     in simulated time: forecasts, phones in the laboratory
//!                                └▶ the decoder  in real time: a pass in parts
//! ```
//!
//! Both ask the same [`Scheduler`] which operation an idle processor begins.

mod bounds;
mod chains;
mod graph;
mod part_graph;
mod part_order;
mod parts;
mod rules;
mod search;
mod simulate;
#[cfg(test)]
mod tests;

pub use self::bounds::Bounds;
pub use self::graph::{Execution, GraphState, Operation, Scheduler, followers};
pub(crate) use self::part_graph::{CPU, DEVICE, PartGraph, PartPlace, PartStep};
pub(crate) use self::part_order::PartOrders;
pub use self::parts::InParts;
pub(crate) use self::parts::{PART_ROWS, part_rows};
pub use self::rules::{ByStalls, InOrder, Planned, Rule, Timetable, by_rule, plan, scheduler};
pub use self::simulate::{Processors, Slot, busy, makespan, simulate};
