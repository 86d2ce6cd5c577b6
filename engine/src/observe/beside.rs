//! The account of a lane.

use crate::engine::Engine;
use crate::forward::weights::Weights;
use crate::lane::{LaneReport, Reported};
use crate::matrix::Matrix;
use crate::mixer::Mixer;

impl Engine {
    /// The account of who computed beside the compute threads, since the engine was opened; `None` without a lane.
    pub fn lane(&self) -> Option<LaneReport> {
        let (decoder, needs) = (&self.decoder, self.needs());
        let (lane, store) = (decoder.ffn.lane.as_ref()?, &decoder.ffn.store);
        let weights = &decoder.weights;
        let chunk = self.prompt_chunk();
        let mut rows = vec![1, self.options().batch, chunk];
        rows.dedup();
        let resident = store.gates();
        Some(lane.report(&Reported {
            rows: &rows,
            chunk,
            clusters: [
                needs.clusters,
                needs.lane_clusters,
                needs.cluster * (needs.gate_len + needs.rest_len),
            ],
            outside: &store.outside,
            streamed: self.rows_streamed(),
            products: [
                decoded(weights),
                multiplied(weights, chunk) / projections(weights),
            ],
            gates: &|bank| resident.matrix(bank)?.lane(),
            waited: Matrix::waited_beside(weights.all_projections().chain([&weights.head])),
        }))
    }
}

/// Number of weights of projections.
fn projections(weights: &Weights) -> f64 {
    weights.all_projections().map(Matrix::weights).sum()
}

/// Those that a lane multiplies for `n` tokens.
fn multiplied(weights: &Weights, n: usize) -> f64 {
    let mixer = |mixer: &Mixer| {
        let matrices = mixer.matrices();
        let inputs = Matrix::weights_beside(matrices.shared(true), n);
        let others = matrices.shared(false);
        let others = others.map(|matrix| Matrix::weights_beside([matrix].into_iter(), n));
        inputs + others.sum::<f64>()
    };
    weights.mixers().map(mixer).sum()
}

/// Share of the weights of projections and head that a lane multiplies for one token.
fn decoded(weights: &Weights) -> f64 {
    let head = Matrix::weights_beside([&weights.head].into_iter(), 1);
    (multiplied(weights, 1) + head) / (projections(weights) + weights.head.weights())
}
