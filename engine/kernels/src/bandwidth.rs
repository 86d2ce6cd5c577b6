//! Memory read bandwidth of this machine: the upper bound for most kernels.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use crate::{
    Compute,
    simd::{self, LINE},
};

/// Bytes per work item: long enough for the hardware prefetcher.
const PIECE: usize = 1 << 20;

/// Prefetches all cache lines of `bytes` into the L2 cache: for data needed soon that the hardware
/// cannot predict, such as the first rows of a list.
#[inline]
pub fn prefetch(bytes: &[u8]) {
    let start = bytes.as_ptr();
    for at in (0..bytes.len()).step_by(LINE) {
        simd::prefetch(start.wrapping_add(at));
    }
}

/// Bytes per second at which all threads together read `buffers`: the best of as many passes as fit
/// in `time`, at least one after a warm-up.
///
/// The buffers together should be several times larger than the last-level cache. Write to them
/// first, since untouched memory is one page of zeros. Reading from huge pages is faster; measure
/// with the page size of the weights.
pub fn read_bandwidth(on: &Compute, buffers: &[&[u8]], time: Duration) -> f64 {
    let pieces: Vec<&[u8]> = buffers.iter().flat_map(|b| b.chunks(PIECE)).collect();
    let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
    let pass = || {
        let start = Instant::now();
        on.workers.for_each_chunk(pieces.len(), &|_, piece| {
            black_box(on.cpu.sum_bytes(pieces[piece]));
        });
        start.elapsed().as_secs_f64()
    };
    pass();
    let start = Instant::now();
    let mut best = pass();
    while start.elapsed() < time {
        best = best.min(pass());
    }
    bytes as f64 / best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;

    #[test]
    fn every_byte_is_read() {
        for len in [0, 1, 7, 8, 511, 512, 513, 3000] {
            let mut bytes = vec![0u8; len];
            for cpu in Cpu::all() {
                assert_eq!(cpu.sum_bytes(&bytes), 0);
            }
            for at in 0..len {
                bytes[at] = 1;
                for cpu in Cpu::all() {
                    assert_eq!(cpu.sum_bytes(&bytes), 1 << (8 * (at % 8)), "{len} {at}");
                }
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn the_rate_is_a_number() {
        let on = Compute::new(2, None);
        let rate = read_bandwidth(&on, &[&[1; 100_000]], Duration::ZERO);
        assert!(rate.is_finite() && rate > 0.0);
    }
}
