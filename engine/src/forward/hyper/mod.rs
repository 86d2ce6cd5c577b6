//! Hyper-connections: several residual streams; each mixer and each FFN reads and changes all of them.
//!
//! ```text
//! x = mixture of the streams        y = mixer(x) or ffn(x)        streamⱼ ← Σᵢ Mᵢⱼ·streamᵢ + shareⱼ·y
//! ```
//!
//! The embedding initialises every stream; the head reads one more mixture, of the rows whose logits are
//! requested. The mixtures are in [`gated`], where `M` is the identity, and [`sinkhorn`]. [`Pass::aux`]
//! holds the streams of each row one after the other, so that a pass can yield between two layers;
//! [`Pass::x`] holds the mixture that a mixer or an FFN reads. Rows are independent.

mod gated;
mod sinkhorn;
mod sizes;

use emberflow_kernels::Compute;
use emberflow_models::config::{Mixing, ModelConfig};
use emberflow_storage::container::Container;

use crate::error::Error;
use crate::forward::pass::Pass;
use crate::loader::Loader;
use crate::scratch::Scratch;
use crate::thread_buffer::renew;
use gated::{GatedBuffers, GatedMix};
use sinkhorn::{SinkhornBuffers, SinkhornMix};
pub(crate) use sizes::Reader;
use sizes::StreamSizes;

/// The weights of one mixture.
#[derive(Debug)]
enum Mix {
    Gated(GatedMix),
    Sinkhorn(SinkhornMix),
}

/// Buffers of mixtures of one kind.
#[derive(Debug)]
enum MixBuffers {
    Gated(GatedBuffers),
    Sinkhorn(SinkhornBuffers),
}

impl Mix {
    fn load(
        from: &Loader<'_>,
        z: StreamSizes,
        mixing: Mixing,
        reader: Reader,
    ) -> Result<Self, Error> {
        Ok(match mixing {
            Mixing::Gated { rank } => Self::Gated(GatedMix::load(from, z, rank as usize, reader)?),
            Mixing::Sinkhorn { iterations, eps } => {
                Self::Sinkhorn(SinkhornMix::load(from, z, iterations, eps, reader)?)
            }
        })
    }

    /// Bytes of the matrices.
    fn len(&self) -> u64 {
        match self {
            Self::Gated(mix) => mix.len(),
            Self::Sinkhorn(mix) => mix.len(),
        }
    }
}

impl MixBuffers {
    fn new(z: StreamSizes, mixing: Mixing, rows: usize) -> Self {
        match mixing {
            Mixing::Gated { rank } => Self::Gated(GatedBuffers::new(z, rank as usize, rows)),
            Mixing::Sinkhorn { .. } => Self::Sinkhorn(SinkhornBuffers::new(z, rows)),
        }
    }

    /// Floats of [`MixBuffers::new`].
    fn floats(z: StreamSizes, mixing: Mixing, rows: usize) -> usize {
        match mixing {
            Mixing::Gated { rank } => GatedBuffers::floats(z, rank as usize, rows),
            Mixing::Sinkhorn { .. } => SinkhornBuffers::floats(z, rows),
        }
    }

    fn set_rows(&mut self, rows: usize) {
        match self {
            Self::Gated(buffers) => buffers.set_rows(rows),
            Self::Sinkhorn(buffers) => buffers.set_rows(rows),
        }
    }
}

/// The hyper-connections of a model: weights and buffers.
#[derive(Debug)]
pub(crate) struct Hyper {
    sizes: StreamSizes,
    /// By layer: of its mixer, of its FFN.
    layers: Vec<[Mix; 2]>,
    head: Mix,
    buffers: MixBuffers,
    /// Each stream's share of the reader's output, `[rows × streams]`.
    shares: Vec<f32>,
    /// The rows of a pass that are mixed.
    rows: Vec<usize>,
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
        let mixing = hyper.mixing;
        let (from, sizes) = (&Loader::of(container), StreamSizes::of(c, hyper));
        let mix = |reader| Mix::load(from, sizes, mixing, reader);
        let layer = |layer| Ok([mix(Reader::Mixer(layer))?, mix(Reader::Ffn(layer))?]);
        let layers = (0..c.layers as usize).map(layer);
        Ok(Some(Self {
            sizes,
            layers: layers.collect::<Result<_, Error>>()?,
            head: mix(Reader::Head)?,
            buffers: MixBuffers::new(sizes, mixing, rows),
            shares: vec![0.0; rows * sizes.count],
            rows: Vec::with_capacity(rows),
        }))
    }

    /// Bytes of the buffers of [`Hyper::load`].
    pub fn bytes_for(c: &ModelConfig, rows: usize) -> u64 {
        let Some(hyper) = c.form.hyper else { return 0 };
        let sizes = StreamSizes::of(c, hyper);
        let mixed = MixBuffers::floats(sizes, hyper.mixing, rows);
        (4 * (mixed + rows * sizes.count) + rows * size_of::<usize>()) as u64
    }

    /// Resizes the buffers for another number of rows.
    pub fn set_rows(&mut self, rows: usize) {
        self.buffers.set_rows(rows);
        renew(&mut self.shares, rows * self.sizes.count);
        self.rows = Vec::with_capacity(rows);
    }

    /// Bytes read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let layers = self.layers.iter().flatten().map(Mix::len);
        layers.sum::<u64>() + self.head.len()
    }

    /// Initialises every stream with the embedding, in `pass.x`.
    pub fn begin(&self, pass: &mut Pass) {
        let (d, width) = (self.sizes.d, self.sizes.width());
        let rows = pass.x.chunks_exact(d).zip(pass.aux.chunks_exact_mut(width));
        for (x, streams) in rows.take(pass.rows) {
            let each = streams.chunks_exact_mut(d);
            each.for_each(|stream| stream.copy_from_slice(x));
        }
    }

    /// Mixes the streams into `pass.x` for a mixer or an FFN, and stores the shares of its output.
    pub fn mix(&mut self, on: &Compute, reader: Reader, pass: &mut Pass, s: &mut Scratch) {
        let rows = pass.rows;
        self.mix_rows(on, reader, 0..rows, pass, s);
    }

    /// Mixes the streams of `rows` for a reader into the first rows of `pass.x`; returns their number.
    pub fn mix_rows(
        &mut self,
        on: &Compute,
        reader: Reader,
        rows: impl Iterator<Item = usize>,
        pass: &mut Pass,
        s: &mut Scratch,
    ) -> usize {
        let mix = match reader {
            Reader::Mixer(layer) => &self.layers[layer][0],
            Reader::Ffn(layer) => &self.layers[layer][1],
            Reader::Head => &self.head,
        };
        self.rows.clear();
        self.rows.extend(rows);
        let (rows, shares) = (&self.rows[..], &mut self.shares);
        match (mix, &mut self.buffers) {
            (Mix::Gated(mix), MixBuffers::Gated(buffers)) => {
                mix.run(on, rows, pass, buffers, shares, s)
            }
            (Mix::Sinkhorn(mix), MixBuffers::Sinkhorn(buffers)) => {
                mix.run(on, rows, pass, buffers, shares, s);
            }
            _ => unreachable!("a model has mixtures and buffers of one kind"),
        }
        rows.len()
    }

    /// Adds the last reader's output, `out [rows × d_model]`, to the streams.
    pub fn add(&self, on: &Compute, out: &[f32], pass: &mut Pass) {
        let (d, count, width) = (self.sizes.d, self.sizes.count, self.sizes.width());
        let streams = &mut pass.aux[..pass.rows * width];
        if let MixBuffers::Sinkhorn(buffers) = &self.buffers {
            (on.workers).for_each_chunk_mut(streams, width, &|_, row, streams| {
                let shares = &self.shares[row * count..][..count];
                let matrix = &buffers.matrices[row * count * count..][..count * count];
                sinkhorn::add(shares, matrix, &out[row * d..][..d], streams);
            });
            return;
        }
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
