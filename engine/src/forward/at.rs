//! What a step of a layer works on.

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_storage::trace::Tracer;

use super::hooks::Hooks;
use super::pass::Pass;
use super::router_ahead::RouterAhead;
use super::specials::Specials;
use crate::ffn::Ffn;
use crate::rope::Ropes;
use crate::scratch::Scratch;
use crate::state::Span;
use crate::tiles::TileStore;

/// A layer of a pass.
pub(crate) struct At<'a, 's, 'h, 'o> {
    /// Threads, and how the layer's inputs are quantised.
    pub on: &'a Compute,
    pub config: &'a ModelConfig,
    pub tracer: &'a Tracer,
    /// Number of the layer.
    pub layer: usize,
    pub pass: &'a mut Pass,
    pub spans: &'a mut [Span<'s>],
    pub scratch: &'a mut Scratch,
    pub specials: &'a mut Specials,
    pub ffn: &'a mut Ffn,
    /// The tiles, if FFNs lie in tiles.
    pub tiles: &'a mut Option<TileStore>,
    /// Guesses the next layer's experts; `None` without experts.
    pub ahead: &'a mut Option<RouterAhead>,
    pub rope: &'a Ropes,
    pub hooks: &'a mut Hooks<'h, 'o>,
    /// For an observer: input of the dense FFN beside the experts; empty without one.
    pub dense: Vec<f32>,
}

impl At<'_, '_, '_, '_> {
    /// Elements of the pass's rows in the residual stream.
    pub fn width(&self) -> usize {
        self.pass.rows * self.config.d_model as usize
    }
}
