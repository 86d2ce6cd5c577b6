//! Names of the tensors of a head for multi-token prediction, which is read as a model of one layer.

use crate::config::ModelConfig;
use crate::names::{MTP, NameTable, Role, Spellings};
use crate::tensor_id::split_index;

/// What of a checkpoint is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Decoder,
    /// The first head for multi-token prediction.
    MtpHead,
}

/// Names inside the layer after the last one, in GGUF and in releases of DeepSeek-V3, GLM-4.5 and others.
const IN_LAYER: Spellings = &[
    (Role::MtpIn, "eh_proj.weight"),
    (Role::MtpEmbedNorm, "enorm.weight"),
    (Role::MtpHiddenNorm, "hnorm.weight"),
    (Role::FinalNorm, "shared_head_norm.weight"),
    (Role::FinalNorm, "shared_head.norm.weight"),
    // copies of the model's own
    (Role::Embed, "embed_tokens.weight"),
    (Role::Head, "shared_head_head.weight"),
    (Role::Head, "shared_head.head.weight"),
];

/// Names outside its layer, after `mtp.` (Qwen3-Next, Qwen3.5).
const OUTSIDE: Spellings = &[
    (Role::MtpIn, "fc.weight"),
    (Role::MtpEmbedNorm, "pre_fc_norm_embedding.weight"),
    (Role::MtpHiddenNorm, "pre_fc_norm_hidden.weight"),
    (Role::FinalNorm, "norm.weight"),
];

/// Where a family's releases have their heads.
#[derive(Clone, Copy)]
pub(crate) struct HeadNames<'a> {
    /// The names of the model's tensors.
    pub(crate) names: &'a NameTable,
    /// Layers of the model, without heads.
    pub(crate) layers: u32,
}

impl HeadNames<'_> {
    /// The name that a tensor of the first head has in a model of one layer; `None` if it is not one of them, or a copy of one
    /// of the model's.
    fn of_head(self, name: &str) -> Option<String> {
        if let Some(rest) = name.strip_prefix("mtp.") {
            return match rest.strip_prefix("layers.") {
                Some(rest) => self.in_layer(split_index(rest).filter(|of| of.0 == 0)?.1),
                None => self.own(find(OUTSIDE, rest)?),
            };
        }
        let (layer, rest) = split_index(name.strip_prefix(self.names.layer_prefix)?)?;
        if layer != self.layers {
            return None;
        }
        let inside = rest.strip_prefix("nextn.").unwrap_or(rest);
        match find(IN_LAYER, inside) {
            Some(role) => self.own(role),
            None => self.in_layer(rest),
        }
    }

    /// For each name of a checkpoint, that in a model of one layer; also whether the head's FFN is a mixture. `None` without a
    /// head.
    pub(crate) fn of_all<'a>(
        self,
        names: impl Iterator<Item = &'a str> + Clone,
        config: &ModelConfig,
    ) -> Option<(bool, Vec<Option<String>>)> {
        let mut all: Vec<_> = names.clone().map(|name| self.of_head(name)).collect();
        let own = |role| {
            let name = self.own(role);
            move |of: &Option<String>| of.is_some() && *of == name
        };
        if !all.iter().any(own(Role::MtpIn)) {
            return None;
        }
        let has_norm = all.iter().any(own(Role::FinalNorm));
        for (of, name) in all.iter_mut().zip(names) {
            let shared = match find(self.names.globals, name) {
                Some(Role::FinalNorm) => !has_norm,
                Some(Role::Embed) => !config.tied_head,
                _ => false,
            };
            if shared {
                *of = Some(name.to_owned());
            }
        }
        let parse = |name: &String| self.names.parse(name, config.experts);
        let mut parsed = all.iter().flatten().filter_map(parse);
        Some((parsed.any(|named| named.is(Role::Router)), all))
    }

    fn in_layer(self, rest: &str) -> Option<String> {
        Some(format!("{}0.{rest}", self.names.layer_prefix))
    }

    fn own(self, role: Role) -> Option<String> {
        let mut all = self.names.globals.iter().chain(MTP);
        let (_, name) = all.find(|entry| entry.0 == role)?;
        (!matches!(role, Role::Embed | Role::Head)).then(|| (*name).to_owned())
    }
}

fn find(table: Spellings, name: &str) -> Option<Role> {
    Some(table.iter().find(|entry| entry.1 == name)?.0)
}

/// Whether a checkpoint with a tensor of this name may have a head: that of its input.
pub(crate) fn may_be_head(name: &str) -> bool {
    name.ends_with("eh_proj.weight") || name.ends_with("mtp.fc.weight")
}
