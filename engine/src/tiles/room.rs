//! Buffers of a layer's FFN.

use emberflow_kernels::Activations;
use emberflow_models::config::ModelConfig;

/// Sizes of the buffers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TileSizes {
    /// Rows computed together.
    rows: usize,
    /// Neurons of the largest bank.
    neurons: usize,
    /// Input and output width of banks.
    d: usize,
}

impl TileSizes {
    /// Rows of a pass that are computed together. A product of 128 rows takes much longer than reading its weights from
    /// memory, so further rows would gain little; their hidden values would take memory from the weights.
    pub const ROWS: usize = 128;

    /// For passes of `rows` rows; nothing if the model's FFNs are neurons.
    pub fn of(c: &ModelConfig, rows: usize, tiles: bool) -> Self {
        let neurons = c.banks().map(|bank| bank.neurons).max();
        match tiles {
            true => Self {
                rows: rows.min(Self::ROWS),
                neurons: neurons.unwrap_or(0) as usize,
                d: c.bundle_width() as usize,
            },
            false => Self::default(),
        }
    }

    /// Bytes that [`TileRoom::new`] allocates.
    pub fn bytes(&self) -> usize {
        let floats = self.rows * 2 * (self.neurons + self.d);
        4 * floats + Activations::bytes(self.neurons.max(self.d), self.rows)
    }

    /// Columns of the widest matrix.
    pub fn widest(&self) -> usize {
        self.neurons.max(self.d)
    }
}

/// The buffers.
#[derive(Debug, Default)]
pub(crate) struct TileRoom {
    /// Inputs of the rows that visit a bank, `[rows × d]`.
    pub gathered: Vec<f32>,
    /// Products of Gate and Up, `[rows × neurons]`.
    pub gates: Vec<f32>,
    pub ups: Vec<f32>,
    /// Products of Down, `[rows × d]`.
    pub sums: Vec<f32>,
    /// The gathered inputs, then the hidden values, in 8 bits.
    pub input: Activations,
}

impl TileRoom {
    pub fn new(sizes: TileSizes) -> Self {
        let TileSizes { rows, neurons, d } = sizes;
        Self {
            gathered: vec![0.0; rows * d],
            gates: vec![0.0; rows * neurons],
            ups: vec![0.0; rows * neurons],
            sums: vec![0.0; rows * d],
            input: Activations::with_capacity(sizes.widest(), rows),
        }
    }
}
