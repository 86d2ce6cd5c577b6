//! Matrices whose rows a format stores as several tensors.

use super::{NameTable, Role, TensorId};
use crate::config::ModelConfig;

impl NameTable {
    /// The names of the tensors that hold the rows of `id`, in order, and their rows; empty if one holds all of them.
    pub(crate) fn parts_of(&self, id: TensorId, config: &ModelConfig) -> Vec<(String, usize)> {
        let mut whole = self.layers.iter().flat_map(|table| table.iter());
        let nets = config.form.delta_net.as_ref().map(|nets| nets.shape);
        let (Role::DeltaIn, Some(net), None) =
            (id.role, nets, whole.find(|entry| entry.0 == id.role))
        else {
            return Vec::new();
        };
        let rows = [net.keys(), net.keys(), net.values()];
        let parts = self.parts.iter().filter(|(role, ..)| *role == id.role);
        let name = |name: &str| format!("{}{}.{name}", self.layer_prefix, id.layer);
        let parts = parts.map(|(_, number, spelling)| (name(spelling), rows[*number as usize % 3]));
        parts.collect()
    }
}
