//! The keys of Gemma 2, 3 and 3n.

use serde_json::Value;

use super::json::Keys;
use super::values::{Sizes, factor, must_be};
use crate::config::{Form, Streams};
use crate::error::Error;

/// `modeling_gemma2.py`: embeddings times `sqrt(hidden_size)`, scores divided by
/// `sqrt(query_pre_attn_scalar)` and capped, logits capped, norms on both sides of attention and FFN.
pub(super) fn gemma2(keys: &Keys, sizes: Sizes, plain: Form) -> Result<Form, Error> {
    Ok(Form {
        attention_cap: cap(keys, "attn_logit_softcapping", 50.0)?,
        logit_cap: cap(keys, "final_logit_softcapping", 30.0)?,
        ..gemma3(keys, sizes, plain)?
    })
}

/// `modeling_gemma3.py`: as Gemma 2, with norms of queries and keys instead of caps, and another
/// rotary base in the layers with a window.
pub(super) fn gemma3(keys: &Keys, sizes: Sizes, plain: Form) -> Result<Form, Error> {
    must_be(keys, "use_bidirectional_attention", false)?;
    let scalar = factor(keys, "query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(Form {
        post_norm: true,
        embedding_scale: (sizes.d_model as f32).sqrt(),
        attention_scale: Some(1.0 / scalar.sqrt()),
        ..plain
    })
}

/// `modeling_gemma3n.py`: scores that are not scaled, norms of values, last layers that read the keys
/// and values of earlier ones, gates by Gaussian top-k, several streams, an input for each layer.
pub(super) fn gemma3n(keys: &Keys, sizes: Sizes, plain: Form) -> Result<Form, Error> {
    if keys
        .u32("altup_active_idx")?
        .is_some_and(|index| index != 0)
    {
        return Err(keys.unsupported("altup_active_idx", "only 0 is implemented"));
    }
    Ok(Form {
        attention_scale: Some(1.0),
        logit_cap: cap(keys, "final_logit_softcapping", 30.0)?,
        value_norm: true,
        shared_kv: keys.need_u32("num_kv_shared_layers")?,
        gate_top: shares(keys, sizes.layers)?,
        streams: Some(Streams {
            count: keys.need_u32("altup_num_inputs")?,
            laurel: keys.need_u32("laurel_rank")?,
            per_layer: keys.need_u32("hidden_size_per_layer_input")?,
            per_layer_vocab: keys.need_u32("vocab_size_per_layer_input")?,
            scaled: keys.bool("altup_correct_scale")?.unwrap_or(true),
        }),
        ..gemma3(keys, sizes, plain)?
    })
}

/// A cap that null takes away.
fn cap(keys: &Keys, key: &str, usual: f32) -> Result<Option<f32>, Error> {
    match keys.map().contains_key(key) {
        true => factor(keys, key),
        false => Ok(Some(usual)),
    }
}

/// The share of each layer's gates that are zero; empty where none are.
fn shares(keys: &Keys, layers: u32) -> Result<Vec<f32>, Error> {
    const KEY: &str = "activation_sparsity_pattern";
    let list = keys.read(KEY, "a list of numbers", |value| {
        let number = |value: &Value| value.as_f64().map(|number| number as f32);
        value
            .as_array()?
            .iter()
            .map(number)
            .collect::<Option<Vec<f32>>>()
    })?;
    let list = list.unwrap_or_else(|| {
        let sparse = if layers > 10 { 10 } else { 0 };
        (0..layers)
            .map(|l| if l < sparse { 0.95 } else { 0.0 })
            .collect()
    });
    if list.len() != layers as usize {
        return Err(keys.bad(KEY, &format!("one number for each of {layers} layers")));
    }
    match list.iter().all(|&share| share == 0.0) {
        true => Ok(Vec::new()),
        false => Ok(list),
    }
}
