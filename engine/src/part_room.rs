//! Buffers of the thread that feeds parts of a pass to devices.

use emberflow_kernels::Activations;
use emberflow_models::config::{MixerKind, ModelConfig, Parallel};

use crate::matrix::Matrix;
use crate::mixer::longest_state;
use crate::schedule::{PART_ROWS, PartOrders};
use crate::scratch::widest_input;
use crate::streams::aux_width;

/// Bytes of the thread's stack, of which touched pages count.
pub(crate) const STACK: usize = 512 << 10;

/// Buffers of the FFN of a part, and of its projections.
#[derive(Default)]
pub(crate) struct PartRoom {
    /// Its input, `[rows × d_model]`.
    pub normed: Vec<f32>,
    /// The same in 8 bits.
    pub input: Activations,
    /// Its output, `[rows × d_model]`.
    pub out: Vec<f32>,
    /// Dequantised rows for products, by thread, as [`Scratch::rows`](crate::scratch::Scratch::rows); empty if devices
    /// multiply no projections.
    pub rows: Vec<Vec<f32>>,
    /// Orders of parts.
    pub orders: PartOrders,
    /// Share of the projections that devices multiply for as many rows layer by layer, 0 to 1.
    pub products: f64,
}

/// Whether passes of a model can run in parts: one residual stream to which a mixer and then a dense FFN add.
pub(crate) fn can_run_in_parts(c: &ModelConfig) -> bool {
    let both = |layer: u32| c.has_mixer(layer) && c.has_ffn(layer);
    let apart = c.form.parallel == Parallel::No || !(0..c.layers).any(both);
    c.mixture.is_none() && apart && c.form.ngrams.is_none() && aux_width(c) == 0
}

/// Whether devices can multiply the projections of such passes: all mixers are plain attention, so that no other thread has
/// products for them.
pub(crate) fn can_project(c: &ModelConfig) -> bool {
    let plain = |layer| matches!(c.mixer_of(layer), MixerKind::Attention | MixerKind::None);
    can_run_in_parts(c) && (0..c.layers).all(plain)
}

impl PartRoom {
    /// For parts of passes of up to `chunk` rows, which are half as long at most, with `threads` compute threads.
    pub fn new(c: &ModelConfig, chunk: usize, threads: usize, products: f64) -> Self {
        let (rows, d) = (rows(chunk), c.d_model as usize);
        let [input, scratch] = widths(c);
        Self {
            normed: vec![0.0; rows * d],
            input: Activations::with_capacity(input, rows),
            out: vec![0.0; rows * d],
            rows: vec![vec![0.0; scratch]; if scratch > 0 { threads } else { 0 }],
            orders: PartOrders::default(),
            products,
        }
    }

    /// Bytes that [`PartRoom::new`] allocates, and that the state between parts takes for `batch` texts.
    pub fn bytes_for(c: &ModelConfig, chunk: usize, threads: usize, batch: usize) -> u64 {
        let (rows, d) = (rows(chunk), c.d_model as usize);
        let [input, scratch] = widths(c);
        let floats = 2 * rows * d + batch * longest_state(c) + threads * scratch;
        (4 * floats + Activations::bytes(input, rows)) as u64
    }
}

/// Widest input, and floats of a thread for products.
fn widths(c: &ModelConfig) -> [usize; 2] {
    match can_project(c) {
        true => [widest_input(c), Matrix::scratch_len(widest_input(c))],
        false => [c.d_model as usize, 0],
    }
}

/// Most rows of a part of a pass of `chunk` rows.
fn rows(chunk: usize) -> usize {
    chunk.div_ceil(2).next_multiple_of(PART_ROWS)
}
