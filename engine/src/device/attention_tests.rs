//! Attention on the OpenCL devices of this machine beside the CPU as a device, bit for bit: odd shapes, several rows,
//! windows, sinks, norms, biases, clamps, denormals, infinities.

use std::sync::Arc;

use emberflow_kernels::{Activations, Cpu, DType, quantize_row};

use super::attend::MOST_ROWS;
use super::numbers::Numbers;
use super::tests::devices;
use super::{
    Attend, AttendRow, Attended, AttentionLayer, AttentionShape, CpuDevice, Dense, Input, KvMemory,
    SharedMatrix,
};
use crate::kv::{KvPages, KvPool, KvShape};

/// What is compared.
#[derive(Clone, Copy)]
struct Case {
    shape: AttentionShape,
    /// Formats of Q, K and V, and of O.
    dtypes: [DType; 2],
    window: usize,
    /// Biases, norms, sinks, a norm of values.
    vectors: bool,
    /// Positions of the rows.
    rows: &'static [usize],
    /// Magnitude of the input and of stored keys and values.
    size: f32,
}

const CONTEXT: usize = 700;

fn case(heads: [usize; 2], head_dim: usize, rows: &'static [usize]) -> Case {
    Case {
        shape: AttentionShape {
            d: 96,
            heads: heads[0],
            kv_heads: heads[1],
            head_dim,
            rotary: head_dim / 2,
            kv: DType::F16,
            page: 64,
            eps: 1e-5,
            scale: 0.3,
            clip: None,
        },
        dtypes: [DType::Q4; 2],
        window: 0,
        vectors: false,
        rows,
        size: 1.0,
    }
}

/// A matrix of random numbers.
fn matrix(dtype: DType, rows: usize, cols: usize, numbers: &mut Numbers) -> SharedMatrix {
    let len = dtype.row_bytes(cols);
    let mut bytes = vec![0; rows * len];
    for bytes in bytes.chunks_exact_mut(len) {
        let row: Vec<f32> = (0..cols).map(|_| 0.2 * numbers.next()).collect();
        let (quants, scales) = bytes.split_at_mut(dtype.quants_bytes(cols));
        quantize_row(dtype, &row, quants, scales).unwrap();
    }
    SharedMatrix {
        dtype,
        rows,
        cols,
        bytes: Arc::new(bytes),
    }
}

impl Case {
    fn vector(&self, len: usize, numbers: &mut Numbers) -> Vec<f32> {
        let len = if self.vectors { len } else { 0 };
        (0..len).map(|_| 1.0 + 0.5 * numbers.next()).collect()
    }

    /// Pages of each row, filled with two layers of keys and values.
    fn pages(&self, pool: &Arc<KvPool>, numbers: &mut Numbers) -> Vec<KvPages> {
        let fill = |&position: &usize| {
            let mut pages = pool.sequence(position + 1).unwrap();
            pages.prepare(0, position + 1);
            for p in 0..position {
                let mut page = pages.writer(p);
                for head in 0..self.shape.kv_heads {
                    let mut row = || {
                        let next = |_| self.size * numbers.next();
                        (0..self.shape.head_dim).map(next).collect::<Vec<f32>>()
                    };
                    page.store_key(Cpu::detect(), 1, head, &row());
                    page.store_value(Cpu::detect(), 1, head, &row());
                }
            }
            pages
        };
        self.rows.iter().map(fill).collect()
    }

    /// The layer, with matrices of the device's.
    fn layer(&self, device: &mut dyn Dense, first: usize) -> AttentionLayer {
        let (s, mut numbers) = (&self.shape, Numbers::new(3));
        let [of_qkv, of_o] = self.dtypes;
        let mut share = |dtype, rows, cols| {
            let matrix = matrix(dtype, rows, cols, &mut numbers);
            device.prepare_products(dtype, cols).unwrap();
            device.share(matrix).unwrap()
        };
        AttentionLayer {
            matrices: [
                share(of_qkv, s.width(), s.d),
                share(of_qkv, s.kv_width(), s.d),
                share(of_qkv, s.kv_width(), s.d),
                share(of_o, s.d, s.width()),
            ],
            quantizes: of_o.is_grouped(),
            biases: self.vector(s.width() + 2 * s.kv_width(), &mut numbers),
            norms: self.vector(2 * s.head_dim, &mut numbers),
            value_norm: self.vectors,
            rotates: s.rotary > 0,
            sinks: self.vector(s.heads, &mut numbers),
            first,
            window: self.window,
        }
    }

    /// O's results, keys and values, by a device.
    fn run(&self, device: &mut dyn Dense, pool: &Arc<KvPool>) -> [Vec<f32>; 3] {
        let (s, n) = (&self.shape, self.rows.len());
        let mut numbers = Numbers::new(11);
        let pages = self.pages(pool, &mut numbers);
        let memory = KvMemory(Arc::new(pool.memory().clone()));
        let room = s.room(MOST_ROWS, CONTEXT);
        device.prepare_attention(s, &room, &memory).unwrap();
        let layer = self.layer(device, pool.shape().at(1, 0, 0));
        let layer = device.share_attention(layer).unwrap();
        let x: Vec<f32> = (0..n * s.d).map(|_| self.size * numbers.next()).collect();
        let angles: Vec<f32> = (0..n * 2 * s.rotary).map(|_| numbers.next()).collect();
        let rows: Vec<AttendRow> = (pages.iter().zip(self.rows))
            .map(|(pages, &position)| AttendRow {
                pages: pages.shared(position + 1),
                position,
            })
            .collect();
        let mut quantized = Activations::default();
        let ticket = device.attend(&Attend {
            layer,
            input: Input::new(Cpu::detect(), &x, n, &mut quantized),
            angles: &angles,
            rows: &rows,
        });
        let [mut out, mut keys, mut values] =
            [s.d, s.kv_width(), s.kv_width()].map(|width| vec![0.0; n * width]);
        let to = Attended {
            out: &mut out,
            keys: &mut keys,
            values: &mut values,
        };
        device.take_attention(ticket.unwrap(), to).unwrap();
        device.clear();
        [out, keys, values]
    }

    fn compare(&self, name: &str) {
        let s = &self.shape;
        let shape = KvShape {
            dtype: s.kv,
            layers: 2,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            page: s.page,
        };
        let pool = KvPool::new(shape, self.rows.len() * shape.pages(CONTEXT)).unwrap();
        let expected = self.run(&mut CpuDevice::new(), &pool);
        for device in devices() {
            let lease = device.lease().unwrap();
            let found = self.run(lease.dense().as_mut(), &pool);
            let own = !device.facts().name.contains("pthread");
            for (expected, found) in expected.iter().zip(&found) {
                let same =
                    |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                let apart = expected.iter().zip(found).position(|both| !same(both));
                assert!(apart.is_none() || own, "{name}: {apart:?}");
            }
        }
    }
}

#[test]
fn odd_shapes_have_the_cpus_bits() {
    // One head for all, and of each its own; elements that fill no group; positions at borders of blocks and pages.
    case([6, 2], 10, &[0, 1, 63, 255]).compare("six heads of 10");
    case([3, 3], 33, &[256, 511, 64]).compare("three heads of 33");
    case([4, 1], 96, &[600]).compare("four heads of 96");
    let mut odd = case([2, 1], 64, &[300, 5]);
    (odd.shape.kv, odd.shape.page, odd.shape.rotary) = (DType::F32, 256, 0);
    odd.compare("f32 without rotation");
}

#[test]
fn formats_windows_and_vectors_have_the_cpus_bits() {
    for (dtypes, window) in [
        ([DType::Q8, DType::Q4], 3),
        ([DType::F16, DType::Q8], 256),
        ([DType::BF16, DType::F16], 300),
        ([DType::Q4, DType::F32], 1),
    ] {
        let mut case = case([4, 2], 24, &[0, 299, 512, 2]);
        (case.dtypes, case.window, case.vectors) = (dtypes, window, true);
        case.shape.clip = Some(0.75);
        case.compare("with vectors");
    }
}

#[test]
fn denormals_and_infinities_have_the_cpus_bits() {
    for (size, kv) in [
        (1e-39, DType::F32),
        (1e-6, DType::F16),
        (1e5, DType::F16),
        (1e30, DType::F32),
        (f32::INFINITY, DType::F32),
    ] {
        let mut case = case([2, 2], 16, &[40, 280]);
        (case.size, case.shape.kv) = (size, kv);
        case.compare(&format!("numbers of {size:e} in {kv}"));
    }
}

/// What does not fit is refused, and nothing is done.
#[test]
fn work_that_does_not_fit_is_refused() {
    let case = case([2, 1], 16, &[3]);
    let shape = KvShape {
        dtype: DType::F16,
        layers: 2,
        kv_heads: 1,
        head_dim: 16,
        page: 64,
    };
    let pools = [0; 2].map(|_| KvPool::new(shape, 4).unwrap());
    for device in devices() {
        let lease = device.lease().unwrap();
        let mut dense = lease.dense();
        let memory = KvMemory(Arc::new(pools[0].memory().clone()));
        let room = case.shape.room(1, 100);
        dense
            .prepare_attention(&case.shape, &room, &memory)
            .unwrap();
        let layer = case.layer(dense.as_mut(), shape.at(1, 0, 0));
        let layer = dense.share_attention(layer).unwrap();
        let x = vec![0.5; case.shape.d];
        let angles = vec![0.5; 2 * case.shape.rotary];
        let mut quantized = Activations::default();
        let input = Input::new(Cpu::detect(), &x, 1, &mut quantized);
        let mut refused = |pool: &Arc<KvPool>, layer, position: usize, held: usize, count| {
            let mut pages = pool.sequence(held).unwrap();
            pages.prepare(0, held);
            let row = AttendRow {
                pages: pages.shared(held),
                position,
            };
            let rows = vec![row; count];
            let work = Attend {
                layer,
                input,
                angles: &angles,
                rows: &rows,
            };
            dense.attend(&work).is_err()
        };
        // Another pool's pages, no such layer, too many positions, too few pages, too many rows, none.
        assert!(refused(&pools[1], layer, 3, 64, 1));
        assert!(refused(&pools[0], layer + 1, 3, 64, 1));
        assert!(refused(&pools[0], layer, 100, 128, 1));
        assert!(refused(&pools[0], layer, 64, 64, 1));
        assert!(refused(&pools[0], layer, 3, 64, 2));
        assert!(refused(&pools[0], layer, 3, 64, 0));
        assert!(!refused(&pools[0], layer, 3, 64, 1));
    }
}
