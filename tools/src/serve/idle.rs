//! Sequences of finished requests, for requests that begin with the same tokens: in memory, and on disk with `--state-dir`.

use std::io::ErrorKind;

use emberflow_engine::{Engine, Error, Sequence};

use super::error::ApiError;
use super::snapshot::IdleSlot;
use crate::Failure;
use crate::states::{Restoring, SlotFileError, SlotName, SlotState, StateFolder, Step};

/// Minimum length of a common prefix for which the state of a finished request is reused.
const REUSE: usize = 8;
/// Tokens by which a saved state must be longer than what is in memory to be read.
const LONGER: usize = 32;

/// An idle sequence.
struct Idle {
    sequence: Sequence,
    /// The slot in which it ran.
    slot: usize,
    /// Whether it is on disk, as far as it will be; and whether its first piece is.
    saved: bool,
    begun: bool,
    /// Number among all that were idle.
    number: u64,
}

/// The idle sequences, oldest first.
pub struct IdleSequences {
    all: Vec<Idle>,
    /// How many there were.
    count: u64,
    states: Option<StateFolder>,
}

/// Places for idle sequences.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    /// How many there may be.
    pub room: usize,
    /// A slot that is not in use.
    pub free: usize,
}

/// A sequence for a request.
pub struct Beginning {
    /// The sequence.
    pub sequence: Sequence,
    /// How many of its tokens were read from disk.
    pub restored: usize,
    /// The slot that it had; a new sequence has none yet.
    pub slot: Option<usize>,
}

/// Where the beginning of a request is.
pub enum Begun {
    /// In memory, or nowhere.
    InMemory(Beginning),
    /// On disk: it is to be read first.
    OnDisk(Restoring),
}

impl IdleSequences {
    /// None yet; they are saved in `states`.
    pub fn new(states: Option<StateFolder>) -> Self {
        Self {
            all: Vec::new(),
            count: 0,
            states,
        }
    }

    /// Adds a finished request's sequence.
    pub fn add(&mut self, sequence: Sequence, slot: usize) {
        if sequence.len() >= REUSE {
            let saved = self.states.is_none();
            self.push(sequence, slot, saved);
        }
    }

    fn push(&mut self, sequence: Sequence, slot: usize, saved: bool) {
        let number = self.count;
        self.count += 1;
        self.all.push(Idle {
            sequence,
            slot,
            saved,
            begun: false,
            number,
        });
    }

    /// A sequence with the longest known prefix of `tokens`, or an empty one. At most `places.room` other idle sequences stay. Of
    /// running texts a new one could share `shared` tokens.
    ///
    /// # Errors
    /// No memory for a sequence.
    pub fn take(
        &mut self,
        tokens: &[u32],
        shared: usize,
        places: Places,
        engine: &Engine,
    ) -> Result<Begun, Error> {
        let in_memory = self.best(tokens).map_or(shared, |(_, len)| len.max(shared));
        let saved = self.states.as_ref().map(|states| states.find(tokens));
        let saved = saved.filter(|saved| saved.len >= in_memory + LONGER);
        if let (Some(saved), Some(states)) = (saved, &self.states) {
            shrink(&mut self.all, places.room);
            let empty = engine.new_sequence()?;
            return Ok(Begun::OnDisk(states.restore(saved, empty)));
        }
        self.take_best(tokens, places, engine).map(Begun::InMemory)
    }

    /// Reads the next piece of saved state. Returns false at its end.
    pub fn restore_next(&mut self, state: &mut Restoring) -> bool {
        let states = self.states.as_mut();
        states.is_some_and(|states| states.restore_next(state))
    }

    /// As [`take`](Self::take), once `state` is read.
    ///
    /// # Errors
    /// No memory for a sequence.
    pub fn restored(
        &mut self,
        tokens: &[u32],
        places: Places,
        state: Restoring,
        engine: &Engine,
    ) -> Result<Beginning, Error> {
        let sequence = state.finish();
        let in_memory = self.best(tokens).map_or(0, |(_, len)| len);
        if sequence.len() > in_memory {
            return Ok(Beginning {
                restored: sequence.len(),
                sequence,
                slot: None,
            });
        }
        // What was found is gone or damaged.
        drop(sequence);
        self.take_best(tokens, places, engine)
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
        Places { room, free }: Places,
        engine: &Engine,
    ) -> Result<Beginning, Error> {
        let new = |sequence| Beginning {
            sequence,
            restored: 0,
            slot: None,
        };
        let Some((at, len)) = self.best(tokens) else {
            shrink(&mut self.all, room);
            return engine.new_sequence().map(new);
        };
        let mut taken = self.all.remove(at);
        shrink(&mut self.all, room);
        // Fork rather than take the sequence of another conversation, if there is room. The request has its slot then: most
        // often it is the same conversation, and the rest is the end of an answer in other tokens.
        if self.all.len() < room && taken.sequence.len() > len {
            let fork = taken.sequence.fork_at(len)?;
            let slot = std::mem::replace(&mut taken.slot, free);
            self.all.insert(at.min(self.all.len()), taken);
            return Ok(Beginning {
                slot: Some(slot),
                ..new(fork)
            });
        }
        taken.sequence.truncate(len);
        Ok(Beginning {
            slot: Some(taken.slot),
            ..new(taken.sequence)
        })
    }

    /// Whether a slot has an idle sequence.
    pub fn has(&self, slot: usize) -> bool {
        self.all.iter().any(|idle| idle.slot == slot)
    }

    /// All of them.
    pub fn slots(&self) -> impl Iterator<Item = IdleSlot> {
        let slot = |idle: &Idle| IdleSlot {
            id: idle.slot,
            tokens: idle.sequence.len(),
        };
        self.all.iter().map(slot)
    }

    /// Removes a slot's sequence from memory. Returns its length.
    pub fn erase(&mut self, slot: usize) -> usize {
        let at = self.all.iter().position(|idle| idle.slot == slot);
        at.map_or(0, |at| self.all.remove(at).sequence.len())
    }

    /// Saves the next piece of a slot's sequence, or at the end its list of tokens. None if there is more to save. `sequence`
    /// remembers which one is being saved.
    ///
    /// # Errors
    /// An empty slot, or one that got another conversation meanwhile; a conversation that is too short, no room, I/O errors.
    pub fn save(
        &mut self,
        slot: usize,
        name: &SlotName,
        sequence: &mut Option<u64>,
    ) -> Result<Option<SlotState>, ApiError> {
        let idle = self.all.iter_mut().find(|idle| idle.slot == slot);
        let (Some(idle), Some(states)) = (idle, &mut self.states) else {
            let message =
                format!("slot {slot} has no conversation; /slots lists those that have one");
            return Err(ApiError::unknown(message));
        };
        let no_room = || {
            ApiError::full(
                "there is no room for this conversation in --state-size, or too much was written today",
            )
        };
        match *sequence {
            None if !states.has_room(&idle.sequence) => return Err(no_room()),
            Some(number) if number != idle.number => {
                let message = format!("slot {slot} got another conversation meanwhile");
                return Err(ApiError::unknown(message));
            }
            _ => *sequence = Some(idle.number),
        }
        match step(idle, states).map_err(ApiError::failed)? {
            Step::Written => return Ok(None),
            Step::NoRoom => return Err(no_room()),
            Step::Whole => {}
        }
        let saved = states.save_slot(name, &idle.sequence);
        let saved = saved.map_err(ApiError::failed)?.ok_or_else(no_room)?;
        match saved.found.len {
            0 => Err(ApiError::invalid(format!(
                "the conversation of slot {slot} is too short to be saved"
            ))),
            _ => Ok(Some(saved)),
        }
    }

    /// Begins to read a saved slot, in place of what the slot has. Returns the bytes of its files, too.
    ///
    /// # Errors
    /// No such state, or not all of it; no memory.
    pub fn begin_restore(
        &mut self,
        slot: usize,
        name: &SlotName,
        engine: &Engine,
    ) -> Result<(Restoring, u64), ApiError> {
        let Some(states) = &mut self.states else {
            return Err(ApiError::unknown("no state is saved"));
        };
        let (tokens, saved) = states.slot(name).map_err(|why| match why {
            SlotFileError::Foreign => ApiError::invalid(
                "the saved slot is of another model, or was computed in another way",
            ),
            SlotFileError::Long(tokens) => ApiError::invalid(format!(
                "the saved slot has {tokens} tokens, more than --context"
            )),
            SlotFileError::Damaged => ApiError::invalid("the file of the saved slot is damaged"),
            SlotFileError::Io(why) if why.kind() == ErrorKind::NotFound => {
                ApiError::unknown("there is no saved slot of this name")
            }
            SlotFileError::Io(why) => ApiError::failed(why),
        })?;
        if saved.found.len < tokens.len() {
            return Err(lost());
        }
        self.all.retain(|idle| idle.slot != slot);
        let empty = engine.new_sequence().map_err(ApiError::failed)?;
        Ok((states.restore(saved.found, empty), saved.bytes))
    }

    /// Adds a slot's state that was read. Returns its length.
    ///
    /// # Errors
    /// Not all of it could be read.
    pub fn add_restored(&mut self, state: Restoring, slot: usize) -> Result<usize, ApiError> {
        let wanted = state.wanted();
        let sequence = state.finish();
        let len = sequence.len();
        if len < wanted {
            return Err(lost());
        }
        self.push(sequence, slot, true);
        Ok(len)
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
        let saved = step(idle, states).unwrap_or_else(|why| {
            tracing::warn!(%why, "the state of a conversation is not saved");
            Step::NoRoom
        });
        idle.saved = saved != Step::Written;
    }
}

/// Saves the next piece of a sequence.
fn step(idle: &mut Idle, states: &mut StateFolder) -> Result<Step, Failure> {
    if !idle.begun {
        states.begin(&idle.sequence);
        idle.begun = true;
    }
    states.save_next(&idle.sequence)
}

/// The error for a saved slot whose pieces are not all there.
fn lost() -> ApiError {
    ApiError::unknown("a part of the saved state is gone or damaged: it will be computed again")
}

/// Drops sequences until there are `room`: those that are saved first, then the oldest.
fn shrink(all: &mut Vec<Idle>, room: usize) {
    while all.len() > room {
        let saved = all.iter().position(|idle| idle.saved);
        all.remove(saved.unwrap_or(0));
    }
}
