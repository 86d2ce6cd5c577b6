//! The gated delta rule: the formula, one element at a time, on every instruction set.

use emberflow_kernels::{Cpu, Decay, DeltaToken, delta_rule, math, scale_by_sigmoid};
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
fn textbook(state: &mut [f32], token: DeltaToken<'_>) -> Vec<f32> {
    let columns = token.value.len();
    let of_column = |column: usize| {
        let mut found = 0.0;
        for (row, key) in token.key.iter().enumerate() {
            state[row * columns + column] *= match token.decay {
                Decay::One(decay) => decay,
                Decay::ByRow(decays) => decays[row],
            };
            found = key.mul_add(state[row * columns + column], found);
        }
        let written = token.beta * (token.value[column] - found);
        let mut answer = 0.0;
        for (row, (key, query)) in token.key.iter().zip(token.query).enumerate() {
            let s = &mut state[row * columns + column];
            *s = key.mul_add(written, *s);
            answer = query.mul_add(*s, answer);
        }
        answer
    };
    (0..columns).map(of_column).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_state_and_the_answer_are_those_of_the_formula(
        rows in 1..70usize, columns in 1..140usize, seed: u64, decay in 0.0f32..=1.0,
        beta in 0.0f32..=1.0, by_row: bool,
    ) {
        let before = floats(seed, rows * columns);
        let [key, query] = [1, 2].map(|n| floats(seed ^ n, rows));
        let value = floats(seed ^ 3, columns);
        let decays: Vec<f32> = floats(seed ^ 4, rows).iter().map(|x| x.abs()).collect();
        let decay = if by_row { Decay::ByRow(&decays) } else { Decay::One(decay) };
        let token = DeltaToken { key: &key, query: &query, value: &value, decay, beta };
        let mut expected = before.clone();
        let answer = textbook(&mut expected, token);
        for cpu in Cpu::all() {
            let mut out = vec![f32::NAN; columns];
            let mut in_place = before.clone();
            delta_rule(cpu, None, &mut in_place, token, &mut out);
            prop_assert_eq!(bits(&in_place), bits(&expected), "{}", cpu.name());
            prop_assert_eq!(bits(&out), bits(&answer), "{}", cpu.name());
            let mut copied = vec![f32::NAN; rows * columns];
            delta_rule(cpu, Some(&before), &mut copied, token, &mut out);
            prop_assert_eq!(bits(&copied), bits(&expected), "{}", cpu.name());
        }
    }

    #[test]
    fn gates_scale_by_their_sigmoids(n in 0..100usize, seed: u64) {
        let [x, gate] = [1, 2].map(|k| floats(seed ^ k, n));
        let sigmoid = |x: f32, g: f32| x / (1.0 + math::exp(-g));
        let expected: Vec<f32> = x.iter().zip(&gate).map(|(&x, &g)| sigmoid(x, g)).collect();
        for cpu in Cpu::all() {
            let mut got = x.clone();
            scale_by_sigmoid(cpu, &mut got, &gate);
            prop_assert_eq!(bits(&got), bits(&expected), "{}", cpu.name());
        }
    }
}

/// A key that was written gives its value back, and another key at a right angle does not change it.
#[test]
fn what_is_written_is_found_again() {
    for cpu in Cpu::all() {
        let mut state = vec![0.0; 4 * 33];
        let mut out = vec![0.0; 33];
        let values = floats(7, 2 * 33);
        let keys = [[0.6, 0.8, 0.0, 0.0], [-0.8, 0.6, 0.0, 0.0]];
        for (key, value) in keys.iter().zip(values.chunks(33)) {
            let token = DeltaToken {
                key,
                query: &keys[0],
                value,
                decay: Decay::One(1.0),
                beta: 1.0,
            };
            delta_rule(cpu, None, &mut state, token, &mut out);
            for (found, value) in out.iter().zip(&values) {
                assert!((found - value).abs() < 1e-6, "{}", cpu.name());
            }
        }
    }
}
