//! Integer dot products: every instruction set returns the bits of the oracle, for rows
//! of odd lengths, strides and alignments, one at a time, in lists and in matrices.

use crate::reference;
use crate::reference::Quantised;
use emberflow_kernels::{
    Activations, Columns, Cpu, DType, GROUP, Row, dot_of_sums, matmul_scratch_q, outliers,
    with_scale_per_token,
};
use proptest::prelude::*;

fn bits(values: &[f32]) -> Vec<u32> {
    // Any NaN equals any NaN: sign and payload are left to the hardware.
    values
        .iter()
        .map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits())
        .collect()
}

/// Lengths around the borders of groups and chunks, and arbitrary ones.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0usize..200,
        4 => 480usize..550,
        4 => 1000usize..1100,
        4 => 2040usize..2060,
        1 => Just(0usize),
    ]
}

/// Ordinary values, exact zeros of both signs, tiny and huge ones, rarely none at all.
fn activation() -> impl Strategy<Value = f32> {
    prop_oneof![
        60 => -4.0f32..4.0,
        10 => Just(0.0f32),
        10 => Just(-0.0f32),
        10 => -1e-30f32..1e-30,
        10 => -1e-38f32..1e-38,
        10 => -1e30f32..1e30,
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX]),
    ]
}

/// Tokens of `n` activations; whole groups are zero at times.
fn tokens(n: usize, count: impl Strategy<Value = usize>) -> impl Strategy<Value = Vec<f32>> {
    (count, any::<u64>()).prop_flat_map(move |(count, zeros)| {
        prop::collection::vec(activation(), n * count).prop_map(move |mut x| {
            for (g, group) in x.chunks_mut(GROUP).enumerate() {
                if zeros >> (g % 64) & 7 == 0 {
                    group.fill(0.0);
                }
            }
            x
        })
    })
}

/// `count` rows with a gap between them after `shift` bytes: any stored quant, and scales
/// of any bits (if `finite`, no infinity and no NaN).
#[derive(Clone, Debug)]
struct Stored {
    dtype: DType,
    n: usize,
    count: usize,
    shift: usize,
    stride: usize,
    bytes: Vec<u8>,
    /// Whether tokens have one scale, as they must for some formats.
    per_token: bool,
    /// Whether their outliers are pruned.
    pruned: bool,
}

impl Stored {
    fn row(&self, r: usize) -> Row<'_> {
        let bytes = &self.bytes[self.shift + r * self.stride..];
        Row::inline(self.dtype, self.n, &bytes[..self.dtype.row_bytes(self.n)])
    }

    fn rows(&self) -> Vec<Row<'_>> {
        (0..self.count).map(|r| self.row(r)).collect()
    }
}

fn stored(n: usize, count: impl Strategy<Value = usize>) -> impl Strategy<Value = Stored> {
    let dtype = prop::sample::select(vec![
        DType::Q4,
        DType::Q4k,
        DType::Q8,
        DType::Mxfp4,
        DType::Q8c,
        DType::Q4c,
    ]);
    let finite = prop::bool::weighted(0.9);
    let how = (finite, any::<bool>(), any::<bool>(), any::<bool>());
    (dtype, count, 0usize..67, 0usize..9, any::<u64>(), how).prop_map(
        move |(dtype, count, shift, gap, seed, (finite, alike, per_token, pruned))| {
            let stride = dtype.row_bytes(n) + gap;
            let mut random = fastrand::Rng::with_seed(seed);
            let mut bytes = vec![0; shift + count * stride];
            random.fill(&mut bytes);
            for row in bytes[shift..].chunks_exact_mut(stride.max(1)) {
                let scales = &mut row[dtype.quants_bytes(n)..dtype.row_bytes(n)];
                reference::tame(dtype, n, finite, scales);
            }
            if alike && dtype == DType::Q4c && count > 0 {
                // as in packed matrices: all rows have the outliers of the first
                let end = dtype.row_bytes(n);
                let channels = shift + end - 2 * outliers(n)..shift + end;
                let first = bytes[channels.clone()].to_vec();
                for r in 1..count {
                    bytes[channels.start + r * stride..][..first.len()].copy_from_slice(&first);
                }
            }
            Stored {
                dtype,
                n,
                count,
                shift,
                stride,
                bytes,
                per_token: per_token || dtype.is_per_channel(),
                pruned,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    #[test]
    fn activations_are_what_the_oracle_stores(
        (n, xs) in length().prop_flat_map(|n| (Just(n), tokens(n, 1usize..4))),
        per_token: bool,
        pruned: bool,
    ) {
        let count = xs.len().checked_div(n).unwrap_or(0);
        for cpu in Cpu::all().into_iter().map(|cpu| with_scale_per_token(cpu, per_token)) {
            // Refilled, so that nothing of an earlier token may be left.
            let mut got = Activations::default();
            let cpu = cpu.pruning(pruned);
            cpu.quantize_activations(&vec![3.0; 2 * 2100], 2, &mut got);
            cpu.quantize_activations(&xs, count, &mut got);
            prop_assert_eq!((got.n(), got.tokens()), (n, count));
            for t in 0..count {
                let x = Quantised::new(&xs[t * n..][..n], per_token, pruned);
                let excess = |i: usize| x.excess.iter().filter(move |its| its.0 == i).map(|its| its.1).sum::<i32>();
                let value = |i: usize| (x.quants[i] + excess(i)) as f32 * x.scales[i / GROUP];
                let expected: Vec<f32> = (0..n).map(value).collect();
                let values: Vec<f32> = (0..n).map(|i| got.all().value(t, i)).collect();
                prop_assert_eq!(bits(&values), bits(&expected), "{} token {}", cpu.name(), t);
                let most = x.excess.iter().map(|its| its.1.abs()).max();
                let importance = 1.0 + most.unwrap_or(0) as f32 / 127.0;
                prop_assert_eq!(got.all().importance(t), importance);
            }
        }
    }

    #[test]
    fn dot_products(
        (m, x) in length().prop_flat_map(|n| (stored(n, 0usize..12), tokens(n, Just(1))))
    ) {
        let oracle = Quantised::new(&x, m.per_token, m.pruned);
        let expected: Vec<f32> = m.rows().iter().map(|&row| reference::dot_q(row, &oracle)).collect();
        // The same rows again, but out of order and with their scales elsewhere.
        let parts: Vec<_> = m.rows().iter().rev().map(|r| (r.quants().to_vec(), r.scales().to_vec())).collect();
        let split: Vec<_> = parts.iter().map(|(q, s)| Row::split(m.dtype, m.n, q, s)).collect();
        let reversed: Vec<f32> = expected.iter().rev().copied().collect();
        for cpu in Cpu::all().into_iter().map(|cpu| with_scale_per_token(cpu, m.per_token)) {
            let mut quantised = Activations::default();
            cpu.pruning(m.pruned).quantize_activations(&x, 1, &mut quantised);
            let x = quantised.token(0);
            let each: Vec<f32> = m.rows().iter().map(|&row| cpu.dot_q(row, x)).collect();
            prop_assert_eq!(bits(&each), bits(&expected), "dot {}", cpu.name());
            let mut y = vec![7.0; m.count];
            cpu.matvec_q(m.dtype, &m.bytes[m.shift..], m.stride, x, &mut y);
            prop_assert_eq!(bits(&y), bits(&expected), "matvec {}", cpu.name());
            cpu.dot_rows_q(&split, x, &mut y);
            prop_assert_eq!(bits(&y), bits(&reversed), "rows {}", cpu.name());
        }
    }

    /// With sums of another processor.
    #[test]
    fn products_of_sums(
        (m, x) in length().prop_flat_map(|n| (stored(n, 0usize..12), tokens(n, Just(1))))
    ) {
        let oracle = Quantised::new(&x, m.per_token, m.pruned);
        for cpu in Cpu::all().into_iter().map(|cpu| with_scale_per_token(cpu, m.per_token)) {
            let mut quantised = Activations::default();
            cpu.pruning(m.pruned).quantize_activations(&x, 1, &mut quantised);
            let mut quants = Vec::new();
            quantised.all().each_quant(0, |quant| quants.push(i32::from(quant)));
            prop_assert_eq!(&quants[..m.n], &oracle.quants[..]);
            prop_assert_eq!(quants.len(), m.n.next_multiple_of(GROUP));
            for row in m.rows() {
                let products: Vec<i32> = (0..m.n).map(|i| reference::quant(row, i) as i32 * quants[i]).collect();
                let mut sums: Vec<i32> = products.chunks(GROUP).map(|group| group.iter().sum()).collect();
                if m.dtype.is_per_channel() {
                    sums = reference::channel_sums(row, &oracle)[..m.dtype.sums(m.n)].to_vec();
                }
                let x = quantised.token(0);
                let [found, expected] = [dot_of_sums(cpu, row, &sums, x), cpu.dot_q(row, x)];
                prop_assert_eq!(bits(&[found]), bits(&[expected]), "{} {}", cpu.name(), m.dtype);
            }
        }
    }

    #[test]
    fn matrices(
        (m, xs) in length().prop_flat_map(|n| (stored(n, 0usize..40), tokens(n, 1usize..30))),
        gap in 0usize..3,
        odd in 0usize..17,
    ) {
        let count = xs.len().checked_div(m.n).unwrap_or(0);
        let y_stride = m.count + gap;
        let mut expected = vec![7.0; count * y_stride];
        for t in 0..count {
            let x = Quantised::new(&xs[t * m.n..][..m.n], m.per_token, m.pruned);
            for (r, &row) in m.rows().iter().enumerate() {
                expected[t * y_stride + r] = reference::dot_q(row, &x);
            }
        }
        for cpu in Cpu::all().into_iter().map(|cpu| with_scale_per_token(cpu, m.per_token)) {
            let mut x = Activations::default();
            cpu.pruning(m.pruned).quantize_activations(&xs, count, &mut x);
            let mut scratch = vec![f32::NAN; matmul_scratch_q(m.n) + odd];
            for list in [false, true] {
                let mut y = vec![7.0; expected.len()];
                let mut columns = Columns::new(&mut y, count, y_stride, m.count);
                let scratch = &mut scratch[odd..];
                if list {
                    cpu.matmul_rows_q(&m.rows(), x.all(), &mut columns, scratch);
                } else {
                    let bytes = &m.bytes[m.shift..];
                    cpu.matmul_q(m.dtype, bytes, m.stride, x.all(), &mut columns, scratch);
                }
                prop_assert_eq!(bits(&y), bits(&expected), "{} {}", cpu.name(), list);
            }
        }
    }

    #[test]
    fn pairs(
        (m, xs) in length().prop_flat_map(|n| (stored(n, 0usize..40), tokens(n, 1usize..80))),
        seed: u64,
        sparse: bool,
    ) {
        let count = xs.len().checked_div(m.n).unwrap_or(0);
        let words = count.div_ceil(64);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut masks = vec![0u64; m.count * words];
        let mut expected = vec![0.0; m.count * count];
        for t in 0..count {
            let x = Quantised::new(&xs[t * m.n..][..m.n], m.per_token, m.pruned);
            for (r, &row) in m.rows().iter().enumerate() {
                if random.u8(..) < if sparse { 40 } else { 200 } {
                    masks[r * words + t / 64] |= 1 << (t % 64);
                    expected[r * count + t] = reference::dot_q(row, &x);
                }
            }
        }
        for cpu in Cpu::all().into_iter().map(|cpu| with_scale_per_token(cpu, m.per_token)) {
            let mut x = Activations::default();
            cpu.pruning(m.pruned).quantize_activations(&xs, count, &mut x);
            let mut out = vec![7.0; expected.len()];
            cpu.dot_pairs_q(&m.rows(), x.all(), &masks, &mut out);
            prop_assert_eq!(bits(&out), bits(&expected), "{}", cpu.name());
        }
    }
}
