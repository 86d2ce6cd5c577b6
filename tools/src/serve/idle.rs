//! Sequences of finished requests, for requests that begin with the same tokens: in memory, and on disk with `--state-dir`.

use emberflow_engine::{Engine, Error, Sequence};

use crate::Failure;
use crate::states::StateFolder;

/// Minimum length of a common prefix for which the state of a finished request is reused.
const REUSE: usize = 8;
/// Tokens by which a saved state must be longer than what is in memory to be read.
const LONGER: usize = 32;

/// An idle sequence.
struct Idle {
    sequence: Sequence,
    /// Whether it is on disk, as far as it will be.
    saved: bool,
}

/// The idle sequences, oldest first.
pub struct IdleSequences {
    all: Vec<Idle>,
    states: Option<StateFolder>,
    /// Whether the folder was looked at since a request ran.
    fresh: bool,
}

/// A sequence for a request.
pub struct Begun {
    /// The sequence.
    pub sequence: Sequence,
    /// How many of its tokens were read from disk.
    pub restored: usize,
}

impl IdleSequences {
    /// None yet; they are saved in `states`.
    pub fn new(states: Option<StateFolder>) -> Self {
        Self {
            all: Vec::new(),
            states,
            fresh: false,
        }
    }

    /// Adds a finished request's sequence.
    pub fn add(&mut self, sequence: Sequence) {
        if sequence.len() >= REUSE {
            let saved = self.states.is_none();
            self.all.push(Idle { sequence, saved });
            self.fresh = false;
        }
    }

    /// A sequence with the longest known prefix of `tokens`, or an empty one. At most `room` other idle sequences stay.
    ///
    /// # Errors
    /// No memory for a sequence.
    pub fn take(&mut self, tokens: &[u32], room: usize, engine: &Engine) -> Result<Begun, Error> {
        let common = |idle: &Idle| {
            let pairs = idle.sequence.tokens().iter().zip(tokens);
            (idle.sequence).reach(pairs.take_while(|(a, b)| a == b).count())
        };
        let all = self.all.iter().map(common).enumerate();
        let best = all.max_by_key(|&(_, len)| len);
        let in_memory = best.map_or(0, |(_, len)| len);
        let saved = self.states.as_ref().map(|states| states.find(tokens));
        let saved = saved.filter(|saved| saved.len >= in_memory + LONGER);
        if let (Some(saved), Some(states)) = (saved, &mut self.states) {
            let excess = self.all.len().saturating_sub(room);
            self.all.drain(..excess);
            let sequence = states.restore(&saved, engine.new_sequence()?);
            if sequence.len() > in_memory {
                let restored = sequence.len();
                return Ok(Begun { sequence, restored });
            }
            // What was found is gone or damaged.
            drop(sequence);
            return self.take(tokens, room, engine);
        }
        let sequence = self.take_best(best, room, engine)?;
        let restored = 0;
        Ok(Begun { sequence, restored })
    }

    /// The sequence at this place up to this length, if it is long enough.
    fn take_best(
        &mut self,
        best: Option<(usize, usize)>,
        room: usize,
        engine: &Engine,
    ) -> Result<Sequence, Error> {
        let best = best.filter(|&(_, len)| len >= REUSE);
        let mut taken = best.map(|(at, _)| self.all.remove(at));
        let excess = self.all.len().saturating_sub(room);
        self.all.drain(..excess);
        let Some((at, len)) = best else {
            return engine.new_sequence();
        };
        // Fork rather than take the sequence of another conversation, if there is room.
        if self.all.len() < room
            && let Some(other) = taken.take_if(|other| other.sequence.len() > len)
        {
            let fork = other.sequence.fork_at(len);
            self.all.insert(at - excess.min(at), other);
            return fork;
        }
        match taken {
            Some(mut idle) => {
                idle.sequence.truncate(len);
                Ok(idle.sequence)
            }
            None => engine.new_sequence(),
        }
    }

    /// Whether a sequence is to be saved.
    pub fn unsaved(&self) -> bool {
        self.all.iter().any(|idle| !idle.saved)
    }

    /// Saves a piece of an idle sequence, of the last one first. A failure is logged, and that sequence is not saved.
    pub fn save_next(&mut self) {
        let Some(idle) = self.all.iter_mut().rev().find(|idle| !idle.saved) else {
            return;
        };
        let Some(states) = &mut self.states else {
            return;
        };
        let saved = save(states, &idle.sequence, &mut self.fresh);
        idle.saved = !saved.unwrap_or_else(|why| {
            tracing::warn!(%why, "the state of a conversation is not saved");
            false
        });
    }
}

/// Saves a piece, if there is one.
fn save(states: &mut StateFolder, sequence: &Sequence, fresh: &mut bool) -> Result<bool, Failure> {
    if !*fresh {
        states.refresh()?;
        *fresh = true;
    }
    states.save_next(sequence)
}
