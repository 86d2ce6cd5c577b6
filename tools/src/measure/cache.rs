//! Measures the bookkeeping of the cold region: lookup, pin, release and replace, compared with one dependent memory
//! access.

use std::hint::black_box;
use std::time::{Duration, Instant};

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Eviction, Key, SlotCache};

use super::timing::{SCATTER, best};
use crate::Failure;

/// Slots of a typical cold region.
pub const USUAL: u32 = 1 << 15;

/// Bytes of weights that flow through the core's caches between two steps of a layer.
const WEIGHTS: usize = 8 << 20;

/// Cache line size.
const LINE: usize = 64;

/// Nanoseconds per neuron of each operation, in a full region that holds half of all neurons. One neuron in five is
/// requested, in ascending order, as a token does, and weights flow through the caches between the steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ColdRates {
    /// Size of the region's tables.
    pub table_bytes: u64,
    /// Test whether a neuron is cached.
    pub lookup_ns: f64,
    /// Find, record the use and pin, with its share of the start of a token.
    pub pin_ns: f64,
    /// Unpin.
    pub release_ns: f64,
    /// Evict another neuron and take its slot.
    pub replace_ns: f64,
    /// Lower bound: one dependent access to memory as large as the tables.
    pub access_ns: f64,
}

/// Measures a region of `slots` slots, for `time` per operation.
///
/// # Errors
/// Out of memory.
pub fn measure(slots: u32, time: Duration) -> Result<ColdRates, Failure> {
    let slots = slots.clamp(SCATTER as u32, 1 << 30);
    let table_bytes = SlotCache::overhead(Eviction::Lrfu, slots, 2 * u64::from(slots));
    let arena = Arena::new(slots, LINE, 1, ArenaOptions::default())
        .map_err(emberflow_storage::Error::from)?;
    let Some(mut cold) = SlotCache::with_eviction(arena, &[2 * slots], Eviction::Lrfu) else {
        return Ok(ColdRates::default());
    };
    (0..slots).for_each(|neuron| admit(&mut cold, neuron));
    let each = f64::from(slots.div_ceil(SCATTER as u32));
    let wanted = || (0..slots).step_by(SCATTER).map(key);
    let lookup = best(time, || {
        black_box(wanted().filter(|&key| cold.contains(key)).count());
    });
    let (start, mut pin, mut release) = (Instant::now(), f64::INFINITY, f64::INFINITY);
    let mut pinned = Vec::with_capacity(slots as usize / SCATTER + 1);
    let weights = vec![1u8; WEIGHTS];
    let forget = || black_box(weights.iter().map(|&b| u64::from(b)).sum::<u64>());
    while start.elapsed() < 2 * time || pin == f64::INFINITY {
        forget();
        let one = Instant::now();
        cold.begin_pass();
        cold.begin_layer(0);
        for key in wanted() {
            pinned.extend(cold.get_pin(key).map(|_| key));
        }
        pin = pin.min(one.elapsed().as_nanos() as f64);
        forget();
        let one = Instant::now();
        pinned.drain(..).for_each(|key| cold.unpin(key));
        release = release.min(one.elapsed().as_nanos() as f64);
    }
    let mut next = slots;
    let replace = best(time, || {
        cold.begin_pass();
        cold.begin_layer(0);
        for _ in wanted() {
            next = (next + 1) % (2 * slots);
            admit(&mut cold, next);
        }
    });
    Ok(ColdRates {
        table_bytes,
        lookup_ns: lookup / each,
        pin_ns: pin / each,
        release_ns: release / each,
        replace_ns: replace / each,
        access_ns: access(table_bytes, time),
    })
}

fn key(neuron: u32) -> Key {
    Key { bank: 0, neuron }
}

fn admit(cold: &mut SlotCache, neuron: u32) {
    if let Some(slot) = cold.reserve(key(neuron)) {
        cold.admit(key(neuron), slot);
        cold.unpin(key(neuron));
    }
}

/// Nanoseconds of a dependent access to `bytes` bytes: a pointer chase through all cache lines in random order.
fn access(bytes: u64, time: Duration) -> f64 {
    /// A cache line that holds the index of the next one.
    #[derive(Clone, Copy)]
    #[repr(align(64))]
    struct Line(u32);
    let count = (bytes as usize / LINE).clamp(2, 1 << 24);
    let mut order: Vec<u32> = (0..count as u32).collect();
    let mut state = 1u64;
    for i in (1..count).rev() {
        state = (state.wrapping_mul(6_364_136_223_846_793_005)).wrapping_add(1);
        order.swap(i, (state >> 33) as usize % (i + 1));
    }
    let mut lines = vec![Line(0); count];
    for (i, &at) in order.iter().enumerate() {
        lines[at as usize] = Line(order[(i + 1) % count]);
    }
    let mut at = 0;
    let pass = best(time, || {
        for _ in 0..count {
            at = lines[at as usize].0;
        }
        black_box(at);
    });
    pass / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_takes_some_time_and_replacing_takes_most() {
        for slots in [1, 1 << 12] {
            let rates = measure(slots, Duration::from_millis(2)).unwrap();
            let ColdRates {
                lookup_ns,
                pin_ns,
                release_ns,
                replace_ns,
                access_ns,
                ..
            } = rates;
            let all = [lookup_ns, pin_ns, release_ns, replace_ns, access_ns];
            assert!(
                all.iter().all(|ns| ns.is_finite() && *ns > 0.0),
                "{rates:?}"
            );
            assert!(replace_ns > lookup_ns && rates.table_bytes > 0, "{rates:?}");
        }
    }
}
