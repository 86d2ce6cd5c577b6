//! The state of a constrained text.

use std::fmt;
use std::sync::Arc;

use emberflow_engine::Constraint;
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use tokio::sync::OwnedSemaphorePermit;

/// Permits for the grammar memory of a request, released when its last text ends.
pub struct Room {
    /// Of the total.
    pub _all: OwnedSemaphorePermit,
    /// Of the part that background requests may use.
    pub _behind: Option<OwnedSemaphorePermit>,
}

/// A grammar matcher over token bytes.
pub struct ByteMatcher {
    matcher: Matcher,
    allowed: SimpleVob,
    /// Its permit for grammar memory.
    room: Arc<Room>,
}

impl ByteMatcher {
    /// At the start of a text.
    pub fn new(matcher: Matcher, room: Room) -> Self {
        Self {
            matcher,
            allowed: SimpleVob::new(),
            room: Arc::new(room),
        }
    }
}

impl fmt::Debug for ByteMatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByteMatcher").finish_non_exhaustive()
    }
}

impl Constraint for ByteMatcher {
    fn prepare(&mut self) -> Result<(), String> {
        let allowed = self.matcher.compute_mask_or_eos();
        self.allowed = allowed.map_err(|e| explain(&e))?;
        if self.allowed.is_zero() {
            Err("the grammar allows no token here".to_owned())
        } else {
            Ok(())
        }
    }

    fn allows(&self, token: u32) -> bool {
        (token as usize) < self.allowed.len() && self.allowed.is_allowed(token)
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        if self.matcher.is_stopped() {
            // EOS after the last token.
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(|e| explain(&e))
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self {
            // Separate caches, so that the limits apply per text.
            matcher: self.matcher.deep_clone(),
            allowed: self.allowed.clone(),
            room: self.room.clone(),
        })
    }
}

/// The first line of an error, which may contain a backtrace.
pub fn explain(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    if line.starts_with("panic") {
        "it is not supported".to_owned()
    } else {
        line.chars().take(300).collect()
    }
}
