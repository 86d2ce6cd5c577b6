//! The layers of Nemotron-H, which have a single sublayer each, and the sizes of its Mamba-2.

use serde_json::Value;

use super::json::Keys;
use super::mamba::refuse_limits;
use crate::config::{Form, MambaLayers, MambaShape};
use crate::error::Error;

/// The sublayer of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sublayer {
    Mamba,
    Attention,
    Ffn,
    Experts,
}

/// A letter for each layer, in releases.
const PATTERN: &str = "hybrid_override_pattern";
/// A name for each layer, under either key.
const LISTS: [&str; 2] = ["layers_block_type", "layer_types"];

impl Sublayer {
    fn of_letter(letter: char) -> Option<Self> {
        match letter {
            'M' => Some(Self::Mamba),
            '*' => Some(Self::Attention),
            '-' => Some(Self::Ffn),
            'E' => Some(Self::Experts),
            _ => None,
        }
    }

    fn of_name(name: &Value) -> Option<Self> {
        match name.as_str()? {
            "mamba" | "linear_attention" => Some(Self::Mamba),
            "attention" | "full_attention" => Some(Self::Attention),
            "mlp" => Some(Self::Ffn),
            "moe" => Some(Self::Experts),
            _ => None,
        }
    }
}

/// The sublayer of each layer.
pub(super) fn sublayers(keys: &Keys) -> Result<Vec<Sublayer>, Error> {
    let letters = keys.read(PATTERN, "M, *, - or E for each layer", |value| {
        let letters = value.as_str()?.chars().map(Sublayer::of_letter);
        letters.collect::<Option<Vec<_>>>()
    })?;
    let mut found = letters;
    for key in LISTS {
        let expected = "mamba, attention, mlp or moe for each layer";
        let named = keys.read(key, expected, |value| {
            let names = value.as_array()?.iter().map(Sublayer::of_name);
            names.collect::<Option<Vec<_>>>()
        })?;
        if let (Some(named), Some(other)) = (&named, &found)
            && named != other
        {
            return Err(keys.bad(key, "the same layers as the other keys of them"));
        }
        found = found.or(named);
    }
    let found = found.ok_or_else(|| keys.missing(PATTERN, "a letter for each layer"))?;
    const COUNT: &str = "num_hidden_layers";
    match keys.u32(COUNT)? {
        Some(count) if count as usize != found.len() => {
            let expected = format!("{}, as there are so many kinds of layers", found.len());
            Err(keys.bad(COUNT, &expected))
        }
        _ => Ok(found),
    }
}

/// The layers of one kind.
pub(super) fn layers_of(of: &[Sublayer], kind: Sublayer) -> Vec<u32> {
    let layers = (0..).zip(of).filter(|(_, sublayer)| **sublayer == kind);
    layers.map(|(layer, _)| layer).collect()
}

/// Sets the layers in the form.
pub(super) fn read(keys: &Keys, form: &mut Form) -> Result<(), Error> {
    let own = keys.u32("head_dim")?;
    const OLD: &str = "attention_head_dim";
    if keys.u32(OLD)?.is_some_and(|dim| Some(dim) != own) {
        return Err(keys.bad(OLD, "the same as head_dim, or 128 without it"));
    }
    refuse_limits(keys)?;
    let all = sublayers(keys)?;
    let is_mixer = |of: &Sublayer| matches!(of, Sublayer::Mamba | Sublayer::Attention);
    let layers = |mixers: bool| {
        let layers = (0..).zip(&all).filter(|(_, of)| is_mixer(of) == mixers);
        layers.map(|(layer, _)| layer).collect()
    };
    form.without_ffn = layers(true);
    form.without_mixer = layers(false);
    let with = layers_of(&all, Sublayer::Mamba);
    if with.is_empty() {
        return Ok(());
    }
    let size = |key, usual| Ok::<_, Error>(keys.u32(key)?.unwrap_or(usual));
    form.mamba = Some(MambaLayers {
        layers: with,
        shape: MambaShape {
            taps: size("conv_kernel", 4)?,
            heads: size("mamba_num_heads", 128)?,
            head_dim: size("mamba_head_dim", 64)?,
            groups: size("n_groups", 8)?,
            state_dim: size("ssm_state_size", 128)?,
            unnormed: false,
        },
        beside: false,
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn with<T>(value: Value, read: impl Fn(&Keys) -> Result<T, Error>) -> Result<T, Error> {
        read(&Keys::new(Path::new("config.json"), &value)?)
    }

    #[test]
    fn layers_are_letters_or_names_which_agree() {
        use Sublayer::*;
        let expected = [Mamba, Experts, Attention, Ffn];
        let old = ["mamba", "moe", "attention", "mlp"];
        let new = ["linear_attention", "moe", "full_attention", "mlp"];
        for good in [
            json!({"hybrid_override_pattern": "ME*-"}),
            json!({"layers_block_type": old}),
            json!({"layer_types": new, "num_hidden_layers": 4}),
            json!({"layers_block_type": new, "hybrid_override_pattern": "ME*-"}),
        ] {
            assert_eq!(with(good, sublayers).unwrap(), expected);
        }
        for (bad, named) in [
            (json!({}), PATTERN),
            (json!({"hybrid_override_pattern": "ME*x"}), PATTERN),
            (json!({"layers_block_type": ["moe", "conv"]}), LISTS[0]),
            (
                json!({"layer_types": old, "hybrid_override_pattern": "ME-*"}),
                LISTS[1],
            ),
            (
                json!({"layer_types": old, "num_hidden_layers": 5}),
                "num_hidden_layers",
            ),
        ] {
            let refused = with(bad, sublayers).unwrap_err().to_string();
            assert!(refused.contains(named), "{refused}");
        }
    }

    #[test]
    fn a_layer_lacks_what_it_is_not() {
        let form = |value: Value| -> Result<Form, Error> {
            let mut form = Form::default();
            read(&Keys::new(Path::new("config.json"), &value)?, &mut form)?;
            Ok(form)
        };
        let sizes = json!({"hybrid_override_pattern": "M-*EM", "head_dim": 9, "n_groups": 3});
        let found = form(sizes).unwrap();
        assert_eq!(found.without_ffn, [0, 2, 4]);
        assert_eq!(found.without_mixer, [1, 3]);
        let mamba = found.mamba.unwrap();
        assert_eq!((mamba.layers, mamba.shape.groups), (vec![0, 4], 3));
        let key = "attention_head_dim";
        let bad = json!({"hybrid_override_pattern": "*-", "head_dim": 9, key: 8});
        let refused = form(bad).unwrap_err().to_string();
        assert!(refused.contains(key), "{refused}");
    }
}
