//! Inputs of a mixer from its layer and pass.

use emberflow_models::config::ModelConfig;

use crate::rope::RopeTable;

/// The pass of a mixer.
#[derive(Clone, Copy)]
pub(crate) struct LayerPass<'a> {
    pub config: &'a ModelConfig,
    /// Index of the layer.
    pub number: usize,
    /// Rotary angles of the rows' positions.
    pub rope: &'a RopeTable,
    /// Replacement for the keys and values that attention stores, `[rows × kv_heads·head_dim]`
    /// each.
    pub given: Option<[&'a [f32]; 2]>,
}
