//! Sums of scaled rows: the bits of the oracle on every instruction set, for every
//! format, number of rows, odd lengths and every alignment, however the rows are cut
//! into calls.

use crate::reference;
use emberflow_kernels::{Cpu, DType, Row};
use fastrand::Rng;
use proptest::prelude::*;

fn bits(values: &[f32]) -> Vec<u32> {
    // Any NaN equals any NaN: sign and payload are left to the hardware.
    values
        .iter()
        .map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits())
        .collect()
}

/// Within ±4, sometimes an exact zero.
fn float(random: &mut Rng) -> f32 {
    match random.u8(..8) {
        0 => 0.0,
        _ => random.u16(..=8000) as f32 / 1000.0 - 4.0,
    }
}

/// `count` rows somewhere in `bytes`, neither aligned nor in order, scales beside or
/// behind the elements. Contents are arbitrary, without infinities and NaN if `finite`.
#[derive(Debug)]
struct Rows {
    dtype: DType,
    n: usize,
    split: bool,
    starts: Vec<usize>,
    bytes: Vec<u8>,
    scales: Vec<u8>,
}

impl Rows {
    fn new(dtype: DType, n: usize, count: usize, split: bool, finite: bool, seed: u64) -> Rows {
        let mut random = Rng::with_seed(seed);
        let mut bytes_of = |len: usize, width: usize| -> Vec<u8> {
            let mut bytes: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
            if finite && width > 0 {
                // Clear the top exponent bit.
                bytes
                    .chunks_exact_mut(width)
                    .for_each(|f| f[width - 1] &= 0xbf);
            }
            bytes
        };
        let (quants, scales) = (dtype.quants_bytes(n), dtype.scales_bytes(n));
        let width = match dtype {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            _ => 0,
        };
        let (mut bytes, mut beside, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            bytes.resize(bytes.len() + bytes_of(1, 0)[0] as usize % 67, 0);
            starts.push(bytes.len());
            bytes.extend(bytes_of(quants, width));
            let mut row_scales = bytes_of(scales, 0);
            reference::tame(dtype, n, finite, &mut row_scales);
            bytes.extend(&row_scales);
            beside.extend(row_scales);
        }
        for i in (1..count).rev() {
            let j = seed as usize % (i + 1);
            starts.swap(i, j);
        }
        Rows {
            dtype,
            n,
            split,
            starts,
            bytes,
            scales: beside,
        }
    }

    fn views(&self) -> Vec<Row<'_>> {
        let (dtype, n) = (self.dtype, self.n);
        let scales = dtype.scales_bytes(n);
        let view = |(i, &start): (usize, &usize)| {
            let bytes = &self.bytes[start..start + dtype.row_bytes(n)];
            if self.split {
                let quants = &bytes[..dtype.quants_bytes(n)];
                Row::split(dtype, n, quants, &self.scales[i * scales..(i + 1) * scales])
            } else {
                Row::inline(dtype, n, bytes)
            }
        };
        self.starts.iter().enumerate().map(view).collect()
    }
}

fn any_rows() -> impl Strategy<Value = Rows> {
    let dtype = prop::sample::select(DType::ALL.to_vec());
    let whole = (1usize..11).prop_map(|n| 128 * n);
    let n = prop_oneof![0usize..200, 480usize..550, 1020usize..1100, whole];
    let count = prop_oneof![
        0usize..6,
        14usize..19,
        30usize..40,
        Just(70usize),
        Just(130usize)
    ];
    let finite = prop::bool::weighted(0.9);
    (dtype, n, count, any::<bool>(), finite, any::<u64>()).prop_map(
        |(dtype, n, count, split, finite, seed)| Rows::new(dtype, n, count, split, finite, seed),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    #[test]
    fn rows_are_added_in_order(rows in any_rows(), cut in 0usize..40, shift in 0usize..5) {
        let views = rows.views();
        let mut random = Rng::with_seed(rows.n as u64 + 77);
        let factors: Vec<f32> = views.iter().map(|_| float(&mut random)).collect();
        let y: Vec<f32> = (0..rows.n + shift).map(|_| float(&mut random)).collect();
        let mut expected = y.clone();
        for (&a, row) in factors.iter().zip(&views) {
            reference::axpy_scaled(a, *row, &mut expected[shift..]);
        }
        let cut = cut.min(views.len());
        for cpu in Cpu::all() {
            let name = format!("{} {} n {} rows {}", cpu.name(), rows.dtype, rows.n, views.len());
            let mut whole = y.clone();
            cpu.axpy_rows(&factors, &views, &mut whole[shift..]);
            prop_assert_eq!(bits(&whole), bits(&expected), "{}", name);
            let mut zeros = vec![0.0; rows.n];
            cpu.axpy_rows(&factors, &views, &mut zeros);
            let mut new = y.clone();
            cpu.sum_rows(&factors, &views, &mut new[shift..]);
            prop_assert_eq!(bits(&new[shift..]), bits(&zeros), "{} sum", name);
            let mut parts = y.clone();
            cpu.axpy_rows(&factors[..cut], &views[..cut], &mut parts[shift..]);
            cpu.axpy_rows(&factors[cut..], &views[cut..], &mut parts[shift..]);
            prop_assert_eq!(bits(&parts), bits(&expected), "{} cut at {}", name, cut);
        }
    }

    #[test]
    fn tokens_share_rows(rows in any_rows(), tokens in prop_oneof![0usize..14, 60usize..70], kind in 0..3) {
        let views = rows.views();
        let mut random = Rng::with_seed(rows.n as u64 + 78);
        let factors: Vec<f32> = (0..views.len() * tokens)
            .map(|_| match kind {
                0 => float(&mut random),
                1 if random.u8(..8) > 0 => 0.0,
                _ => float(&mut random) + 4.5,
            })
            .collect();
        let ys: Vec<f32> = (0..tokens * rows.n).map(|_| float(&mut random)).collect();
        let mut expected = ys.clone();
        for (t, y) in expected.chunks_exact_mut(rows.n.max(1)).enumerate() {
            for (i, row) in views.iter().enumerate() {
                if factors[i * tokens + t] != 0.0 {
                    reference::axpy_scaled(factors[i * tokens + t], *row, y);
                }
            }
        }
        for cpu in Cpu::all() {
            let mut got = ys.clone();
            cpu.axpy_rows_tokens(&factors, &views, tokens, &mut got);
            let name = format!("{} {} n {} rows {} tokens {}",
                cpu.name(), rows.dtype, rows.n, views.len(), tokens);
            prop_assert_eq!(bits(&got), bits(&expected), "{}", name);
            let mut zeros = vec![0.0; tokens * rows.n];
            cpu.axpy_rows_tokens(&factors, &views, tokens, &mut zeros);
            let mut new = ys.clone();
            cpu.sum_rows_tokens(&factors, &views, tokens, &mut new);
            prop_assert_eq!(bits(&new), bits(&zeros), "{} sum", name);
        }
    }
}

#[test]
#[should_panic(expected = "factors has 1 elements, expected 2")]
fn every_row_needs_a_factor() {
    let row = Row::f32(&[1.0]);
    Cpu::detect().axpy_rows(&[1.0], &[row, row], &mut [0.0]);
}

#[test]
#[should_panic(expected = "y has 2 elements, expected 1")]
fn all_rows_must_be_as_long_as_the_sum() {
    let rows = [Row::f32(&[1.0, 2.0]), Row::f32(&[1.0])];
    Cpu::detect().axpy_rows(&[1.0, 1.0], &rows, &mut [0.0, 0.0]);
}

#[test]
#[should_panic(expected = "rows of f32 and f16")]
fn all_rows_must_have_one_format() {
    let rows = [Row::f32(&[1.0]), Row::inline(DType::F16, 1, &[0, 0])];
    Cpu::detect().axpy_rows(&[1.0, 1.0], &rows, &mut [0.0]);
}
