//! Gemma 4's additions to Gemma 3, as written by `Gemma4Model` in llama.cpp's
//! `conversion/gemma.py`.

use crate::config::{Form, GlobalHeads, LayerInputs};
use crate::error::Error;
use crate::metadata::ArchKeys;

/// Elements of a head of a layer with a window.
pub(super) const LOCAL_LENGTH: &str = "attention.key_length_swa";

/// Properties from the tensors.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Gemma4Facts {
    /// Rows of the table of per-layer inputs.
    pub(super) rows: u32,
    /// Some layers have keys and no values.
    pub(super) key_is_value: bool,
    /// Layers end with a factor.
    pub(super) layer_scale: bool,
    /// There are divisors of the rotary frequencies.
    pub(super) rope_factors: bool,
}

/// Reads the deviations into the form, with the window of each layer. Returns the key/value heads of
/// layers with a window, and the neurons of the dense FFN of layers with their own keys and values.
pub(super) fn form(
    of: ArchKeys<'_>,
    facts: Gemma4Facts,
    window: &[u32],
    form: &mut Form,
) -> Result<(Option<u32>, Option<u32>), Error> {
    let local = of.need(LOCAL_LENGTH)?;
    for rest in ["attention.value_length_swa", "rope.dimension_count_swa"] {
        if of.u32(rest)?.is_some_and(|length| length != local) {
            let why = format!("only {local}, the length of keys, is implemented");
            return Err(of.unsupported(rest, &why));
        }
    }
    if !facts.rope_factors {
        let expected = "the divisors of rotary frequencies";
        return Err(of.metadata.missing("rope_freqs.weight", expected));
    }
    form.layer_scale = facts.layer_scale;
    form.shared_kv = of.u32("attention.shared_kv_layers")?.unwrap_or(0);
    let width = of.u32("embedding_length_per_layer_input")?;
    form.layer_inputs = width.filter(|&width| width > 0).map(|width| LayerInputs {
        width,
        vocab: facts.rows,
    });
    let [windowed, full] = by_window(of, "attention.head_count_kv", window)?;
    let global = GlobalHeads {
        kv_heads: full.unwrap_or(windowed.unwrap_or(0)),
        head_dim: of.need("attention.key_length")?,
        key_is_value: facts.key_is_value,
    };
    let kv_heads = windowed.unwrap_or(global.kv_heads);
    let own = GlobalHeads {
        kv_heads,
        head_dim: local,
        key_is_value: false,
    };
    form.global_heads = (global != own).then_some(global);
    let neurons = neurons(of, window.len() as u32, form)?;
    Ok((Some(kv_heads), Some(neurons)))
}

/// Neurons of the dense FFN of layers with their own keys and values; those of the other layers are set
/// in the form if they differ.
fn neurons(of: ArchKeys<'_>, layers: u32, form: &mut Form) -> Result<u32, Error> {
    const KEY: &str = "feed_forward_length";
    let list = numbers(of, KEY, layers)?;
    let own = layers.saturating_sub(form.shared_kv) as usize;
    let (first, last) = list.split_at(own.min(list.len()));
    let same = |part: &[u32]| part.windows(2).all(|pair| pair[0] == pair[1]);
    if !same(first) || !same(last) {
        let why = "only layers that share keys and values may have other FFNs, and all the same";
        return Err(of.unsupported(KEY, why));
    }
    let neurons = first.first().or(last.first()).copied().unwrap_or(0);
    form.shared_kv_ffn = last
        .first()
        .copied()
        .filter(|&wide| wide != neurons)
        .unwrap_or(0);
    Ok(neurons)
}

/// The value for layers with a window, and that for layers without, if there are any.
fn by_window(of: ArchKeys<'_>, key: &str, window: &[u32]) -> Result<[Option<u32>; 2], Error> {
    let list = numbers(of, key, window.len() as u32)?;
    let mut found = [None; 2];
    for (&window, number) in window.iter().zip(list) {
        let place = &mut found[usize::from(window == 0)];
        if place.is_some_and(|found| found != number) {
            let why = "only layers with a window and those without may have different numbers";
            return Err(of.unsupported(key, why));
        }
        *place = Some(number);
    }
    Ok(found)
}

/// A number for each layer: a list, or one number for all.
fn numbers(of: ArchKeys<'_>, key: &str, layers: u32) -> Result<Vec<u32>, Error> {
    if !of.metadata.is_list(&of.key(key)) {
        return Ok(vec![of.need(key)?; layers as usize]);
    }
    let list = of.u32s(key)?;
    match list.len() == layers as usize {
        true => Ok(list),
        false => Err(of.bad(key, &format!("a number for each of {layers} layers"))),
    }
}
