//! Scratch buffers of a forward pass, allocated once.

use emberflow_kernels::Activations;
use emberflow_models::config::ModelConfig;

use crate::replay::Replay;
use crate::router::Routes;
use crate::thread_buffer::renew;
use crate::tiles::{TileRoom, TileSizes};

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
    /// Of FFNs whose matrices lie by rows.
    pub tiles: TileRoom,
    /// Inputs of recurrences.
    pub replay: Replay,
    /// Recurrent state of a layer, while the model itself makes drafts.
    pub state: Vec<f32>,
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

/// Sizes of the buffers in elements: what [`Scratch::new`] allocates and [`Sizes::bytes`] adds up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// By row: `normed`, `out`, `parallel`, `block`.
    pub by_row: [usize; 4],
    /// Columns of the widest matrix outside the FFN.
    pub widest: usize,
    /// Elements of a thread's dequantised rows.
    pub thread: usize,
    pub partials: usize,
    pub logits: usize,
    /// Of [`Scratch::replay`].
    pub replay: usize,
    /// Of [`Scratch::state`].
    pub state: usize,
    pub tiles: TileSizes,
}

impl Sizes {
    /// Bytes of the buffers for `rows` rows and `threads` threads.
    pub fn bytes(&self, c: &ModelConfig, rows: usize, threads: usize) -> u64 {
        let by_row = rows * self.by_row.iter().sum::<usize>();
        let fixed = self.logits + self.partials + self.replay + self.state;
        let floats = by_row + fixed + threads * self.thread;
        let input = Activations::bytes(self.widest, rows);
        (4 * floats + input + Routes::bytes_for(c, rows) + self.tiles.bytes()) as u64
    }
}

impl Scratch {
    /// Allocates the buffers for `rows` rows and `threads` threads.
    pub fn new(c: &ModelConfig, sizes: &Sizes, rows: usize, threads: usize) -> Self {
        let mut new = Self {
            normed: Vec::new(),
            out: Vec::new(),
            parallel: Vec::new(),
            block: RowBuffers::default(),
            partials: vec![0.0; sizes.partials],
            rows: vec![vec![0.0; sizes.thread]; threads],
            input: Activations::default(),
            routes: Routes::new(c, 0),
            logits: vec![0.0; sizes.logits],
            tiles: TileRoom::default(),
            replay: Replay::default(),
            state: vec![0.0; sizes.state],
        };
        new.set_rows(c, sizes, rows);
        new
    }

    /// Resizes the buffers for another number of rows, except the logits and the threads' buffers.
    pub fn set_rows(&mut self, c: &ModelConfig, sizes: &Sizes, rows: usize) {
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
        self.tiles = TileRoom::default();
        self.tiles = TileRoom::new(sizes.tiles);
    }

    /// Bytes of the buffers, without those of activations and routes.
    #[cfg(test)]
    pub fn allocated(&self) -> usize {
        let RowBuffers(block) = &self.block;
        let single = [
            &self.normed,
            &self.out,
            &self.parallel,
            block,
            &self.partials,
            &self.logits,
            &self.state,
        ];
        let buffers = single.into_iter().chain(&self.rows);
        let floats: usize = buffers.map(Vec::capacity).sum();
        4 * (floats + self.replay.allocated())
    }
}

#[cfg(test)]
mod tests {
    use super::RowBuffers;

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
