//! The bookkeeping of a cache has its documented size, for the slots within its limit and not for
//! its capacity. A separate file, as the allocator counts the bytes of the process.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Eviction, Key, SlotCache};

struct Counting;

static LIVE: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards everything to the system allocator unchanged; `realloc` and `alloc_zeroed` go
// through these two by default.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Neurons of a 7B model: 32 layers of 14336.
const BANKS: [u32; 32] = [14336; 32];
const NEURONS: u32 = 32 * 14336;

/// The list of the banks, and the allocator's own.
const ROUNDING: u64 = 8 << 10;

fn fill(cache: &mut SlotCache) {
    for (bank, &neurons) in (0u32..).zip(&BANKS) {
        for neuron in 0..neurons {
            let key = Key::new(bank, neuron);
            if let Some(slot) = cache.reserve_if_free(key) {
                cache.admit(key, slot);
                cache.unpin(key);
            }
        }
    }
}

#[test]
fn bookkeeping_is_for_slots_below_the_limit() {
    let before = LIVE.load(Ordering::Relaxed);
    let held = || LIVE.load(Ordering::Relaxed) - before;
    let limit = NEURONS / 10;
    let options = ArenaOptions::default();
    let arena = Arena::with_limit(limit, NEURONS, 8192, 4096, options).unwrap();
    let mut cache = SlotCache::with_eviction(arena, &BANKS, Eviction::Lrfu).unwrap();
    let neurons = u64::from(NEURONS);
    // 6.0 MB of tables and 0.4 MB for 45,875 slots; for all slots it would be 10 MB.
    let said = |slots| SlotCache::overhead(Eviction::Lrfu, slots, neurons);
    let per_neuron = 13 * neurons;
    let fixed = said(0) - per_neuron;
    assert!(fixed < 160 << 10, "{fixed}");
    assert_eq!(said(limit), fixed + per_neuron + 9 * u64::from(limit));
    for slots in [limit, 128, NEURONS / 2, NEURONS, 1000, NEURONS / 4] {
        assert_eq!(cache.resize(slots), 0);
        let needed = said(slots);
        let said = needed + ROUNDING;
        assert!(
            held() <= said,
            "{} bytes held for {slots} slots, {said} said",
            held()
        );
        // The documented size is not an overestimate.
        assert!(held() + ROUNDING >= needed);
        fill(&mut cache);
        assert_eq!(cache.resident(), slots);
        cache.check_invariants();
        assert!(
            held() <= said,
            "{} bytes held after use, {said} said",
            held()
        );
    }
}
