//! One sequence: its tokens and their state.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;

use arrayvec::ArrayVec;
use emberflow_models::config::ModelConfig;

use super::entries::{Entries, EntryPool};
use super::pages::{KvPages, KvPool};
use super::pool::Pool;
use super::recurrent::{BLOCKS, Recurrent, RecurrentPart};
use super::shape::StateShape;
use crate::error::Error;

/// The memory of an engine's sequences.
#[derive(Debug)]
pub(crate) struct StatePool {
    pages: Arc<KvPool>,
    /// Blocks of recurrent state, if the model has any.
    blocks: Option<Arc<Pool>>,
    /// Vectors of pools of positions, by pool size.
    entries: [Option<EntryPool>; 2],
    shape: StateShape,
}

impl StatePool {
    /// Memory for `sequences` sequences of `positions` positions, not backed until used.
    pub fn new(shape: StateShape, positions: usize, sequences: usize) -> Result<Self, Error> {
        let pages = shape.pages.pages(positions) * sequences;
        let blocks = match shape.recurrent {
            0 => None,
            floats => Some(Arc::new(Pool::new(4 * floats, BLOCKS * sequences)?)),
        };
        let [small, large] = shape.pools;
        Ok(Self {
            pages: KvPool::new(shape.pages, pages)?,
            entries: [
                EntryPool::new(small, positions, sequences)?,
                EntryPool::new(large, positions, sequences)?,
            ],
            blocks,
            shape,
        })
    }

    /// Shape of a sequence's state.
    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// An empty sequence with memory reserved for `positions` positions.
    ///
    /// # Errors
    /// [`Error::KvFull`] if other sequences reserve too much.
    pub fn sequence(&self, positions: usize) -> Result<Sequence, Error> {
        let blocks = self.blocks.as_ref();
        let recurrent = blocks.map(|blocks| Recurrent::new(blocks, positions));
        let entries = self.entries.iter().flatten();
        Ok(Sequence {
            pages: self.pages.sequence(positions)?,
            entries: (entries.map(|entries| entries.sequence(positions)))
                .collect::<Result<_, Error>>()?,
            recurrent: (recurrent.transpose()).map_err(|[free, all]| full(positions, free, all))?,
            tokens: Vec::with_capacity(positions),
        })
    }
}

/// The error for a pool with `free` of `all` blocks left, too few for a sequence of `positions`
/// positions.
fn full(positions: usize, free: usize, all: usize) -> Error {
    Error::KvFull {
        positions,
        free: free / BLOCKS * positions,
        total: all / BLOCKS * positions,
    }
}

/// The state of one conversation or completion.
///
/// Creating a sequence reserves memory of the engine for its full length; dropping it releases it.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) pages: KvPages,
    /// Vectors of pools of positions, by pool size.
    pub(crate) entries: ArrayVec<Entries, 2>,
    recurrent: Option<Recurrent>,
    tokens: Vec<u32>,
}

/// A sequence's part of a pass.
pub struct Span<'a> {
    /// The sequence to extend.
    pub sequence: &'a mut Sequence,
    /// Its next tokens, at least one.
    pub tokens: &'a [u32],
}

impl Sequence {
    /// Number of tokens computed.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether no token was computed yet.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Free positions.
    pub fn room(&self) -> usize {
        self.pages.capacity() - self.tokens.len()
    }

    /// Rejects keys and values that became infinite in their format.
    pub(crate) fn check_range(&self) -> Result<(), Error> {
        self.check_range_to(self.len())
    }

    /// The same among the first `len` positions.
    pub(crate) fn check_range_to(&self, len: usize) -> Result<(), Error> {
        let entries = self.entries.iter().filter_map(Entries::overflow);
        match entries.chain(self.pages.overflow()).min() {
            Some(position) if position < len => Err(Error::KvRange { position }),
            _ => Ok(()),
        }
    }

    /// Rejects more tokens than there are free positions.
    pub(crate) fn check_room(&self, tokens: usize, config: &ModelConfig) -> Result<(), Error> {
        if tokens <= self.room() {
            return Ok(());
        }
        Err(Error::ContextFull {
            capacity: self.len() + self.room(),
            needed: self.len() + tokens,
            limit: config.max_context as usize,
        })
    }

    /// The tokens computed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The longest length up to `len` at which the sequence can continue: `len`, unless its state
    /// is recurrent and has no snapshot there.
    pub fn reach(&self, len: usize) -> usize {
        let len = len.min(self.len());
        self.recurrent.as_ref().map_or(len, |r| r.reach(len))
    }

    /// A sequence that continues from this point, with the same capacity. Keys and values are
    /// shared, copy-on-write.
    ///
    /// # Errors
    /// [`Error::KvFull`] if the engine has no memory for another sequence of this length.
    pub fn fork(&self) -> Result<Self, Error> {
        self.fork_at(self.len())
    }

    /// Like [`Sequence::fork`], from position `len`, or from the earlier one that it
    /// [reaches](Sequence::reach).
    ///
    /// # Errors
    /// As [`Sequence::fork`].
    pub fn fork_at(&self, len: usize) -> Result<Self, Error> {
        let (len, positions) = (self.reach(len), self.pages.capacity());
        let recurrent = self.recurrent.as_ref().map(|r| r.fork(len, positions));
        let mut tokens = Vec::with_capacity(positions);
        tokens.extend_from_slice(&self.tokens[..len]);
        let entries = self.entries.iter();
        Ok(Self {
            pages: self.pages.fork(len, positions)?,
            entries: (entries.map(|entries| entries.fork(len, positions)))
                .collect::<Result<_, Error>>()?,
            recurrent: (recurrent.transpose()).map_err(|[free, all]| full(positions, free, all))?,
            tokens,
        })
    }

    /// Replaces the contents by the first `len` tokens of `other`, which it can reach, and shares
    /// their state.
    pub(crate) fn adopt(&mut self, other: &Self, len: usize) {
        self.clear();
        self.pages.adopt(&other.pages, len);
        for (entries, other) in self.entries.iter_mut().zip(&other.entries) {
            entries.adopt(other, len);
        }
        if let (Some(recurrent), Some(other)) = (&mut self.recurrent, &other.recurrent) {
            recurrent.adopt(other, len);
        }
        self.tokens.extend_from_slice(&other.tokens[..len]);
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Whether it can go back to any length. Otherwise its state is recurrent and goes back to snapshots, or to before the
    /// last pass.
    pub fn goes_back(&self) -> bool {
        self.recurrent.is_none()
    }

    /// Undoes the end of the last pass, which had `rows` tokens, from position `len` on. A recurrent state goes back to
    /// what it was before that pass. Returns the number of remaining tokens. No pass may have been prepared since.
    pub(crate) fn undo(&mut self, rows: usize, len: usize) -> usize {
        if len >= self.len() {
            return self.len();
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.undo(rows);
        }
        self.truncate(len)
    }

    /// Makes the recurrent state that before the last pass, which had `rows` tokens, and prepares it for the first `count` of
    /// them. They are then taken up again, and [`Sequence::end_replay`] ends it.
    pub(crate) fn begin_replay(&mut self, rows: usize, count: usize) {
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.undo(rows);
            recurrent.prepare(count);
        }
    }

    /// See [`Sequence::begin_replay`]. Removes the tokens of the pass after these.
    pub(crate) fn end_replay(&mut self, rows: usize, count: usize) {
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.commit(count);
        }
        self.truncate(self.len() - rows + count);
    }

    /// Begins passes that leave no trace. `buffer`: floats of the largest recurrent state of a layer.
    pub(crate) fn begin_drafts(&mut self, buffer: Vec<f32>) {
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.begin_drafts(buffer);
        }
    }

    /// Removes what was computed since [`Sequence::begin_drafts`], and returns its buffer.
    pub(crate) fn end_drafts(&mut self, len: usize) -> Vec<f32> {
        let buffer = self.recurrent.as_mut().map(Recurrent::end_drafts);
        self.truncate(len);
        buffer.unwrap_or_default()
    }

    /// Removes the tokens from position `len` on, or from the earlier one that it
    /// [reaches](Sequence::reach). Returns the number of remaining tokens.
    pub fn truncate(&mut self, len: usize) -> usize {
        let len = len.min(self.len());
        let reached = self.recurrent.as_mut().map_or(len, |r| r.truncate(len));
        self.tokens.truncate(reached);
        self.pages.truncate(reached);
        for entries in &mut self.entries {
            entries.truncate(reached);
        }
        reached
    }

    /// Whether every position's state can be written.
    pub fn can_be_saved(&self) -> bool {
        self.check_range().is_ok()
    }

    /// Bytes that [`write_positions`](Self::write_positions) writes of `positions`.
    pub fn saved_bytes(&self, positions: Range<usize>) -> u64 {
        let pools = self
            .entries
            .iter()
            .map(|entries| entries.saved_bytes(positions.clone()));
        positions.len() as u64 * self.position_bytes() + pools.sum::<u64>()
    }

    /// Writes keys, values and pool vectors of `positions`, in an order that depends on the model only.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write_positions(&self, positions: Range<usize>, to: &mut dyn Write) -> io::Result<()> {
        self.pages.write(positions.clone(), to)?;
        (self.entries.iter()).try_for_each(|entries| entries.write(positions.clone(), to))
    }

    /// Lengths at which it has recurrent state, from the shortest on; none if its state is that of positions.
    pub fn snapshots(&self) -> impl Iterator<Item = usize> {
        self.recurrent.iter().flat_map(Recurrent::lens)
    }

    /// Recurrent state after `len` tokens, one of [`snapshots`](Self::snapshots).
    pub fn snapshot(&self, len: usize) -> Option<&[u8]> {
        self.recurrent.as_ref()?.block(len)
    }

    /// Takes a snapshot at position `len`, so that other sequences can continue from it.
    pub(crate) fn mark(&mut self, len: usize) {
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.mark(len);
        }
    }

    /// Bytes of keys and values per position.
    pub fn position_bytes(&self) -> u64 {
        self.pages.shape().position_bytes()
    }

    /// One layer's part of the recurrent state.
    pub(crate) fn recurrent(&mut self, part: Range<usize>) -> RecurrentPart<'_> {
        match &mut self.recurrent {
            Some(recurrent) => recurrent.part(part),
            None => unreachable!("only recurrent layers request recurrent state"),
        }
    }

    /// Prepares the state for a pass of `count` tokens. Idempotent.
    pub(crate) fn prepare(&mut self, count: usize) {
        self.pages.prepare(self.tokens.len(), count);
        for entries in &mut self.entries {
            entries.prepare(self.tokens.len(), count);
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.prepare(count);
        }
    }

    /// Ends a pass of `tokens`.
    pub(crate) fn advance(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.commit(tokens.len());
        }
    }

    /// Replaces the contents by `count` positions of `token` without computing them, for
    /// benchmarks.
    pub(crate) fn pretend(&mut self, token: u32, count: usize) {
        self.clear();
        self.pages.pretend(count);
        for entries in &mut self.entries {
            entries.pretend(count);
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.mark(0);
            recurrent.prepare(count);
            recurrent.commit(count);
        }
        self.tokens.resize(count, token);
    }
}

/// A sequence whose state is read from outside of the process. What was read before an error counts.
#[derive(Debug)]
pub struct Restored(Sequence);

impl Restored {
    /// Begins with `empty`, whose contents are removed.
    pub fn new(mut empty: Sequence) -> Self {
        empty.clear();
        Self(empty)
    }

    /// Free positions.
    pub fn room(&self) -> usize {
        self.0.room()
    }

    /// Number of tokens so far.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Reads what [`Sequence::write_positions`] wrote of the next positions, which are of `tokens`.
    ///
    /// # Errors
    /// Those of `from`, and more tokens than the sequence has room for.
    pub fn positions(&mut self, tokens: &[u32], from: &mut dyn Read) -> io::Result<()> {
        let sequence = &mut self.0;
        if tokens.len() > sequence.room() {
            return Err(io::Error::other("it is longer than the context"));
        }
        let positions = sequence.len()..sequence.len() + tokens.len();
        sequence.pages.read(positions.clone(), from)?;
        for entries in &mut sequence.entries {
            entries.read(positions.clone(), from)?;
        }
        sequence.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Reads a [snapshot](Sequence::snapshot) of the state after `len` tokens. Of more than two the last ones count.
    ///
    /// # Errors
    /// Those of `from`.
    pub fn snapshot(&mut self, len: usize, from: &mut dyn Read) -> io::Result<()> {
        match &mut self.0.recurrent {
            Some(recurrent) => recurrent.restore(len, |block| from.read_exact(block)),
            None => Ok(()),
        }
    }

    /// The sequence, up to the last token from which it can continue.
    pub fn finish(mut self) -> Sequence {
        let len = self.0.len();
        let resumed = self.0.recurrent.as_mut().map_or(len, |r| r.resume(len));
        self.0.truncate(resumed);
        self.0
    }
}
