//! A text that is held to rules.

use std::fmt;
use std::sync::Arc;

use emberflow_engine::Constraint;
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use tokio::sync::OwnedSemaphorePermit;

/// The memory of some texts' rules, until the last of them ends.
pub struct Room {
    /// Among all texts.
    pub _all: OwnedSemaphorePermit,
    /// Among those of background work.
    pub _behind: Option<OwnedSemaphorePermit>,
}

/// A matcher over a vocabulary's bytes.
pub struct Held {
    matcher: Matcher,
    allowed: SimpleVob,
    /// Its share of the memory for rules.
    room: Arc<Room>,
}

impl Held {
    /// A text that has not begun.
    pub fn new(matcher: Matcher, room: Room) -> Self {
        Self {
            matcher,
            allowed: SimpleVob::new(),
            room: Arc::new(room),
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").finish_non_exhaustive()
    }
}

impl Constraint for Held {
    fn prepare(&mut self) -> Result<(), String> {
        let allowed = self.matcher.compute_mask_or_eos();
        self.allowed = allowed.map_err(|e| explain(&e))?;
        match self.allowed.is_zero() {
            true => Err("no token may follow".to_owned()),
            false => Ok(()),
        }
    }

    fn allows(&self, token: u32) -> bool {
        (token as usize) < self.allowed.len() && self.allowed.is_allowed(token)
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        if self.matcher.is_stopped() {
            // The end of the text after the last token.
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(|e| explain(&e))
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self {
            // With its own caches: what they hold counts to the limits of one text.
            matcher: self.matcher.deep_clone(),
            allowed: self.allowed.clone(),
            room: self.room.clone(),
        })
    }
}

/// The first line of an error, which may have a backtrace.
pub fn explain(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    match line.starts_with("panic") {
        true => "it is not supported".to_owned(),
        false => line.chars().take(300).collect(),
    }
}
