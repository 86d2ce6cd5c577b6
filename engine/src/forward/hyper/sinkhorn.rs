//! Manifold-constrained hyper-connections (mHC, DeepSeek-V4). Formulas as in `modeling_deepseek_v4.py`:
//!
//! ```text
//! [a, b, c] = scale ∘ (Mix · rmsnorm(streams)) + base        x = Σⱼ (σ(aⱼ) + ε)·streamⱼ
//! shareⱼ = 2·σ(bⱼ)        M = sinkhorn(softmax of the rows of c, + ε)
//! streamⱼ ← shareⱼ·y + Σᵢ Mᵢⱼ·streamᵢ
//! ```
//!
//! The norm covers all streams of a row together and has no weights. `sinkhorn` divides the columns of a
//! matrix by their sums `+ ε`, then alternates between rows and columns.

use emberflow_kernels::{Compute, math};
use emberflow_models::config::MAX_STREAMS;
use emberflow_models::names::Role;

use super::sizes::{Reader, StreamSizes};
use crate::error::Error;
use crate::forward::pass::Pass;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::norm::sigmoid;
use crate::scratch::Scratch;
use crate::thread_buffer::renew;

/// The weights of one mixture.
#[derive(Debug)]
pub(super) struct SinkhornMix {
    sizes: StreamSizes,
    iterations: u32,
    eps: f32,
    /// `[(2 + streams)·streams × streams·d_model]`; for the head, only its first rows.
    mix: Matrix,
    base: Vec<f32>,
    /// Factors of its parts; the head has one part.
    scale: Vec<f32>,
}

/// Buffers of a mixture.
#[derive(Debug)]
pub(super) struct SinkhornBuffers {
    sizes: StreamSizes,
    /// The normed streams, `[rows × streams·d_model]`.
    normed: Vec<f32>,
    /// Inputs of the mixtures, `[rows × (2 + streams)·streams]`.
    numbers: Vec<f32>,
    /// The matrices that mix the streams, `[rows × streams²]`.
    pub matrices: Vec<f32>,
}

impl SinkhornBuffers {
    /// Buffers for passes of up to `rows` rows.
    pub fn new(z: StreamSizes, rows: usize) -> Self {
        Self {
            sizes: z,
            normed: vec![0.0; rows * z.width()],
            numbers: vec![0.0; rows * (2 + z.count) * z.count],
            matrices: vec![0.0; rows * z.count * z.count],
        }
    }

    /// Resizes the buffers for another number of rows.
    pub fn set_rows(&mut self, rows: usize) {
        let (width, n) = (self.sizes.width(), self.sizes.count);
        renew(&mut self.normed, rows * width);
        renew(&mut self.numbers, rows * (2 + n) * n);
        renew(&mut self.matrices, rows * n * n);
    }

    /// Floats of [`SinkhornBuffers::new`].
    pub fn floats(z: StreamSizes, rows: usize) -> usize {
        rows * (z.width() + (2 + 2 * z.count) * z.count)
    }
}

impl SinkhornMix {
    /// Loads the weights of the mixture that `reader` reads.
    pub fn load(
        from: &Loader<'_>,
        z: StreamSizes,
        iterations: u32,
        eps: f32,
        reader: Reader,
    ) -> Result<Self, Error> {
        use Role::{
            HyperFfnBase, HyperFfnMix, HyperFfnScale, HyperHeadBase, HyperHeadMix, HyperHeadScale,
            HyperMixerBase, HyperMixerMix, HyperMixerScale,
        };
        let whole = (2 + z.count) * z.count;
        let ([mix, base, scale], layer, rows, scales) = match reader {
            Reader::Mixer(layer) => (
                [HyperMixerMix, HyperMixerBase, HyperMixerScale],
                layer,
                whole,
                3,
            ),
            Reader::Ffn(layer) => ([HyperFfnMix, HyperFfnBase, HyperFfnScale], layer, whole, 3),
            Reader::Head => ([HyperHeadMix, HyperHeadBase, HyperHeadScale], 0, z.count, 1),
        };
        let layer = layer as u32;
        Ok(Self {
            sizes: z,
            iterations,
            eps,
            mix: from.matrix(mix, layer, rows, z.width())?,
            base: from.vector(base, layer, rows)?,
            scale: from.vector(scale, layer, scales)?,
        })
    }

    /// Bytes of the matrix.
    pub fn len(&self) -> u64 {
        self.mix.len()
    }

    /// Mixes the streams of the `selected` rows of a pass into the first rows of `pass.x`; stores the streams'
    /// shares in `shares` and, except for the head, the matrices in `buffers`.
    pub fn run(
        &self,
        on: &Compute,
        selected: &[usize],
        pass: &mut Pass,
        buffers: &mut SinkhornBuffers,
        shares: &mut [f32],
        s: &mut Scratch,
    ) {
        let z = self.sizes;
        let (rows, d, width, n) = (selected.len(), z.d, z.width(), z.count);
        let normed = &mut buffers.normed[..rows * width];
        let streams = &pass.aux;
        on.workers
            .for_each_chunk_mut(normed, width, &|_, row, out| {
                let x = &streams[selected[row] * width..][..width];
                let mean = on.cpu.dot_f32(x, x) / width as f32;
                let factor = 1.0 / libm::sqrtf(mean + z.eps);
                out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
            });
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        let each = self.mix.rows();
        let numbers = &mut buffers.numbers[..rows * each];
        self.mix.matmul(on, input, &mut s.rows, numbers);
        for (row, numbers) in numbers.chunks_exact_mut(each).enumerate() {
            for (i, (number, base)) in numbers.iter_mut().zip(&self.base).enumerate() {
                *number = *number * self.scale[(i / n).min(2)] + base;
            }
            let (weights, rest) = numbers.split_at_mut(n);
            for weight in &mut *weights {
                *weight = sigmoid(*weight) + self.eps;
            }
            if rest.is_empty() {
                continue;
            }
            let (given, matrix) = rest.split_at(n);
            let shares = &mut shares[row * n..][..n];
            for (share, given) in shares.iter_mut().zip(given) {
                *share = 2.0 * sigmoid(*given);
            }
            let target = &mut buffers.matrices[row * n * n..][..n * n];
            target.copy_from_slice(matrix);
            self.balance(target);
        }
        let (numbers, x) = (&buffers.numbers, &mut pass.x[..rows * d]);
        on.workers.for_each_chunk_mut(x, d, &|_, row, x| {
            x.fill(0.0);
            let weights = &numbers[row * each..][..n];
            let streams = streams[selected[row] * width..][..width].chunks_exact(d);
            for (stream, weight) in streams.zip(weights) {
                x.iter_mut()
                    .zip(stream)
                    .for_each(|(x, y)| *x = weight.mul_add(*y, *x));
            }
        });
    }

    /// Scales a matrix, given as logarithms, so that its rows and columns sum to nearly 1.
    fn balance(&self, matrix: &mut [f32]) {
        let n = self.sizes.count;
        for row in matrix.chunks_exact_mut(n) {
            let most = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
            row.iter_mut().for_each(|x| *x = math::exp(*x - most));
            let sum = row.iter().fold(0.0, |sum, x| sum + x);
            row.iter_mut().for_each(|x| *x = *x / sum + self.eps);
        }
        self.divide_columns(matrix);
        for _ in 1..self.iterations {
            for row in matrix.chunks_exact_mut(n) {
                let sum = row.iter().fold(0.0, |sum, x| sum + x) + self.eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
            self.divide_columns(matrix);
        }
    }

    fn divide_columns(&self, matrix: &mut [f32]) {
        let n = self.sizes.count;
        for column in 0..n {
            let values = || (0..n).map(move |row| row * n + column);
            let sum = values().fold(0.0, |sum, at| sum + matrix[at]) + self.eps;
            values().for_each(|at| matrix[at] /= sum);
        }
    }
}

/// `streamⱼ ← shareⱼ·out + Σᵢ matrixᵢⱼ·streamᵢ` for the streams of one row, `out.len()` elements
/// each.
pub(super) fn add(shares: &[f32], matrix: &[f32], out: &[f32], streams: &mut [f32]) {
    let (d, n) = (out.len(), shares.len());
    for (at, y) in out.iter().enumerate() {
        let mut before = [0.0; MAX_STREAMS as usize];
        for (i, value) in before[..n].iter_mut().enumerate() {
            *value = streams[i * d + at];
        }
        for (j, share) in shares.iter().enumerate() {
            let mixed = (0..n).fold(0.0, |sum: f32, i| before[i].mul_add(matrix[i * n + j], sum));
            streams[j * d + at] = share.mul_add(*y, mixed);
        }
    }
}
