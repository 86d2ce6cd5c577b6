//! Attention over several blocks: correctness, and bit equality under any split.

use emberflow_kernels::{Cpu, DType, Workers};

use super::{Layer, Pass, Reach};
use crate::state::{BLOCK, HeadLayers, KvPages, KvPool, KvShape};

/// Geometry of a layer.
#[derive(Debug, Clone, Copy)]
struct Shape {
    dtype: DType,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Elements of a value. If fewer than those of a key, a value is the beginning of the latent
    /// vector.
    value_dim: usize,
    /// In positions.
    capacity: usize,
}

impl Shape {
    fn is_latent(self) -> bool {
        self.value_dim < self.head_dim
    }

    /// Pages of two layers for all positions.
    fn pages(self, page: usize) -> KvPages {
        let shape = KvShape {
            dtype: self.dtype,
            kinds: [
                HeadLayers {
                    layers: 2,
                    kv_heads: self.kv_heads,
                    head_dim: self.head_dim,
                },
                HeadLayers::default(),
            ],
            page,
            latent: self.is_latent(),
        };
        let pool = KvPool::new(shape, shape.pages(self.capacity)).unwrap();
        pool.sequence(self.capacity).unwrap()
    }
}

/// A layer's queries, keys and values for some positions.
struct Case {
    shape: Shape,
    reach: Reach,
    /// By head, the attention sink; empty without.
    sinks: Vec<f32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Positions of a pool, 0 without pools, and the vectors of pools.
    pool: usize,
    pools: Vec<f32>,
}

/// Numbers within ±2, exact in f16.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count)
        .map(|_| f32::from(random.u16(..=1024)) / 256.0 - 2.0)
        .collect()
}

impl Case {
    fn new(shape: Shape, reach: Reach) -> Self {
        let row = shape.kv_heads * shape.head_dim;
        let values = if shape.is_latent() { 2 } else { 3 };
        Self {
            shape,
            reach,
            sinks: Vec::new(),
            queries: numbers(1, shape.capacity * shape.heads * shape.head_dim),
            keys: numbers(2, shape.capacity * row),
            values: numbers(values, shape.capacity * row),
            pool: 0,
            pools: Vec::new(),
        }
    }

    /// The same with pools of `size` positions.
    fn with_pools(self, size: usize) -> Self {
        let floats = self.shape.capacity / size * self.shape.head_dim;
        Self {
            pool: size,
            pools: numbers(5, floats),
            ..self
        }
    }

    /// Stores the vectors of the pools that `tokens` positions from `first` on complete.
    fn fill(&self, pools: &mut KvPages, first: usize, tokens: usize) {
        let count = |positions: usize| positions.checked_div(self.pool).unwrap_or(0);
        for pool in count(first)..count(first + tokens) {
            pools.prepare(pool, 1);
            let vector = &self.pools[pool * self.shape.head_dim..][..self.shape.head_dim];
            let mut writer = pools.writer(pool);
            writer.store_value(Cpu::detect(), 1, 0, vector);
        }
    }

    /// Results of all positions, computed in chunks of these lengths, repeated, with this page
    /// size.
    fn run(&self, chunks: &[usize], threads: usize, page: usize) -> Vec<f32> {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            value_dim,
            capacity,
            ..
        } = self.shape;
        let workers = Workers::new(threads, None);
        let cpu = Cpu::detect();
        let [query, row] = [head_dim, value_dim].map(|dim| heads * dim);
        let mut kv = self.shape.pages(page);
        let width = head_dim.next_multiple_of(32) + 2;
        let mut pools = self.shape.pages(page);
        let blocks = 2 * capacity.div_ceil(BLOCK);
        let mut partials = vec![0.0; blocks * heads * width];
        let mut out = vec![f32::NAN; capacity * row];
        let mut first = 0;
        for &chunk in chunks.iter().cycle() {
            let tokens = chunk.min(capacity - first);
            if tokens == 0 {
                break;
            }
            kv.prepare(first, tokens);
            for position in first..first + tokens {
                let mut writer = kv.writer(position);
                for head in 0..kv_heads {
                    let offset = (position * kv_heads + head) * head_dim;
                    if !self.shape.is_latent() {
                        writer.store_key(cpu, 1, head, &self.keys[offset..][..head_dim]);
                    }
                    writer.store_value(cpu, 1, head, &self.values[offset..][..head_dim]);
                }
            }
            self.fill(&mut pools, first, tokens);
            let layer = kv.layer(1);
            let pass = Pass {
                cpu,
                kv: layer,
                queries: &self.queries[first * query..][..tokens * query],
                first,
                tokens,
                pools: (self.pool > 0).then(|| (self.pool, pools.layer(1))),
                layer: Layer {
                    place: 1,
                    head_dim,
                    value_dim,
                    kv_heads,
                    group: heads / kv_heads,
                    reach: self.reach,
                    pools: None,
                    sinks: (!self.sinks.is_empty()).then_some(&self.sinks),
                    cap: None,
                },
            };
            let out = &mut out[first * row..][..tokens * row];
            pass.run(&workers, out, &mut partials);
            first += tokens;
        }
        out
    }

    /// Naive reference in f64: one position and head.
    fn textbook(&self, position: usize, head: usize) -> Vec<f64> {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            value_dim,
            ..
        } = self.shape;
        let query = &self.queries[(position * heads + head) * head_dim..][..head_dim];
        let kv_head = head / (heads / kv_heads);
        let offset = |p: usize| (p * kv_heads + kv_head) * head_dim;
        let first = match self.reach {
            Reach::All => 0,
            Reach::Last(count) => (position + 1).saturating_sub(count as usize),
            Reach::Chunk(count) => position / count as usize * count as usize,
        };
        let weights: Vec<f64> = (first..=position)
            .map(|p| {
                let key = &self.keys[offset(p)..][..head_dim];
                let products = query
                    .iter()
                    .zip(key)
                    .map(|(q, k)| f64::from(*q) * f64::from(*k));
                products.sum::<f64>().exp()
            })
            .collect();
        let complete = (position + 1).checked_div(self.pool).unwrap_or(0);
        let pools: Vec<(f64, &[f32])> = (self.pools.chunks_exact(head_dim).take(complete))
            .map(|vector| {
                let products = query.iter().zip(vector);
                let product = products.map(|(q, k)| f64::from(*q) * f64::from(*k));
                (product.sum::<f64>().exp(), vector)
            })
            .collect();
        let sink = self.sinks.get(head).map(|sink| f64::from(*sink).exp());
        let sum: f64 = weights.iter().sum::<f64>() + sink.unwrap_or(0.0);
        let sum = sum + pools.iter().map(|(w, _)| w).sum::<f64>();
        (0..value_dim)
            .map(|j| {
                let mix = (first..=position).zip(&weights);
                let mix = mix.map(|(p, w)| w * f64::from(self.values[offset(p) + j]));
                let pool_terms = pools.iter().map(|(w, vector)| w * f64::from(vector[j]));
                mix.chain(pool_terms).sum::<f64>() / sum
            })
            .collect()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// One and several queries per KV head, pools, a head size that is no multiple of 32, and windows and
/// chunks of positions shorter than a chunk, within a block and across blocks.
fn cases() -> Vec<Case> {
    use Reach::{All, Chunk, Last};
    let shape = |dtype, heads, kv_heads, head_dim, capacity| Shape {
        dtype,
        heads,
        kv_heads,
        head_dim,
        value_dim: head_dim,
        capacity,
    };
    let latent = |heads, value_dim, shape| Shape {
        heads,
        kv_heads: 1,
        value_dim,
        ..shape
    };
    let sinks = |heads, case| Case {
        sinks: numbers(4, heads).iter().map(|sink| 8.0 * sink).collect(),
        ..case
    };
    let long = shape(DType::F32, 6, 2, 40, 2 * BLOCK + 70);
    let half = shape(DType::F16, 1, 1, 72, 2 * BLOCK + 20);
    vec![
        Case::new(latent(5, 32, long), All),
        Case::new(latent(20, 41, half), All),
        Case::new(latent(3, 64, half), Last(5)),
        Case::new(latent(32, 32, long), Last(40)).with_pools(2),
        sinks(
            5,
            Case::new(latent(5, 64, half), Last(BLOCK as u32 + 3)).with_pools(3),
        ),
        sinks(6, Case::new(long, All)),
        sinks(
            4,
            Case::new(shape(DType::F16, 4, 1, 32, BLOCK + 20), Last(5)),
        ),
        Case::new(shape(DType::F16, 6, 2, 40, 2 * BLOCK + 70), All),
        Case::new(shape(DType::F32, 3, 3, 8, BLOCK + 33), All),
        Case::new(shape(DType::F16, 20, 1, 16, BLOCK + 3), All),
        Case::new(shape(DType::F16, 4, 1, 32, 2 * BLOCK + 20), Last(5)),
        Case::new(
            shape(DType::F32, 4, 2, 16, 2 * BLOCK + 20),
            Last(BLOCK as u32 + 17),
        ),
        Case::new(shape(DType::F16, 4, 1, 32, 2 * BLOCK + 20), Chunk(31)),
        Case::new(shape(DType::F32, 6, 2, 40, 2 * BLOCK + 20), Chunk(256)),
        Case::new(shape(DType::F16, 4, 2, 16, 2 * BLOCK + 20), Chunk(300)),
        Case::new(shape(DType::F16, 2, 1, 16, 31), All),
    ]
}

#[test]
fn chunks_threads_and_pages_change_no_bit() {
    for case in cases() {
        let expected = bits(&case.run(&[1], 1, BLOCK));
        for (chunks, threads, page) in [
            (&[64][..], 1, 32),
            (&[7, 1, 30], 2, 128),
            (&[1], 3, 64),
            (&[2, 64], 16, BLOCK),
        ] {
            let got = bits(&case.run(chunks, threads, page));
            assert!(
                got == expected,
                "{:?} {:?} chunks {chunks:?} threads {threads} pages of {page}",
                case.shape,
                case.reach
            );
        }
    }
}

#[test]
fn attention_matches_the_reference() {
    for case in cases() {
        let Shape {
            heads,
            value_dim,
            capacity,
            ..
        } = case.shape;
        let got = case.run(&[50], 2, 64);
        for position in [0, 1, 30, 31, BLOCK - 1, BLOCK, 2 * BLOCK + 1, capacity - 1] {
            if position >= capacity {
                continue;
            }
            for head in 0..heads {
                let got = &got[(position * heads + head) * value_dim..][..value_dim];
                for (got, expected) in got.iter().zip(case.textbook(position, head)) {
                    let error = (f64::from(*got) - expected).abs();
                    assert!(
                        error < 1e-5,
                        "{:?} {:?} position {position} head {head}: {got}, expected {expected}",
                        case.shape,
                        case.reach
                    );
                }
            }
        }
    }
}

#[test]
fn writing_one_layer_leaves_others_unchanged() {
    let cases = cases();
    let case = cases.iter().find(|case| !case.shape.is_latent()).unwrap();
    let cpu = Cpu::detect();
    let mut kv = case.shape.pages(32);
    let vector = vec![1.0; case.shape.head_dim];
    kv.prepare(0, 4);
    let mut writer = kv.writer(3);
    writer.store_key(cpu, 0, 1, &vector);
    writer.store_value(cpu, 0, 1, &vector);
    let other = kv.layer(1);
    assert!(other.keys(1, 0..32).0.iter().all(|b| *b == 0));
    assert!(other.values(1, 0..32).iter().all(|b| *b == 0));
    let layer = kv.layer(0);
    for head in 0..case.shape.kv_heads {
        let set = |bytes: &[u8]| bytes.chunks(2).filter(|b| **b != [0, 0]).count();
        let expected = if head == 1 { case.shape.head_dim } else { 0 };
        assert_eq!(set(layer.keys(head, 0..32).0), expected);
        assert_eq!(set(layer.values(head, 0..32)), expected);
        assert_eq!(set(layer.values(head, 3..4)), expected);
    }
}
