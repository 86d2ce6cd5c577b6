//! How long a processor takes for a product.

/// `[rows × cols] · [cols × n]`: weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Product {
    /// Rows of the weights.
    pub rows: usize,
    /// Their columns.
    pub cols: usize,
    /// Tokens.
    pub n: usize,
}

/// Times of products on a processor.
pub trait Curve {
    /// Seconds for a product: more for more rows, not less for more tokens; 0 without rows.
    fn seconds(&self, of: Product) -> f64;
}

/// `launch + rows · row`, whatever the tokens: pieces of one kind of work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Linear {
    /// Seconds for any work at all.
    pub launch: f64,
    /// Seconds for a row.
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
