//! What a mixer is told of its layer.

use emberflow_models::config::ModelConfig;

use crate::rope::RopeTable;

/// The pass that a mixer runs in.
#[derive(Clone, Copy)]
pub(crate) struct LayerPass<'a> {
    pub config: &'a ModelConfig,
    /// Index of the layer.
    pub number: usize,
    /// Rotary angles of the rows' positions.
    pub rope: &'a RopeTable,
    /// What attention stores instead of its keys and values, `[rows × kv_heads·head_dim]` each.
    pub given: Option<[&'a [f32]; 2]>,
}
