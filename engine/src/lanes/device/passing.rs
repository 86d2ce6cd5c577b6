//! How far a layer has come of which a device computes some rows with all clusters.

use std::ops::Range;

/// How far a layer has come.
#[derive(Default)]
pub(crate) struct Passing {
    /// Clusters that the device holds and is to compute yet.
    pub held: Range<usize>,
    /// Groups that were begun.
    pub groups: usize,
    /// Clusters of the group that are to be uploaded yet.
    pub missing: usize,
    /// Those of the group that pass through a buffer, until they are submitted.
    pub group: Option<Range<usize>>,
    /// Something was submitted, so that what follows goes on from there.
    pub begun: bool,
    /// How many (neuron, row) pairs a predictor wants; `None` for all.
    pub wanted: Option<u64>,
}

/// What the caller waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    /// That the group's buffer is being computed, so that the other one is free.
    ForGroup,
    /// That all pieces are.
    ForAll,
}

/// A piece of work that may begin.
pub(super) struct Piece {
    /// Clusters of the bank.
    pub clusters: Range<usize>,
    /// The device holds them; else they are in the buffer of their group.
    pub held: bool,
}

impl Passing {
    /// A layer of which the device holds so many clusters, and is to compute so many pairs.
    pub fn begin(&mut self, held: usize, wanted: Option<u64>) {
        *self = Self {
            held: 0..held,
            wanted,
            ..Self::default()
        };
    }

    /// A group of clusters, those that the device does not hold.
    pub fn begin_group(&mut self, clusters: Range<usize>) {
        self.groups += 1;
        self.missing = clusters.len();
        self.group = Some(clusters).filter(|clusters| !clusters.is_empty());
    }

    /// The number of the buffer that the group passes through.
    pub fn buffer(&self) -> usize {
        self.groups % 2
    }

    /// What is to be computed next, of so many clusters at most: first what is held, in the order of clusters.
    pub(super) fn next(&self, at_once: usize) -> Option<Piece> {
        let Range { start, end } = self.held;
        match start < end {
            true => Some(Piece {
                clusters: start..end.min(start + at_once),
                held: true,
            }),
            false => self
                .group
                .clone()
                .filter(|_| self.missing == 0)
                .map(|clusters| Piece {
                    clusters,
                    held: false,
                }),
        }
    }

    /// Takes note that a piece was submitted.
    pub(super) fn submitted(&mut self, piece: &Piece) {
        self.begun = true;
        match piece.held {
            true => self.held.start = piece.clusters.end,
            false => self.group = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_in_the_order_of_clusters() {
        let mut passing = Passing::default();
        passing.begin(5, None);
        passing.begin_group(5..8);
        let mut seen = Vec::new();
        for _ in 0..4 {
            if let Some(piece) = passing.next(3) {
                seen.push((piece.clusters.clone(), piece.held));
                passing.submitted(&piece);
            } else {
                // All have arrived.
                passing.missing = 0;
            }
        }
        assert_eq!(seen, [(0..3, true), (3..5, true), (5..8, false)]);
        assert!(passing.next(3).is_none() && passing.begun);
    }
}
