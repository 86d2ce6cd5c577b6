//! The bounds of the engine, with their reasons.

/// Longest chunk of tokens that is computed at once: above it the working memory grows and the
/// weights are read hardly less often.
pub const MAX_CHUNK: usize = 512;

/// Most sequences at once. Few enough that all of them fit in one pass.
pub const MAX_BATCH: usize = 64;

/// Most compute threads.
pub const MAX_THREADS: usize = 256;

const _: () = assert!(MAX_BATCH <= MAX_CHUNK);
