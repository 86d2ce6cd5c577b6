//! What all kinds of mixers do.

use std::fmt::Debug;

use emberflow_kernels::Compute;

use super::layer_pass::LayerPass;
use super::needs::Matrices;
use crate::replay::Inputs;
use crate::scratch::{RowBuffers, Scratch};
use crate::state::Span;

/// How a kind of mixer computes: its weights apart from the matrices that it declares.
pub(super) trait Mix: Debug + Send + Sync {
    /// See [`super::Mixer::run`].
    fn run(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    );

    /// Keys and values that a pass of `rows` rows has left in the buffers, `[rows × kv_heads·head_dim]` each.
    fn stored<'a>(&self, _rows: usize, _s: &'a Scratch) -> [&'a [f32]; 2] {
        [&[]; 2]
    }

    /// See [`super::Mixer::replay`].
    fn replay(&self, _on: &Compute, _layer: usize, _span: Span<'_>, _s: &mut Scratch) {}
}

/// A mixer of recurrent state: projections, a recurrence that reads no weights, projections.
pub(super) trait Recurrence: Debug + Send + Sync {
    /// Projects the normed rows of a pass into the buffers.
    fn project(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        rows: usize,
        s: &mut Scratch,
    );

    /// The buffers that the recurrence reads, of a pass of `rows` rows: `input_floats` of its needs in all.
    fn inputs<'a>(&self, rows: usize, block: &'a mut RowBuffers) -> Inputs<'a>;

    /// The recurrence over the rows of the spans, of a pass of `rows` rows.
    fn recur(&self, on: &Compute, spans: &mut [Span<'_>], rows: usize, block: &mut RowBuffers);

    /// Projects the results into `s.out`.
    fn output(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &[Span<'_>],
        s: &mut Scratch,
    );
}

impl<T: Recurrence> Mix for T {
    fn run(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) {
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        self.project(on, matrices, at, rows, s);
        s.replay.keep(at.number, self.inputs(rows, &mut s.block));
        self.recur(on, spans, rows, &mut s.block);
        self.output(on, matrices, at, spans, s);
    }

    fn replay(&self, on: &Compute, layer: usize, span: Span<'_>, s: &mut Scratch) {
        let rows = s.replay.rows();
        s.replay.restore(layer, self.inputs(rows, &mut s.block));
        self.recur(on, &mut [span], rows, &mut s.block);
    }
}
