//! Hyper-connections: several residual streams, all of which each mixer and each FFN reads and changes.
//!
//! ```text
//! x = mixture of the streams        y = mixer(x) or ffn(x)        streamⱼ ← streamⱼ + shareⱼ · y
//! ```
//!
//! The embedding begins every stream; the head reads one more mixture. [`gated`] has the mixtures. The
//! streams of a row lie in [`Pass::beside`], one after the other, so that a pass can yield between two
//! layers; [`Pass::x`] holds the mixture that a part of a layer reads. A row depends on no other row.

mod gated;
mod sizes;

use emberflow_kernels::Compute;
use emberflow_models::config::{Mixing, ModelConfig};
use emberflow_storage::container::Container;

use crate::error::Error;
use crate::loader::Loader;
use crate::pass::Pass;
use crate::scratch::Scratch;
use crate::thread_buffer::renew;
use gated::{GatedBuffers, GatedMix};
pub(crate) use sizes::Reader;
use sizes::StreamSizes;

/// The hyper-connections of a model: weights and buffers.
#[derive(Debug)]
pub(crate) struct Hyper {
    sizes: StreamSizes,
    /// By layer: of its mixer, of its FFN.
    layers: Vec<[GatedMix; 2]>,
    head: GatedMix,
    buffers: GatedBuffers,
    /// Each stream's share of what the reader gives, `[rows × streams]`.
    shares: Vec<f32>,
}

impl Hyper {
    /// Reads and verifies the weights, for passes of up to `rows` rows; `None` for a model with one
    /// residual stream.
    pub fn load(
        container: &Container,
        c: &ModelConfig,
        rows: usize,
    ) -> Result<Option<Self>, Error> {
        let Some(hyper) = c.form.hyper else {
            return Ok(None);
        };
        let Mixing::Gated { rank } = hyper.mixing;
        let (from, sizes) = (&Loader { container }, StreamSizes::of(c, hyper));
        let mix = |reader| GatedMix::load(from, sizes, rank as usize, reader);
        let layer = |layer| Ok([mix(Reader::Mixer(layer))?, mix(Reader::Ffn(layer))?]);
        let layers = (0..c.layers as usize).map(layer);
        Ok(Some(Self {
            sizes,
            layers: layers.collect::<Result<_, Error>>()?,
            head: mix(Reader::Head)?,
            buffers: GatedBuffers::new(sizes, rank as usize, rows),
            shares: vec![0.0; rows * sizes.count],
        }))
    }

    /// Bytes of the buffers of [`Hyper::load`].
    pub fn bytes_for(c: &ModelConfig, rows: usize) -> u64 {
        let Some(hyper) = c.form.hyper else { return 0 };
        let Mixing::Gated { rank } = hyper.mixing;
        let sizes = StreamSizes::of(c, hyper);
        let mixed = GatedBuffers::floats(sizes, rank as usize, rows);
        4 * (mixed + rows * sizes.count) as u64
    }

    /// Resizes the buffers for another number of rows.
    pub fn set_rows(&mut self, rows: usize) {
        self.buffers.set_rows(rows);
        renew(&mut self.shares, rows * self.sizes.count);
    }

    /// Bytes read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let layers = self.layers.iter().flatten().map(GatedMix::len);
        layers.sum::<u64>() + self.head.len()
    }

    /// Begins every stream with the embedding, in `pass.x`.
    pub fn begin(&self, pass: &mut Pass) {
        let (d, width) = (self.sizes.d, self.sizes.width());
        let rows = pass
            .x
            .chunks_exact(d)
            .zip(pass.beside.chunks_exact_mut(width));
        for (x, streams) in rows.take(pass.rows) {
            let each = streams.chunks_exact_mut(d);
            each.for_each(|stream| stream.copy_from_slice(x));
        }
    }

    /// Mixes the streams into `pass.x` for a reader, and keeps the shares of what it will give.
    pub fn mix(&mut self, on: &Compute, reader: Reader, pass: &mut Pass, s: &mut Scratch) {
        let mix = match reader {
            Reader::Mixer(layer) => &self.layers[layer][0],
            Reader::Ffn(layer) => &self.layers[layer][1],
            Reader::Head => &self.head,
        };
        mix.run(on, pass, &mut self.buffers, &mut self.shares, s);
    }

    /// Adds what the last reader gave, `out [rows × d_model]`, to the streams.
    pub fn add(&self, on: &Compute, out: &[f32], pass: &mut Pass) {
        let (d, count) = (self.sizes.d, self.sizes.count);
        let streams = &mut pass.beside[..pass.rows * self.sizes.width()];
        on.workers
            .for_each_chunk_mut(streams, d, &|_, stream, values| {
                let (share, row) = (self.shares[stream], stream / count);
                let out = &out[row * d..][..d];
                values
                    .iter_mut()
                    .zip(out)
                    .for_each(|(x, y)| *x += share * y);
            });
    }
}
