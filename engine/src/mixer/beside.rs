//! Attention and Mamba-2 side by side (Falcon-H1): both read the layer's input, and their outputs are added.

use std::ops::Range;

use emberflow_kernels::Compute;
use emberflow_models::config::{MambaShape, ModelConfig};

use super::attention::{self, Attention};
use super::mamba::{self, Mamba};
use super::mix::Mix;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
use crate::error::Error;
use crate::loader::Loader;
use crate::norm::add_rows;
use crate::scratch::Scratch;
use crate::state::Span;

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Beside {
    attention: Attention,
    mamba: Mamba,
    /// Floats by row of the buffers that both use in turn.
    shared: usize,
}

/// Needs of attention and of Mamba-2, and floats by row of the buffers that both use in turn.
fn parts(c: &ModelConfig, layer: u32, shape: MambaShape) -> (Needs, Needs, usize) {
    let (attention, mamba) = (attention::needs(c, layer), mamba::needs(c, shape));
    let shared = attention.row_floats.max(mamba.row_floats);
    (attention, mamba, shared)
}

/// What layer `layer` needs.
pub(super) fn needs(c: &ModelConfig, layer: u32, shape: MambaShape) -> Needs {
    let (mut attention, mamba, shared) = parts(c, layer, shape);
    let inner = mamba.matrices.into_iter().map(MatrixSpec::inner);
    attention.matrices.extend(inner);
    Needs {
        // and the output of Mamba-2
        row_floats: shared + c.d_model as usize,
        state_floats: mamba.state_floats,
        input_floats: mamba.input_floats,
        ..attention
    }
}

impl Beside {
    /// Loads the weights of layer `l`, whose state is `part` of a sequence's recurrent state.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        l: u32,
        shape: MambaShape,
        part: Range<usize>,
    ) -> Result<Self, Error> {
        Ok(Self {
            attention: Attention::load(from, c, l)?,
            mamba: Mamba::load(from, l, shape, part)?,
            shared: parts(c, l, shape).2,
        })
    }
}

impl Mix for Beside {
    /// Attention comes last, so that the buffers hold what it has mixed and stored.
    fn run(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) {
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let len = rows * at.config.d_model as usize;
        self.mamba.run(on, matrices, at, spans, s);
        let [_, held] = s
            .block
            .split(rows, [self.shared, at.config.d_model as usize]);
        held.copy_from_slice(&s.out[..len]);
        self.attention.run(on, matrices, at, spans, s);
        let [_, held] = s
            .block
            .split(rows, [self.shared, at.config.d_model as usize]);
        add_rows(&mut s.out, held, len);
    }

    fn stored<'a>(&self, rows: usize, s: &'a Scratch) -> [&'a [f32]; 2] {
        self.attention.stored(rows, s)
    }

    fn replay(&self, on: &Compute, layer: usize, span: Span<'_>, s: &mut Scratch) {
        self.mamba.replay(on, layer, span, s);
    }
}
