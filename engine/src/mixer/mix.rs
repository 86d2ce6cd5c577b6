//! What all kinds of mixers do.

use std::fmt::Debug;

use emberflow_kernels::Compute;

use super::layer_pass::LayerPass;
use super::needs::Matrices;
use crate::scratch::Scratch;
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
}
