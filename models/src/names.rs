//! Canonical tensor names, and the tensors a configuration requires.
//!
//! A checkpoint's own names exist only in the readers' tables; everything after them uses
//! [`TensorId`].

pub use crate::tensor_id::{Role, TensorId, UnknownName};

use crate::config::ModelConfig;
use crate::tensor_id::split_index;

/// The names of one checkpoint format: the prefix of layers and the name of each role.
pub(crate) struct NameTable {
    /// Prefix of the layer number: `model.layers.`.
    pub(crate) layer_prefix: &'static str,
    /// Roles outside the layers.
    pub(crate) globals: &'static [(Role, &'static str)],
    /// Roles inside a layer.
    pub(crate) layers: &'static [(Role, &'static str)],
}

impl NameTable {
    /// The tensor that `name` denotes.
    pub(crate) fn parse(&self, name: &str) -> Option<TensorId> {
        let find = |table: &[(Role, &str)], name: &str| {
            table
                .iter()
                .find(|(_, spelling)| *spelling == name)
                .map(|entry| entry.0)
        };
        if let Some(role) = find(self.globals, name) {
            return Some(TensorId::global(role));
        }
        let (layer, rest) = split_index(name.strip_prefix(self.layer_prefix)?)?;
        find(self.layers, rest).map(|role| TensorId::layer(role, layer))
    }

    /// The format's name of `id`, or the canonical name if it has none.
    pub(crate) fn spell(&self, id: TensorId) -> String {
        if let Some((_, name)) = self.globals.iter().find(|entry| entry.0 == id.role) {
            return (*name).to_owned();
        }
        match self.layers.iter().find(|entry| entry.0 == id.role) {
            Some((_, name)) => format!("{}{}.{name}", self.layer_prefix, id.layer),
            None => id.to_string(),
        }
    }
}

/// A required tensor and the shape it is presented in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Required {
    /// Which tensor.
    pub id: TensorId,
    /// Rows (1 for a vector).
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// Every tensor required by a decoder with this configuration, in the order of the forward pass,
/// without the optional predictors. The configuration must have passed [`ModelConfig::validate`].
pub fn required(config: &ModelConfig) -> Vec<Required> {
    let d = config.d_model as usize;
    let ffn = config.ffn as usize;
    let vocab = config.vocab as usize;
    let head_dim = config.head_dim as usize;
    let q = config.heads as usize * head_dim;
    let kv = config.kv_heads as usize * head_dim;

    let mut list = Vec::new();
    let mut push = |id, rows, cols| list.push(Required { id, rows, cols });
    push(TensorId::global(Role::Embed), vocab, d);
    for layer in 0..config.layers {
        let at = |role| TensorId::layer(role, layer);
        push(at(Role::AttnNorm), 1, d);
        push(at(Role::Q), q, d);
        push(at(Role::K), kv, d);
        push(at(Role::V), kv, d);
        if config.qkv_bias {
            push(at(Role::QBias), 1, q);
            push(at(Role::KBias), 1, kv);
            push(at(Role::VBias), 1, kv);
        }
        if config.qk_norm {
            push(at(Role::QNorm), 1, head_dim);
            push(at(Role::KNorm), 1, head_dim);
        }
        push(at(Role::O), d, q);
        if config.o_bias {
            push(at(Role::OBias), 1, d);
        }
        push(at(Role::FfnNorm), 1, d);
        for expert in 0..config.experts {
            for role in [Role::Gate, Role::Up, Role::Down] {
                push(
                    TensorId {
                        role,
                        layer,
                        expert,
                    },
                    ffn,
                    d,
                );
            }
        }
    }
    push(TensorId::global(Role::FinalNorm), 1, d);
    if !config.tied_head {
        push(TensorId::global(Role::Head), vocab, d);
    }
    list
}
