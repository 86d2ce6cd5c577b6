//! Rounds each expert against its inputs.
//!
//! An input is weighted by the router's weight for the expert, a factor of the expert's output and so of its error, or
//! of its input.
//! An expert visited by few tokens is also rounded against other tokens of the layer, with a lower weight, since few
//! inputs leave most directions undetermined.

use emberflow_engine::ffn_hidden;
use emberflow_kernels::Row;
use emberflow_models::config::{Bank, ModelConfig};
use emberflow_models::names::{Role, TensorId, bundled};
use emberflow_predictor::rounding::{Covariance, Gemm};

use super::matrices::{Calibrator, is_calibrated};
use super::pass::{DOWN_BLOCK, Visits};
use super::rounded::{LayerRows, StoredRows};
use crate::Failure;

/// Minimum number of inputs, as a multiple of the input width.
const LEAST: usize = 2;

/// Weight of a token that does not visit the expert, relative to the mean weight of those that do.
const OTHERS: f32 = 0.5;

/// Tokens whose hidden values are computed in one batch.
const BLOCK: usize = 512;

/// Weighted inputs of an expert: row index and weight.
type WeightedInputs = Vec<(usize, f32)>;

/// The matrices of an expert that read its input: Gate, and Up if there is one.
fn before_down(c: &ModelConfig) -> impl Iterator<Item = Role> {
    let roles = bundled(c).iter().copied();
    roles.filter(|&role| role != Role::Down)
}

/// Rounds the experts of a layer.
pub(super) struct ExpertCalibrator<'a, 'b> {
    pub(super) calibrator: &'a Calibrator<'b>,
}

impl ExpertCalibrator<'_, '_> {
    /// Rounds all experts of a layer.
    pub(super) fn round(
        &self,
        layer: u32,
        visits: &Visits,
        rows: &mut LayerRows,
    ) -> Result<(), Failure> {
        let c = self.calibrator.source.config();
        let d = c.bundle_width() as usize;
        for bank in c.banks_of(layer) {
            let is_shared = bank.expert == c.experts;
            let from = if is_shared && !visits.dense.is_empty() {
                &visits.dense
            } else {
                &visits.x
            };
            let id = |role| TensorId {
                role,
                layer,
                expert: bank.expert,
            };
            let inputs: WeightedInputs = if is_shared {
                // every token visits the shared expert
                (0..from.len() / d).map(|token| (token, 1.0)).collect()
            } else {
                inputs_of(visits, bank.expert, d)
            };
            let mut covariance = Covariance::new(d);
            for_each_block(from, &inputs, d, |x, _| {
                covariance.add(&self.calibrator.on, x)
            });
            let ids: Vec<TensorId> = before_down(c).map(id).collect();
            self.calibrator.rows(&ids, covariance, rows)?;
            if is_calibrated(
                self.calibrator.source.config(),
                Role::Down,
                self.calibrator.options.dtype_of(id(Role::Down)),
            ) {
                let hidden = self.hidden(bank, from, &inputs, rows)?;
                rows.put(
                    id(Role::Down),
                    self.calibrator.down(id(Role::Down), hidden)?,
                );
            }
        }
        Ok(())
    }

    /// Weighted inputs of an expert's Down, block by block of neurons, computed with the rounded Gate and Up.
    fn hidden(
        &self,
        bank: Bank,
        from: &[f32],
        inputs: &WeightedInputs,
        rows: &LayerRows,
    ) -> Result<Vec<Covariance>, Failure> {
        let c = self.calibrator.source.config();
        let (d, neurons) = (c.bundle_width() as usize, bank.neurons as usize);
        let mut matrices = Vec::with_capacity(2);
        for role in before_down(c) {
            let id = TensorId {
                role,
                layer: bank.layer,
                expert: bank.expert,
            };
            let stored = rows.get(id);
            let stored = stored.ok_or_else(|| Failure::Fault(format!("{id} was not rounded")))?;
            matrices.push(self.values(stored));
        }
        let biases = [Role::GateBias, Role::UpBias].map(|role| self.bias(bank, role));
        let [gate_bias, up_bias] = biases;
        let biases = [gate_bias?, up_bias?];
        let sizes = (0..neurons).step_by(DOWN_BLOCK);
        let sizes = sizes.map(|first| DOWN_BLOCK.min(neurons - first));
        let mut sums: Vec<Covariance> = sizes.map(Covariance::new).collect();
        let (mut gemm, mut block) = (Gemm::new(&self.calibrator.on), Vec::new());
        let scales_input = c.mixture.as_ref().is_some_and(|m| m.scales_input);
        let take = |x: &[f32], factors: &[f32]| {
            let tokens = factors.len();
            let products = |gemm: &mut Gemm<'_>, matrix: &[f32]| {
                let mut y = vec![0.0; tokens * neurons];
                gemm.product(d, x, matrix, &mut y);
                y
            };
            let mut gates = products(&mut gemm, &matrices[0]);
            let ups = matrices.get(1).map(|matrix| products(&mut gemm, matrix));
            let mut ups = ups.unwrap_or_default();
            for (values, bias) in [(&mut gates, &biases[0]), (&mut ups, &biases[1])] {
                for row in values.chunks_exact_mut(neurons) {
                    row.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
                }
            }
            ffn_hidden(
                c.ffn_kind_of(bank.layer),
                self.calibrator.on.cpu,
                &mut gates,
                &ups,
            );
            if !scales_input {
                for (hidden, factor) in gates.chunks_exact_mut(neurons).zip(factors) {
                    hidden.iter_mut().for_each(|h| *h *= factor);
                }
            }
            for (b, sum) in sums.iter_mut().enumerate() {
                block.clear();
                for hidden in gates.chunks_exact(neurons) {
                    block.extend_from_slice(&hidden[b * DOWN_BLOCK..][..sum.size()]);
                }
                debug_assert_eq!(block.len(), tokens * sum.size());
                sum.add(&self.calibrator.on, &block);
            }
        };
        if scales_input {
            for_each_block(from, inputs, d, take)
        } else {
            for_each_unscaled_block(from, inputs, d, take)
        }
        Ok(sums)
    }

    /// Biases of an expert's neurons; empty if it has none.
    fn bias(&self, bank: Bank, role: Role) -> Result<Vec<f32>, Failure> {
        let id = TensorId::layer(role, bank.layer);
        if self.calibrator.shape(id).0 == 0 {
            return Ok(Vec::new());
        }
        let before = self.calibrator.source.config().banks_of(bank.layer);
        let before = before.take_while(|other| other.expert != bank.expert);
        let first = before.map(|other| other.neurons as usize).sum();
        let mut bias = vec![0.0; bank.neurons as usize];
        (self.calibrator.source).read_rows(id, first, bias.len(), &mut bias)?;
        Ok(bias)
    }

    /// A stored matrix as f32.
    fn values(&self, stored: &StoredRows) -> Vec<f32> {
        let rows = stored
            .bytes
            .chunks_exact(stored.dtype.row_bytes(stored.cols));
        let mut values = vec![0.0; rows.len() * stored.cols];
        for (row, values) in rows.zip(values.chunks_exact_mut(stored.cols)) {
            let row = Row::inline(stored.dtype, stored.cols, row);
            self.calibrator.on.cpu.dequantize(row, values);
        }
        values
    }
}

/// Tokens that visit an expert, with their weights; if there are too few, also others, evenly spread.
fn inputs_of(visits: &Visits, expert: u32, d: usize) -> WeightedInputs {
    let choices = visits.choices.chunks_exact(visits.chosen.max(1));
    let shares = choices.map(|choices| choices.iter().find(|c| c.expert == expert));
    let shares: Vec<Option<f32>> = shares.map(|found| found.map(|c| c.weight)).collect();
    let visitors = shares.iter().flatten();
    let (count, sum) = visitors.fold((0, 0.0), |(n, sum), share| (n + 1, sum + share));
    let mean = if count > 0 { sum / count as f32 } else { 1.0 };
    let (missing, others) = ((LEAST * d).saturating_sub(count), shares.len() - count);
    let mut passed = 0;
    let mut inputs = WeightedInputs::new();
    for (token, share) in shares.into_iter().enumerate() {
        match share {
            Some(share) => inputs.push((token, share)),
            None => {
                passed += 1;
                // Take every n-th of the others, so that the missing number is reached.
                if passed * missing / others > (passed - 1) * missing / others {
                    inputs.push((token, OTHERS * mean));
                }
            }
        }
    }
    inputs
}

/// Calls `f` with blocks of inputs, each multiplied by its weight, and the weights.
fn for_each_block(
    from: &[f32],
    inputs: &WeightedInputs,
    d: usize,
    mut take: impl FnMut(&[f32], &[f32]),
) {
    let mut scaled = Vec::new();
    for_each_unscaled_block(from, inputs, d, |x, factors| {
        scaled.clear();
        for (x, factor) in x.chunks_exact(d).zip(factors) {
            scaled.extend(x.iter().map(|x| x * factor));
        }
        take(&scaled, factors);
    });
}

/// Calls `f` with blocks of inputs and their weights.
fn for_each_unscaled_block(
    from: &[f32],
    inputs: &WeightedInputs,
    d: usize,
    mut take: impl FnMut(&[f32], &[f32]),
) {
    let (mut x, mut factors) = (Vec::new(), Vec::new());
    for block in inputs.chunks(BLOCK) {
        x.clear();
        factors.clear();
        for &(token, factor) in block {
            x.extend_from_slice(&from[token * d..][..d]);
            factors.push(factor);
        }
        take(&x, &factors);
    }
}
