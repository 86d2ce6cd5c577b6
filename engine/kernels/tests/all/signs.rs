//! Sign bits and their differences, on every instruction set of this machine.

use emberflow_kernels::{Cpu, sign_bytes};
use proptest::prelude::*;

#[test]
fn bits_and_differences_of_a_hand_case() {
    let (x, w) = (
        [1.0, -2.0, 0.0, -0.0, -1e-30],
        [-1.0, -1.0, 3.0, -1.0, -1.0],
    );
    for cpu in Cpu::all() {
        let (mut xs, mut ws) = ([0xff; 8], [0xff; 8]);
        cpu.sign_bits(&x, &mut xs);
        cpu.sign_bits(&w, &mut ws);
        assert_eq!(xs, [0b10010, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(ws, [0b11011, 0, 0, 0, 0, 0, 0, 0]);
        let mut y = [9];
        cpu.sign_differences(&ws, 8, &xs, &mut y);
        assert_eq!(y, [2]);
    }
}

proptest! {
    #[test]
    fn every_instruction_set_equals_the_naive_count(
        n in 1usize..700,
        rows in 0usize..6,
        gap in 0usize..5,
        seed in any::<u64>(),
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut next = || random.i32(..) as f32 / 3.0;
        let x: Vec<f32> = (0..n).map(|_| next()).collect();
        let w: Vec<Vec<f32>> = (0..rows).map(|_| (0..n).map(|_| next()).collect()).collect();
        let naive: Vec<u32> = w
            .iter()
            .map(|w| w.iter().zip(&x).filter(|(w, x)| (**w < 0.0) != (**x < 0.0)).count() as u32)
            .collect();
        let stride = sign_bytes(n) + gap;
        for cpu in Cpu::all() {
            let mut bits = vec![0; sign_bytes(n)];
            cpu.sign_bits(&x, &mut bits);
            let mut bytes = vec![0; rows * stride];
            for (row, w) in bytes.chunks_exact_mut(stride).zip(&w) {
                cpu.sign_bits(w, &mut row[..sign_bytes(n)]);
            }
            let mut y = vec![0; rows];
            cpu.sign_differences(&bytes, stride, &bits, &mut y);
            prop_assert_eq!(&y, &naive, "{}", cpu.name());
        }
    }
}
