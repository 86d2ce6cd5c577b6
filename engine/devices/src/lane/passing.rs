//! Progress of a layer of which devices compute some rows with all clusters.

use std::ops::Range;

/// Progress of a layer.
#[derive(Default)]
pub(crate) struct Passing {
    /// Held clusters that are not submitted.
    pub held: Range<usize>,
    /// Number of groups begun.
    pub groups: usize,
    /// Clusters of the group that are not uploaded.
    pub missing: usize,
    /// Clusters of the group that pass through a buffer, until they are submitted.
    pub group: Option<Range<usize>>,
}

/// A piece of work that may begin.
pub(super) struct Piece {
    /// Clusters of the bank.
    pub clusters: Range<usize>,
    /// Devices hold them; otherwise they are in the buffer of their group.
    pub held: bool,
}

impl Passing {
    /// A layer of which devices hold the first `held` clusters.
    pub fn of(held: usize) -> Self {
        Self {
            held: 0..held,
            ..Self::default()
        }
    }

    /// Begins a group of clusters that devices do not hold.
    pub fn begin_group(&mut self, clusters: Range<usize>) {
        self.groups += 1;
        self.missing = clusters.len();
        self.group = Some(clusters).filter(|clusters| !clusters.is_empty());
    }

    /// Number of the group's buffer.
    pub fn buffer(&self) -> usize {
        self.groups % 2
    }

    /// The next piece, of at most `at_once` clusters: held ones first, in the order of clusters.
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

    /// A piece was submitted.
    pub(super) fn submitted(&mut self, piece: &Piece) {
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
        let mut passing = Passing::of(5);
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
        assert!(passing.next(3).is_none());
    }
}
