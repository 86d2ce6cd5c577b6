//! Gated mixtures of residual streams (Qwen3.8-Flash-Next). Formulas as in `modeling_qwen4_exp.py`:
//!
//! ```text
//! nⱼ = rmsnorm(streamⱼ)        g = σ(Up · silu(Down · n / streams))        x = Σⱼ gⱼ ∘ nⱼ / streams
//! share = 2·σ(Inject · n / streams)
//! ```

use emberflow_kernels::{Compute, math, scale_by_sigmoid};
use emberflow_models::names::Role;

use super::sizes::{Reader, StreamSizes};
use crate::error::Error;
use crate::forward::pass::Pass;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::scratch::Scratch;
use crate::thread_buffer::renew;

/// The weights of one mixture.
#[derive(Debug)]
pub(super) struct GatedMix {
    sizes: StreamSizes,
    /// Norms of the streams, `[streams·d_model]`.
    norm: Vec<f32>,
    /// Low-rank path to the gates: `[rank × streams·d_model]`, `[streams·d_model × rank]`.
    down: Matrix,
    up: Matrix,
    /// Projection to the streams' shares, `[streams × streams·d_model]`; the head has none.
    inject: Option<Matrix>,
}

/// Buffers of a mixture.
#[derive(Debug)]
pub(super) struct GatedBuffers {
    /// Elements of a row's streams, and of its low-rank path.
    widths: [usize; 2],
    /// The normed streams, and their gates, `[rows × streams·d_model]` each.
    normed: Vec<f32>,
    gates: Vec<f32>,
    /// `[rows × rank]`.
    low: Vec<f32>,
}

impl GatedBuffers {
    /// Buffers for passes of up to `rows` rows.
    pub fn new(z: StreamSizes, rank: usize, rows: usize) -> Self {
        Self {
            widths: [z.width(), rank],
            normed: vec![0.0; rows * z.width()],
            gates: vec![0.0; rows * z.width()],
            low: vec![0.0; rows * rank],
        }
    }

    /// Resizes the buffers for another number of rows.
    pub fn set_rows(&mut self, rows: usize) {
        let [width, rank] = self.widths.map(|width| rows * width);
        renew(&mut self.normed, width);
        renew(&mut self.gates, width);
        renew(&mut self.low, rank);
    }

    /// Floats of [`GatedBuffers::new`].
    pub fn floats(z: StreamSizes, rank: usize, rows: usize) -> usize {
        rows * (2 * z.width() + rank)
    }
}

impl GatedMix {
    /// Loads the weights of the mixture that `reader` reads.
    pub fn load(
        from: &Loader<'_>,
        z: StreamSizes,
        rank: usize,
        reader: Reader,
    ) -> Result<Self, Error> {
        use Role::{
            HyperFfnDown, HyperFfnInject, HyperFfnNorm, HyperFfnUp, HyperHeadDown, HyperHeadNorm,
            HyperHeadUp, HyperMixerDown, HyperMixerInject, HyperMixerNorm, HyperMixerUp,
        };
        let ([norm, down, up], inject, layer) = match reader {
            Reader::Mixer(layer) => (
                [HyperMixerNorm, HyperMixerDown, HyperMixerUp],
                Some(HyperMixerInject),
                layer,
            ),
            Reader::Ffn(layer) => (
                [HyperFfnNorm, HyperFfnDown, HyperFfnUp],
                Some(HyperFfnInject),
                layer,
            ),
            Reader::Head => ([HyperHeadNorm, HyperHeadDown, HyperHeadUp], None, 0),
        };
        let (layer, width) = (layer as u32, z.width());
        let inject = inject.map(|role| from.matrix(role, layer, z.count, width));
        Ok(Self {
            sizes: z,
            norm: from.vector(norm, layer, width)?,
            down: from.matrix(down, layer, rank, width)?,
            up: from.matrix(up, layer, width, rank)?,
            inject: inject.transpose()?,
        })
    }

    /// Bytes of the matrices.
    pub fn len(&self) -> u64 {
        let inject = self.inject.as_ref().map_or(0, Matrix::len);
        self.down.len() + self.up.len() + inject
    }

    /// Mixes the streams of the `selected` rows of a pass into the first rows of `pass.x`; stores the streams'
    /// shares in `shares`.
    pub fn run(
        &self,
        on: &Compute,
        selected: &[usize],
        pass: &mut Pass,
        buffers: &mut GatedBuffers,
        shares: &mut [f32],
        s: &mut Scratch,
    ) {
        let z = self.sizes;
        let (rows, d, width, count) = (selected.len(), z.d, z.width(), z.count as f32);
        let normed = &mut buffers.normed[..rows * width];
        let streams = &pass.aux;
        on.workers.for_each_chunk_mut(normed, d, &|_, at, out| {
            let (row, stream) = (selected[at / z.count], at % z.count);
            let weight = &self.norm[stream * d..][..d];
            let stream_values = &streams[row * width + stream * d..][..d];
            on.cpu.rmsnorm(stream_values, weight, z.eps, out);
        });
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        let low = &mut buffers.low[..rows * self.down.rows()];
        self.down.matmul(on, input, &mut s.rows, low);
        if let Some(inject) = &self.inject {
            let shares = &mut shares[..rows * z.count];
            inject.matmul(on, input, &mut s.rows, shares);
            let share = |x: &mut f32| *x = 2.0 / (1.0 + math::exp(-*x / count));
            shares.iter_mut().for_each(share);
        }
        low.iter_mut().for_each(|value| *value /= count);
        on.cpu.silu(low);
        let input = Input::new(on.cpu, low, rows, &mut s.input);
        let gates = &mut buffers.gates[..rows * width];
        self.up.matmul(on, input, &mut s.rows, gates);
        let normed = &mut buffers.normed[..rows * width];
        (on.workers).for_each_chunk_pair_mut([normed, gates], [d; 2], |_, normed, gates| {
            scale_by_sigmoid(on.cpu, normed, gates);
        });
        let (normed, x) = (&buffers.normed, &mut pass.x[..rows * d]);
        on.workers.for_each_chunk_mut(x, d, &|_, row, x| {
            let (first, others) = normed[row * width..][..width].split_at(d);
            x.copy_from_slice(first);
            for other in others.chunks_exact(d) {
                x.iter_mut().zip(other).for_each(|(x, y)| *x += y);
            }
            x.iter_mut().for_each(|x| *x /= count);
        });
    }
}
