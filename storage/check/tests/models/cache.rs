//! Slots and the cold cache: what a handle shows stays until it is gone.

use emberflow_storage_check::arena::SharedSlot;
use emberflow_storage_check::cache::{ColdCache, Key};
use loom::thread;

use super::{LEN, arena, check};

fn reads(handle: SharedSlot, byte: u8) -> thread::JoinHandle<()> {
    thread::spawn(move || assert_eq!(handle.as_slice(), [byte; LEN]))
}

/// A slot becomes exclusive only when the last reader is done with it.
#[test]
fn handles_keep_writers_away() {
    check(5, || {
        let mut slot = arena(1).take().unwrap();
        slot.as_mut_slice().fill(1);
        let mine = slot.share();
        let readers = [reads(mine.clone(), 1), reads(mine.clone(), 1)];
        let mine = match mine.try_unshare() {
            Ok(mut slot) => {
                slot.as_mut_slice().fill(2);
                slot.share()
            }
            Err(mine) => mine,
        };
        for reader in readers {
            reader.join().unwrap();
        }
        let mut slot = mine.try_unshare().unwrap();
        slot.as_mut_slice().fill(3);
    });
}

/// The owner evicts and loads while workers read what it has handed out without pins.
#[test]
fn eviction_waits_for_readers() {
    check(5, || {
        let [a, b, c] = [0, 1, 2].map(|n| Key::new(0, n));
        let mut cache = ColdCache::new(arena(2), &[3]).unwrap();
        let load = |cache: &mut ColdCache, key: Key| {
            let mut slot = cache.reserve(key)?;
            slot.as_mut_slice().fill(key.neuron as u8);
            Some(cache.admit(key, slot))
        };
        let mut workers = Vec::new();
        for key in [a, b] {
            let id = load(&mut cache, key).unwrap();
            workers.push(reads(cache.share(id), key.neuron as u8));
            cache.unpin(key);
        }
        // Both may be in use: then there is no slot.
        let loaded = load(&mut cache, c);
        cache.check_invariants();
        if let Some(id) = loaded {
            assert!(!cache.contains(a) || !cache.contains(b));
            assert!(cache.bytes(id).iter().all(|&b| b == 2));
        } else {
            assert!(cache.contains(a) && cache.contains(b));
        }
        for worker in workers {
            worker.join().unwrap();
        }
        if loaded.is_some() {
            cache.unpin(c);
        }
        assert!(loaded.is_some() || load(&mut cache, c).is_some());
        cache.check_invariants();
    });
}

/// A slot that was abandoned, or given back by a smaller cache, is not one that somebody reads.
#[test]
fn shrinking_and_abandoning_respect_readers() {
    check(5, || {
        let [a, b] = [0, 1].map(|n| Key::new(0, n));
        let mut cache = ColdCache::new(arena(2), &[2]).unwrap();
        let mut slot = cache.reserve(a).unwrap();
        slot.as_mut_slice().fill(7);
        let id = cache.admit(a, slot);
        let worker = reads(cache.share(id), 7);
        cache.unpin(a);
        let mut slot = cache.reserve(b).unwrap();
        slot.as_mut_slice().fill(9);
        cache.abandon(b, slot);
        // The worker's unit is in the lowest slot: it leaves or is kept, as a whole.
        let stuck = cache.resize(0);
        assert_eq!(stuck, u32::from(cache.contains(a)));
        worker.join().unwrap();
        assert_eq!(cache.resize(0), 0);
        assert!(!cache.contains(a));
        cache.check_invariants();
    });
}
