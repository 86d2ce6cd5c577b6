//! Small conversions.

use std::time::Duration;

/// A time in whole nanoseconds.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Replaces a buffer by zeros of another length. The old one is freed first, so that both never exist at once.
pub(crate) fn renew(buffer: &mut Vec<f32>, len: usize) {
    *buffer = Vec::new();
    *buffer = vec![0.0; len];
}
