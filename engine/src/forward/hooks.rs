//! Callbacks of a pass.

use crate::ffn::FfnSeen;

/// Called for every FFN, before its output is added to the residual stream.
pub type FfnObserver<'a> = dyn FnMut(&FfnSeen<'_>) + 'a;

/// Inputs and outputs of a layer's mixer, for an observer of [`crate::Engine::forward_residual`].
pub struct AttentionSeen<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// Tokens of the chunk.
    pub tokens: usize,
    /// Input of the first projections: the residual stream after the norm, `[tokens × d_model]`.
    pub x: &'a [f32],
    /// Input of the last projection: the mixed values, `[tokens × width]`.
    pub mixed: &'a [f32],
    /// Keys and values as stored, `[tokens × kv_heads·head_dim]` each; empty if the layer has none.
    pub stored: [&'a [f32]; 2],
}

/// Rows that enter the layers as residual streams, for [`crate::Engine::forward_residual`].
pub struct StreamRows<'a> {
    /// Their tokens; used only by layers with inputs per token.
    pub tokens: &'a [u32],
    /// Residual streams, `[rows × streams·d_model]`; if empty, the tokens' embeddings are used.
    pub x: &'a mut Vec<f32>,
    /// What the first layer stores instead of its own keys and values, `[rows × kv_heads·head_dim]`
    /// each.
    pub stored: Option<[&'a [f32]; 2]>,
}

/// Called for every attention, before its output is added to the residual stream.
pub type AttentionObserver<'a> = dyn FnMut(&AttentionSeen<'_>) + 'a;

/// Callbacks of a pass.
#[derive(Default)]
pub(crate) struct Hooks<'a, 'b> {
    pub observer: Option<&'a mut FfnObserver<'b>>,
    pub attention: Option<&'a mut AttentionObserver<'b>>,
    /// The pass begins and ends between two layers.
    pub between: Option<Between<'a>>,
    /// Hidden states that a head for multi-token prediction reads, `[rows × d_model]`.
    pub hidden: &'a [f32],
    /// FFN weights that are not in memory are left out: the pass makes drafts.
    pub held_only: bool,
    /// Polled between layers: whether to yield.
    pub yields: Option<&'a dyn Fn() -> bool>,
}

/// See [`StreamRows`].
#[derive(Clone, Copy)]
pub(crate) struct Between<'a> {
    pub x: &'a [f32],
    pub stored: Option<[&'a [f32]; 2]>,
}
