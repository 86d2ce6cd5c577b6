//! Rows of two and three bits against their definition, on every instruction set of this machine.

use emberflow_kernels::{Activations, Cpu, DType, NARROW_GROUP, Narrow, Row};
use proptest::prelude::*;

proptest! {
    #[test]
    fn widened_rows_hold_the_values_that_were_stored(
        n in 1usize..700,
        rows in 1usize..4,
        narrow in prop_oneof![Just(Narrow::Two), Just(Narrow::Three)],
        seed in any::<u64>(),
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let groups = n.div_ceil(NARROW_GROUP);
        let mut bytes = vec![0; rows * narrow.row_bytes(n)];
        let mut expected = Vec::new();
        for row in bytes.chunks_exact_mut(narrow.row_bytes(n)) {
            let quants: Vec<u8> = (0..n).map(|_| random.u8(..=narrow.most())).collect();
            let scales: Vec<f32> = (0..groups).map(|g| 0.25 * (g + 1) as f32).collect();
            let stored: Vec<u16> = scales.iter().map(|&s| half::f16::from_f32(s).to_bits()).collect();
            narrow.store(&quants, &stored, row);
            expected.extend(quants.iter().enumerate().map(|(i, &q)| {
                (2.0 * f32::from(q) - f32::from(narrow.most())) * scales[i / NARROW_GROUP]
            }));
        }
        let x: Vec<f32> = (0..n).map(|_| random.i32(..) as f32).collect();
        let mut products: Vec<Vec<u32>> = Vec::new();
        for cpu in Cpu::all() {
            let mut wide = vec![0; rows * DType::Q4.row_bytes(n)];
            cpu.widen(narrow, &bytes, n, &mut wide);
            let mut quantized = Activations::default();
            cpu.quantize_activations(&x, 1, &mut quantized);
            let mut y = Vec::new();
            let wide = wide.chunks_exact(DType::Q4.row_bytes(n));
            for (row, expected) in wide.zip(expected.chunks_exact(n)) {
                let row = Row::inline(DType::Q4, n, row);
                let mut values = vec![0.0; n];
                cpu.dequantize(row, &mut values);
                prop_assert_eq!(&values[..], expected, "{}", cpu.name());
                y.push(cpu.dot_q(row, quantized.all()).to_bits());
            }
            products.push(y);
        }
        prop_assert!(products.windows(2).all(|p| p[0] == p[1]));
    }
}
