//! Sequences of finished requests, for requests that begin with the same tokens: in memory, and on disk with `--state-dir`.

use emberflow_engine::{Engine, Error, Sequence};

use crate::states::StateFolder;

/// Minimum length of a common prefix for which the state of a finished request is reused.
const REUSE: usize = 8;
/// Tokens by which a saved state must be longer than what is in memory to be read.
const LONGER: usize = 32;

/// An idle sequence.
struct Idle {
    sequence: Sequence,
    /// Whether it is on disk, as far as it will be; and whether its first piece is.
    saved: bool,
    begun: bool,
}

/// The idle sequences, oldest first.
pub struct IdleSequences {
    all: Vec<Idle>,
    states: Option<StateFolder>,
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
        }
    }

    /// Adds a finished request's sequence.
    pub fn add(&mut self, sequence: Sequence) {
        if sequence.len() >= REUSE {
            let saved = self.states.is_none();
            self.all.push(Idle {
                sequence,
                saved,
                begun: false,
            });
        }
    }

    /// A sequence with the longest known prefix of `tokens`, or an empty one. At most `room` other idle sequences stay.
    ///
    /// # Errors
    /// No memory for a sequence.
    pub fn take(&mut self, tokens: &[u32], room: usize, engine: &Engine) -> Result<Begun, Error> {
        let in_memory = self.best(tokens).map_or(0, |(_, len)| len);
        let saved = self.states.as_ref().map(|states| states.find(tokens));
        let saved = saved.filter(|saved| saved.len >= in_memory + LONGER);
        if let (Some(saved), Some(states)) = (saved, &mut self.states) {
            shrink(&mut self.all, room);
            let sequence = states.restore(&saved, engine.new_sequence()?);
            if sequence.len() > in_memory {
                let restored = sequence.len();
                return Ok(Begun { sequence, restored });
            }
            // What was found is gone or damaged.
        }
        let sequence = self.take_best(tokens, room, engine)?;
        let restored = 0;
        Ok(Begun { sequence, restored })
    }

    /// The place of the sequence with the longest known prefix of `tokens`, and the prefix's length.
    fn best(&self, tokens: &[u32]) -> Option<(usize, usize)> {
        let common = |idle: &Idle| {
            let pairs = idle.sequence.tokens().iter().zip(tokens);
            (idle.sequence).reach(pairs.take_while(|(a, b)| a == b).count())
        };
        let all = self.all.iter().map(common).enumerate();
        let best = all.max_by_key(|&(_, len)| len);
        best.filter(|&(_, len)| len >= REUSE)
    }

    /// As [`take`](Self::take), from memory.
    fn take_best(
        &mut self,
        tokens: &[u32],
        room: usize,
        engine: &Engine,
    ) -> Result<Sequence, Error> {
        let Some((at, len)) = self.best(tokens) else {
            shrink(&mut self.all, room);
            return engine.new_sequence();
        };
        let mut taken = self.all.remove(at);
        shrink(&mut self.all, room);
        // Fork rather than take the sequence of another conversation, if there is room.
        if self.all.len() < room && taken.sequence.len() > len {
            let fork = taken.sequence.fork_at(len);
            self.all.insert(at.min(self.all.len()), taken);
            return fork;
        }
        taken.sequence.truncate(len);
        Ok(taken.sequence)
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
        if !idle.begun {
            states.begin(&idle.sequence);
            idle.begun = true;
        }
        let saved = states.save_next(&idle.sequence);
        idle.saved = !saved.unwrap_or_else(|why| {
            tracing::warn!(%why, "the state of a conversation is not saved");
            false
        });
    }
}

/// Drops sequences until there are `room`: those that are saved first, then the oldest.
fn shrink(all: &mut Vec<Idle>, room: usize) {
    while all.len() > room {
        let saved = all.iter().position(|idle| idle.saved);
        all.remove(saved.unwrap_or(0));
    }
}
