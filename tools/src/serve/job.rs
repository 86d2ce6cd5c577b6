//! What the engine thread is asked for.

use std::sync::Arc;
use std::time::Instant;

use emberflow_engine::{Bias, Constraint, Request};
use tokio::sync::mpsc::UnboundedSender;

use super::lines::LineOptions;
use super::out::Out;
use super::slot_order::SlotOrder;

/// A message to the engine thread.
pub enum Work {
    /// Texts of a prompt.
    Texts(Box<Job>),
    /// An action on a slot.
    Slot(SlotOrder),
}

/// A request and the channel for its output.
pub struct Job {
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// Generation parameters.
    pub request: Request,
    /// Index of its first text.
    pub first: usize,
    /// Number of texts.
    pub samples: usize,
    /// Whether these are the first texts of their prompt.
    pub begins: bool,
    /// Stop strings.
    pub stops: Vec<String>,
    /// Stop strings that responses do not mention.
    pub quiet_stops: Vec<String>,
    /// Whether the text includes the stop string.
    pub keeps_stop: bool,
    /// Line-based end conditions.
    pub lines: LineOptions,
    /// Additional tokens that end the text.
    pub ends: Arc<[u32]>,
    /// Logit bias.
    pub bias: Vec<Bias>,
    /// Grammar or schema.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Special tokens shown as text.
    pub signs: Arc<[u32]>,
    /// Background request.
    pub proactive: bool,
    /// Whether its output tells how much of the prompt is read.
    pub progress: bool,
    /// Arrival time.
    pub arrived: Instant,
    /// Output; closed when the client has gone.
    pub out: UnboundedSender<Out>,
}

impl Job {
    /// One greedy continuation of `prompt`, sent to `out`.
    pub fn new(prompt: Vec<u32>, out: UnboundedSender<Out>) -> Self {
        Self {
            prompt,
            request: Request::default(),
            first: 0,
            samples: 1,
            begins: true,
            stops: Vec::new(),
            quiet_stops: Vec::new(),
            keeps_stop: false,
            lines: LineOptions::default(),
            ends: Arc::default(),
            bias: Vec::new(),
            constraint: None,
            signs: Arc::default(),
            proactive: false,
            progress: false,
            arrived: Instant::now(),
            out,
        }
    }

    /// The tokens whose state may be reused.
    pub fn reusable(&self) -> &[u32] {
        // Logits of cached tokens are not available.
        if self.request.prompt_log_probs || self.request.mean_hidden {
            &[]
        } else {
            &self.prompt[..self.prompt.len() - 1]
        }
    }
}
