//! Blocks of GGUF files: decoding is that of the `gguf` package, products are those of the oracle on
//! every instruction set, one token at a time or many.

use crate::reference::Quantised;
use emberflow_kernels::{
    Activations, Block, Columns, Cpu, DType, GROUP, Row, block_group, decode_blocks,
    matmul_scratch_q, with_scale_per_token,
};
use proptest::prelude::*;

fn bits(values: &[f32]) -> Vec<u32> {
    // Any NaN equals any NaN: sign and payload are left to the hardware.
    let canonical = |v: &f32| if v.is_nan() { f32::NAN } else { *v }.to_bits();
    values.iter().map(canonical).collect()
}

/// `tests/fixtures/quants` has values of every format, and what the `gguf` package decodes them to.
#[test]
fn decoding_is_that_of_the_gguf_package() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/quants");
    for format in Block::ALL {
        let read = |ending| std::fs::read(format!("{folder}/{}.{ending}", format.name())).unwrap();
        let (stored, expected) = (read("bin"), read("f32"));
        let expected = expected.as_chunks::<4>().0.iter();
        let expected: Vec<f32> = expected.map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let mut decoded = vec![f32::NAN; expected.len()];
        decode_blocks(format, &stored, &mut decoded);
        assert_eq!(bits(&decoded), bits(&expected), "{}", format.name());
        // as a row too
        let row = Row::inline(DType::Block(format), decoded.len(), &stored);
        let mut again = vec![f32::NAN; decoded.len()];
        Cpu::detect().dequantize(row, &mut again);
        assert_eq!(bits(&again), bits(&expected), "{}", format.name());
    }
}

/// Where the f16 scales of a block are; in MXFP4 the exponent, in IQ1_M none, as the scale is spread over words.
fn scales(format: Block) -> &'static [usize] {
    match format {
        Block::Q4_0 | Block::Q5_0 | Block::Q8_0 | Block::Iq4Nl | Block::Iq4Xs => &[0],
        Block::Q4_1 | Block::Q5_1 | Block::Q4K | Block::Q5K => &[0, 2],
        Block::Q6K => &[208],
        Block::Q2K => &[80, 82],
        Block::Q3K => &[108],
        Block::Iq2Xxs | Block::Iq2Xs | Block::Iq2S | Block::Iq3Xxs | Block::Iq3S => &[0],
        Block::Iq1S | Block::Q1_0 | Block::Q2_0 | Block::Mxfp4 => &[0],
        Block::Tq1_0 => &[52],
        Block::Tq2_0 => &[64],
        Block::Iq1M => &[],
    }
}

/// What the weights and scales of a matrix are.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Any bits; scales that are infinite or no numbers too.
    Any,
    /// Any finite scale.
    Finite,
    /// The largest scales and steps with the largest weights.
    Extreme,
    /// Scales that are zero or subnormal.
    Tiny,
}

fn matrix(format: Block, kind: Kind, bytes: usize, random: &mut fastrand::Rng) -> Vec<u8> {
    let mut stored = vec![0; bytes];
    random.fill(&mut stored);
    for block in stored.chunks_exact_mut(format.bytes()) {
        if matches!(kind, Kind::Extreme) {
            // all quants and packed scales at one end
            block.fill(random.choice([0x00, 0x80, 0x7f, 0xff]).unwrap());
        }
        for &at in scales(format) {
            if format == Block::Mxfp4 {
                block[at] = match kind {
                    Kind::Any => random.u8(..),
                    Kind::Finite => random.u8(..255),
                    Kind::Extreme => random.u8(200..255),
                    Kind::Tiny => random.u8(..3),
                };
                continue;
            }
            block[at..at + 2].copy_from_slice(&half(kind, random).to_le_bytes());
        }
        if format == Block::Iq1M {
            let half = half(kind, random);
            for (w, upper) in block[48..].iter_mut().skip(1).step_by(2).enumerate() {
                *upper = *upper & 15 | ((half >> (4 * w) & 15) << 4) as u8;
            }
        }
    }
    stored
}

/// An f16 scale.
fn half(kind: Kind, random: &mut fastrand::Rng) -> u16 {
    match kind {
        Kind::Any => random.u16(..),
        Kind::Finite => random.u16(..0x7c00) | (random.u16(..2) << 15),
        Kind::Extreme => random.choice([0x7bff, 0xfbff]).unwrap(),
        Kind::Tiny => (random.u16(..0x0400) * random.u16(..2)) | (random.u16(..2) << 15),
    }
}

/// `row · x` by the chain rule, one integer at a time.
fn product(format: Block, row: &[u8], x: &Quantised) -> f32 {
    let mut chains = [0.0f32; 16];
    for (g, xs) in x.quants.chunks(GROUP).enumerate() {
        let group = block_group(format, row, g);
        let (mut sum, mut less) = (0, 0);
        for (i, &x) in xs.iter().enumerate() {
            let (half, quant) = (i / (GROUP / 2), i32::from(group.quants[i]));
            sum += i32::from(group.steps[half]) * quant * x;
            less += i32::from(group.min_steps[half]) * x;
        }
        let chain = &mut chains[g % 16];
        *chain = (sum as f32).mul_add(group.scale * x.scales[g], *chain);
        if format == Block::Q2K {
            *chain = (less as f32).mul_add(-group.minimum * x.scales[g], *chain);
        } else if matches!(format, Block::Q4_1 | Block::Q5_1 | Block::Q4K | Block::Q5K) {
            let all = xs.iter().sum::<i32>() as f32 * x.scales[g];
            *chain = (-group.minimum).mul_add(all, *chain);
        }
    }
    for width in [8, 4, 2, 1] {
        for j in 0..width {
            chains[j] += chains[j + width];
        }
    }
    let product = chains[0];
    if x.excess.is_empty() {
        return product;
    }
    let mut weights = vec![0.0; x.quants.len()];
    decode_blocks(format, row, &mut weights);
    let more = x.excess.iter().fold(0.0, |sum, &(i, steps)| {
        sum + weights[i] * (steps as f32 * x.scales[0])
    });
    product + more
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Any),
        Just(Kind::Finite),
        Just(Kind::Extreme),
        Just(Kind::Tiny)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    #[test]
    fn products_are_those_of_the_oracle(
        kind in kind(),
        groups in prop_oneof![1usize..4, 14usize..19, 30usize..36],
        count in prop_oneof![1usize..4, 7usize..20],
        tokens in prop_oneof![1usize..8, 15usize..18],
        gap in 0usize..5,
        per_token: bool,
        ordinary: bool,
        seed: u64,
    ) {
        for format in Block::ALL {
            let mut random = fastrand::Rng::with_seed(seed);
            let n = (groups * GROUP).next_multiple_of(format.elements());
            let row = format.row_bytes(n);
            let rows: Vec<Vec<u8>> = (0..count).map(|_| matrix(format, kind, row, &mut random)).collect();
            let stride = row + gap;
            // The last row ends with the bytes.
            let mut bytes = vec![0xff; (count - 1) * stride + row];
            for (r, stored) in rows.iter().enumerate() {
                bytes[r * stride..][..row].copy_from_slice(stored);
            }
            let mut xs: Vec<f32> = (0..tokens * n).map(|_| random.f32() * 8.0 - 4.0).collect();
            for group in xs.chunks_mut(GROUP) {
                match random.u8(..8) {
                    0 => group.fill(0.0),
                    1 if !ordinary => group.iter_mut().for_each(|x| *x *= 1e30),
                    2 => group.iter_mut().for_each(|x| *x = x.signum()),
                    3 => group.fill(1.0),
                    _ => {}
                }
            }
            let mut expected = vec![0.0; tokens * count];
            for t in 0..tokens {
                let x = Quantised::new(&xs[t * n..][..n], per_token, false);
                for r in 0..count {
                    expected[t * count + r] = product(format, &rows[r], &x);
                }
            }
            let dtype = DType::Block(format);
            for cpu in Cpu::all().into_iter().map(|cpu| with_scale_per_token(cpu, per_token)) {
                let mut x = Activations::default();
                cpu.quantize_activations(&xs, tokens, &mut x);
                let mut y = vec![7.0; count];
                for t in 0..tokens {
                    cpu.matvec_q(dtype, &bytes, stride, x.token(t), &mut y);
                    let expected = &expected[t * count..][..count];
                    prop_assert_eq!(bits(&y), bits(expected), "{} {} token {}", dtype, cpu.name(), t);
                }
                let mut all = vec![7.0; tokens * count];
                let mut scratch = vec![f32::NAN; matmul_scratch_q(n)];
                let mut columns = Columns::new(&mut all, tokens, count, count);
                cpu.matmul_q(dtype, &bytes, stride, x.all(), &mut columns, &mut scratch);
                prop_assert_eq!(bits(&all), bits(&expected), "{} {} {}", dtype, cpu.name(), tokens);
            }
        }
    }
}

#[test]
fn no_rows_have_no_products() {
    let cpu = Cpu::detect();
    let mut x = Activations::default();
    cpu.quantize_activations(&[1.0; 256], 1, &mut x);
    for format in Block::ALL {
        cpu.matvec_q(
            DType::Block(format),
            &[],
            format.row_bytes(256),
            x.token(0),
            &mut [],
        );
    }
}

#[test]
#[should_panic(expected = "takes 144 bytes")]
fn decoding_checks_lengths() {
    decode_blocks(Block::Q4K, &[0; 143], &mut [0.0; 256]);
}

#[test]
#[should_panic(expected = "a row of Q4_K takes quantised activations")]
fn floats_do_not_meet_blocks() {
    let row = Row::inline(DType::Block(Block::Q4K), 256, &[0; 144]);
    Cpu::detect().dot(row, &[0.0; 256]);
}

#[test]
#[should_panic(expected = "rows of Q4_K are multiplied as matrices")]
fn lists_of_rows_are_no_matrices() {
    let cpu = Cpu::detect();
    let mut x = Activations::default();
    cpu.quantize_activations(&[1.0; 256], 1, &mut x);
    cpu.dot_q(
        Row::inline(DType::Block(Block::Q4K), 256, &[0; 144]),
        x.token(0),
    );
}
