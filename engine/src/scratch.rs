//! Scratch buffers of a forward pass, allocated once.

use emberflow_kernels::Activations;
use emberflow_models::config::{Mixing, ModelConfig, NGrams, Parallel};

use crate::lane::ProductRoom;
use crate::matrix::Matrix;
use crate::mixer::{MatrixSpec, Needs, needs};
use crate::narrow_sizes;
use crate::options::Options;
use crate::router::Routes;
use crate::thread_buffer::renew;

/// Dimensions of the buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScratchRoom {
    /// Most rows of a pass.
    pub rows: usize,
    /// Most rows of logits per call.
    pub batch: usize,
    /// Context length in positions.
    pub context: usize,
    pub threads: usize,
}

impl ScratchRoom {
    /// Dimensions for passes of `rows` rows.
    pub fn of(options: &Options, rows: usize) -> Self {
        Self {
            rows,
            batch: options.batch,
            context: options.context,
            threads: options.threads,
        }
    }
}

/// Largest products on a device: of projections for `rows` rows, and of the head for `batch` rows.
pub(crate) fn product_room(
    c: &ModelConfig,
    rows: usize,
    batch: usize,
    gates: usize,
) -> ProductRoom {
    let [d, vocab] = [c.d_model, c.vocab].map(|n| n as usize);
    let mixers = mixers(c);
    let results = mixers.iter().map(Needs::lane_results);
    let results = results.fold(d.max(gates), usize::max);
    let widest = widest_input(c, &mixers);
    let token = Activations::bytes(widest, 1).max(4 * widest);
    ProductRoom {
        input: rows.max(batch) * token,
        results: (rows * results).max(batch * vocab),
    }
}

/// Buffers of a pass, except its residual stream.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Normalised input of a block, `[rows × d_model]`.
    pub normed: Vec<f32>,
    /// Output of a block, `[rows × d_model]`.
    pub out: Vec<f32>,
    /// Attention's output in layers whose FFN reads the same input (parallel blocks), or the output of a parallel dense FFN,
    /// `[rows × d_model]`; otherwise empty.
    pub parallel: Vec<f32>,
    /// Buffers of a mixer, and then of experts of another width.
    pub block: RowBuffers,
    /// Attention's results per block of positions, of one token; empty if the context is a single block.
    pub partials: Vec<f32>,
    /// Dequantised rows for multi-token products, by thread.
    pub rows: Vec<Vec<f32>>,
    /// Quantised input of a matrix.
    pub input: Activations,
    /// Routes of a layer's rows to experts.
    pub routes: Routes,
    /// Logits of one token of each sequence, `[batch × vocab]`.
    pub logits: Vec<f32>,
}

/// Memory for buffers that exist at the same time, one after another. It is as large as those of one layer, the largest; the
/// next layer divides it again.
#[derive(Debug, Default)]
pub(crate) struct RowBuffers(Vec<f32>);

impl RowBuffers {
    /// Buffers of `rows` rows, each of its width. Their contents are arbitrary, or those of the last division with the
    /// same rows and widths.
    pub fn split<const N: usize>(&mut self, rows: usize, widths: [usize; N]) -> [&mut [f32]; N] {
        let mut rest = &mut self.0[..];
        widths.map(|width| {
            let (buffer, others) = std::mem::take(&mut rest).split_at_mut(rows * width);
            rest = others;
            buffer
        })
    }

    /// The same for reading.
    pub fn view<const N: usize>(&self, rows: usize, widths: [usize; N]) -> [&[f32]; N] {
        let mut rest = &self.0[..];
        widths.map(|width| {
            let (buffer, others) = rest.split_at(rows * width);
            rest = others;
            buffer
        })
    }
}

/// Sizes of the buffers in elements: what [`Scratch::new`] allocates and [`Scratch::bytes_for`] adds up.
struct Sizes {
    /// By row: `normed`, `out`, `parallel`, `block`.
    by_row: [usize; 4],
    /// Columns of the widest matrix outside the FFN.
    widest: usize,
    /// Elements of a thread's dequantised rows.
    thread: usize,
    partials: usize,
    logits: usize,
}

impl Sizes {
    fn new(c: &ModelConfig, context: usize, batch: usize) -> Self {
        let (d, mixers) = (c.d_model as usize, mixers(c));
        let experts = narrow_sizes::widths(c).iter().sum();
        let block = mixers.iter().map(|mixer| mixer.row_floats);
        let partials = mixers.iter().filter_map(|mixer| mixer.scores);
        let widest = widest_input(c, &mixers);
        Self {
            by_row: [d, d, parallel(c), block.fold(experts, usize::max)],
            widest,
            thread: Matrix::scratch_len(widest),
            partials: (partials.map(|scores| scores.partials(context)).max()).unwrap_or(0),
            logits: batch * c.vocab as usize,
        }
    }
}

impl Scratch {
    /// Allocates the buffers for a model.
    pub fn new(c: &ModelConfig, room: ScratchRoom) -> Self {
        let sizes = Sizes::new(c, room.context, room.batch);
        let mut new = Self {
            normed: Vec::new(),
            out: Vec::new(),
            parallel: Vec::new(),
            block: RowBuffers::default(),
            partials: vec![0.0; sizes.partials],
            rows: vec![vec![0.0; sizes.thread]; room.threads],
            input: Activations::default(),
            routes: Routes::new(c, 0),
            logits: vec![0.0; sizes.logits],
        };
        new.resize(c, &sizes, room.rows);
        new
    }

    /// Resizes the buffers for another number of rows, except the logits.
    pub fn set_rows(&mut self, c: &ModelConfig, rows: usize) {
        self.resize(c, &Sizes::new(c, 0, 0), rows);
    }

    fn resize(&mut self, c: &ModelConfig, sizes: &Sizes, rows: usize) {
        let Self {
            normed,
            out,
            parallel,
            block: RowBuffers(block),
            ..
        } = self;
        let buffers = [normed, out, parallel, block].into_iter();
        for (buffer, width) in buffers.zip(sizes.by_row) {
            renew(buffer, rows * width);
        }
        // The old buffer is freed first, so that both never exist at once.
        self.input = Activations::default();
        self.input = Activations::with_capacity(sizes.widest, rows);
        self.routes = Routes::new(c, rows);
    }

    /// Bytes allocated by [`Scratch::new`].
    pub fn bytes_for(c: &ModelConfig, room: ScratchRoom) -> u64 {
        let sizes = Sizes::new(c, room.context, room.batch);
        let by_row = room.rows * sizes.by_row.iter().sum::<usize>();
        let floats = by_row + sizes.logits + sizes.partials + room.threads * sizes.thread;
        let input = Activations::bytes(sizes.widest, room.rows);
        (4 * floats + input + Routes::bytes_for(c, room.rows)) as u64
    }
}

/// What the mixer of each layer needs.
fn mixers(c: &ModelConfig) -> Vec<Needs> {
    (0..c.layers).map(|layer| needs(c, layer)).collect()
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
    use crate::testing::fixtures;

    /// Bytes of the buffers, without those of activations and routes.
    fn allocated(s: &Scratch) -> usize {
        let RowBuffers(block) = &s.block;
        let single = [
            &s.normed,
            &s.out,
            &s.parallel,
            block,
            &s.partials,
            &s.logits,
        ];
        let buffers = single.into_iter().chain(&s.rows);
        buffers.map(|buffer| 4 * buffer.capacity()).sum()
    }

    #[test]
    fn declared_bytes_are_allocated() {
        let room = ScratchRoom {
            rows: 5,
            batch: 2,
            context: 1000,
            threads: 3,
        };
        for (name, c) in fixtures() {
            for rows in [5, 1, 64] {
                let mut scratch = Scratch::new(&c, room);
                scratch.set_rows(&c, rows);
                let declared = Scratch::bytes_for(&c, ScratchRoom { rows, ..room });
                let sizes = Sizes::new(&c, room.context, room.batch);
                let input = Activations::bytes(sizes.widest, rows);
                let others = input + Routes::bytes_for(&c, rows);
                assert_eq!(
                    declared,
                    (allocated(&scratch) + others) as u64,
                    "{name}, {rows} rows"
                );
            }
        }
    }

    #[test]
    fn buffers_are_next_to_each_other() {
        let mut block = RowBuffers((0..12).map(|x| x as f32).collect());
        let [first, none, second] = block.split(2, [2, 0, 3]);
        assert_eq!((first.len(), none.len(), second.len()), (4, 0, 6));
        second[0] = -1.0;
        let [_, second] = block.view(2, [2, 3]);
        assert_eq!(second, [-1.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    }
}
