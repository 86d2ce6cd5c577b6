//! Time of a product on a processor.

/// `[rows × cols] · [cols × n]`: weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Product {
    /// Rows of the weights.
    pub rows: usize,
    /// Columns of the weights.
    pub cols: usize,
    /// Tokens.
    pub n: usize,
}

/// Times of products on a processor.
pub trait Curve {
    /// Seconds of a product: increasing in rows, non-decreasing in tokens; 0 without rows.
    fn seconds(&self, of: Product) -> f64;

    /// The numbers of tokens, ascending, that it has static graphs for: other numbers are padded, or divided among several.
    /// Empty on a processor for which no number is better than another.
    fn graphs(&self) -> &[usize] {
        &[]
    }
}

/// `launch + rows · row` for any number of tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Linear {
    /// Seconds per launch.
    pub launch: f64,
    /// Seconds per row.
    pub row: f64,
}

impl Curve for Linear {
    fn seconds(&self, of: Product) -> f64 {
        match of.rows {
            0 => 0.0,
            rows => self.launch + rows as f64 * self.row,
        }
    }
}
