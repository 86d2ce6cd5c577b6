//! What the arithmetic needs to know about a model's FFNs.

use emberflow_models::config::FfnKind;

use crate::bundle::NeuronFormat;

/// The same for every bank of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FfnShape {
    pub format: NeuronFormat,
    pub kind: FfnKind,
    /// Compute every neuron, firing or not.
    pub dense: bool,
}
