//! The kernels of attention: the bits of the oracle on every instruction set, for every
//! number of queries and positions.

use crate::reference;
use emberflow_kernels::{Cpu, DType, GROUP, Row};
use proptest::prelude::*;

fn bits(values: &[f32]) -> Vec<u32> {
    // Any NaN equals any NaN: sign and payload are left to the hardware.
    values
        .iter()
        .map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits())
        .collect()
}

/// Numbers within ±4 from a seed.
fn floats(seed: u64, count: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count)
        .map(|_| random.u16(..=8000) as f32 / 1000.0 - 4.0)
        .collect()
}

/// Stored floats, every one finite.
fn stored(dtype: DType, seed: u64, count: usize) -> Vec<u8> {
    let width = dtype.row_bytes(1);
    let mut bytes: Vec<u8> = floats(seed, count * width)
        .iter()
        .map(|x| (x * 99.0) as i32 as u8)
        .collect();
    bytes
        .chunks_exact_mut(width)
        .for_each(|f| f[width - 1] &= 0xbf);
    bytes
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::F32, DType::F16, DType::BF16])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..Default::default() })]

    #[test]
    fn scores_of_keys(dtype in dtypes(), head_dim in 1usize..140, blocks in 0usize..4,
                      count in 0usize..20, gap in 0usize..5, seed in any::<u64>()) {
        let keys = stored(dtype, seed, blocks * head_dim * GROUP);
        let elements = reference::dequantize(Row::inline(dtype, blocks * head_dim * GROUP, &keys));
        let queries = floats(seed ^ 1, count * head_dim);
        let stride = blocks * GROUP + gap;
        let mut expected = floats(seed ^ 2, count * stride);
        let before = expected.clone();
        for q in 0..count {
            for p in 0..blocks * GROUP {
                let mut sum = 0.0f32;
                for d in 0..head_dim {
                    let key = elements[(p / GROUP * head_dim + d) * GROUP + p % GROUP];
                    sum = queries[q * head_dim + d].mul_add(key, sum);
                }
                expected[q * stride + p] = sum;
            }
        }
        for cpu in Cpu::all() {
            let mut got = before.clone();
            cpu.key_scores(dtype, &keys, head_dim, &queries, &mut got, stride);
            prop_assert_eq!(bits(&got), bits(&expected), "{}", cpu.name());
        }
    }

    #[test]
    fn mixes_of_values(dtype in dtypes(), groups in 1usize..6, positions in 0usize..150,
                       count in 0usize..12, gap in 0usize..5, seed in any::<u64>()) {
        let width = groups * GROUP;
        let values = stored(dtype, seed, positions * width);
        let elements = reference::dequantize(Row::inline(dtype, positions * width, &values));
        let stride = positions + gap;
        let weights = floats(seed ^ 1, count * stride);
        let mut expected = floats(seed ^ 2, count * width);
        let before = expected.clone();
        for q in 0..count {
            for p in 0..positions {
                for j in 0..width {
                    let out = &mut expected[q * width + j];
                    *out = weights[q * stride + p].mul_add(elements[p * width + j], *out);
                }
            }
        }
        for cpu in Cpu::all() {
            let mut got = before.clone();
            cpu.mix_values(dtype, &values, width, &weights, stride, &mut got);
            prop_assert_eq!(bits(&got), bits(&expected), "{}", cpu.name());
            // Cut into two calls.
            let cut = positions / 3;
            let (first, rest) = values.split_at(cut * width * dtype.row_bytes(1));
            let mut got = before.clone();
            cpu.mix_values(dtype, first, width, &weights, stride, &mut got);
            if count > 0 {
                cpu.mix_values(dtype, rest, width, &weights[cut..], stride, &mut got);
            }
            prop_assert_eq!(bits(&got), bits(&expected), "{} cut", cpu.name());
        }
    }

    #[test]
    fn blocks_of_a_softmax(n in 0usize..200, seed in any::<u64>(), a in -2.0f32..2.0) {
        let x = floats(seed, n);
        let y = floats(seed ^ 1, n);
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let e: Vec<f32> = x.iter().map(|x| emberflow_kernels::math::exp(x - max)).collect();
        let sum = reference::lane_sum(&e);
        let blended: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 0.3f32.mul_add(*x, a * y)).collect();
        for cpu in Cpu::all() {
            let mut got = x.clone();
            let parts = cpu.exp_block(&mut got);
            prop_assert_eq!(bits(&got), bits(&e), "{}", cpu.name());
            prop_assert_eq!(bits(&[parts.0, parts.1]), bits(&[max, sum]), "{}", cpu.name());
            let mut got = y.clone();
            cpu.blend(a, &mut got, 0.3, &x);
            prop_assert_eq!(bits(&got), bits(&blended), "{}", cpu.name());
        }
    }
}

#[test]
#[should_panic(expected = "no attention over q8")]
fn quantised_keys_are_refused() {
    Cpu::detect().key_scores(DType::Q8, &[0; 32], 1, &[0.0], &mut [0.0; 32], 32);
}

#[test]
#[should_panic(expected = "31 scores at stride 32 for 32 positions")]
fn scores_need_room_for_every_position() {
    Cpu::detect().key_scores(DType::F16, &[0; 64], 1, &[0.0], &mut [0.0; 31], 32);
}

#[test]
#[should_panic(expected = "1 weights at stride 2 for 2 positions")]
fn values_need_a_weight_for_every_position() {
    Cpu::detect().mix_values(DType::F16, &[0; 128], 32, &[0.0], 2, &mut [0.0; 32]);
}
