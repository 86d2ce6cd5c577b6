//! Gemma 4's additions to Gemma 3, as written by `Gemma4Model` in llama.cpp's
//! `conversion/gemma.py`.

use crate::config::{Form, GlobalHeads, LayerInputs};
use crate::error::Error;
use crate::families::Arch;
use crate::metadata::Metadata;

/// Elements of a head of a layer with a window.
pub(super) const LOCAL_LENGTH: &str = "attention.key_length_swa";

/// Properties from the tensors.
#[derive(Debug, Clone, Copy)]
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
    metadata: &Metadata,
    arch: &Arch,
    facts: Gemma4Facts,
    window: &[u32],
    form: &mut Form,
) -> Result<(Option<u32>, Option<u32>), Error> {
    let key = |rest: &str| format!("{}.{rest}", arch.name);
    let need = |rest: &str| {
        let found = metadata.u32(&key(rest))?;
        found.ok_or_else(|| metadata.missing(&key(rest), "an integer"))
    };
    let local = need(LOCAL_LENGTH)?;
    for rest in ["attention.value_length_swa", "rope.dimension_count_swa"] {
        if metadata
            .u32(&key(rest))?
            .is_some_and(|length| length != local)
        {
            let why = format!("only {local}, the length of keys, is implemented");
            return Err(metadata.unsupported(&key(rest), &why));
        }
    }
    if !facts.rope_factors {
        return Err(metadata.missing("rope_freqs.weight", "the divisors of rotary frequencies"));
    }
    form.layer_scale = facts.layer_scale;
    form.shared_kv = metadata
        .u32(&key("attention.shared_kv_layers"))?
        .unwrap_or(0);
    let width = metadata.u32(&key("embedding_length_per_layer_input"))?;
    form.layer_inputs = width.filter(|&width| width > 0).map(|width| LayerInputs {
        width,
        vocab: facts.rows,
    });
    let [windowed, full] = by_window(metadata, &key("attention.head_count_kv"), window)?;
    let global = GlobalHeads {
        kv_heads: full.unwrap_or(windowed.unwrap_or(0)),
        head_dim: need("attention.key_length")?,
        key_is_value: facts.key_is_value,
    };
    let kv_heads = windowed.unwrap_or(global.kv_heads);
    let own = GlobalHeads {
        kv_heads,
        head_dim: local,
        key_is_value: false,
    };
    form.global_heads = (global != own).then_some(global);
    let neurons = neurons(metadata, arch, window.len() as u32, form)?;
    Ok((Some(kv_heads), Some(neurons)))
}

/// Neurons of the dense FFN of layers with their own keys and values; those of the other layers are set
/// in the form if they differ.
fn neurons(metadata: &Metadata, arch: &Arch, layers: u32, form: &mut Form) -> Result<u32, Error> {
    let key = format!("{}.feed_forward_length", arch.name);
    let list = numbers(metadata, &key, layers)?;
    let own = layers.saturating_sub(form.shared_kv) as usize;
    let (first, last) = list.split_at(own.min(list.len()));
    let same = |part: &[u32]| part.windows(2).all(|pair| pair[0] == pair[1]);
    if !same(first) || !same(last) {
        let why = "only layers that share keys and values may have other FFNs, and all the same";
        return Err(metadata.unsupported(&key, why));
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
fn by_window(metadata: &Metadata, key: &str, window: &[u32]) -> Result<[Option<u32>; 2], Error> {
    let list = numbers(metadata, key, window.len() as u32)?;
    let mut found = [None; 2];
    for (&window, number) in window.iter().zip(list) {
        let place = &mut found[usize::from(window == 0)];
        if place.is_some_and(|found| found != number) {
            let why = "only layers with a window and those without may have different numbers";
            return Err(metadata.unsupported(key, why));
        }
        *place = Some(number);
    }
    Ok(found)
}

/// A number for each layer: a list, or one number for all.
fn numbers(metadata: &Metadata, key: &str, layers: u32) -> Result<Vec<u32>, Error> {
    if metadata.is_list(key) {
        let list = metadata.u32s(key)?;
        return if list.len() == layers as usize {
            Ok(list)
        } else {
            Err(metadata.bad(key, &format!("a number for each of {layers} layers")))
        };
    }
    let one = metadata.u32(key)?;
    let one = one.ok_or_else(|| metadata.missing(key, "an integer"))?;
    Ok(vec![one; layers as usize])
}
