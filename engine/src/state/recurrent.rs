//! State of fixed size: one block of floats per sequence, and snapshots of it.
//!
//! A recurrence cannot be undone, so a sequence can go back only to lengths with a snapshot. A pass
//! reads one block and writes another, and a completed pass swaps them: rows dropped in the middle
//! of a pass leave no trace, and the block before the pass becomes a snapshot without a copy.

use std::ops::Range;
use std::sync::Arc;

use arrayvec::ArrayVec;

use super::page::Page;
use super::pool::Pool;

/// Snapshots of a sequence in addition to its current state: one token before the ends of its last
/// prompts.
/// Two, because a conversation continues from its last message, or from the one before it.
const SNAPSHOTS: usize = 2;

/// Blocks of a sequence: its current state, the one that a pass writes, and snapshots.
pub(super) const BLOCKS: usize = 2 + SNAPSHOTS;

/// The state after the first `len` tokens.
#[derive(Debug, Clone)]
struct Snapshot {
    len: usize,
    block: Arc<Page>,
}

/// The recurrent state of one sequence.
#[derive(Debug)]
pub(super) struct Recurrent {
    pool: Arc<Pool>,
    charged: usize,
    /// `now` is the state after these tokens. It is zeros if there are none.
    len: usize,
    now: Option<Arc<Page>>,
    /// The block that the current pass writes.
    next: Option<Arc<Page>>,
    /// The length at which to take a snapshot; 0 for none.
    mark: usize,
    /// The snapshot that the current pass writes.
    marked: Option<Snapshot>,
    /// Least recently used first.
    snapshots: ArrayVec<Snapshot, SNAPSHOTS>,
    /// While drafts are made.
    drafting: Option<Drafting>,
}

/// Passes whose state is dropped. The first one reads `now`; all write `next`, layer by layer in place.
#[derive(Debug)]
struct Drafting {
    /// The state of one layer before a pass.
    buffer: Vec<f32>,
    /// Whether `next` is the state after such a pass.
    begun: bool,
}

/// One layer's part of a sequence's block, during a pass.
pub(crate) struct RecurrentPart<'a> {
    /// The state before the pass.
    pub before: &'a [f32],
    /// Receives the state after all rows of the pass.
    pub after: &'a mut [f32],
    /// Receives the state after this number of its rows.
    pub marked: Option<(usize, &'a mut [f32])>,
}

impl Recurrent {
    /// The state of an empty sequence of up to `positions` positions.
    ///
    /// # Errors
    /// The numbers of free blocks and of all blocks, if there are too few.
    pub fn new(pool: &Arc<Pool>, positions: usize) -> Result<Self, [usize; 2]> {
        let charged = if positions == 0 { 0 } else { BLOCKS };
        (pool.reserve(charged)).map_err(|free| [free, pool.total()])?;
        Ok(Self {
            pool: Arc::clone(pool),
            charged,
            len: 0,
            now: None,
            next: None,
            mark: 0,
            marked: None,
            snapshots: ArrayVec::new(),
            drafting: None,
        })
    }

    /// The same for a fork of up to `positions` positions, with the same mark.
    ///
    /// # Errors
    /// As [`Recurrent::new`].
    pub fn fork(&self, len: usize, positions: usize) -> Result<Self, [usize; 2]> {
        let mut fork = Self::new(&self.pool, positions)?;
        fork.mark = self.mark;
        fork.adopt(self, len);
        Ok(fork)
    }

    /// Requests a snapshot after `len` tokens.
    pub fn mark(&mut self, len: usize) {
        self.mark = len;
        self.unmark();
    }

    /// The longest length up to `len` that the sequence can go back to.
    pub fn reach(&self, len: usize) -> usize {
        if len >= self.len {
            return self.len;
        }
        let lens = self.snapshots.iter().map(|snapshot| snapshot.len);
        lens.filter(|&snapshot| snapshot <= len).max().unwrap_or(0)
    }

    /// Prepares the blocks for a pass of `count` tokens. Idempotent.
    pub fn prepare(&mut self, count: usize) {
        if self.now.is_none() {
            let mut zeros = self.pool.take();
            if let Some(zeros) = Arc::get_mut(&mut zeros) {
                zeros.floats_mut().fill(0.0);
            }
            self.now = Some(zeros);
        }
        let owned = self.next.as_mut().and_then(Arc::get_mut).is_some();
        if !owned {
            let shared = self.next.take();
            self.release(shared);
            self.next = Some(self.pool.take());
        }
        if self.drafting.is_some() {
            return;
        }
        let inside = self.len < self.mark && self.mark < self.len + count;
        if !inside {
            self.unmark();
        } else if self.marked.is_none() {
            self.make_room();
            self.marked = Some(Snapshot {
                len: self.mark,
                block: self.pool.take(),
            });
        }
        if self.mark == self.len {
            self.keep_now();
        }
    }

    /// The part `range` of the blocks, after [`Recurrent::prepare`].
    pub fn part(&mut self, range: Range<usize>) -> RecurrentPart<'_> {
        let (Some(now), Some(next)) = (&self.now, self.next.as_mut().and_then(Arc::get_mut)) else {
            unreachable!("a prepared block has one owner");
        };
        let (len, after) = (self.len, &mut next.floats_mut()[range.clone()]);
        let before = match &mut self.drafting {
            Some(drafting) if drafting.begun => {
                let buffer = &mut drafting.buffer[..range.len()];
                buffer.copy_from_slice(after);
                buffer
            }
            _ => &now.floats()[range.clone()],
        };
        RecurrentPart {
            before,
            after,
            marked: self.marked.as_mut().and_then(|marked| {
                let block = Arc::get_mut(&mut marked.block)?;
                Some((marked.len - len, &mut block.floats_mut()[range]))
            }),
        }
    }

    /// Begins passes whose state is dropped, each after the one before. `buffer`: floats of the largest part.
    pub fn begin_drafts(&mut self, buffer: Vec<f32>) {
        self.drafting = Some(Drafting {
            buffer,
            begun: false,
        });
    }

    /// Goes back to the state before [`Recurrent::begin_drafts`], and returns its buffer.
    pub fn end_drafts(&mut self) -> Vec<f32> {
        self.drafting.take().map_or(Vec::new(), |of| of.buffer)
    }

    /// Ends a pass of `count` tokens.
    pub fn commit(&mut self, count: usize) {
        if let Some(drafting) = &mut self.drafting {
            drafting.begun = true;
            return;
        }
        self.len += count;
        std::mem::swap(&mut self.now, &mut self.next);
        if let Some(marked) = self.marked.take() {
            self.keep(marked);
        }
        if self.mark == self.len {
            self.keep_now();
        }
    }

    /// Goes back to the state before the last pass, which had `count` tokens and after which none was prepared.
    pub fn undo(&mut self, count: usize) {
        let before = self.next.take();
        self.go_to(self.len - count, before);
    }

    /// Lengths at which there is a state, from the shortest on.
    pub fn lens(&self) -> ArrayVec<usize, { SNAPSHOTS + 1 }> {
        let snapshots = self.snapshots.iter().map(|snapshot| snapshot.len);
        let mut lens: ArrayVec<_, _> = snapshots.filter(|&len| len < self.len).collect();
        lens.sort_unstable();
        lens.extend(
            self.now
                .is_some()
                .then_some(self.len)
                .filter(|&len| len > 0),
        );
        lens
    }

    /// The state after `len` tokens, if there is one.
    pub fn block(&self, len: usize) -> Option<&[u8]> {
        let snapshot = || self.snapshots.iter().find(|snapshot| snapshot.len == len);
        let now = self.now.as_ref().filter(|_| len == self.len);
        let block = now.or_else(|| snapshot().map(|snapshot| &snapshot.block))?;
        Some(block.bytes())
    }

    /// Adds the state after `len` tokens as a snapshot, as `fill` fills it.
    ///
    /// # Errors
    /// Those of `fill`.
    pub fn restore<E>(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut block = self.pool.take();
        let filled = match Arc::get_mut(&mut block) {
            Some(block) => fill(block.bytes_mut()),
            None => unreachable!("a free block has one owner"),
        };
        match filled {
            Ok(()) => self.keep(Snapshot { len, block }),
            Err(_) => self.release(Some(block)),
        }
        filled
    }

    /// Makes the longest snapshot of up to `len` tokens the current state, and returns its length.
    pub fn resume(&mut self, len: usize) -> usize {
        let usable = self.snapshots.iter().filter(|snapshot| snapshot.len <= len);
        let last = usable.max_by_key(|snapshot| snapshot.len).cloned();
        let (len, block) = last.map_or((0, None), |last| (last.len, Some(last.block)));
        self.go_to(len, block);
        len
    }

    /// Goes back to the longest length up to `len` that is possible, and returns it.
    pub fn truncate(&mut self, len: usize) -> usize {
        let reached = self.reach(len);
        if reached < self.len {
            let index = self
                .snapshots
                .iter()
                .position(|snapshot| snapshot.len == reached);
            let block = index.map(|index| self.snapshots[index].block.clone());
            self.go_to(reached, block);
        }
        reached
    }

    /// Replaces the contents by the state of `other` after its first `len` tokens, which it can
    /// reach.
    pub fn adopt(&mut self, other: &Self, len: usize) {
        self.truncate(0);
        let now = (len == other.len).then_some(&other.now);
        let mut snapshots = other.snapshots.iter();
        let snapshot = snapshots
            .find(|snapshot| snapshot.len == len)
            .map(|snapshot| &snapshot.block);
        let block = now.and_then(Option::as_ref).or(snapshot).cloned();
        for snapshot in other.snapshots.iter().filter(|snapshot| snapshot.len < len) {
            self.keep(snapshot.clone());
        }
        self.go_to(len, block);
    }

    /// Makes `block`, the state after `len` tokens, the current one. Drops snapshots after it.
    fn go_to(&mut self, len: usize, block: Option<Arc<Page>>) {
        let old = std::mem::replace(&mut self.now, block);
        self.len = len;
        self.release(old);
        self.unmark();
        while let Some(at) = self
            .snapshots
            .iter()
            .position(|snapshot| snapshot.len > len)
        {
            let gone = self.snapshots.remove(at);
            self.release(Some(gone.block));
        }
        if self.snapshots.iter().any(|snapshot| snapshot.len == len) {
            self.keep_now();
        }
    }

    /// Takes a snapshot of the current state.
    fn keep_now(&mut self) {
        if let (Some(block), 1..) = (&self.now, self.len) {
            let block = block.clone();
            self.keep(Snapshot {
                len: self.len,
                block,
            });
        }
    }

    /// Stores a snapshot as the most recently used one.
    fn keep(&mut self, snapshot: Snapshot) {
        if let Some(at) = self
            .snapshots
            .iter()
            .position(|other| other.len == snapshot.len)
        {
            let same = self.snapshots.remove(at);
            self.release(Some(same.block));
        }
        self.make_room();
        self.snapshots.push(snapshot);
    }

    /// Drops the least recently used snapshot if there is no slot for another one.
    fn make_room(&mut self) {
        if self.snapshots.is_full() {
            let oldest = self.snapshots.remove(0);
            self.release(Some(oldest.block));
        }
    }

    /// Drops the snapshot that a pass was to write.
    fn unmark(&mut self) {
        let unused = self.marked.take().map(|marked| marked.block);
        self.release(unused);
    }

    fn release(&self, block: Option<Arc<Page>>) {
        if block.is_some() {
            self.pool.give_back(block, 0);
        }
    }
}

impl Drop for Recurrent {
    fn drop(&mut self) {
        let blocks = [self.now.take(), self.next.take()].into_iter().flatten();
        let snapshots = self.snapshots.drain(..).chain(self.marked.take());
        let blocks = blocks.chain(snapshots.map(|snapshot| snapshot.block));
        self.pool.give_back(blocks, self.charged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOATS: usize = 3;

    fn pool(sequences: usize) -> Arc<Pool> {
        Arc::new(Pool::new(4 * FLOATS, sequences * BLOCKS).unwrap())
    }

    /// Runs tokens through a recurrence that depends on all of them: `s = 2·s + token` in the first
    /// part of the block, and their number in the second.
    fn pass(state: &mut Recurrent, tokens: &[u8]) {
        state.prepare(tokens.len());
        for (range, factor, counts) in [(0..2, 2.0, false), (2..3, 1.0, true)] {
            let RecurrentPart {
                before,
                after,
                mut marked,
            } = state.part(range);
            after.copy_from_slice(before);
            for (at, &token) in (1..).zip(tokens) {
                let add = if counts { 1.0 } else { f32::from(token) };
                after.iter_mut().for_each(|s| *s = factor * *s + add);
                if let Some((rows, to)) = &mut marked
                    && *rows == at
                {
                    to.copy_from_slice(after);
                }
            }
        }
    }

    fn run(state: &mut Recurrent, tokens: &[u8]) {
        pass(state, tokens);
        state.commit(tokens.len());
    }

    /// The state after the tokens, by the definition.
    fn expected(tokens: &[u8]) -> Vec<f32> {
        let sum = tokens.iter().fold(0.0, |s, &t| 2.0 * s + f32::from(t));
        vec![sum, sum, tokens.len() as f32]
    }

    fn check(state: &Recurrent, tokens: &[u8]) {
        assert_eq!(state.len, tokens.len());
        let zeros = [0.0; FLOATS];
        let found = state.now.as_ref().map_or(&zeros[..], |now| now.floats());
        assert_eq!(found, expected(tokens));
        for snapshot in &state.snapshots {
            assert_eq!(snapshot.block.floats(), expected(&tokens[..snapshot.len]));
        }
    }

    #[test]
    fn a_snapshot_is_what_a_sequence_goes_back_to() {
        let pool = pool(1);
        let mut state = Recurrent::new(&pool, 9).unwrap();
        let text = [3, 1, 4, 1, 5, 2, 6];
        state.mark(3);
        run(&mut state, &text[..2]);
        run(&mut state, &text[2..6]);
        check(&state, &text[..6]);
        assert_eq!([2, 3, 5, 6, 9].map(|len| state.reach(len)), [0, 3, 3, 6, 6]);
        assert_eq!(state.truncate(5), 3);
        check(&state, &text[..3]);
        // again, with the snapshot at the end of a pass
        state.mark(5);
        run(&mut state, &text[3..5]);
        run(&mut state, &text[5..]);
        check(&state, &text);
        assert_eq!((state.truncate(6), state.reach(4)), (5, 3));
        check(&state, &text[..5]);
        assert_eq!(state.truncate(2), 0);
        check(&state, &[]);
        run(&mut state, &text[..4]);
        check(&state, &text[..4]);
        drop(state);
        assert_eq!(pool.free(), (BLOCKS, BLOCKS));
    }

    #[test]
    fn a_pass_can_be_undone() {
        let pool = pool(1);
        let mut state = Recurrent::new(&pool, 9).unwrap();
        state.mark(2);
        run(&mut state, &[3, 1, 4]);
        for wrong in [&[9][..], &[8, 8, 8], &[5, 5]] {
            run(&mut state, wrong);
            state.undo(wrong.len());
            check(&state, &[3, 1, 4]);
        }
        run(&mut state, &[1, 5]);
        check(&state, &[3, 1, 4, 1, 5]);
        assert_eq!(state.truncate(4), 2, "snapshots stay");
        // Also the first pass, and one that took a snapshot.
        state.mark(4);
        run(&mut state, &[7, 7, 7]);
        assert_eq!(state.reach(4), 4);
        state.undo(3);
        check(&state, &[3, 1]);
        assert_eq!(state.reach(1), 0, "a snapshot of what was undone");
        state.truncate(0);
        run(&mut state, &[6]);
        state.undo(1);
        run(&mut state, &[2]);
        check(&state, &[2]);
    }

    #[test]
    fn drafts_follow_the_text_and_leave_no_trace() {
        let pool = pool(2);
        let mut state = Recurrent::new(&pool, 20).unwrap();
        let mut text = vec![3, 1, 4];
        state.mark(2);
        run(&mut state, &text);
        for drafts in [&[&[9][..], &[8, 8], &[5]][..], &[&[1, 2]], &[]] {
            state.mark(text.len() + 1);
            state.begin_drafts(vec![0.0; 2]);
            let mut guessed = text.clone();
            for tokens in drafts {
                run(&mut state, tokens);
                guessed.extend_from_slice(tokens);
                let after = state.next.as_ref().unwrap().floats();
                assert_eq!(after, expected(&guessed));
            }
            assert_eq!(state.end_drafts().len(), 2);
            check(&state, &text);
            // A pass after them can be undone.
            run(&mut state, &[7, 7]);
            state.undo(2);
            check(&state, &text);
            run(&mut state, &[6, 6]);
            text.extend([6, 6]);
            check(&state, &text);
            assert_eq!(state.reach(text.len() - 1), text.len() - 1);
        }
        drop(state);
        assert_eq!(pool.free(), (2 * BLOCKS, 2 * BLOCKS));
    }

    #[test]
    fn a_dropped_pass_leaves_no_trace() {
        let mut state = Recurrent::new(&pool(1), 9).unwrap();
        run(&mut state, &[7, 8]);
        state.mark(3);
        pass(&mut state, &[9, 9, 9]);
        check(&state, &[7, 8]);
        pass(&mut state, &[1, 2]);
        state.prepare(2);
        state.commit(2);
        check(&state, &[7, 8, 1, 2]);
        assert_eq!(state.truncate(3), 3);
        check(&state, &[7, 8, 1]);
    }

    /// Against copies of whole texts: random passes, forks, snapshots and cuts of three sequences.
    #[test]
    fn sequences_share_blocks_and_never_see_each_other() {
        let pool = pool(3);
        let mut random = fastrand::Rng::with_seed(5);
        let new = || (Recurrent::new(&pool, 99).unwrap(), Vec::<u8>::new());
        let mut sequences = [new(), new(), new()];
        for _ in 0..3000 {
            let index = random.usize(..3);
            let (state, text) = &mut sequences[index];
            match random.u8(..8) {
                0 => state.mark(text.len() + random.usize(..6)),
                1 if random.bool() => {
                    let reached = state.truncate(random.usize(..=text.len()));
                    text.truncate(reached);
                }
                2 => {
                    let (len, to) = (random.usize(..=text.len()), random.usize(..3));
                    if let Ok([from, to]) = sequences.get_disjoint_mut([index, to]) {
                        let len = from.0.reach(len);
                        to.0.adopt(&from.0, len);
                        to.1 = from.1[..len].to_vec();
                    }
                }
                3 => pass(state, &[255; 3]),
                _ => {
                    let tokens: Vec<u8> = (0..random.usize(1..5)).map(|_| random.u8(..)).collect();
                    // so that all states are exact
                    if text.len() + tokens.len() > 14 {
                        text.truncate(state.truncate(0));
                    }
                    run(state, &tokens);
                    text.extend(tokens);
                }
            }
            sequences
                .iter()
                .for_each(|(state, text)| check(state, text));
        }
        assert!(Recurrent::new(&pool, 1).is_err(), "all blocks are reserved");
        drop(sequences);
        assert_eq!(pool.free(), (3 * BLOCKS, 3 * BLOCKS));
    }
}
