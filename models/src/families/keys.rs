//! Keys of a family that set a property of the form, with their names in both formats.

use crate::config::Form;

/// A key: the property it sets, and its name in `config.json` and in GGUF.
pub(crate) struct Key {
    pub(crate) sets: Sets,
    /// In `config.json`.
    pub(crate) hf: Spelled,
    /// In GGUF, after the architecture.
    pub(crate) gguf: Spelled,
}

/// A property of the form that a key sets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sets {
    EmbeddingScale,
    ResidualScale,
    LogitScale,
    AttentionScale,
    AttentionCap,
    LogitCap,
    FfnBias,
    HeadBias,
}

/// A key in one format.
#[derive(Clone, Copy)]
pub(crate) struct Spelled {
    /// Empty if the format has no such key.
    pub(crate) name: &'static str,
    pub(crate) by: By,
    pub(crate) absent: Absent,
}

/// Behaviour without the key.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Absent {
    /// The reader refuses the file.
    Needed,
    /// The form keeps its default.
    Keeps,
    /// The key has this value.
    Is(f32),
    /// The key has this value; null removes the property.
    IsUnlessNull(f32),
    /// The flag is set, or not.
    Flag(bool),
}

/// Conversion from the key's value to the property.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Itself,
    /// `1 / x`.
    Reciprocal,
    /// `1 / sqrt(x)`.
    RootReciprocal,
    /// `x / sqrt(layers)`.
    OverRootLayers,
    /// `x / d_model`.
    OverWidth,
}

impl By {
    pub(crate) fn apply(self, x: f32, d_model: u32, layers: u32) -> f32 {
        match self {
            Self::Itself => x,
            Self::Reciprocal => 1.0 / x,
            Self::RootReciprocal => 1.0 / x.sqrt(),
            Self::OverRootLayers => x / (layers as f32).sqrt(),
            Self::OverWidth => x / d_model as f32,
        }
    }

    /// The key's value for `part`, exact if a nearby one is.
    pub(crate) fn invert(self, part: f32, d_model: u32, layers: u32) -> f32 {
        let about = match self {
            Self::Itself => part,
            Self::Reciprocal => 1.0 / part,
            // mostly the width of a head
            Self::RootReciprocal => (1.0 / (part * part)).round(),
            Self::OverRootLayers => part * (layers as f32).sqrt(),
            Self::OverWidth => part * d_model as f32,
        };
        let steps = (0..64i32).flat_map(|step| [step, -step]);
        let mut near = steps.map(|n| f32::from_bits(about.to_bits().wrapping_add_signed(n)));
        let exact = near.find(|&x| self.apply(x, d_model, layers) == part);
        exact.unwrap_or(about)
    }
}

impl Spelled {
    /// The format has no such key.
    pub(super) const NONE: Self = Self::of("", Absent::Keeps);

    const fn of(name: &'static str, absent: Absent) -> Self {
        Self {
            name,
            by: By::Itself,
            absent,
        }
    }

    pub(super) const fn need(name: &'static str) -> Self {
        Self::of(name, Absent::Needed)
    }

    pub(super) const fn or(name: &'static str, absent: f32) -> Self {
        Self::of(name, Absent::Is(absent))
    }

    pub(super) const fn or_kept(name: &'static str) -> Self {
        Self::of(name, Absent::Keeps)
    }

    pub(super) const fn or_null(name: &'static str, absent: f32) -> Self {
        Self::of(name, Absent::IsUnlessNull(absent))
    }

    pub(super) const fn by(self, by: By) -> Self {
        Self { by, ..self }
    }
}

impl Key {
    pub(super) const fn new(sets: Sets, hf: Spelled, gguf: Spelled) -> Self {
        Self { sets, hf, gguf }
    }

    /// A flag of `config.json`; in GGUF it follows from the tensors.
    pub(super) const fn flag(sets: Sets, name: &'static str, absent: bool) -> Self {
        Self::new(sets, Spelled::of(name, Absent::Flag(absent)), Spelled::NONE)
    }
}

impl Sets {
    /// Whether the key is a flag.
    pub(crate) fn is_flag(self) -> bool {
        matches!(self, Self::FfnBias | Self::HeadBias)
    }

    /// Sets a flag in the form.
    pub(crate) fn put_flag(self, form: &mut Form, value: bool) {
        match self {
            Self::FfnBias => form.ffn_bias = value,
            Self::HeadBias => form.head_bias = value,
            _ => {}
        }
    }

    /// The form's flag.
    pub(crate) fn flag(self, form: &Form) -> bool {
        match self {
            Self::HeadBias => form.head_bias,
            _ => form.ffn_bias,
        }
    }

    /// Sets a number, or none, in the form.
    pub(crate) fn put(self, form: &mut Form, value: Option<f32>) {
        match self {
            Self::EmbeddingScale => form.embedding_scale = value.unwrap_or(1.0),
            Self::ResidualScale => form.residual_scale = value.unwrap_or(1.0),
            Self::LogitScale => form.logit_scale = value.unwrap_or(1.0),
            Self::AttentionScale => form.attention_scale = value,
            Self::AttentionCap => form.attention_cap = value,
            Self::LogitCap => form.logit_cap = value,
            Self::FfnBias | Self::HeadBias => {}
        }
    }

    /// The form's number for heads of `head_dim` elements.
    pub(crate) fn number(self, form: &Form, head_dim: u32) -> Option<f32> {
        match self {
            Self::EmbeddingScale => Some(form.embedding_scale),
            Self::ResidualScale => Some(form.residual_scale),
            Self::LogitScale => Some(form.logit_scale),
            Self::AttentionScale => {
                let usual = 1.0 / (head_dim as f32).sqrt();
                Some(form.attention_scale.unwrap_or(usual))
            }
            Self::AttentionCap => form.attention_cap,
            Self::LogitCap => form.logit_cap,
            Self::FfnBias | Self::HeadBias => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_gives_the_value_that_it_came_from() {
        let all = [
            By::Itself,
            By::Reciprocal,
            By::RootReciprocal,
            By::OverRootLayers,
            By::OverWidth,
        ];
        for by in all {
            for value in [1.0f32, 7.0, 192.0] {
                let part = by.apply(value, 36, 3);
                let back = by.invert(part, 36, 3);
                assert_eq!(by.apply(back, 36, 3).to_bits(), part.to_bits());
                assert!((back - value).abs() <= value * 1e-6);
            }
        }
        assert_eq!(By::OverWidth.apply(72.0, 36, 3), 2.0);
        assert_eq!(By::OverRootLayers.apply(6.0, 36, 4), 3.0);
        assert_eq!(By::RootReciprocal.apply(16.0, 1, 1), 0.25);
    }
}
