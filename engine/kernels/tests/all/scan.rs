//! The scan of a state-space model: the formula, one element at a time, on every instruction set.

use emberflow_kernels::{Cpu, ScanToken, selective_scan};
use proptest::prelude::*;

/// Numbers within ±1 from a seed.
fn floats(seed: u64, count: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| random.f32() * 2.0 - 1.0).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The formula, column by column.
fn textbook(state: &mut [f32], token: ScanToken<'_>) -> Vec<f32> {
    let columns = token.input.len();
    let of_column = |column: usize| {
        let input = token.input[column];
        let mut answer = 0.0;
        for (row, (write, read)) in token.write.iter().zip(token.read).enumerate() {
            let s = &mut state[row * columns + column];
            *s = write.mul_add(token.step * input, token.decay * *s);
            answer = read.mul_add(*s, answer);
        }
        token.skip.mul_add(input, answer)
    };
    (0..columns).map(of_column).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_state_and_the_answer_are_those_of_the_formula(
        rows in 1..70usize, columns in 1..140usize, seed: u64, decay in 0.0f32..=1.0,
        step in 0.0f32..=9.0, skip in -2.0f32..=2.0,
    ) {
        let before = floats(seed, rows * columns);
        let [write, read] = [1, 2].map(|n| floats(seed ^ n, rows));
        let input = floats(seed ^ 3, columns);
        let token = ScanToken { input: &input, write: &write, read: &read, decay, step, skip };
        let mut expected = before.clone();
        let answer = textbook(&mut expected, token);
        for cpu in Cpu::all() {
            let mut out = vec![f32::NAN; columns];
            let mut in_place = before.clone();
            selective_scan(cpu, None, &mut in_place, token, &mut out);
            prop_assert_eq!(bits(&in_place), bits(&expected), "{}", cpu.name());
            prop_assert_eq!(bits(&out), bits(&answer), "{}", cpu.name());
            let mut copied = vec![f32::NAN; rows * columns];
            selective_scan(cpu, Some(&before), &mut copied, token, &mut out);
            prop_assert_eq!(bits(&copied), bits(&expected), "{}", cpu.name());
            prop_assert_eq!(bits(&out), bits(&answer), "{}", cpu.name());
        }
    }
}

/// What was written fades by the decay, and only the input itself passes a state that is not read.
#[test]
fn what_is_written_fades() {
    for cpu in Cpu::all() {
        let mut state = vec![0.0; 3 * 33];
        let mut out = vec![0.0; 33];
        let input = floats(7, 33);
        let token = ScanToken {
            input: &input,
            write: &[0.0, 2.0, 0.0],
            read: &[1.0, 0.0, 1.0],
            decay: 0.5,
            step: 0.25,
            skip: 1.0,
        };
        selective_scan(cpu, None, &mut state, token, &mut out);
        assert_eq!(out, input, "{}", cpu.name());
        let silent = ScanToken {
            input: &[0.0; 33],
            read: &[0.0, 4.0, 0.0],
            ..token
        };
        selective_scan(cpu, None, &mut state, silent, &mut out);
        // 4 · 0.5 · 2 · 0.25
        assert_eq!(out, input, "{}", cpu.name());
    }
}
