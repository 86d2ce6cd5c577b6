//! Sizes of a pass's buffers, from what the layers declare.

use emberflow_kernels::Activations;
use emberflow_models::config::{Mixing, ModelConfig, NGrams, Parallel};

use crate::lane::ProductRoom;
use crate::matrix::Matrix;
use crate::mixer::{MatrixSpec, Needs, needs, ngram_floats, replayed_floats};
use crate::narrow_sizes;
use crate::options::Options;
use crate::replay::Replay;
use crate::scratch::{Scratch, Sizes};
use crate::tiles::TileSizes;

/// Dimensions of the buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScratchRoom {
    /// Most rows of a pass.
    pub rows: usize,
    /// Most rows of logits per call.
    pub logit_rows: usize,
    /// Most rows of a pass with drafts, whose recurrences can be replayed.
    pub replayed: usize,
    /// The model itself makes drafts.
    pub drafts: bool,
    /// Context length in positions.
    pub context: usize,
    pub threads: usize,
    /// FFNs are matrices that lie by rows.
    pub tiles: bool,
}

impl ScratchRoom {
    /// Dimensions for passes of `rows` rows.
    pub fn of(options: &Options, rows: usize, tiles: bool) -> Self {
        Self {
            rows,
            logit_rows: options.logit_rows(),
            replayed: options.speculation.logit_rows(),
            drafts: options.speculation.memory,
            context: options.context,
            threads: options.threads,
            tiles,
        }
    }

    /// Allocates the buffers for a model.
    pub fn scratch(self, c: &ModelConfig) -> Scratch {
        let mut scratch = Scratch::new(c, &self.sizes(c), self.rows, self.threads);
        scratch.replay = Replay::new(&replayed_floats(c), self.replayed);
        scratch
    }

    /// Bytes that [`ScratchRoom::scratch`] allocates.
    pub fn bytes(self, c: &ModelConfig) -> u64 {
        self.sizes(c).bytes(c, self.rows, self.threads)
    }

    /// Resizes the buffers of a model for another number of rows.
    pub fn resize(self, c: &ModelConfig, scratch: &mut Scratch) {
        scratch.set_rows(c, &self.sizes(c), self.rows);
    }

    fn sizes(self, c: &ModelConfig) -> Sizes {
        let (d, mixers) = (c.d_model as usize, mixers(c));
        let experts = narrow_sizes::widths(c).iter().sum();
        let block = mixers.iter().map(|mixer| mixer.row_floats);
        let partials = mixers.iter().filter_map(|mixer| mixer.scores);
        let partials = partials.map(|scores| scores.partials(self.context)).max();
        let widest = widest_input(c, &mixers);
        let tiles = TileSizes::of(c, self.rows, self.tiles);
        Sizes {
            by_row: [d, d, parallel(c), block.fold(experts, usize::max)],
            widest,
            thread: Matrix::scratch_len(widest.max(tiles.widest())),
            partials: partials.unwrap_or(0),
            logits: self.logit_rows * c.vocab as usize,
            replay: Replay::floats(&replayed_floats(c), self.replayed),
            state: match self.drafts {
                true => drafted_state(c, &mixers),
                false => 0,
            },
            tiles,
        }
    }
}

/// Largest products on a device: of projections for `rows` rows, and of the head for `logit_rows` rows.
pub(crate) fn product_room(
    c: &ModelConfig,
    rows: usize,
    logit_rows: usize,
    gates: usize,
) -> ProductRoom {
    let [d, vocab] = [c.d_model, c.vocab].map(|n| n as usize);
    let mixers = mixers(c);
    let results = mixers.iter().map(Needs::lane_results);
    let results = results.fold(d.max(gates), usize::max);
    let widest = widest_input(c, &mixers);
    let token = Activations::bytes(widest, 1).max(4 * widest);
    ProductRoom {
        input: rows.max(logit_rows) * token,
        results: (rows * results).max(logit_rows * vocab),
    }
}

/// What the mixer of each layer needs.
fn mixers(c: &ModelConfig) -> Vec<Needs> {
    (0..c.layers).map(|layer| needs(c, layer)).collect()
}

/// Floats of the largest recurrent state of a layer.
fn drafted_state(c: &ModelConfig, mixers: &[Needs]) -> usize {
    let states = mixers.iter().map(|mixer| mixer.state_floats);
    states.fold(ngram_floats(c), usize::max)
}

/// Width of [`Scratch::parallel`].
fn parallel(c: &ModelConfig) -> usize {
    let dense = (c.mixture.as_ref()).is_some_and(|mixture| mixture.parallel_dense);
    match c.form.parallel {
        Parallel::No if !dense => 0,
        Parallel::No | Parallel::OneNorm | Parallel::TwoNorms => c.d_model as usize,
    }
}

/// Columns of the widest matrix outside the FFN.
fn widest_input(c: &ModelConfig, mixers: &[Needs]) -> usize {
    let matrices = mixers.iter().flat_map(|mixer| &mixer.matrices);
    let mixer = matrices.map(MatrixSpec::input_width).max().unwrap_or(0);
    (c.d_model as usize)
        .max(mixer)
        .max(hyper(c))
        .max(2 * usize::from(c.form.mtp) * c.d_model as usize)
        .max(narrow_sizes::widest(c))
}

/// Columns of the widest matrix of hyper-connections.
fn hyper(c: &ModelConfig) -> usize {
    c.form.hyper.map_or(0, |of| {
        let rank = match of.mixing {
            Mixing::Gated { rank } => rank as usize,
            Mixing::Sinkhorn { .. } => 0,
        };
        let ngrams = c.form.ngrams.as_ref();
        let embedding = ngrams.map_or(0, NGrams::embedding);
        of.width(c.d_model).max(rank).max(embedding)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::Routes;
    use crate::testing::fixtures;

    #[test]
    fn declared_bytes_are_allocated() {
        let room = ScratchRoom {
            rows: 5,
            logit_rows: 2,
            replayed: 3,
            drafts: true,
            context: 1000,
            threads: 3,
            tiles: false,
        };
        for (name, c) in fixtures() {
            for rows in [5, 1, 64] {
                let (mut scratch, other) = (room.scratch(&c), ScratchRoom { rows, ..room });
                other.resize(&c, &mut scratch);
                let input = Activations::bytes(other.sizes(&c).widest, rows);
                let others = input + Routes::bytes_for(&c, rows);
                assert_eq!(
                    other.bytes(&c),
                    (scratch.allocated() + others) as u64,
                    "{name}, {rows} rows"
                );
            }
        }
    }
}
