//! The rows that travel through the layers together.

/// The rows of a pass and its progress.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    /// Residual stream, `[rows × d_model]`.
    pub x: Vec<f32>,
    /// What else a row consists of: other streams and the inputs of all layers, `[rows × beside]`.
    pub beside: Vec<f32>,
    pub rows: usize,
    /// Number of completed layers; `None` before the embedding.
    pub layers: Option<usize>,
}

impl Pass {
    /// For up to `rows` rows of `d` elements, and `beside` beside each.
    pub fn new(rows: usize, d: usize, beside: usize) -> Self {
        Self {
            x: vec![0.0; rows * d],
            beside: vec![0.0; rows * beside],
            rows: 0,
            layers: None,
        }
    }

    /// Starts a new pass.
    pub fn begin(&mut self, rows: usize) {
        (self.rows, self.layers) = (rows, None);
    }
}
