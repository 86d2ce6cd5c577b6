//! Attention on the OpenCL devices of this machine beside the CPU as a device, bit for bit: odd shapes, next tokens and
//! prompts, windows, sinks, norms of rows, of heads and over all heads, biases, clamps, denormals, infinities.

use std::sync::Arc;

use emberflow_kernels::{Cpu, DType, quantize_row};

use super::numbers::Numbers;
use super::{
    Attend, AttendSpan, Attended, AttentionLayer, AttentionRoom, AttentionShape, CpuDevice, Dense,
    Device, DeviceChoice, KvMemory, RowNorm, SharedMatrix,
};
use crate::kv::{KvPages, KvPool, KvShape};

/// The norm before the projections.
#[derive(Clone, Copy)]
enum Before {
    Nothing,
    Rms,
    Layer,
}

/// What is compared.
#[derive(Clone, Copy)]
struct Case {
    shape: AttentionShape,
    /// Formats of Q, K and V, and of O.
    dtypes: [DType; 2],
    window: usize,
    /// Biases, norms, sinks, a norm of values.
    vectors: bool,
    /// Norms of Q and K are over all heads.
    whole: bool,
    before: Before,
    /// First position and rows of each span.
    spans: &'static [(usize, usize)],
    /// Most rows.
    room: usize,
    /// The rows behind them are computed too, in another piece of work.
    again: bool,
    /// Magnitude of the input and of stored keys and values.
    size: f32,
}

const CONTEXT: usize = 700;

/// The OpenCL devices of this machine, with its memory and with a memory of their own.
fn devices() -> impl Iterator<Item = Device> {
    let count = super::tests::devices().len();
    let kinds = [DeviceChoice::OpenCl, DeviceChoice::OpenClApart];
    let open = move |of: fn(usize) -> DeviceChoice| {
        (0..count).map(move |number| of(number).open().unwrap().unwrap())
    };
    kinds.into_iter().flat_map(open)
}

fn case(heads: [usize; 2], head_dim: usize, spans: &'static [(usize, usize)]) -> Case {
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
        whole: false,
        before: Before::Rms,
        spans,
        room: spans.iter().map(|span| span.1).sum(),
        again: false,
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

    fn norm(&self, numbers: &mut Numbers) -> Option<RowNorm> {
        let mut vector = |len| (0..len).map(|_| 1.0 + 0.5 * numbers.next()).collect();
        let biases = match self.before {
            Before::Nothing => return None,
            Before::Rms => 0,
            Before::Layer => self.shape.d,
        };
        Some(RowNorm {
            weights: vector(self.shape.d),
            biases: vector(biases),
            eps: 1e-6,
        })
    }

    /// Pages of each span, filled with two layers of keys and values.
    fn pages(&self, pool: &Arc<KvPool>, numbers: &mut Numbers) -> Vec<KvPages> {
        let fill = |&(first, rows): &(usize, usize)| {
            let len = first + if self.again { 2 * rows } else { rows };
            let mut pages = pool.sequence(len).unwrap();
            pages.prepare(0, len);
            (0..first).for_each(|p| self.write(&mut pages, p, numbers));
            pages
        };
        self.spans.iter().map(fill).collect()
    }

    /// Writes a position of the second layer.
    fn write(&self, pages: &mut KvPages, p: usize, numbers: &mut Numbers) {
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

    /// Stores the rows' keys and values, as an engine does.
    fn store(&self, pages: &mut [KvPages], [_, keys, values]: &[Vec<f32>; 3], copies: bool) {
        let hd = self.shape.head_dim;
        let mut rows = keys
            .chunks(self.shape.kv_width())
            .zip(values.chunks(self.shape.kv_width()));
        for (pages, &(first, count)) in pages.iter_mut().zip(self.spans) {
            for (p, (keys, values)) in (first..first + count).zip(rows.by_ref()) {
                let mut page = pages.writer(p);
                for (head, (key, value)) in keys.chunks(hd).zip(values.chunks(hd)).enumerate() {
                    page.store_key(Cpu::detect(), 1, head, key);
                    page.store_value(Cpu::detect(), 1, head, value);
                }
                if copies {
                    pages.is_copied(1, p);
                }
            }
        }
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
            quantizes: [of_qkv, of_qkv, of_qkv, of_o].map(DType::is_grouped),
            norm: self.norm(&mut numbers),
            after: None,
            biases: self.vector(s.width() + 2 * s.kv_width(), &mut numbers),
            norms: match self.whole {
                true => self.vector(s.width() + s.kv_width(), &mut numbers),
                false => self.vector(2 * s.head_dim, &mut numbers),
            },
            whole: self.whole,
            value_norm: self.vectors,
            rotates: s.rotary > 0,
            sinks: self.vector(s.heads, &mut numbers),
            first,
            window: self.window,
        }
    }

    /// O's results, keys and values, by a device.
    fn run(&self, device: &mut dyn Dense, pool: &Arc<KvPool>) -> [Vec<f32>; 3] {
        let s = &self.shape;
        let mut numbers = Numbers::new(11);
        let mut pages = self.pages(pool, &mut numbers);
        let memory = KvMemory(Arc::new(pool.memory().clone()));
        device.prepare_attention(s, &memory).unwrap();
        let room = AttentionRoom {
            rows: self.room,
            ..s.room(
                self.room,
                [self.spans.len(), CONTEXT],
                !device.facts().unified,
            )
        };
        device.make_attention_room(&room).unwrap();
        let layer = self.layer(device, pool.shape().at(1, 0, 0));
        let layer = device.share_attention(layer).unwrap();
        let mut all = self.attend(device, (layer, 0), &pages, &mut numbers);
        if self.again {
            let copies = !device.facts().unified;
            self.store(&mut pages, &all, copies);
            // What the host writes in between, which lies in the middle and at the end of pages.
            for (pages, &(first, _)) in pages.iter_mut().zip(self.spans) {
                let changed = (0..first).filter(|p| p % 61 < 2);
                changed.for_each(|p| self.write(pages, p, &mut numbers));
            }
            let more = self.attend(device, (layer, 1), &pages, &mut numbers);
            all.iter_mut()
                .zip(more)
                .for_each(|(all, more)| all.extend(more));
        }
        device.clear();
        all
    }

    /// The first piece of work or the next one: O's results, keys and values.
    fn attend(
        &self,
        device: &mut dyn Dense,
        (layer, piece): (usize, usize),
        pages: &[KvPages],
        numbers: &mut Numbers,
    ) -> [Vec<f32>; 3] {
        let s = &self.shape;
        let n: usize = self.spans.iter().map(|span| span.1).sum();
        let copies = !device.facts().unified;
        let x: Vec<f32> = (0..n * s.d).map(|_| self.size * numbers.next()).collect();
        let angles: Vec<f32> = (0..n * 2 * s.rotary).map(|_| numbers.next()).collect();
        let (cosines, sines) = angles.split_at(n * s.rotary);
        let spans: Vec<AttendSpan> = (pages.iter().zip(self.spans))
            .map(|(pages, &(first, rows))| {
                let first = first + piece * rows;
                AttendSpan {
                    pages: pages.shared(1, [first, first + rows], copies),
                    first,
                    rows,
                }
            })
            .collect();
        let ticket = device.attend(&Attend {
            layer,
            x: &x,
            angles: [cosines, sines],
            spans: &spans,
        });
        let [mut out, mut keys, mut values] =
            [s.d, s.kv_width(), s.kv_width()].map(|width| vec![0.0; n * width]);
        let to = Attended {
            out: &mut out,
            keys: &mut keys,
            values: &mut values,
        };
        device.take_attention(ticket.unwrap(), to).unwrap();
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
        let pool = || KvPool::new(shape, self.spans.len() * shape.pages(CONTEXT)).unwrap();
        let expected = self.run(&mut CpuDevice::new(), &pool());
        for device in devices() {
            let lease = device.lease().unwrap();
            let found = self.run(lease.dense().as_mut(), &pool());
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

/// Next tokens.
#[test]
fn odd_shapes_have_the_cpus_bits() {
    // One head for all, and of each its own; elements that fill no group; positions at borders of blocks and pages.
    case([6, 2], 10, &[(0, 1), (1, 1), (63, 1), (255, 1)]).compare("six heads of 10");
    case([3, 3], 33, &[(256, 1), (511, 1), (64, 1)]).compare("three heads of 33");
    case([4, 1], 96, &[(600, 1)]).compare("four heads of 96");
    let mut odd = case([2, 1], 64, &[(300, 1), (5, 1)]);
    (odd.shape.kv, odd.shape.page, odd.shape.rotary) = (DType::F32, 256, 0);
    odd.compare("f32 without rotation");
}

/// Rows that see each other, in spans that begin and end at borders of blocks and pages and within them.
#[test]
fn prompts_have_the_cpus_bits() {
    case([6, 2], 10, &[(0, 70)]).compare("from the first position on");
    case([4, 1], 32, &[(255, 2), (64, 64), (0, 1), (37, 30)]).compare("four spans");
    let mut long = case([2, 2], 24, &[(200, 400)]);
    (long.shape.kv, long.shape.page) = (DType::F32, 32);
    long.compare("across three blocks");
    // With more room than rows.
    long.room = 500;
    long.compare("less than there is room for");
    for window in [1, 3, 40, 256, 300] {
        let mut case = case([4, 2], 16, &[(250, 90), (513, 1), (3, 8)]);
        (case.window, case.vectors) = (window, true);
        case.compare(&format!("a window of {window}"));
    }
}

/// A device with a copy of all pages puts its own keys and values there, and what the host writes is copied.
#[test]
fn pages_that_change_have_the_cpus_bits() {
    for (kv, page, head_dim) in [
        (DType::F16, 64, 10),
        (DType::F32, 32, 33),
        (DType::F16, 256, 64),
    ] {
        let mut case = case([4, 2], head_dim, &[(250, 9), (0, 1), (63, 1), (128, 70)]);
        (case.shape.kv, case.shape.page, case.again) = (kv, page, true);
        case.compare(&format!("pages of {page} with heads of {head_dim}"));
    }
}

/// So many positions that few rows have their scores held at a time.
#[test]
fn rows_whose_scores_are_held_one_after_the_other_have_the_cpus_bits() {
    let case = case([160, 1], 8, &[(600, 100)]);
    let scored = case.shape.room(100, [1, CONTEXT], false).scored;
    assert!((2..9).contains(&scored) && 100 % scored != 0, "{scored}");
    case.compare("160 heads");
}

#[test]
fn norms_of_rows_have_the_cpus_bits() {
    for (before, d) in [
        (Before::Nothing, 96),
        (Before::Rms, 1),
        (Before::Rms, 63),
        (Before::Rms, 1030),
        (Before::Layer, 64),
        (Before::Layer, 65),
        (Before::Layer, 700),
    ] {
        for (size, dtype) in [(1.0, DType::Q4), (1e-39, DType::F32), (1e18, DType::F16)] {
            let mut case = case([2, 1], 16, &[(3, 5), (40, 1)]);
            (case.before, case.shape.d, case.size) = (before, d, size);
            (case.dtypes, case.shape.kv) = ([dtype, DType::Q8], DType::F32);
            case.compare(&format!("rows of {d} numbers of {size:e}"));
        }
    }
}

#[test]
fn norms_over_all_heads_have_the_cpus_bits() {
    for (heads, head_dim) in [([3, 1], 10), ([4, 2], 64), ([5, 5], 33)] {
        for clip in [None, Some(0.75)] {
            let mut case = case(heads, head_dim, &[(70, 9), (0, 1)]);
            (case.vectors, case.whole, case.shape.clip) = (true, true, clip);
            case.compare(&format!("{heads:?} of {head_dim}"));
        }
    }
}

#[test]
fn formats_windows_and_vectors_have_the_cpus_bits() {
    for (dtypes, window) in [
        ([DType::Q8, DType::Q4], 3),
        ([DType::F16, DType::Q8], 256),
        ([DType::BF16, DType::F16], 300),
        ([DType::Q4, DType::F32], 1),
    ] {
        let mut case = case([4, 2], 24, &[(0, 1), (299, 1), (512, 1), (2, 1)]);
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
        for before in [Before::Nothing, Before::Rms, Before::Layer] {
            let mut case = case([2, 2], 16, &[(40, 1), (280, 3)]);
            (case.size, case.shape.kv, case.before) = (size, kv, before);
            case.compare(&format!("numbers of {size:e} in {kv}"));
        }
    }
}

/// What does not fit is refused, and nothing is done.
#[test]
fn work_that_does_not_fit_is_refused() {
    let case = case([2, 1], 16, &[(3, 1)]);
    let shape = KvShape {
        dtype: DType::F16,
        layers: 2,
        kv_heads: 1,
        head_dim: 16,
        page: 64,
    };
    for device in devices() {
        let pools = [0; 2].map(|_| KvPool::new(shape, 4).unwrap());
        let lease = device.lease().unwrap();
        let mut dense = lease.dense();
        let memory = KvMemory(Arc::new(pools[0].memory().clone()));
        dense.prepare_attention(&case.shape, &memory).unwrap();
        let layer = case.layer(dense.as_mut(), shape.at(1, 0, 0));
        let layer = dense.share_attention(layer).unwrap();
        let refused = |dense: &mut dyn Dense, pool: &Arc<KvPool>, layer, span: [usize; 3]| {
            let [first, held, rows] = span;
            let mut pages = pool.sequence(held).unwrap();
            pages.prepare(0, held);
            let spans = [AttendSpan {
                pages: pages.shared(1, [first, held], !dense.facts().unified),
                first,
                rows,
            }];
            let x = vec![0.5; rows * case.shape.d];
            let angles = vec![0.5; rows * case.shape.rotary];
            let work = Attend {
                layer,
                x: &x,
                angles: [&angles; 2],
                spans: &spans,
            };
            dense.attend(&work).is_err()
        };
        let [own, other] = &pools;
        // No buffers yet.
        assert!(refused(dense.as_mut(), own, layer, [3, 64, 1]));
        let room = case.shape.room(2, [1, 100], false);
        dense.make_attention_room(&room).unwrap();
        // Another pool's pages, no such layer, too many positions, too few pages, too many rows, none.
        assert!(refused(dense.as_mut(), other, layer, [3, 64, 1]));
        assert!(refused(dense.as_mut(), own, layer + 1, [3, 64, 1]));
        assert!(refused(dense.as_mut(), own, layer, [100, 128, 1]));
        assert!(refused(dense.as_mut(), own, layer, [99, 128, 2]));
        assert!(refused(dense.as_mut(), own, layer, [65, 64, 1]));
        assert!(refused(dense.as_mut(), own, layer, [3, 64, 3]));
        assert!(refused(dense.as_mut(), own, layer, [3, 64, 0]));
        assert!(!refused(dense.as_mut(), own, layer, [3, 64, 2]));
    }
}
