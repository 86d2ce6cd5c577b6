//! A slip: the state of one device command and the reads it serves.

use super::sys::Piece;

/// Maps a file range to pieces of memory, and records its progress and its reads. Slips are
/// allocated once and reused.
pub(super) struct Slip {
    /// Fixed address: the kernel reads it while the command is in flight.
    pieces: Box<[Piece]>,
    count: usize,
    /// Pieces before this one are full.
    first: usize,
    /// Reads served, as indices into the engine's active reads.
    pub(super) owners: Vec<u32>,
    /// File range.
    pub(super) start: u64,
    pub(super) len: u64,
    /// Bytes received.
    pub(super) filled: u64,
    /// Start time, on the trace clock.
    pub(super) since: u64,
    /// Consecutive interruptions.
    pub(super) retries: u32,
}

impl Slip {
    pub(super) fn new(pieces: usize) -> Self {
        Self {
            pieces: vec![Piece::EMPTY; pieces].into_boxed_slice(),
            count: 0,
            first: 0,
            owners: Vec::with_capacity(pieces),
            start: 0,
            len: 0,
            filled: 0,
            since: 0,
            retries: 0,
        }
    }

    /// Resets the slip for a command at file offset `at`, started at `now`.
    pub(super) fn reset(&mut self, at: u64, now: u64) {
        self.count = 0;
        self.first = 0;
        self.owners.clear();
        self.start = at;
        self.len = 0;
        self.filled = 0;
        self.since = now;
        self.retries = 0;
    }

    /// Pieces so far.
    pub(super) fn pieces(&self) -> usize {
        self.count
    }

    /// File offset after the last piece.
    pub(super) fn end(&self) -> u64 {
        self.start + self.len
    }

    /// Adds the next `len` bytes of the file. The caller checks that a piece is free.
    pub(super) fn add(&mut self, to: *mut u8, len: u32) {
        self.pieces[self.count] = Piece::new(to, len as usize);
        self.count += 1;
        self.len += u64::from(len);
    }

    /// File offset and pieces of what is still missing.
    pub(super) fn rest(&self) -> (u64, &[Piece]) {
        let offset = self.start + self.filled;
        (offset, &self.pieces[self.first..self.count])
    }

    /// Records `n` received bytes; returns whether the command is complete.
    pub(super) fn advance(&mut self, n: u32) -> bool {
        self.retries = 0;
        self.filled += u64::from(n);
        let mut n = n as usize;
        while self.first < self.count {
            let piece = &mut self.pieces[self.first];
            let taken = n.min(piece.len());
            piece.advance(taken);
            n -= taken;
            if piece.len() > 0 {
                return false;
            }
            self.first += 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_crosses_pieces() {
        let mut memory = [0u8; 30];
        let at = memory.as_mut_ptr();
        let mut slip = Slip::new(3);
        slip.reset(1000, 0);
        slip.add(at, 10);
        slip.add(at.wrapping_add(10), 20);
        assert_eq!((slip.pieces(), slip.end()), (2, 1030));
        assert!(!slip.advance(4));
        // Four bytes arrived: the rest starts there, in file and memory.
        let (offset, rest) = slip.rest();
        assert_eq!(
            (offset, rest.len(), rest[0].addr()),
            (1004, 2, at as usize + 4)
        );
        assert!(!slip.advance(6));
        let (offset, rest) = slip.rest();
        assert_eq!((offset, rest.len(), rest[0].len()), (1010, 1, 20));
        assert!(slip.advance(20));
        slip.reset(0, 0);
        assert_eq!((slip.pieces(), slip.end(), slip.rest().1.len()), (0, 0, 0));
    }
}
