//! What a model is to run for, when a file of it is chosen.

use emberflow_engine::Budget;

use crate::cli::{PLAN_CONTEXT, PullArgs, budget_text};

/// What a model is to run for.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// Memory budget.
    pub memory: Budget,
    /// Positions of each context.
    pub context: u32,
    /// Concurrent requests of a server; `None` for a single text.
    pub requests: Option<u16>,
    /// Bytes that are needed besides the engine.
    pub reserve: u64,
}

impl Workload {
    /// A single text.
    pub fn text(memory: Budget, context: Option<u32>) -> Self {
        Self {
            memory,
            context: context.unwrap_or(PLAN_CONTEXT),
            requests: None,
            reserve: 0,
        }
    }

    /// What `pull` is to choose for.
    pub fn of_pull(args: &PullArgs) -> Self {
        Self {
            memory: args.memory,
            context: args.context,
            requests: args.served.requests,
            reserve: args.served.reserve,
        }
    }

    /// Options of `pull` and `plan`, with the budget or without one.
    pub fn options(&self, with_memory: bool) -> Vec<String> {
        let mut options = vec![
            format!("--context={}", self.context),
            format!("--reserve={}", self.reserve),
        ];
        options.extend(self.requests.map(|n| format!("--requests={n}")));
        if with_memory {
            options.push(format!("--memory={}", budget_text(self.memory)));
        }
        options
    }
}
