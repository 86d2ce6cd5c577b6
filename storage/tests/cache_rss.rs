//! Shrinking the cache returns memory to the operating system. A separate file, as it measures the
//! whole process.

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Key, SlotCache};
use emberflow_storage::mem;

const MIB: u64 = 1 << 20;
const SLOTS: u32 = 8192;
const LEN: usize = 8192;

fn fill(cache: &mut SlotCache) {
    for n in 0..SLOTS {
        let key = Key::new(0, n);
        if cache.contains(key) {
            continue;
        }
        if let Some(mut slot) = cache.reserve_if_free(key) {
            slot.as_mut_slice().fill(n as u8);
            cache.admit(key, slot);
            cache.unpin(key);
        }
    }
}

#[test]
fn rss_follows_the_size_of_the_cache() {
    for huge_pages in [false, true] {
        let options = ArenaOptions {
            huge_pages,
            ..ArenaOptions::default()
        };
        let before = mem::rss().unwrap();
        let arena = Arena::new(SLOTS, LEN, 4096, options).unwrap();
        let mut cache = SlotCache::new(arena, &[SLOTS]).unwrap();
        let empty = mem::rss().unwrap();
        assert!(empty - before < 4 * MIB, "the arena is resident before use");
        fill(&mut cache);
        let full = mem::rss().unwrap();
        assert!(
            full - empty >= 60 * MIB,
            "64 MiB were written, {} appeared",
            full - empty
        );

        assert_eq!(cache.resize(SLOTS / 4), 0);
        cache.check_invariants();
        let quarter = mem::rss().unwrap();
        assert!(
            full - quarter >= 46 * MIB,
            "only {} went away",
            full - quarter
        );
        // The most recently used quarter remains, with its bytes.
        for n in 0..SLOTS {
            let key = Key::new(0, n);
            let id = cache.get_pin(key);
            assert_eq!(id.is_some(), n >= SLOTS / 4 * 3, "neuron {n}");
            if let Some(id) = id {
                assert!(cache.bytes(id).iter().all(|&b| b == n as u8));
                cache.unpin(key);
            }
        }

        assert_eq!(cache.resize(SLOTS), 0);
        fill(&mut cache);
        assert_eq!(cache.resident(), SLOTS);
        assert!(mem::rss().unwrap() - quarter >= 46 * MIB);
    }
}
