//! Inputs of the recurrences of a pass, so that the state after some of its rows can be computed without reading weights.
//!
//! A recurrence cannot be undone. When the last rows of a pass are rejected drafts, its state is that before the pass, and the
//! accepted rows are taken up again from these inputs.

use arrayvec::ArrayVec;

/// Buffers with the inputs of a recurrence, each `[rows × width]`.
pub(crate) type Inputs<'a> = ArrayVec<&'a mut [f32], 3>;

/// The inputs of one pass, layer by layer.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    /// `[rows × width]` for the most rows; empty for layers without recurrent state, and for models that cannot replay.
    layers: Vec<Vec<f32>>,
    /// Most rows.
    most: usize,
    /// Rows of the pass, whose inputs are complete when it ends; 0 for a pass without.
    rows: usize,
}

impl Replay {
    /// Memory for passes of up to `rows` rows with the inputs of layers of these `widths`; none for one row, which is never
    /// rejected.
    pub fn new(widths: &[usize], rows: usize) -> Self {
        let most = if rows > 1 { rows } else { 0 };
        let layers = widths.iter().map(|width| vec![0.0; width * most]);
        Self {
            layers: layers.collect(),
            most,
            rows: 0,
        }
    }

    /// Floats of [`Replay::new`].
    pub fn floats(widths: &[usize], rows: usize) -> usize {
        let all: usize = widths.iter().sum();
        if rows > 1 { rows * all } else { 0 }
    }

    /// Floats that it has allocated.
    #[cfg(test)]
    pub fn allocated(&self) -> usize {
        self.layers.iter().map(Vec::capacity).sum()
    }

    /// Whether passes of drafts can be replayed.
    pub fn is_possible(&self) -> bool {
        self.most > 0 && !self.layers.is_empty()
    }

    /// Most rows of a pass.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Begins a pass of `rows` rows of one text, or of others (0).
    pub fn begin(&mut self, rows: usize) {
        let fits = self.is_possible() && (2..=self.most).contains(&rows);
        self.rows = if fits { rows } else { 0 };
    }

    /// Rows of the last pass, if their inputs are here.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Stores the inputs of a layer.
    pub fn keep(&mut self, layer: usize, inputs: Inputs<'_>) {
        if self.rows == 0 {
            return;
        }
        let mut to = &mut self.layers[layer][..];
        for from in inputs {
            let (part, rest) = to.split_at_mut(from.len());
            part.copy_from_slice(from);
            to = rest;
        }
    }

    /// Copies the inputs of a layer back.
    pub fn restore(&self, layer: usize, inputs: Inputs<'_>) {
        let mut from = &self.layers[layer][..];
        for to in inputs {
            let (part, rest) = from.split_at(to.len());
            to.copy_from_slice(part);
            from = rest;
        }
    }
}
