//! Attention and Mamba-2 side by side (Falcon-H1): both read the layer's input, and their outputs are added.

use emberflow_kernels::Compute;
use emberflow_models::config::{MambaShape, ModelConfig};

use super::LayerPass;
use super::attention::Attention;
use super::mamba::Mamba;
use crate::error::Error;
use crate::loader::Loader;
use crate::norm::add_rows;
use crate::scratch::Scratch;
use crate::state::Span;

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Beside {
    pub attention: Attention,
    pub mamba: Mamba,
}

impl Beside {
    /// Loads the weights of layer `l`, whose recurrent state begins at float `at` of a sequence's block.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        l: u32,
        shape: MambaShape,
        at: usize,
    ) -> Result<Self, Error> {
        Ok(Self {
            attention: Attention::load(from, c, l)?,
            mamba: Mamba::load(from, c, l, shape, at)?,
        })
    }

    /// See [`super::Mixer::run`]. Attention comes last, so that the buffers hold what it has mixed and stored.
    pub fn run(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        self.mamba.run(on, at, spans, s);
        std::mem::swap(&mut s.out, &mut s.parallel);
        self.attention.run(on, at, spans, s);
        let len = rows * at.config.d_model as usize;
        add_rows(&mut s.out, &s.parallel, len);
    }
}
