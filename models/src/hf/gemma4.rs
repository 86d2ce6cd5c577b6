//! What Gemma 4 has beside Gemma 3, in `config.json`.

use serde_json::Value;

use super::json::Keys;
use super::values::Sizes;
use crate::config::{Form, GlobalHeads, LayerInputs};
use crate::error::Error;

/// Elements of a head of a layer without a window, where no key says it.
const GLOBAL_DIM: u32 = 512;
/// Every so many layers, one has no window, where no list names the layers.
const PATTERN: u32 = 6;
/// Key of what differs by layer, as transformers 5 writes it.
const BY_LAYER: &str = "per_layer_config";

/// `modeling_gemma4.py`: other heads without a window, whose values may be their keys; last layers that
/// read the keys and values of earlier ones, with wider FFNs; an input for each layer; a factor at each
/// layer's end.
pub(super) fn form(keys: &Keys, sizes: Sizes, form: &mut Form) -> Result<(), Error> {
    form.layer_scale = true;
    form.shared_kv = keys.u32("num_kv_shared_layers")?.unwrap_or(0);
    if keys.bool("use_double_wide_mlp")? == Some(true) && form.shared_kv > 0 {
        form.shared_kv_ffn = keys.need_u32("intermediate_size")?.saturating_mul(2);
    }
    let width = keys.u32("hidden_size_per_layer_input")?.unwrap_or(0);
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
    let heads = global_heads(keys, sizes.layers)?;
    let local = GlobalHeads {
        kv_heads: keys.need_u32("num_key_value_heads")?,
        head_dim: keys.need_u32("head_dim")?,
        key_is_value: false,
    };
    form.global_heads = (heads != local).then_some(heads);
    Ok(())
}

/// Heads of the layers without a window.
fn global_heads(keys: &Keys, layers: u32) -> Result<GlobalHeads, Error> {
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
    // numbers of layers may have leading zeros
    let number = |key: &String| key.parse::<u32>().ok();
    let full = full_layers(keys, layers)?;
    let named: Vec<Option<u32>> = by_layer.map().keys().map(number).collect();
    let is_full = |layer: &Option<u32>| layer.is_some_and(|layer| full.contains(&layer));
    if let Some(at) = named.iter().position(|layer| !is_full(layer)) {
        let key = by_layer.map().keys().nth(at).map_or("", String::as_str);
        let why = "only layers without a window may have other heads";
        return Err(by_layer.unsupported(key, why));
    }
    let mut found: Option<GlobalHeads> = None;
    for layer in full {
        let at = named.iter().position(|named| *named == Some(layer));
        let key = at.and_then(|at| by_layer.map().keys().nth(at));
        let of = match key {
            Some(key) => match by_layer.object(key, "per_layer_config.")? {
                Some(object) => one_layer(&object, heads)?,
                None => heads,
            },
            None => heads,
        };
        if found.is_some_and(|found| found != of) {
            let why = "the layers without a window have different heads";
            return Err(keys.unsupported(BY_LAYER, why));
        }
        found = Some(of);
    }
    Ok(found.unwrap_or(heads))
}

/// What the object of a layer changes.
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

/// The layers without a window. The last one is always among them.
fn full_layers(keys: &Keys, layers: u32) -> Result<Vec<u32>, Error> {
    let kinds = keys.read("layer_types", "a list", Value::as_array)?;
    let Some(kinds) = kinds else {
        let is_full = |layer: &u32| (layer + 1).is_multiple_of(PATTERN);
        return Ok((0..layers).filter(is_full).collect());
    };
    if kinds.last().and_then(Value::as_str) != Some("full_attention") {
        let expected = "a list that ends with full_attention, which transformers makes the last";
        return Err(keys.bad("layer_types", expected));
    }
    let full = (0..)
        .zip(kinds)
        .filter(|(_, kind)| *kind == "full_attention");
    Ok(full.map(|(layer, _)| layer).collect())
}
