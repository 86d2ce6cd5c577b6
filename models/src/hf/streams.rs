//! Gemma 3n's additions to its layers.

use serde_json::Value;

use crate::config::{Form, Streams};
use crate::error::Error;
use crate::json::Keys;
use crate::mixers::Sizes;

/// `modeling_gemma3n.py`: last layers that share the keys and values of earlier ones, gates by
/// Gaussian top-k, several streams, per-layer inputs.
pub(super) fn streams(keys: &Keys, sizes: Sizes, form: &mut Form) -> Result<(), Error> {
    form.shared_kv = keys.need_u32("num_kv_shared_layers")?;
    form.gate_top = shares(keys, sizes.layers)?;
    form.streams = Some(Streams {
        count: keys.need_u32("altup_num_inputs")?,
        laurel: keys.need_u32("laurel_rank")?,
        per_layer: keys.need_u32("hidden_size_per_layer_input")?,
        per_layer_vocab: keys.need_u32("vocab_size_per_layer_input")?,
        scaled: keys.bool("altup_correct_scale")?.unwrap_or(true),
    });
    Ok(())
}

/// The share of each layer's gates that are zero; empty if none are.
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
    if list.iter().all(|&share| share == 0.0) {
        Ok(Vec::new())
    } else {
        Ok(list)
    }
}
