//! How much of a layer a lane computes: more for more rows (PowerInfer-2 §4.1.3), because one read of a weight serves all
//! rows there, while on the CPU more of its neurons fire.

/// Work of a lane in passes of some number of rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Width {
    /// Rows.
    pub rows: usize,
    /// By bank: clusters that it computes, if it holds them.
    pub clusters: Vec<u32>,
    /// Rows that it computes with all clusters instead, if that is faster.
    pub streamed: usize,
}

/// Widths by ascending number of rows. Empty: all that it holds, whatever the number.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Widths(pub Vec<Width>);

impl Widths {
    /// No row is computed with all clusters, as there are no buffers.
    pub(crate) fn keep_to_held(&mut self) {
        self.0.iter_mut().for_each(|width| width.streamed = 0);
    }

    /// Whether passes of up to `rows` rows stream clusters through buffers.
    pub fn streams(&self, rows: usize) -> bool {
        self.streamed(rows) > 0
    }

    /// Number of `rows` rows that are computed with all clusters, interpolated; 0 where that is not known to be faster.
    pub fn streamed(&self, rows: usize) -> usize {
        let Some(last) = self.0.last() else { return 0 };
        let Some(i) = self.0.iter().position(|width| width.rows >= rows) else {
            return last.streamed * rows / last.rows.max(1);
        };
        let (a, b) = (&self.0[i.saturating_sub(1)], &self.0[i]);
        match (a.streamed, b.streamed) {
            _ if b.rows == rows => b.streamed,
            (0, _) | (_, 0) => 0,
            (from, to) => from + to.saturating_sub(from) * (rows - a.rows) / (b.rows - a.rows),
        }
    }

    /// Clusters of a bank for `rows` rows, interpolated; `None` for all.
    pub fn clusters(&self, bank: usize, rows: usize) -> Option<u32> {
        let of = |width: &Width| width.clusters.get(bank).copied();
        let last = self.0.last()?;
        match self.0.iter().position(|width| width.rows >= rows) {
            Some(0) => of(&self.0[0]),
            Some(i) => {
                let (a, b) = (&self.0[i - 1], &self.0[i]);
                let (from, to) = (i64::from(of(a)?), i64::from(of(b)?));
                let [part, all] = [rows - a.rows, b.rows - a.rows].map(|n| n as i64);
                // Between two numbers of clusters.
                u32::try_from(from + (to - from) * part / all).ok()
            }
            None => of(last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lie_on_lines_between_widths() {
        let width = |rows, clusters| Width {
            rows,
            clusters: vec![clusters, 7],
            streamed: 0,
        };
        let widths = Widths(vec![width(2, 10), width(4, 20), width(8, 0)]);
        let of = |rows| widths.clusters(0, rows).unwrap();
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 7, 8, 99].map(of),
            [10, 10, 10, 15, 20, 15, 5, 0, 0]
        );
        assert_eq!(widths.clusters(1, 3), Some(7));
        assert_eq!(widths.clusters(2, 3), None);
        assert_eq!(Widths::default().clusters(0, 1), None);
    }

    #[test]
    fn rows_are_streamed_between_numbers_for_which_it_is_faster() {
        let width = |(rows, streamed)| Width {
            rows,
            clusters: Vec::new(),
            streamed,
        };
        let known = [(16, 0), (32, 20), (64, 60), (128, 0), (256, 250)];
        let widths = Widths(known.map(width).to_vec());
        let of = |rows| widths.streamed(rows);
        assert_eq!(
            [1, 16, 20, 32, 48, 64, 100, 128, 200, 256, 512].map(of),
            [0, 0, 0, 20, 40, 60, 0, 0, 0, 250, 500]
        );
        assert_eq!(Widths::default().streamed(64), 0);
    }
}
