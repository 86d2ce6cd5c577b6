//! Lengths of buffers.

use emberflow_models::config::ModelConfig;

use crate::ffn::FfnRoom;
use crate::{ffn, mixer};

/// Floats of a thread's buffer for passes of `rows` rows.
pub(crate) fn thread_floats(c: &ModelConfig, rows: usize) -> usize {
    let group = c.heads as usize / c.kv_heads.max(1) as usize;
    let attention = mixer::thread_floats(c.head_dim as usize, group, rows);
    attention.max(ffn::thread_floats(c.d_model as usize, rows))
}

/// What the lengths of buffers follow besides the number of rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rooms {
    /// Of the FFN.
    pub ffn: FfnRoom,
    /// Gates of a layer that a device may compute from resident rows.
    pub gates: usize,
}

/// A chunk of a prompt that the memory was divided for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LongChunk {
    /// Its rows.
    pub rows: usize,
    /// Those that a device computed with all neurons.
    pub streamed: usize,
}
