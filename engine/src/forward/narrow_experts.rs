//! Experts whose width differs from the residual stream's (LatentMoE, Nemotron 3 Super).
//!
//! ```text
//! latent = In·x        out = Out·Σ weight × expert(latent) + shared(x)
//! ```
//!
//! `In`, `Out` and the matrices of the shared expert are resident: their sizes differ from those of a
//! bank's neurons, and every token needs them. The router reads `x`.

use emberflow_models::config::{FfnKind, ModelConfig};
use emberflow_models::names::Role;

use super::at::At;
use crate::activation::hidden;
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::narrow_sizes;
use crate::norm::add_rows;
use crate::scratch::RowBuffers;

/// The matrices before the experts.
#[derive(Debug)]
pub(crate) struct ExpertsIn {
    /// Projection to the experts' input, `[width × d_model]`.
    input: Matrix,
    buffers: ExpertBuffers,
    /// Of the shared expert, which every token visits: gate, and up unless it has none; `[neurons × d_model]` each.
    shared: Vec<Matrix>,
}

/// The matrices after the experts.
#[derive(Debug)]
pub(crate) struct ExpertsOut {
    /// Projection of their sum, `[d_model × width]`.
    output: Matrix,
    buffers: ExpertBuffers,
    /// Of the shared expert, `[d_model × neurons]`.
    down: Option<Matrix>,
    kind: FfnKind,
}

/// Widths of the buffers of a pass: the experts' input, their sums, and the products of the shared expert's matrices, gates
/// and then ups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertBuffers([usize; 3]);

impl ExpertBuffers {
    /// The buffers of `rows` rows.
    pub fn split<'a>(&self, rows: usize, block: &'a mut RowBuffers) -> [&'a mut [f32]; 3] {
        block.split(rows, self.0)
    }
}

/// The matrices of layer `l`, if its experts have another width.
pub(crate) fn load(
    from: &Loader<'_>,
    c: &ModelConfig,
    l: u32,
) -> Result<Option<(ExpertsIn, ExpertsOut)>, Error> {
    let Some(mixture) = c.mixture_of(l).filter(|mixture| mixture.width > 0) else {
        return Ok(None);
    };
    let [d, width, neurons] = [c.d_model, mixture.width, mixture.shared].map(|n| n as usize);
    let buffers = ExpertBuffers(narrow_sizes::widths(c));
    let roles: &[Role] = match (neurons, c.ffn_kind.ungated) {
        (0, _) => &[],
        (_, true) => &[Role::SharedIn],
        (_, false) => &[Role::SharedIn, Role::SharedUp],
    };
    let shared = roles.iter().map(|&role| from.matrix(role, l, neurons, d));
    let before = ExpertsIn {
        input: from.matrix(Role::ExpertsIn, l, width, d)?,
        buffers,
        shared: shared.collect::<Result<_, _>>()?,
    };
    let down = (neurons > 0).then(|| from.matrix(Role::SharedOut, l, d, neurons));
    let after = ExpertsOut {
        output: from.matrix(Role::ExpertsOut, l, d, width)?,
        buffers,
        down: down.transpose()?,
        kind: c.ffn_kind,
    };
    Ok(Some((before, after)))
}

impl ExpertsIn {
    /// The buffers that the experts' projections share.
    pub fn buffers(&self) -> ExpertBuffers {
        self.buffers
    }

    /// Bytes of the matrices.
    pub fn len(&self) -> u64 {
        self.input.len() + self.shared.iter().map(Matrix::len).sum::<u64>()
    }

    /// The experts' input and the shared expert's products, for the rows of `scratch.normed`.
    pub fn run(&self, at: &mut At<'_, '_, '_, '_>) {
        let (on, rows, width, s) = (at.on, at.pass.rows, at.width(), &mut *at.scratch);
        let input = Input::new(on.cpu, &s.normed[..width], rows, &mut s.input);
        let [latent, _, products] = self.buffers.split(rows, &mut s.block);
        self.input.matmul(on, input, &mut s.rows, latent);
        let mut rest = products;
        for matrix in &self.shared {
            let (product, after) = rest.split_at_mut(rows * matrix.rows());
            matrix.matmul(on, input, &mut s.rows, product);
            rest = after;
        }
    }
}

impl ExpertsOut {
    /// Bytes of the matrices.
    pub fn len(&self) -> u64 {
        self.output.len() + self.down.as_ref().map_or(0, Matrix::len)
    }

    /// `scratch.out`: `Out` of the experts' sums, plus the shared expert's output.
    /// Overwrites `scratch.normed`.
    pub fn run(&self, at: &mut At<'_, '_, '_, '_>) {
        let (on, rows, len, s) = (at.on, at.pass.rows, at.width(), &mut *at.scratch);
        let [_, sums, products] = self.buffers.split(rows, &mut s.block);
        let input = Input::new(on.cpu, sums, rows, &mut s.input);
        self.output.matmul(on, input, &mut s.rows, &mut s.out);
        let Some(down) = &self.down else {
            return;
        };
        let hidden_len = rows * down.cols();
        let (gates, ups) = products.split_at_mut(hidden_len);
        let ups = if self.kind.ungated {
            &[]
        } else {
            &ups[..hidden_len]
        };
        hidden(self.kind, on.cpu, gates, ups);
        let input = Input::new(on.cpu, gates, rows, &mut s.input);
        down.matmul(on, input, &mut s.rows, &mut s.normed);
        add_rows(&mut s.out, &s.normed, len);
    }
}
