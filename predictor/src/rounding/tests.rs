//! Matrices compared with a reference that follows the definition step by step.

use emberflow_kernels::{
    Compute, DType, Outliers, Row, outlier_channels, quantize_q4c, quantize_row,
};
use proptest::prelude::*;

use super::factor::DAMPING;
use super::scale::{Grid, inverse_of};
use super::{ChannelRounder, Covariance, Inputs, Rounder};

/// Correlated inputs, `[tokens × size]`: each follows the one before it.
fn inputs(seed: u64, tokens: usize, size: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut all = Vec::with_capacity(tokens * size);
    for _ in 0..tokens {
        let mut last = 0.0;
        for i in 0..size {
            last = 0.8 * last + random.f32() - 0.5;
            // Some inputs are always zero, as those of neurons that never fire.
            all.push(if i % 7 == 3 { 0.0 } else { last });
        }
    }
    all
}

fn weights(seed: u64, count: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed ^ 0x5EED);
    let one = |random: &mut fastrand::Rng| random.f32() + random.f32() + random.f32() - 1.5;
    (0..count).map(|_| one(&mut random)).collect()
}

fn covariance(on: &Compute, inputs: &[f32], size: usize) -> Vec<f32> {
    let mut sum = Covariance::new(size);
    sum.add(on, inputs);
    sum.mean()
}

fn values(on: &Compute, dtype: DType, len: usize, stored: &[u8]) -> Vec<f32> {
    let mut all = vec![0.0; stored.len() / dtype.row_bytes(len) * len];
    let rows = stored.chunks_exact(dtype.row_bytes(len));
    for (row, out) in rows.zip(all.chunks_exact_mut(len)) {
        on.cpu.dequantize(Row::inline(dtype, len, row), out);
    }
    all
}

fn plain(on: &Compute, dtype: DType, len: usize, rows: &[f32]) -> Vec<f32> {
    let stride = dtype.row_bytes(len);
    let mut stored = vec![0; rows.len() / len * stride];
    for (row, out) in rows.chunks_exact(len).zip(stored.chunks_exact_mut(stride)) {
        let (quants, scales) = out.split_at_mut(dtype.quants_bytes(len));
        quantize_row(dtype, row, quants, scales).unwrap();
    }
    values(on, dtype, len, &stored)
}

fn turned(matrix: &[f32], cols: usize) -> Vec<f32> {
    let mut out = Vec::new();
    super::transpose(matrix, cols, &mut out);
    out
}

/// Squared errors of the products, by definition: `tr((W − Q) H (W − Q)ᵀ)`.
fn loss(inputs: &[f32], size: usize, w: &[f32], q: &[f32]) -> f64 {
    let mut sum = 0.0;
    for x in inputs.chunks_exact(size) {
        for (w, q) in w.chunks_exact(size).zip(q.chunks_exact(size)) {
            let terms = x.iter().zip(w.iter().zip(q));
            let error: f64 = terms
                .map(|(x, (w, q))| f64::from(*x) * f64::from(w - q))
                .sum();
            sum += error * error;
        }
    }
    sum
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Both layouts, in every grouped format: never worse than rounding each weight on its own.
    #[test]
    fn rounding_against_inputs_is_never_worse(
        seed in any::<u64>(),
        size in prop_oneof![1usize..100, 250usize..300],
        outputs in prop_oneof![1usize..70, 250usize..300],
        tokens in 0usize..60,
    ) {
        let on = Compute::new(2, None);
        let (x, w) = (inputs(seed, tokens, size), weights(seed, outputs * size));
        let covariance = covariance(&on, &x, size);
        let inputs = Inputs::new(&on, size, covariance);
        let (by_rows, by_columns) = (Rounder::for_rows(&inputs), Rounder::for_columns(&inputs));
        for dtype in [DType::Q4, DType::Q4k, DType::Q8] {
            let rows = by_rows.rows(dtype, &w).unwrap().unwrap();
            let columns = by_columns.columns(dtype, outputs, &turned(&w, size)).unwrap().unwrap();
            let by_column = plain(&on, dtype, outputs, &turned(&w, size));
            let cases = [
                (values(&on, dtype, size, &rows), plain(&on, dtype, size, &w)),
                (
                    turned(&values(&on, dtype, outputs, &columns), outputs),
                    turned(&by_column, outputs),
                ),
            ];
            for (with, without) in cases {
                let (with, without) = (loss(&x, size, &w, &with), loss(&x, size, &w, &without));
                prop_assert!(with <= without * (1.0 + 1e-4) + 1e-9, "{dtype}: {with} {without}");
            }
        }
    }
}

/// Damping added to every variance.
fn damping(covariance: &[f32], n: usize) -> f64 {
    let variances = (0..n).map(|i| f64::from(covariance[i * (n + 1)]));
    DAMPING * variances.sum::<f64>() / n as f64
}

/// Inverse of the damped covariance, by Gauss-Jordan.
fn inverse(covariance: &[f32], n: usize) -> Vec<Vec<f64>> {
    let damping = damping(covariance, n);
    let one = |i: usize, j: usize| f64::from(u8::from(i == j));
    let damped = |i: usize, j: usize| f64::from(covariance[i * n + j]) + damping * one(i, j);
    let row = |i| {
        let left = (0..n).map(move |j| damped(i, j));
        left.chain((0..n).map(move |j| one(i, j))).collect()
    };
    let mut a: Vec<Vec<f64>> = (0..n).map(row).collect();
    for i in 0..n {
        let pivot = a[i][i];
        a[i].iter_mut().for_each(|x| *x /= pivot);
        let row = a[i].clone();
        for (_, other) in a.iter_mut().enumerate().filter(|(k, _)| *k != i) {
            let factor = other[i];
            let both = other.iter_mut().zip(&row);
            both.for_each(|(x, r)| *x -= factor * r);
        }
    }
    a.into_iter().map(|row| row[n..].to_vec()).collect()
}

/// Rounds one row by definition: after each weight, the others take the values that minimise the
/// error of the products, from the inverse of the damped covariance; the rounded weight is then
/// eliminated from it.
fn reference(covariance: &[f32], w: &[f32], grid: Grid) -> Vec<f32> {
    let n = w.len();
    let mut inverse = inverse(covariance, n);
    // Cost of an error in each weight after those that follow have compensated it.
    let mut later = inverse.clone();
    let mut costs = vec![0.0; n];
    for (i, cost) in costs.iter_mut().enumerate() {
        *cost = (1.0 / later[i][i]) as f32;
        eliminate(&mut later, i);
    }
    let scale = grid.best_scale(w, &costs).to_f32();
    let mut row: Vec<f64> = w.iter().map(|&x| f64::from(x)).collect();
    for i in 0..n {
        let rounded = f64::from(grid.nearest(row[i] as f32, inverse_of(scale)) * scale);
        let error = (row[i] - rounded) / inverse[i][i];
        let later = row.iter_mut().zip(&inverse[i]).skip(i + 1);
        later.for_each(|(x, share)| *x -= error * share);
        row[i] = rounded;
        eliminate(&mut inverse, i);
    }
    let rounded = row.into_iter().map(|x| x as f32).collect();
    settled(
        covariance,
        w,
        rounded,
        |x| grid.nearest(x, inverse_of(scale)) * scale,
        scale,
    )
}

/// Moves each weight step by step along the grid to the smallest loss, while the others are fixed.
fn settled(
    covariance: &[f32],
    w: &[f32],
    mut rounded: Vec<f32>,
    nearest: impl Fn(f32) -> f32,
    step: f32,
) -> Vec<f32> {
    let n = w.len();
    let damping = damping(covariance, n);
    let loss = |q: &[f32]| {
        let e: Vec<f64> = w.iter().zip(q).map(|(w, q)| f64::from(w - q)).collect();
        let pairs = (0..n * n).map(|at| e[at / n] * e[at % n] * f64::from(covariance[at]));
        pairs.sum::<f64>() + damping * e.iter().map(|e| e * e).sum::<f64>()
    };
    for i in (0..3).flat_map(|_| 0..n) {
        loop {
            let [down, up] = [-step, step].map(|step| {
                let mut other = rounded.clone();
                other[i] = nearest(rounded[i] + step);
                other
            });
            let best = if loss(&down) < loss(&up) { down } else { up };
            if loss(&best) >= loss(&rounded) {
                break;
            }
            rounded = best;
        }
    }
    rounded
}

/// Eliminates input `i` from an inverse.
fn eliminate(inverse: &mut [Vec<f64>], i: usize) {
    let row = inverse[i].clone();
    let others = inverse.iter_mut().enumerate().filter(|(j, _)| *j != i);
    for (_, other) in others {
        let factor = other[i] / row[i];
        other
            .iter_mut()
            .zip(&row)
            .for_each(|(x, r)| *x -= factor * r);
    }
}

#[test]
fn a_row_is_rounded_as_the_definition_says() {
    let on = Compute::new(1, None);
    let mut better = 0;
    for seed in 0..8 {
        let size = 20;
        let (x, w) = (inputs(seed, 200, size), weights(seed, size));
        let covariance = covariance(&on, &x, size);
        let Some(grid) = Grid::of(DType::Q4) else {
            panic!("q4 has scales");
        };
        let expected = reference(&covariance, &w, grid);
        let inputs = Inputs::new(&on, size, covariance);
        let found = Rounder::for_rows(&inputs)
            .rows(DType::Q4, &w)
            .unwrap()
            .unwrap();
        let plain = plain(&on, DType::Q4, size, &w);
        let [with, without] = [&expected, &plain].map(|q| loss(&x, size, &w, q));
        let best = if with < without { expected } else { plain };
        assert_eq!(values(&on, DType::Q4, size, &found), best, "seed {seed}");
        better += u32::from(with < 0.8 * without);
    }
    assert!(better >= 6, "{better} of 8 are better by a fifth");
}

/// The outliers of a matrix, and its rows in q4c rounded one by one.
fn plain_channels(w: &[f32], size: usize) -> (Vec<u16>, Vec<u8>) {
    let squares = |i: usize| w[i..].iter().step_by(size).map(|w| w * w).sum();
    let channels = outlier_channels(&(0..size).map(squares).collect::<Vec<f32>>());
    let stride = DType::Q4c.row_bytes(size);
    let mut stored = vec![0; w.len() / size * stride];
    for (row, out) in w.chunks_exact(size).zip(stored.chunks_exact_mut(stride)) {
        let (quants, scales) = out.split_at_mut(DType::Q4c.quants_bytes(size));
        quantize_q4c(row, &channels, quants, scales).unwrap();
    }
    (channels, stored)
}

/// The elements that are outliers of a row, whose nibbles stand for zero.
fn outliers_of(row: &[u8], len: usize) -> Vec<u16> {
    let its = Outliers::of(Row::inline(DType::Q4c, len, row));
    let nibble = |i: usize| row[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15;
    let channels = its.each().map(|(_, channel)| {
        assert_eq!(nibble(channel), 8);
        channel as u16
    });
    channels.collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Rows with one scale, stored by outputs and by inputs: never worse than rounding each weight on its own, with as
    /// many outliers as the format has.
    #[test]
    fn rows_with_one_scale_are_never_worse(
        seed in any::<u64>(),
        size in prop_oneof![1usize..140, 250usize..300],
        outputs in 1usize..100,
        tokens in 0usize..60,
    ) {
        let (on, dtype) = (Compute::new(2, None), DType::Q4c);
        let (x, w) = (inputs(seed, tokens, size), weights(seed, outputs * size));
        let inputs = Inputs::new(&on, size, covariance(&on, &x, size));
        let (channels, by_row) = plain_channels(&w, size);
        let rows = ChannelRounder::for_rows(&inputs, channels.clone()).rows(&w).unwrap();
        for row in rows.chunks_exact(dtype.row_bytes(size)) {
            prop_assert_eq!(outliers_of(row, size), channels.clone());
        }
        let columns = turned(&w, size);
        let by_column = plain(&on, dtype, outputs, &columns);
        let columns = ChannelRounder::for_columns(&inputs).columns(outputs, &columns).unwrap();
        for row in columns.chunks_exact(dtype.row_bytes(outputs)) {
            outliers_of(row, outputs);
        }
        let cases = [
            [values(&on, dtype, size, &rows), values(&on, dtype, size, &by_row)],
            [values(&on, dtype, outputs, &columns), by_column].map(|of| turned(&of, outputs)),
        ];
        for both in cases {
            let [with, without] = both.map(|q| loss(&x, size, &w, &q));
            prop_assert!(with <= without * (1.0 + 1e-4) + 1e-9, "{} {}", with, without);
        }
    }
}

/// Most of the error of the products goes if inputs are correlated.
#[test]
fn errors_of_rows_with_one_scale_are_compensated() {
    let (on, dtype) = (Compute::new(2, None), DType::Q4c);
    let (size, outputs) = (200, 90);
    let (x, w) = (inputs(3, 2000, size), weights(3, outputs * size));
    let inputs = Inputs::new(&on, size, covariance(&on, &x, size));
    let (channels, by_row) = plain_channels(&w, size);
    let rows = ChannelRounder::for_rows(&inputs, channels).rows(&w);
    let columns = turned(&w, size);
    let by_column = plain(&on, dtype, outputs, &columns);
    let columns = ChannelRounder::for_columns(&inputs).columns(outputs, &columns);
    let of = |q: &[f32]| loss(&x, size, &w, q);
    let [with, without] =
        [rows.unwrap(), by_row].map(|of_all| of(&values(&on, dtype, size, &of_all)));
    assert!(with < 0.5 * without, "rows: {with} {without}");
    let columns = values(&on, dtype, outputs, &columns.unwrap());
    let [with, without] = [columns, by_column].map(|q| of(&turned(&q, outputs)));
    assert!(with < 0.5 * without, "columns: {with} {without}");
}

#[test]
fn threads_change_no_byte() {
    let (size, outputs) = (70, 45);
    let (x, w) = (inputs(1, 100, size), weights(1, outputs * size));
    let made = [1, 3].map(|threads| {
        let on = Compute::new(threads, None);
        let covariance = covariance(&on, &x, size);
        let inputs = Inputs::new(&on, size, covariance);
        let (by_rows, by_columns) = (Rounder::for_rows(&inputs), Rounder::for_columns(&inputs));
        let columns = by_columns.columns(DType::Q4, outputs, &turned(&w, size));
        let of_channels = [
            ChannelRounder::for_rows(&inputs, vec![7, 60]).rows(&w),
            ChannelRounder::for_columns(&inputs).columns(outputs, &turned(&w, size)),
        ];
        let grouped = (by_rows.rows(DType::Q4, &w).unwrap(), columns.unwrap());
        (grouped, of_channels.map(Result::unwrap))
    });
    assert!(made[0] == made[1]);
}
