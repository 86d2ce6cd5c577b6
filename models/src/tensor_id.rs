//! A tensor of the decoder and its canonical name.

use std::fmt;
use std::str::FromStr;

use crate::role::{Place, ROLES, Role, RoleFacts};

/// One tensor of the decoder. Its text form is its name in the container:
/// `embed`, `layers.3.attn.q`, `layers.3.ffn.0.gate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId {
    /// Its role.
    pub role: Role,
    /// Layer, from 0; 0 for the tensors outside the layers.
    pub layer: u32,
    /// Expert, from 0; the number of experts for the shared one, 0 for a dense FFN and outside the
    /// FFN; outside the layers, the number of a tensor among several of its role.
    pub expert: u32,
}

impl TensorId {
    /// A tensor outside the layers.
    pub fn global(role: Role) -> Self {
        Self {
            role,
            layer: 0,
            expert: 0,
        }
    }

    /// One of several tensors of a role outside the layers.
    pub fn numbered(role: Role, number: u32) -> Self {
        Self {
            expert: number,
            ..Self::global(role)
        }
    }

    /// A tensor of a layer (of its expert 0 if the role belongs to the FFN).
    pub fn layer(role: Role, layer: u32) -> Self {
        Self {
            role,
            layer,
            expert: 0,
        }
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            role,
            layer,
            expert,
        } = *self;
        let RoleFacts { place, name, .. } = role.facts();
        match place {
            Place::Global => f.write_str(name),
            Place::Numbered => write!(f, "{name}.{expert}"),
            Place::Layer => write!(f, "layers.{layer}.{name}"),
            Place::Expert => write!(f, "layers.{layer}.ffn.{expert}.{name}"),
        }
    }
}

/// A text that is not the name of any tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a tensor name")]
pub struct UnknownName(pub String);

impl FromStr for TensorId {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        parse_id(text).ok_or_else(|| UnknownName(text.to_owned()))
    }
}

fn parse_id(text: &str) -> Option<TensorId> {
    let find = |spelling: &str, wanted: fn(&Place) -> bool| {
        ROLES
            .iter()
            .find(|of| wanted(&of.place) && of.name == spelling)
            .map(|of| of.role)
    };
    let Some(rest) = text.strip_prefix("layers.") else {
        if let Some((name, number)) = text.split_once('.') {
            let role = find(name, |p| matches!(p, Place::Numbered))?;
            return Some(TensorId::numbered(role, canonical(number)?));
        }
        return find(text, |p| matches!(p, Place::Global)).map(TensorId::global);
    };
    let (layer, rest) = split_index(rest)?;
    if let Some(role) = find(rest, |p| matches!(p, Place::Layer)) {
        return Some(TensorId::layer(role, layer));
    }
    let (expert, rest) = split_index(rest.strip_prefix("ffn.")?)?;
    let role = find(rest, |p| matches!(p, Place::Expert))?;
    Some(TensorId {
        role,
        layer,
        expert,
    })
}

/// Splits `12.rest` into 12 and `rest`. Only the canonical spelling of a number
/// is taken, so that two texts never name one tensor.
pub(crate) fn split_index(text: &str) -> Option<(u32, &str)> {
    let (number, rest) = text.split_once('.')?;
    Some((canonical(number)?, rest))
}

/// A number in its canonical spelling.
fn canonical(number: &str) -> Option<u32> {
    let value: u32 = number.parse().ok()?;
    (value.to_string() == number).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_is_spelled_once_and_reads_back() {
        for (index, facts) in ROLES.iter().enumerate() {
            let role = facts.role;
            assert_eq!(role as usize, index);
            let id = match facts.place {
                Place::Global => TensorId::global(role),
                Place::Numbered => TensorId::numbered(role, 2),
                Place::Layer => TensorId::layer(role, 17),
                Place::Expert => TensorId {
                    role,
                    layer: 17,
                    expert: 5,
                },
            };
            assert_eq!(id.to_string().parse(), Ok(id));
        }
    }

    #[test]
    fn names_are_the_documented_ones() {
        assert_eq!(TensorId::global(Role::FinalNorm).to_string(), "final_norm");
        assert_eq!(TensorId::layer(Role::Q, 3).to_string(), "layers.3.attn.q");
        let gate = TensorId {
            role: Role::Gate,
            layer: 3,
            expert: 2,
        };
        assert_eq!(gate.to_string(), "layers.3.ffn.2.gate");
    }

    #[test]
    fn other_spellings_are_refused() {
        for text in [
            "",
            "layers.",
            "layers.03.attn.q",
            "layers.+3.attn.q",
            "layers.3.gate",
            "attn.q",
            "layers.3.embed",
            "layers.4294967296.attn.q",
        ] {
            assert!(text.parse::<TensorId>().is_err(), "{text}");
        }
    }
}
