//! Experts whose width differs from the residual stream's (LatentMoE, Nemotron 3 Super).
//!
//! ```text
//! latent = In·x        out = Out·Σ weight × expert(latent) + shared(x)
//! ```
//!
//! `In`, `Out` and the matrices of the shared expert are resident: their sizes differ from those of a
//! bank's neurons, and every token needs them. The router reads `x`.

use emberflow_kernels::Compute;
use emberflow_models::config::{FfnKind, ModelConfig};
use emberflow_models::names::Role;

use crate::activation::hidden;
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::narrow_sizes;
use crate::scratch::{RowBuffers, Scratch};

/// The matrices of one layer.
#[derive(Debug)]
pub(crate) struct NarrowExperts {
    /// Projection to the experts' input, `[width × d_model]`.
    input: Matrix,
    /// Projection of their sum, `[d_model × width]`.
    output: Matrix,
    shared: Option<SharedExpert>,
    widths: [usize; 3],
}

/// The shared expert, which every token visits.
#[derive(Debug)]
struct SharedExpert {
    /// `[neurons × d_model]`.
    gate: Matrix,
    /// Of the same shape; `None` without a gate projection.
    up: Option<Matrix>,
    /// `[d_model × neurons]`.
    down: Matrix,
}

impl NarrowExperts {
    /// The matrices of layer `l`, if its experts have another width.
    pub fn load(from: &Loader<'_>, c: &ModelConfig, l: u32) -> Result<Option<Self>, Error> {
        let Some(mixture) = c.mixture_of(l).filter(|mixture| mixture.width > 0) else {
            return Ok(None);
        };
        let [d, width, neurons] = [c.d_model, mixture.width, mixture.shared].map(|n| n as usize);
        let shared = || {
            Ok::<_, Error>(SharedExpert {
                gate: from.matrix(Role::SharedIn, l, neurons, d)?,
                up: (!c.ffn_kind.ungated)
                    .then(|| from.matrix(Role::SharedUp, l, neurons, d))
                    .transpose()?,
                down: from.matrix(Role::SharedOut, l, d, neurons)?,
            })
        };
        Ok(Some(Self {
            input: from.matrix(Role::ExpertsIn, l, width, d)?,
            output: from.matrix(Role::ExpertsOut, l, d, width)?,
            shared: (neurons > 0).then(shared).transpose()?,
            widths: narrow_sizes::widths(c),
        }))
    }

    /// Buffers of a pass: the experts' input, their sums, and the products of the shared expert's matrices, gates and then ups.
    pub fn buffers<'a>(&self, rows: usize, block: &'a mut RowBuffers) -> [&'a mut [f32]; 3] {
        block.split(rows, self.widths)
    }

    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let of_shared = self.shared.as_ref();
        let of_shared =
            of_shared.map(|shared| [Some(&shared.gate), shared.up.as_ref(), Some(&shared.down)]);
        let own = [&self.input, &self.output];
        own.into_iter()
            .chain(of_shared.into_iter().flatten().flatten())
    }

    /// The experts' input and the shared expert's products, for the rows of `scratch.normed`.
    pub fn begin(&self, on: &Compute, rows: usize, s: &mut Scratch) {
        let d = self.output.rows();
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let [latent, _, products] = self.buffers(rows, &mut s.block);
        self.input.matmul(on, input, &mut s.rows, latent);
        let Some(shared) = &self.shared else {
            return;
        };
        let (gates, ups) = products.split_at_mut(rows * shared.gate.rows());
        shared.gate.matmul(on, input, &mut s.rows, gates);
        if let Some(up) = &shared.up {
            up.matmul(on, input, &mut s.rows, ups);
        }
    }

    /// `scratch.out`: `Out` of the experts' sums, plus the shared expert's output.
    /// Overwrites `scratch.normed`.
    pub fn end(&self, on: &Compute, kind: FfnKind, rows: usize, s: &mut Scratch) {
        let d = self.output.rows();
        let [_, sums, products] = self.buffers(rows, &mut s.block);
        let input = Input::new(on.cpu, sums, rows, &mut s.input);
        self.output.matmul(on, input, &mut s.rows, &mut s.out);
        let Some(shared) = &self.shared else {
            return;
        };
        let len = rows * shared.gate.rows();
        let (gates, ups) = products.split_at_mut(len);
        let ups = match shared.up {
            Some(_) => &ups[..len],
            None => &[],
        };
        hidden(kind, on.cpu, gates, ups);
        let input = Input::new(on.cpu, gates, rows, &mut s.input);
        shared.down.matmul(on, input, &mut s.rows, &mut s.normed);
        let out = s.out[..rows * d].iter_mut();
        out.zip(&s.normed).for_each(|(out, shared)| *out += shared);
    }
}
