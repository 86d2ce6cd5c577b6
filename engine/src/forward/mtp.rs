//! Input of a head for multi-token prediction (MTP), a model of one layer (DeepSeek-V3, arXiv 2412.19437 §2.2):
//!
//! ```text
//! x = In · [ norm(embedding of the next token) ; norm(hidden state of the model) ]
//! ```

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;
use emberflow_storage::container::Container;

use super::pass::Pass;
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::norm::Norm;
use crate::scratch::Scratch;
use crate::thread_buffer::renew;

/// What a head for multi-token prediction has before its layer, and a buffer.
pub(crate) struct MtpInput {
    /// `[d_model × 2·d_model]`.
    matrix: Matrix,
    embedding: Norm,
    hidden: Norm,
    /// `[rows × 2·d_model]`.
    joined: Vec<f32>,
}

impl MtpInput {
    /// Loads and verifies the weights, for passes of up to `rows` rows; `None` for other models.
    pub fn load(
        container: &Container,
        c: &ModelConfig,
        rows: usize,
    ) -> Result<Option<Self>, Error> {
        if !c.form.mtp {
            return Ok(None);
        }
        let (from, d) = (Loader::of(container), c.d_model as usize);
        let norm = |role| -> Result<Norm, Error> {
            Ok(Norm {
                weight: from.vector(role, 0, d)?,
                bias: c.form.layer_norm.then(|| vec![0.0; d]),
                eps: c.rms_eps,
            })
        };
        let mut loaded = Self {
            matrix: from.matrix(Role::MtpIn, 0, d, 2 * d)?,
            embedding: norm(Role::MtpEmbedNorm)?,
            hidden: norm(Role::MtpHiddenNorm)?,
            joined: Vec::new(),
        };
        loaded.set_rows(rows);
        Ok(Some(loaded))
    }

    /// Resizes the buffer for another number of rows.
    pub fn set_rows(&mut self, rows: usize) {
        renew(&mut self.joined, rows * 2 * self.matrix.rows());
    }

    /// Bytes of the buffer for passes of up to `rows` rows.
    pub fn bytes_for(c: &ModelConfig, rows: usize) -> u64 {
        let width = 2 * u64::from(c.form.mtp) * u64::from(c.d_model);
        4 * rows as u64 * width
    }

    /// Bytes of weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        self.matrix.len()
    }

    /// Replaces the embeddings in `pass.x` by the input of the layer; `hidden` is `[rows × d_model]`.
    pub fn join(&mut self, on: &Compute, hidden: &[f32], pass: &mut Pass, s: &mut Scratch) {
        let (rows, d) = (pass.rows, self.matrix.rows());
        let x = &mut pass.x[..rows * d];
        let joined = &mut self.joined[..rows * 2 * d];
        let inputs = x.chunks_exact(d).zip(hidden.chunks_exact(d));
        for ((x, hidden), joined) in inputs.zip(joined.chunks_exact_mut(2 * d)) {
            let (first, second) = joined.split_at_mut(d);
            self.embedding.rows(on.cpu, x, first);
            self.hidden.rows(on.cpu, hidden, second);
        }
        let input = Input::new(on.cpu, joined, rows, &mut s.input);
        self.matrix.matmul(on, input, &mut s.rows, x);
    }
}
