//! The tensor of a format that contains a matrix.

use super::{NameTable, Named, Spellings, Stack};
use crate::config::{MixerKind, ModelConfig};
use crate::names::{Role, TensorId};

/// The name of a tensor, and its meaning.
type Stored = (String, Named);

impl NameTable {
    /// The format's name of `id` in a model of this configuration, or the canonical name if it has
    /// none.
    pub(crate) fn spell(&self, id: TensorId, config: &ModelConfig) -> String {
        match self.stored(id, config) {
            Some((name, _)) => name,
            None => id.to_string(),
        }
    }

    /// The name of the tensor that contains `id` in a model of this configuration, and its meaning.
    pub(crate) fn stored(&self, id: TensorId, config: &ModelConfig) -> Option<Stored> {
        if let Some(name) = find(self.globals, id.role) {
            return Some((name.to_owned(), Named::One(id)));
        }
        if let Some(prefix) = find(self.numbered, id.role) {
            let name = format!("{prefix}{}.weight", id.expert);
            return Some((name, Named::One(id)));
        }
        let (rest, named) = self.inside(id, config)?;
        let name = format!("{}{}.{rest}", self.layer_prefix, id.layer);
        Some((name, named))
    }

    /// The same inside a layer, without the prefix.
    fn inside(&self, id: TensorId, config: &ModelConfig) -> Option<Stored> {
        let one = |name: &str| (name.to_owned(), Named::One(id));
        let shared = |role| find(self.experts.shared, role).map(one);
        match id.role {
            Role::SharedIn => return shared(Role::Gate),
            Role::SharedUp => return shared(Role::Up),
            Role::SharedOut => return shared(Role::Down),
            _ => {}
        }
        let of_ffn = matches!(id.role, Role::Gate | Role::Up | Role::Down);
        if !of_ffn || config.mixture_of(id.layer).is_none() {
            let single = || self.single(id, config).map(one);
            return (self.fused(id).or_else(single)).or_else(|| self.stacked(id));
        }
        let (prefix, names) = self.experts.one;
        if id.expert == config.experts {
            return shared(id.role).or_else(|| self.fused(id));
        }
        if prefix.is_empty() {
            return self.stacked(id);
        }
        let name = find(names, id.role)?;
        Some(one(&format!("{prefix}{}.{name}", id.expert)))
    }

    /// The name of a matrix that is stored separately: the first of its role, or the second if the
    /// role has one by mixer.
    fn single(&self, id: TensorId, config: &ModelConfig) -> Option<&'static str> {
        let all = self.layers.iter().flat_map(|table| table.iter());
        let mut names = all.filter(|entry| entry.0 == id.role).map(|entry| entry.1);
        let first = names.next()?;
        let second = match (id.role, config.mixer_of(id.layer)) {
            (Role::Q, MixerKind::Latent(latent)) => latent.query_rank.is_some(),
            (Role::O | Role::QGate, MixerKind::Kda(_)) => true,
            _ => false,
        };
        Some(names.next().filter(|_| second).unwrap_or(first))
    }

    /// A tensor of several matrices.
    fn fused(&self, id: TensorId) -> Option<Stored> {
        let mut fused = self.fused.iter();
        let &(fused, name) = fused.find(|entry| entry.0.holds(id.role))?;
        Some((name.to_owned(), Named::Fused(fused, id.layer)))
    }

    /// A tensor of all experts: preferably one with only this matrix.
    fn stacked(&self, id: TensorId) -> Option<Stored> {
        let all = self.experts.stacked;
        let alone = |stack| stack == Stack::One(id.role);
        let own = all.iter().find(|entry| alone(entry.0));
        let any = || all.iter().find(|entry| entry.0.holds(id.role));
        let &(stack, name) = own.or_else(any)?;
        Some((name.to_owned(), Named::Stacked(stack, id.layer)))
    }
}

/// The first name of a role.
fn find(table: Spellings, role: Role) -> Option<&'static str> {
    Some(table.iter().find(|entry| entry.0 == role)?.1)
}
