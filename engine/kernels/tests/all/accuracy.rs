//! How far the kernels are from exact arithmetic (f64), with a named budget for each.

use emberflow_kernels::{
    Activations, Cpu, DType, GROUP, Row, argmax, math, quantize_row, with_scale_per_token,
};

/// Error of a dot product of 4096 normal weights with normal inputs, relative to
/// ‖w‖·‖x‖: what storing in each format costs.
const DOT_BUDGET: [(DType, f64); 8] = [
    (DType::F32, 1e-8),
    (DType::F16, 1e-5),
    (DType::BF16, 1e-4),
    (DType::Q8, 3e-4),
    (DType::Q4, 5e-3),
    (DType::Q4k, 4e-3),
    (DType::Q8c, 3e-4),
    (DType::Q4c, 7e-3),
];
/// The same with quantised activations, stored error included.
const DOT_Q_BUDGET: [(DType, f64); 5] = [
    (DType::Q8, 4e-4),
    (DType::Q4, 5e-3),
    (DType::Q4k, 4e-3),
    (DType::Q8c, 5e-4),
    (DType::Q4c, 7e-3),
];
/// What quantising the activations alone costs, in a dot product and in one activation
/// relative to the largest of its group.
const ACTIVATION_BUDGET: f64 = 3e-4;
/// The same with one scale for all activations of a token.
const TOKEN_BUDGET: f64 = 5e-4;
const QUANT_BUDGET: f64 = 0.5 / 127.0 + 1e-7;
/// Units in the last place.
const EXP_BUDGET: f64 = 1.0;
/// Relative to the exact result.
const SILU_BUDGET: f64 = 4e-7;
const SOFTMAX_BUDGET: f64 = 1e-6;
const RMSNORM_BUDGET: f64 = 4e-7;
/// Relative to |x|: far below zero the result itself is tiny, and the error-function form
/// cancels while the tanh form magnifies the rounding of its exponent.
const GELU_BUDGET: f64 = 2e-7;
/// Relative to the result, however small.
const TANH_BUDGET: f64 = 3e-7;

/// Seeded, roughly normal numbers (a sum of uniform ones).
fn normal(seed: u64, n: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut normal = || (0..12).map(|_| random.f32() - 0.5).sum();
    (0..n).map(|_| normal()).collect()
}

/// A row's quants and scales.
fn quantised_row(dtype: DType, weights: &[f32]) -> Vec<u8> {
    let mut row = vec![0; dtype.row_bytes(weights.len())];
    let (quants, scales) = row.split_at_mut(dtype.quants_bytes(weights.len()));
    quantize_row(dtype, weights, quants, scales).unwrap();
    row
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn dot_products() {
    const N: usize = 4096;
    for (dtype, budget) in DOT_BUDGET {
        let (mut worst, mut worst_arithmetic): (f64, f64) = (0.0, 0.0);
        for seed in 0..50 {
            let (w, x) = (normal(seed, N), normal(seed + 1000, N));
            let bytes = quantised_row(dtype, &w);
            let row = Row::inline(dtype, N, &bytes);
            let cpu = Cpu::detect();
            let mut stored = vec![0.0; N];
            cpu.dequantize(row, &mut stored);
            let got = f64::from(cpu.dot(row, &x));
            let exact = |w: &[f32]| -> f64 {
                w.iter()
                    .zip(&x)
                    .map(|(&w, &x)| f64::from(w) * f64::from(x))
                    .sum()
            };
            let size = norm(&w) * norm(&x);
            worst = worst.max((got - exact(&w)).abs() / size);
            worst_arithmetic = worst_arithmetic.max((got - exact(&stored)).abs() / size);
        }
        println!("{dtype}: {worst:.1e} stored, {worst_arithmetic:.1e} arithmetic");
        assert!(worst <= budget, "{dtype}: {worst:e}");
        assert!(
            worst_arithmetic <= DOT_BUDGET[0].1,
            "{dtype}: {worst_arithmetic:e}"
        );
    }
}

#[test]
fn dot_products_of_quantised_activations() {
    const N: usize = 4096;
    let cpu = Cpu::detect();
    for (dtype, budget) in DOT_Q_BUDGET {
        let (mut worst, mut worst_activations): (f64, f64) = (0.0, 0.0);
        for seed in 0..50 {
            let (w, x) = (normal(seed, N), normal(seed + 1000, N));
            let bytes = quantised_row(dtype, &w);
            let row = Row::inline(dtype, N, &bytes);
            let mut stored = vec![0.0; N];
            cpu.dequantize(row, &mut stored);
            let cpu = with_scale_per_token(cpu, dtype.is_per_channel());
            let mut quantised = Activations::default();
            cpu.quantize_activations(&x, 1, &mut quantised);
            let got = f64::from(cpu.dot_q(row, quantised.token(0)));
            let exact = |w: &[f32], x: &dyn Fn(usize) -> f32| -> f64 {
                let terms = w.iter().enumerate();
                terms.map(|(i, &w)| f64::from(w) * f64::from(x(i))).sum()
            };
            let size = norm(&w) * norm(&x);
            let original = |i: usize| x[i];
            worst = worst.max((got - exact(&w, &original)).abs() / size);
            let loss = (got - exact(&stored, &original)).abs() / size;
            worst_activations = worst_activations.max(loss);
            // The chains add nothing to what is stored of both.
            let kept = exact(&stored, &|i| quantised.all().value(0, i));
            let arithmetic = (got - kept).abs() / size;
            assert!(arithmetic <= DOT_BUDGET[0].1, "{dtype}: {arithmetic:e}");
        }
        println!("{dtype}: {worst:.1e} stored, {worst_activations:.1e} activations");
        assert!(worst <= budget, "{dtype}: {worst:e}");
        let budget = match dtype.is_per_channel() {
            true => TOKEN_BUDGET,
            false => ACTIVATION_BUDGET,
        };
        assert!(
            worst_activations <= budget,
            "{dtype}: {worst_activations:e}"
        );
    }
}

#[test]
fn quantised_activations() {
    for seed in 0..20 {
        // Groups of very different sizes.
        let mut x = normal(seed, 4096);
        for (g, group) in x.chunks_mut(GROUP).enumerate() {
            let size = 10f32.powi((g as i32 * 7) % 40 - 20);
            group.iter_mut().for_each(|x| *x *= size);
        }
        let mut quantised = Activations::default();
        Cpu::detect().quantize_activations(&x, 1, &mut quantised);
        for (g, group) in x.chunks(GROUP).enumerate() {
            let largest = group.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            for (i, x) in group.iter().enumerate() {
                let got = quantised.all().value(0, g * GROUP + i);
                let error = (f64::from(got) - f64::from(*x)).abs() / f64::from(largest);
                assert!(error <= QUANT_BUDGET, "{x} becomes {got}: {error:e}");
            }
        }
    }
}

#[test]
fn exp_over_its_whole_range() {
    let mut worst: f64 = 0.0;
    for bits in (0..=u32::MAX).step_by(1023) {
        let x = f32::from_bits(bits);
        let got = math::exp(x);
        if x.is_nan() {
            assert!(got.is_nan());
            continue;
        }
        let exact = f64::from(x).exp();
        if exact as f32 == f32::INFINITY {
            assert_eq!(got, f32::INFINITY, "{x}");
            continue;
        }
        // One unit in the last place of the rounded exact result.
        let rounded = exact as f32;
        let unit = f64::from(rounded.next_up()) - f64::from(rounded);
        worst = worst.max(((f64::from(got) - exact) / unit).abs());
    }
    println!("exp: {worst:.2} units in the last place");
    assert!(worst <= EXP_BUDGET, "{worst}");
    assert_eq!(math::exp(0.0), 1.0);
    assert_eq!(math::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(math::exp(f32::INFINITY), f32::INFINITY);
}

#[test]
fn activations() {
    let relative = |got: f32, exact: f64| ((f64::from(got) - exact) / exact).abs();
    let (mut silu, mut gelu, mut tanh): (f64, f64, f64) = (0.0, 0.0, 0.0);
    for i in -200_000..=200_000 {
        if i == 0 {
            continue;
        }
        let x = i as f32 * 1e-4;
        let e = f64::from(x);
        silu = silu.max(relative(math::silu(x), e / (1.0 + (-e).exp())));
        let exact = 0.5 * e * libm::erfc(-e / 2f64.sqrt());
        gelu = gelu.max((f64::from(math::gelu(x)) - exact).abs() / e.abs());
        let u = (2.0 / std::f64::consts::PI).sqrt() * (e + 0.044715 * e.powi(3));
        let exact = 0.5 * e * (1.0 + u.tanh());
        tanh = tanh.max((f64::from(math::gelu_tanh(x)) - exact).abs() / e.abs());
    }
    println!("silu {silu:.1e}, gelu {gelu:.1e}, gelu_tanh {tanh:.1e}");
    assert!(silu <= SILU_BUDGET, "silu {silu:e}");
    assert!(gelu <= GELU_BUDGET, "gelu {gelu:e}");
    assert!(tanh <= GELU_BUDGET, "gelu_tanh {tanh:e}");
    for f in [math::silu, math::gelu, math::gelu_tanh] {
        assert_eq!(f(0.0), 0.0);
        assert_eq!(f(1e30), 1e30);
        assert_eq!(f(-1e30), 0.0);
    }
}

/// Relative to the sum of the magnitudes of the parts, which cancel.
#[test]
fn expanded_integral_of_elu() {
    let of = math::Xielu {
        positive: 0.7,
        negative: 1.3,
        beta: 0.5,
        eps: -1e-6,
    };
    let [positive, negative, beta, eps] =
        [of.positive, of.negative, of.beta, of.eps].map(f64::from);
    let mut worst: f64 = 0.0;
    for i in -200_000..=200_000 {
        let x = i as f32 * 1e-3;
        let e = f64::from(x);
        let (curved, size) = if x > 0.0 {
            (positive * e * e, positive * e * e)
        } else {
            let m = e.min(eps).exp_m1();
            (negative * (m - e), negative * (m.abs() + e.abs()))
        };
        let exact = curved + beta * e;
        let size = size + (beta * e).abs();
        let off = (f64::from(math::xielu(x, of)) - exact).abs();
        worst = worst.max(off / size.max(1e-30));
    }
    println!("xielu {worst:.1e}");
    assert!(worst <= 3e-7, "{worst:e}");
    assert!(math::xielu(f32::NAN, of).is_nan());
}

/// Of small values too: the result is as near relative to itself as to 1.
#[test]
fn hyperbolic_tangent() {
    let mut worst: f64 = 0.0;
    for bits in (0..f32::INFINITY.to_bits()).step_by(1009) {
        for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
            let (got, exact) = (math::tanh(x), f64::from(x).tanh());
            // The last place of subnormal values is all that they have.
            if x.abs() < f32::MIN_POSITIVE {
                assert_eq!(got, x);
                continue;
            }
            worst = worst.max(((f64::from(got) - exact) / exact).abs());
        }
    }
    println!("tanh: {worst:.1e}");
    assert!(worst <= TANH_BUDGET, "{worst:e}");
    assert_eq!(math::tanh(f32::INFINITY), 1.0);
    assert_eq!(math::tanh(f32::NEG_INFINITY), -1.0);
    assert!(math::tanh(f32::NAN).is_nan());
}

#[test]
fn softmax() {
    for (n, spread) in [(1, 1.0), (5, 1.0), (64, 20.0), (1000, 3.0), (4097, 50.0)] {
        let x: Vec<f32> = normal(n as u64, n).iter().map(|x| x * spread).collect();
        let max = x.iter().copied().fold(f32::MIN, f32::max);
        let exact: Vec<f64> = x.iter().map(|&x| f64::from(x - max).exp()).collect();
        let sum: f64 = exact.iter().sum();
        let mut y = x.clone();
        Cpu::detect().softmax(&mut y);
        for (y, exact) in y.iter().zip(&exact).filter(|(_, e)| **e > 1e-30) {
            assert!(
                (f64::from(*y) / (exact / sum) - 1.0).abs() <= SOFTMAX_BUDGET,
                "{n}"
            );
        }
    }
    let mut masked = [1.0, f32::NEG_INFINITY, 1.0];
    Cpu::detect().softmax(&mut masked);
    assert_eq!(masked, [0.5, 0.0, 0.5]);
    Cpu::detect().softmax(&mut []);
}

#[test]
fn rmsnorm() {
    for n in [1, 63, 64, 65, 1000, 4096] {
        let (x, w) = (normal(n as u64, n), normal(n as u64 + 7, n));
        let mut out = vec![0.0; n];
        Cpu::detect().rmsnorm(&x, &w, 1e-5, &mut out);
        let scale = 1.0 / (norm(&x).powi(2) / n as f64 + 1e-5).sqrt();
        for i in 0..n {
            let exact = f64::from(x[i]) * scale * f64::from(w[i]);
            assert!((f64::from(out[i]) - exact).abs() <= RMSNORM_BUDGET * exact.abs());
        }
    }
}

#[test]
fn rope_turns_the_first_dimensions_only() {
    let angle = 0.3f32;
    let mut x = [1.0, 2.0, 0.0, -1.0, 9.0];
    Cpu::detect().rope_rotate_half(&mut x, &[angle.cos(), 1.0], &[angle.sin(), 0.0]);
    assert!((x[0] - angle.cos()).abs() < 1e-6 && (x[2] - angle.sin()).abs() < 1e-6);
    assert_eq!((x[1], x[3], x[4]), (2.0, -1.0, 9.0));
}

#[test]
fn argmax_takes_the_first_largest_number() {
    assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), Some(1));
    assert_eq!(argmax(&[f32::NAN, -1.0, f32::NAN, -0.5]), Some(3));
    assert_eq!(argmax(&[f32::NEG_INFINITY]), Some(0));
    assert_eq!(argmax(&[f32::NAN]), None);
    assert_eq!(argmax(&[]), None);
}
