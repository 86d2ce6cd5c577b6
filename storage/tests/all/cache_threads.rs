//! Threads read the cache concurrently, between two changes.

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{Key, SlotCache};
use emberflow_storage::io::IoThread;

const LEN: usize = 512;
const NEURONS: u32 = 64;

#[test]
fn caches_and_io_threads_can_be_shared() {
    fn shared<T: Send + Sync>() {}
    shared::<SlotCache>();
    shared::<Slot>();
    shared::<IoThread>();
}

#[test]
fn threads_read_what_is_pinned() {
    let arena = Arena::new(8, LEN, 512, ArenaOptions::default()).unwrap();
    let mut cache = SlotCache::new(arena, &[NEURONS]).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..500 {
        let mut pinned = Vec::new();
        while pinned.len() < 6 {
            let key = Key::new(0, random.u32(..NEURONS));
            let id = cache.get_pin(key).unwrap_or_else(|| {
                let mut slot = cache.reserve(key).unwrap();
                slot.as_mut_slice().fill(key.neuron as u8);
                cache.admit(key, slot)
            });
            pinned.push((key, id));
        }
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (cache, pinned) = (&cache, &pinned);
                scope.spawn(move || {
                    for &(key, id) in pinned {
                        let right = |&b: &u8| u32::from(b) == key.neuron;
                        assert!(cache.bytes(id).iter().all(right), "{key:?}");
                    }
                });
            }
        });
        pinned.iter().for_each(|(key, _)| cache.unpin(*key));
    }
    cache.check_invariants();
    let stats = cache.stats();
    assert!(stats.evictions > 1_000, "{stats:?}");
}
