//! Buffer sizes.

use emberflow_models::config::ModelConfig;

use crate::ffn::FfnRoom;
use crate::{ffn, mixer};

/// Floats of scratch per thread for passes of `rows` rows.
pub(crate) fn thread_floats(c: &ModelConfig, rows: usize) -> usize {
    let attention = mixer::thread_floats(c, rows);
    attention.max(ffn::thread_floats(c.bundle_width() as usize, rows))
}

/// Buffer sizes that do not depend on the number of rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rooms {
    /// Buffers of the FFN.
    pub ffn: FfnRoom,
    /// Gates per layer that a lane may compute from resident rows.
    pub gates: usize,
}

/// A prompt chunk for which memory was divided.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LongChunk {
    /// Rows of the chunk.
    pub rows: usize,
    /// Rows that a lane computed with all neurons.
    pub streamed: usize,
}
