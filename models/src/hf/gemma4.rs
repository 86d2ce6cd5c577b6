//! Gemma 4's additions to Gemma 3, in `config.json`.

use crate::config::{Form, GlobalHeads, LayerInputs};
use crate::error::Error;
use crate::json::Keys;

/// Elements of a head of a layer without a window, if no key is given.
const GLOBAL_DIM: u32 = 512;
/// Elements of a layer's input, if the key is absent.
const LAYER_INPUT: u32 = 256;
/// Key of per-layer differences, as in transformers 5.
const BY_LAYER: &str = "per_layer_config";

/// `modeling_gemma4.py`: other heads without a window, whose values may be their keys; last layers that
/// share the keys and values of earlier ones, with wider FFNs; per-layer inputs; a factor at each
/// layer's end.
pub(super) fn form(keys: &Keys, window: &[u32], form: &mut Form) -> Result<(), Error> {
    if window.last().is_none_or(|&window| window != 0) {
        let expected = "a list that ends with full_attention, as transformers makes the last layer";
        return Err(keys.bad("layer_types", expected));
    }
    if keys.get("rope_parameters").is_none() {
        return Err(keys.missing("rope_parameters", "those of both kinds of layers"));
    }
    form.layer_scale = true;
    form.shared_kv = keys.u32("num_kv_shared_layers")?.unwrap_or(0);
    if keys.bool("use_double_wide_mlp")? == Some(true) && form.shared_kv > 0 {
        form.shared_kv_ffn = keys.need_u32("intermediate_size")?.saturating_mul(2);
    }
    const WIDTH: &str = "hidden_size_per_layer_input";
    let width = if keys.map().contains_key(WIDTH) {
        keys.u32(WIDTH)?.unwrap_or(0)
    } else {
        LAYER_INPUT
    };
    if width > 0 {
        let (tokens, vocab) = ("vocab_size_per_layer_input", keys.need_u32("vocab_size")?);
        form.layer_inputs = Some(LayerInputs {
            width,
            vocab: match keys.need_u32(tokens)? {
                rows if rows >= vocab => rows,
                _ => return Err(keys.bad(tokens, "vocab_size, or more")),
            },
        });
    }
    let heads = global_heads(keys, window)?;
    let local = GlobalHeads {
        kv_heads: keys.need_u32("num_key_value_heads")?,
        head_dim: keys.need_u32("head_dim")?,
        key_is_value: false,
    };
    form.global_heads = (heads != local).then_some(heads);
    Ok(())
}

/// Heads of the layers without a window.
fn global_heads(keys: &Keys, window: &[u32]) -> Result<GlobalHeads, Error> {
    let key_is_value = keys.bool("attention_k_eq_v")?.unwrap_or(false);
    let mut heads = GlobalHeads {
        kv_heads: keys.need_u32("num_key_value_heads")?,
        head_dim: keys.u32("global_head_dim")?.unwrap_or(GLOBAL_DIM),
        key_is_value,
    };
    let own = keys.u32("num_global_key_value_heads")?;
    heads.kv_heads = own.filter(|_| key_is_value).unwrap_or(heads.kv_heads);
    let Some(by_layer) = keys.object(BY_LAYER, "per_layer_config.")? else {
        return Ok(heads);
    };
    for key in ["global_head_dim", "num_global_key_value_heads"] {
        if keys.get(key).is_some() {
            return Err(keys.bad(key, "absent, as per_layer_config is given"));
        }
    }
    heads.kv_heads = keys.need_u32("num_key_value_heads")?;
    heads.head_dim = keys.need_u32("head_dim")?;
    let mut given = vec![None; window.len()];
    for key in by_layer.map().keys() {
        // numbers may have leading zeros
        let layer = key.parse::<usize>().ok();
        let layer = layer.filter(|&layer| window.get(layer) == Some(&0));
        let Some(layer) = layer else {
            let why = "only layers without a window may have other heads";
            return Err(by_layer.unsupported(key, why));
        };
        let object = by_layer.object(key, "per_layer_config.")?;
        given[layer] = object.map(|object| one_layer(&object, heads)).transpose()?;
    }
    let mut found: Option<GlobalHeads> = None;
    let full = given
        .into_iter()
        .zip(window)
        .filter(|(_, window)| **window == 0);
    for (given, _) in full {
        let of = given.unwrap_or(heads);
        if found.is_some_and(|found| found != of) {
            let why = "the layers without a window have different heads";
            return Err(keys.unsupported(BY_LAYER, why));
        }
        found = Some(of);
    }
    Ok(found.unwrap_or(heads))
}

/// The changes in the object of a layer.
fn one_layer(object: &Keys, mut heads: GlobalHeads) -> Result<GlobalHeads, Error> {
    let known = ["head_dim", "num_key_value_heads"];
    if let Some(key) = object
        .map()
        .keys()
        .find(|key| !known.contains(&key.as_str()))
    {
        return Err(object.unsupported(key, "implemented: head_dim, num_key_value_heads"));
    }
    heads.head_dim = object.u32("head_dim")?.unwrap_or(heads.head_dim);
    let own = object.u32("num_key_value_heads")?;
    heads.kv_heads = own.unwrap_or(heads.kv_heads);
    Ok(heads)
}
