//! The sublayers of models whose layers have a single one each (Nemotron-H), in `config.json`.

use serde_json::Value;

use crate::error::Error;
use crate::json::Keys;

/// The sublayer of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sublayer {
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
pub(crate) fn sublayers(keys: &Keys) -> Result<Vec<Sublayer>, Error> {
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
pub(crate) fn layers_of(of: &[Sublayer], kind: Sublayer) -> Vec<u32> {
    let layers = (0..).zip(of).filter(|(_, sublayer)| **sublayer == kind);
    layers.map(|(layer, _)| layer).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::keys_of;

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
            assert_eq!(keys_of(&good, sublayers).unwrap(), expected);
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
            let refused = keys_of(&bad, sublayers).unwrap_err().to_string();
            assert!(refused.contains(named), "{refused}");
        }
    }
}
