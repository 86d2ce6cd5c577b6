//! An action on a slot, as the engine thread gets it.

use std::time::{Duration, Instant};

use tokio::sync::oneshot::Sender;

use super::error::ApiError;
use crate::states::SlotName;

/// An action on the conversation in a slot.
#[derive(Debug)]
pub enum SlotAction {
    /// Save its state under a name.
    Save(SlotName),
    /// Replace it by a saved one.
    Restore(SlotName),
    /// Remove it from memory.
    Erase,
}

/// An action, and where its outcome goes.
#[derive(Debug)]
pub struct SlotOrder {
    /// The slot.
    pub slot: usize,
    /// What to do.
    pub action: SlotAction,
    /// The conversation that is being saved.
    pub sequence: Option<u64>,
    begun: Option<Instant>,
    reply: Sender<Result<SlotDone, ApiError>>,
}

/// A finished action.
#[derive(Debug, Clone, Copy)]
pub struct SlotDone {
    /// Tokens saved, restored or erased.
    pub tokens: usize,
    /// Bytes of the files.
    pub bytes: u64,
    /// Time since the slot was free.
    pub time: Duration,
}

impl SlotOrder {
    /// An action whose outcome is sent to `reply`.
    pub fn new(slot: usize, action: SlotAction, reply: Sender<Result<SlotDone, ApiError>>) -> Self {
        Self {
            slot,
            action,
            sequence: None,
            begun: None,
            reply,
        }
    }

    /// Whether nobody waits for it.
    pub fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    /// The slot is free.
    pub fn begin(&mut self) {
        self.begun.get_or_insert_with(Instant::now);
    }

    /// Sends the outcome: tokens, and bytes of the files.
    pub fn end(self, outcome: Result<(usize, u64), ApiError>) {
        let time = self.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        let done = outcome.map(|(tokens, bytes)| SlotDone {
            tokens,
            bytes,
            time,
        });
        // The client may have gone.
        let _ = self.reply.send(done);
    }
}
