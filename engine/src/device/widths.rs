//! How much of what a device holds it computes: more for more rows (PowerInfer-2 §4.1.3), because one reading
//! of a row serves them all there, while on the CPU more of its neurons fire.

/// For passes of so many rows: how many of each bank's clusters a device computes, if it holds them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Width {
    /// Rows.
    pub rows: usize,
    /// Clusters, by bank.
    pub clusters: Vec<u32>,
}

/// The same by numbers of rows, ascending. Empty: all that it holds, whatever the number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Widths(pub Vec<Width>);

impl Widths {
    /// Clusters of a bank for `rows` rows, along straight lines between those that are known; `None` for all.
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
}
