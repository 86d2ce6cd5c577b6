//! The layers of Nemotron-H, which have a single sublayer each.

use crate::config::Form;
use crate::error::Error;
use crate::json::Keys;
use crate::mixers::sublayers::{Sublayer, sublayers};

/// Sets the layers in the form.
pub(super) fn read(keys: &Keys, form: &mut Form) -> Result<(), Error> {
    let own = keys.u32("head_dim")?;
    const OLD: &str = "attention_head_dim";
    if keys.u32(OLD)?.is_some_and(|dim| Some(dim) != own) {
        return Err(keys.bad(OLD, "the same as head_dim, or 128 without it"));
    }
    let all = sublayers(keys)?;
    let is_mixer = |of: &Sublayer| matches!(of, Sublayer::Mamba | Sublayer::Attention);
    let layers = |mixers: bool| {
        let layers = (0..).zip(&all).filter(|(_, of)| is_mixer(of) == mixers);
        layers.map(|(layer, _)| layer).collect()
    };
    form.without_ffn = layers(true);
    form.without_mixer = layers(false);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::families;
    use crate::testing::{keys_of, sizes_of};

    #[test]
    fn a_layer_lacks_what_it_is_not() {
        let form = |value: Value| -> Result<Form, Error> {
            let mut form = Form::default();
            keys_of(&value, |keys| {
                let mut mixers = families::of("nemotron_h").mixers.iter();
                mixers.try_for_each(|of| of.read(keys, sizes_of(36, 5), &mut form))?;
                read(keys, &mut form)
            })?;
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
