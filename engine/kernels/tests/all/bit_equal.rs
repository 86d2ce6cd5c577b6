//! Every instruction set of this machine, the scalar one included, returns the bits of
//! the oracle, for every format, odd lengths, odd strides and every alignment.

use crate::reference;
use emberflow_kernels::{Cpu, DType, Row, math, soft_cap};
use proptest::prelude::*;

fn bits(values: &[f32]) -> Vec<u32> {
    // Any NaN equals any NaN: sign and payload are left to the hardware.
    values
        .iter()
        .map(|v| {
            if v.is_nan() {
                f32::NAN.to_bits()
            } else {
                v.to_bits()
            }
        })
        .collect()
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::ALL.to_vec())
}

/// Lengths around the group, lane and scale-block borders, and arbitrary ones.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..200, 480usize..550, 1020usize..1100]
}

/// Activations: ordinary values, exact zeros of both signs, tiny and huge ones.
fn activation() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => -4.0f32..4.0,
        1 => Just(0.0f32),
        1 => Just(-0.0f32),
        1 => -1e-30f32..1e-30,
        1 => -1e30f32..1e30,
    ]
}

/// Bytes of `rows` rows with `gap` bytes between them, after `shift` bytes. The contents
/// are arbitrary: any stored nibble, signed scales, subnormals, padding that is not zero.
#[derive(Clone, Debug)]
struct Rows {
    dtype: DType,
    n: usize,
    shift: usize,
    stride: usize,
    bytes: Vec<u8>,
    finite: bool,
}

impl Rows {
    fn row(&self, r: usize) -> Row<'_> {
        let start = self.shift + r * self.stride;
        Row::inline(
            self.dtype,
            self.n,
            &self.bytes[start..start + self.dtype.row_bytes(self.n)],
        )
    }
}

fn rows(count: usize) -> impl Strategy<Value = Rows> {
    (
        dtype(),
        length(),
        0usize..67,
        0usize..9,
        any::<u64>(),
        prop::bool::weighted(0.9),
    )
        .prop_map(move |(dtype, n, shift, gap, seed, finite)| {
            let stride = dtype.row_bytes(n) + gap;
            let mut random = fastrand::Rng::with_seed(seed);
            let mut bytes = vec![0; shift + count * stride];
            random.fill(&mut bytes);
            if finite {
                for r in 0..count {
                    let start = shift + r * stride;
                    let row = &mut bytes[start..start + dtype.row_bytes(n)];
                    let (quants, scales) = row.split_at_mut(dtype.quants_bytes(n));
                    // Clear the top exponent bit: no infinities, no NaN.
                    if dtype.is_grouped() {
                        reference::tame(dtype, n, true, scales);
                        continue;
                    }
                    let (floats, width) = match dtype {
                        DType::F32 => (quants, 4),
                        _ => (quants, 2),
                    };
                    floats
                        .chunks_exact_mut(width)
                        .for_each(|f| f[width - 1] &= 0xbf);
                }
            }
            Rows {
                dtype,
                n,
                shift,
                stride,
                bytes,
                finite,
            }
        })
}

fn activations(max: usize) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(activation(), max)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..Default::default() })]

    #[test]
    fn row_kernels(rows in rows(1), xs in activations(1110), a in activation(), shift in 0usize..7) {
        let row = rows.row(0);
        let (from, to) = (shift, shift + rows.n);
        let weights = reference::dequantize(row);
        prop_assert!(!rows.finite || weights.iter().all(|w| w.is_finite()));
        let dot = reference::dot(row, &xs[from..to]);
        let mut sum = xs.clone();
        reference::axpy(a, row, &mut sum[from..to]);

        for cpu in Cpu::all() {
            let mut out = vec![0.0; to];
            cpu.dequantize(row, &mut out[from..]);
            prop_assert_eq!(bits(&out[from..]), bits(&weights), "dequantize {}", cpu.name());
            let mut y = xs.clone();
            cpu.axpy(a, row, &mut y[from..to]);
            prop_assert_eq!(bits(&y), bits(&sum), "axpy {}", cpu.name());
            let got = cpu.dot(row, &xs[from..to]);
            prop_assert_eq!(bits(&[got]), bits(&[dot]), "dot {}", cpu.name());
        }
    }

    #[test]
    fn split_scales_equal_inline_scales(rows in rows(1), xs in activations(1110)) {
        let (inline, x) = (rows.row(0), &xs[..rows.n]);
        let (quants, scales) = (inline.quants().to_vec(), inline.scales().to_vec());
        let split = Row::split(rows.dtype, rows.n, &quants, &scales);
        for cpu in Cpu::all() {
            prop_assert_eq!(bits(&[cpu.dot(split, x)]), bits(&[cpu.dot(inline, x)]));
        }
    }

    #[test]
    fn matrices(
        (rows, tokens, xs) in (rows(8), 0usize..40).prop_flat_map(|(rows, tokens)| {
            let n = rows.n;
            (Just(rows), Just(tokens), activations(tokens * n))
        }),
        used in 0usize..9,
        y_gap in 0usize..3,
        extra_scratch in 0usize..5000,
    ) {
        let (dtype, n, stride) = (rows.dtype, rows.n, rows.stride);
        let bytes = &rows.bytes[rows.shift..];
        let y_stride = used + y_gap;
        let len = if tokens == 0 { 0 } else { (tokens - 1) * y_stride + used };
        let mut expected = vec![7.0; len];
        for t in 0..tokens {
            for r in 0..used {
                expected[t * y_stride + r] = reference::dot(rows.row(r), &xs[t * n..][..n]);
            }
        }
        for cpu in Cpu::all() {
            let mut y = vec![7.0; len];
            let mut scratch = vec![0.0; n + extra_scratch];
            cpu.matmul(dtype, bytes, stride, n, &xs, tokens, &mut y, y_stride, &mut scratch);
            prop_assert_eq!(bits(&y), bits(&expected), "matmul {}", cpu.name());
            for t in 0..tokens {
                let mut y = vec![0.0; used];
                cpu.matvec(dtype, bytes, stride, n, &xs[t * n..][..n], &mut y);
                prop_assert_eq!(bits(&y), bits(&expected[t * y_stride..][..used]), "matvec {}", cpu.name());
            }
        }
    }

    #[test]
    fn elementwise(x in length().prop_flat_map(activations), eps in 1e-6f32..1e-5) {
        let n = x.len();
        let weight: Vec<f32> = (0..n).map(|i| 0.5 + (i % 13) as f32 * 0.1).collect();
        let angles: Vec<f32> = (0..n / 2).map(|i| i as f32 * 0.37).collect();
        let turn = &angles[..(n / 2).min(n % 41)];
        let cos: Vec<f32> = turn.iter().map(|&a| libm::cosf(a)).collect();
        let sin: Vec<f32> = turn.iter().map(|&a| libm::sinf(a)).collect();

        let mut turned = x.clone();
        reference::rope_rotate_half(&mut turned, &cos, &sin);
        let norm = reference::rmsnorm(&x, &weight, eps);
        let bias: Vec<f32> = (0..n).map(|i| (i % 7) as f32 * 0.3 - 1.0).collect();
        let layer = reference::layernorm(&x, &weight, &bias, eps);
        let map = |f: fn(f32) -> f32| x.iter().map(|&x| f(x)).collect::<Vec<f32>>();
        let silu = map(math::silu);
        let gelu = map(math::gelu);
        let gelu_tanh = map(math::gelu_tanh);
        let xielu_of = math::Xielu {
            positive: 0.7,
            negative: 1.3,
            beta: 0.5,
            eps: -1e-6,
        };
        let xielu: Vec<f32> = x.iter().map(|&x| math::xielu(x, xielu_of)).collect();
        let capped = map(|x| 30.0 * math::tanh(x / 30.0));
        let softmax = reference::softmax(&x);
        let halves = reference::f16_bytes(&x);

        for cpu in Cpu::all() {
            let run = |f: &dyn Fn(&mut [f32])| {
                let mut y = x.clone();
                f(&mut y);
                bits(&y)
            };
            let name = cpu.name();
            prop_assert_eq!(run(&|y| cpu.rmsnorm(&x, &weight, eps, y)), bits(&norm), "{}", name);
            prop_assert_eq!(run(&|y| cpu.rmsnorm_inplace(y, &weight, eps)), bits(&norm), "{}", name);
            let layernorm = run(&|y| cpu.layernorm_inplace(y, &weight, &bias, eps));
            prop_assert_eq!(layernorm, bits(&layer), "{}", name);
            prop_assert_eq!(run(&|y| cpu.softmax(y)), bits(&softmax), "{}", name);
            prop_assert_eq!(run(&|y| cpu.silu(y)), bits(&silu), "{}", name);
            prop_assert_eq!(run(&|y| cpu.gelu(y)), bits(&gelu), "{}", name);
            prop_assert_eq!(run(&|y| cpu.gelu_tanh(y)), bits(&gelu_tanh), "{}", name);
            prop_assert_eq!(run(&|y| cpu.xielu(y, xielu_of)), bits(&xielu), "{}", name);
            prop_assert_eq!(run(&|y| soft_cap(cpu, y, 30.0)), bits(&capped), "{}", name);
            prop_assert_eq!(run(&|y| cpu.rope_rotate_half(y, &cos, &sin)), bits(&turned), "{}", name);
            let mut got = vec![0u8; 2 * n];
            cpu.f32_to_f16_bytes(&x, &mut got);
            prop_assert_eq!(&got, &halves, "f16 {}", name);
        }
    }
}

/// Sums of products that underflow to −0.0: a kernel that skips the padded part of the
/// last chunk would return −0.0 lanes where another returns +0.0.
#[test]
fn signed_zeros_survive_padding_alike() {
    for n in 1..200 {
        let w = vec![-1e-30f32; n];
        let x = vec![1e-30f32; n];
        let expected = reference::dot(Row::f32(&w), &x);
        for cpu in Cpu::all() {
            assert_eq!(
                cpu.dot_f32(&w, &x).to_bits(),
                expected.to_bits(),
                "{} n {n}",
                cpu.name()
            );
        }
    }
}

/// Conversions have only 65,536 inputs: all of them, on every unit.
#[test]
fn all_halves_convert_alike() {
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dtype in [DType::F16, DType::BF16] {
        let row = Row::inline(dtype, 65_536, &bytes);
        let expected = reference::dequantize(row);
        for cpu in Cpu::all() {
            let mut out = vec![0.0; 65_536];
            cpu.dequantize(row, &mut out);
            assert_eq!(bits(&out), bits(&expected), "{} {dtype}", cpu.name());
            if dtype == DType::F16 {
                let mut back = vec![0u8; bytes.len()];
                cpu.f32_to_f16_bytes(&out, &mut back);
                for (i, value) in out.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
                    assert_eq!(back[2 * i..2 * i + 2], bytes[2 * i..2 * i + 2], "{value}");
                }
            }
        }
    }
}
