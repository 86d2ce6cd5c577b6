//! Threads compute on shared handles while the cache goes on evicting and loading.

use std::sync::mpsc::sync_channel;

use emberflow_storage::arena::{Arena, ArenaOptions, SharedSlot};
use emberflow_storage::cache::{ColdCache, Key};
use emberflow_storage::io::IoThread;

const LEN: usize = 512;
const NEURONS: u32 = 64;

#[test]
fn caches_and_io_threads_can_be_shared() {
    fn shared<T: Send + Sync>() {}
    shared::<ColdCache>();
    shared::<SharedSlot>();
    shared::<IoThread>();
}

/// Handles are the only protection here: units are unpinned before the workers look at them. A
/// unit that is evicted under a handle shows the bytes of its successor.
#[test]
fn bytes_stay_while_a_handle_lives() {
    let arena = Arena::new(8, LEN, 512, ArenaOptions::default()).unwrap();
    let mut cache = ColdCache::new(arena, &[NEURONS]).unwrap();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let (to, from) = sync_channel::<(u32, SharedSlot)>(2);
                scope.spawn(move || {
                    for (neuron, slot) in from {
                        assert!(
                            slot.as_slice().iter().all(|&b| u32::from(b) == neuron),
                            "neuron {neuron} was overwritten while in use"
                        );
                    }
                });
                to
            })
            .collect();
        let mut random = 1u64;
        for i in 0..60_000usize {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let neuron = (random >> 40) as u32 % NEURONS;
            let key = Key::new(0, neuron);
            let id = match cache.get_pin(key) {
                Some(id) => id,
                None => {
                    // Three workers hold at most nine handles; with eight slots all may be taken.
                    let Some(mut slot) = cache.reserve(key) else {
                        std::thread::yield_now();
                        continue;
                    };
                    slot.as_mut_slice().fill(neuron as u8);
                    cache.admit(key, slot)
                }
            };
            let handle = cache.share(id);
            cache.unpin(key);
            workers[i % 3].send((neuron, handle)).unwrap();
        }
        drop(workers);
    });
    cache.check_invariants();
    let stats = cache.stats();
    assert!(stats.evictions > 10_000, "{stats:?}");
}
