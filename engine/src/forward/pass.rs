//! The rows of a pass.

/// The rows of a pass and its progress.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    /// Residual stream, `[rows × d_model]`.
    pub x: Vec<f32>,
    /// Further data per row: other residual streams, per-layer inputs; `[rows × aux_width]`.
    pub aux: Vec<f32>,
    pub rows: usize,
    /// Number of completed layers; `None` before the embedding.
    pub layers: Option<usize>,
}

impl Pass {
    /// Buffers for up to `rows` rows of `d` elements, plus `aux_width` further elements each.
    pub fn new(rows: usize, d: usize, aux_width: usize) -> Self {
        Self {
            x: vec![0.0; rows * d],
            aux: vec![0.0; rows * aux_width],
            rows: 0,
            layers: None,
        }
    }

    /// Starts a new pass.
    pub fn begin(&mut self, rows: usize) {
        (self.rows, self.layers) = (rows, None);
    }
}
