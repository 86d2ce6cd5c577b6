//! Compares the cold cache's own LRU with the `lru` crate on the same skewed accesses. Both find a
//! neuron, touch it, or evict and insert.
//!
//! A layer requests neurons in ascending order and hot ones in nearly every token; about a tenth of
//! a 14336-neuron layer per token. `emberflow bench cache` measures the single steps of the cold
//! cache.

use std::hint::black_box;
use std::num::NonZeroUsize;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Eviction, Key, SlotCache};

const BANKS: u32 = 8;
const NEURONS: u32 = 14336;
const SLOTS: u32 = BANKS * NEURONS / 2;

/// One token's accesses: neuron `n` fires with a probability that falls with `n`.
fn tokens(count: usize) -> Vec<Vec<Key>> {
    let mut random = fastrand::Rng::with_seed(1);
    (0..count)
        .map(|_| {
            (0..BANKS)
                .flat_map(|bank| (0..NEURONS).map(move |neuron| Key { bank, neuron }))
                .filter(|k| {
                    let heat = f64::from(k.neuron) / f64::from(NEURONS);
                    random.f64() < 0.9 * (-12.0 * heat).exp() + 0.02
                })
                .collect()
        })
        .collect()
}

fn lookups(c: &mut Criterion) {
    let tokens = tokens(16);
    let mean = tokens.iter().map(Vec::len).sum::<usize>() / tokens.len();
    let mut group = c.benchmark_group("cold_cache");
    group.throughput(Throughput::Elements(mean as u64));

    let mut next = 0;
    for (name, eviction) in [("own", Eviction::Lru), ("own_lrfu", Eviction::Lrfu)] {
        let arena = Arena::new(SLOTS, 512, 512, ArenaOptions::default()).expect("arena");
        let banks = [NEURONS; BANKS as usize];
        let mut cache = SlotCache::with_eviction(arena, &banks, eviction).expect("cache");
        let mut pinned: Vec<Key> = Vec::with_capacity(NEURONS as usize);
        group.bench_function(name, |b| {
            b.iter(|| {
                cache.begin_pass();
                cache.begin_layer(BANKS - 1);
                for &key in &tokens[next % tokens.len()] {
                    let id = match cache.get_pin(key) {
                        Some(id) => id,
                        None => {
                            let slot = cache.reserve(key).expect("unpinned slots");
                            cache.admit(key, slot)
                        }
                    };
                    black_box(id);
                    pinned.push(key);
                }
                for key in pinned.drain(..) {
                    cache.unpin(key);
                }
                next += 1;
            });
        });
    }

    let capacity = NonZeroUsize::new(SLOTS as usize).expect("slots");
    let mut lru: lru::LruCache<(u32, u32), u32> = lru::LruCache::new(capacity);
    let mut slot = 0;
    group.bench_function("lru_crate", |b| {
        b.iter(|| {
            for key in &tokens[next % tokens.len()] {
                let key = (key.bank, key.neuron);
                if let Some(found) = lru.get(&key) {
                    black_box(*found);
                } else {
                    slot += 1;
                    black_box(lru.push(key, slot));
                }
            }
            next += 1;
        });
    });
    group.finish();
}

criterion_group!(benches, lookups);
criterion_main!(benches);
