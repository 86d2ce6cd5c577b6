//! Limits of the engine, with reasons.

/// Longest chunk: beyond it scratch grows while weights are read hardly less often.
pub const MAX_CHUNK: usize = 512;

/// Most concurrent sequences: all of them fit in one pass.
pub const MAX_BATCH: usize = 64;

/// Most compute threads.
pub const MAX_THREADS: usize = 256;

const _: () = assert!(MAX_BATCH <= MAX_CHUNK);
