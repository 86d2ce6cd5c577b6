//! Limits of the engine, with reasons.

/// Longest chunk in tokens: longer ones need more scratch but hardly read weights less often.
pub const MAX_CHUNK: usize = 512;

/// Most concurrent sequences; all of them fit in one pass.
pub const MAX_BATCH: usize = 64;

/// Most compute threads.
pub const MAX_THREADS: usize = 256;

const _: () = assert!(MAX_BATCH <= MAX_CHUNK);
