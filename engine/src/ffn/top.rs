//! Gaussian top-k: of a token's gates, those above a cutoff that depends on all of them.
//!
//! The cutoff is the mean plus a multiple of the deviation, so that of normally distributed gates
//! the given share is zero (`_gaussian_topk` in `modeling_gemma3n.py`). Sums run in packed order, in
//! as many chains as there are lanes, whatever the number of rows.

use emberflow_kernels::Cpu;
use emberflow_models::config::ModelConfig;

use super::activation::Gating;

/// Chains of a sum.
const LANES: usize = 8;

/// Cutoffs of the rows of a unit.
#[derive(Debug, Default)]
pub(super) struct Tops {
    /// By layer: the multiple of the deviation, or `None` for a layer whose gates are all used.
    multiples: Vec<Option<f32>>,
    /// Sums and sums of squares, `[2 × LANES × rows]`.
    sums: Vec<f64>,
    cutoffs: Vec<f32>,
}

impl Tops {
    /// For passes of up to `rows` rows.
    pub fn new(c: &ModelConfig, rows: usize) -> Self {
        let multiple = |&share: &f32| (share > 0.0).then(|| quantile(share.into()) as f32);
        let room = if c.form.has_gate_top() { rows } else { 0 };
        Self {
            multiples: c.form.gate_top.iter().map(multiple).collect(),
            sums: Vec::with_capacity(2 * LANES * room),
            cutoffs: Vec::with_capacity(room),
        }
    }

    /// The multiple of layer `layer`, if it has one.
    pub fn of(&self, layer: usize) -> Option<f32> {
        self.multiples.get(layer).copied().flatten()
    }

    /// The cutoffs of `rows` rows with `gates`, `[neurons × rows]`.
    pub fn find(&mut self, multiple: f32, gates: &[f32], rows: usize) -> &[f32] {
        self.sums.clear();
        self.sums.resize(2 * LANES * rows, 0.0);
        let (sums, squares) = self.sums.split_at_mut(LANES * rows);
        for block in gates.chunks(LANES * rows) {
            for ((sum, square), &gate) in sums.iter_mut().zip(&mut *squares).zip(block) {
                let gate = f64::from(gate);
                *sum += gate;
                *square += gate * gate;
            }
        }
        let neurons = (gates.len() / rows) as f64;
        let total =
            |lanes: &[f64], row: usize| (0..LANES).map(|l| lanes[l * rows + row]).sum::<f64>();
        self.cutoffs.clear();
        for row in 0..rows {
            let mean = total(sums, row) / neurons;
            let variance = (total(squares, row) / neurons - mean * mean).max(0.0);
            let deviation = libm::sqrt(variance);
            self.cutoffs
                .push((mean + deviation * f64::from(multiple)) as f32);
        }
        &self.cutoffs
    }
}

/// Activates what of `gates`, `[neurons × rows]`, is above the rows' `cutoffs`; the others become
/// zero.
pub(super) fn apply(gating: Gating, cpu: Cpu, cutoffs: &[f32], gates: &mut [f32]) {
    for gates in gates.chunks_exact_mut(cutoffs.len()) {
        for (i, &cutoff) in cutoffs.iter().enumerate() {
            let above = gates[i] - cutoff;
            gates[i] = above.max(0.0);
            if above > 0.0 {
                gating.activate(cpu, &mut gates[i..=i]);
            }
        }
    }
}

/// The point of the normal distribution below which `share` of it lies.
fn quantile(share: f64) -> f64 {
    // erfc keeps the digits of shares near 1
    let below = |x: f64| 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    let (mut low, mut high) = (-9.0, 9.0);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        match below(middle) < share {
            true => low = middle,
            false => high = middle,
        }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quantile_is_that_of_the_normal_distribution() {
        for (share, expected) in [
            (0.5, 0.0),
            (0.95, 1.644_853_626_951),
            (0.1, -1.281_551_565_545),
        ] {
            assert!((quantile(share) - expected).abs() < 1e-9, "{share}");
        }
    }

    #[test]
    fn a_row_has_the_same_cutoff_alone_and_among_others() {
        let gate = |n: usize, row: usize| ((n * 37 + row * 11) % 101) as f32 / 17.0 - 3.0;
        let (neurons, rows) = (301, 5);
        let gates = |of: &[usize]| -> Vec<f32> {
            let all = (0..neurons).flat_map(|n| of.iter().map(move |&row| gate(n, row)));
            all.collect()
        };
        let mut tops = Tops::default();
        let all: Vec<f32> = tops.find(1.6, &gates(&[0, 1, 2, 3, 4]), rows).to_vec();
        for (row, &among) in all.iter().enumerate() {
            let alone = tops.find(1.6, &gates(&[row]), 1)[0];
            assert_eq!(alone.to_bits(), among.to_bits());
        }
        let of_row = gates(&[2]);
        let mean = of_row.iter().sum::<f32>() / neurons as f32;
        let square = of_row.iter().map(|g| (g - mean) * (g - mean)).sum::<f32>();
        let expected = mean + 1.6 * (square / neurons as f32).sqrt();
        assert!((all[2] - expected).abs() < 1e-4);
    }
}
