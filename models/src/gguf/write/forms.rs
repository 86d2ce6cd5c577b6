//! Deviations from the plain decoder: keys, names and shapes of tensors.
//!
//! As llama.cpp's converters write them (`conversion/*.py`).

use super::types::GgufValue::{self, Bools, F32, I32s, U32};
use crate::config::{ModelConfig, RopeScaling};
use crate::families::{self, Quirk};
use crate::gguf::stored_rows;
use crate::names::Role;

/// Divisor of the frequencies of pairs that do not rotate, as written by the converter of Gemma 4.
const ENORMOUS: f32 = 1e30;

/// Whether every file stores the matrix in f32.
pub(super) fn is_float(role: Role) -> bool {
    let biases = matches!(role, Role::GateBias | Role::UpBias | Role::DownBias);
    role == Role::Router || biases || role.is_conv()
}

/// Dimensions of a tensor of this shape, innermost first.
pub(super) fn dims(role: Role, [rows, cols]: [usize; 2], config: &ModelConfig) -> Vec<u64> {
    let heads = config.heads.max(1) as usize;
    let dims = match role {
        // a matrix for each head
        Role::LatentKeys | Role::LatentValues => vec![cols, rows / heads, heads],
        _ if rows == 1 => match stored_rows(config, role) {
            Some(rows) => vec![cols / rows.max(1), rows],
            None => vec![cols],
        },
        _ => vec![cols, rows],
    };
    dims.into_iter().map(|dim| dim as u64).collect()
}

/// The divisors of rotary frequencies, if the file has them.
pub(super) fn rope_factors(config: &ModelConfig) -> Vec<f32> {
    let RopeScaling::Proportional { pairs } = config.rope.scaling else {
        return Vec::new();
    };
    let all = 0..config.rope.dims / 2;
    let factor = |pair| if pair < pairs { 1.0 } else { ENORMOUS };
    all.map(factor).collect()
}

/// Widths of heads, and number of key/value heads.
pub(super) fn head_keys(c: &ModelConfig, own: &mut impl FnMut(&str, GgufValue)) {
    let family = families::of(&c.family);
    if c.form.latent.is_some() {
        // its own keys
        return;
    }
    let widest = c.form.global_heads.map_or(c.head_dim, |of| of.head_dim);
    own("attention.key_length", U32(widest));
    own("attention.value_length", U32(widest));
    if family.has(Quirk::GlobalHeads) {
        own("attention.key_length_swa", U32(c.head_dim));
        own("attention.value_length_swa", U32(c.head_dim));
        own("attention.shared_kv_layers", U32(c.form.shared_kv));
        own("embedding_length_per_layer_input", U32(0));
        let windowed = c.window.iter().map(|&window| window != 0);
        own(
            "attention.sliding_window_pattern",
            Bools(windowed.collect()),
        );
    }
    let heads = |layer| match c.mixer_of(layer).has_attention() {
        true => c.heads_of(layer).kv_heads.cast_signed(),
        false => 0,
    };
    let all: Vec<i32> = (0..c.layers).map(heads).collect();
    let recurrent = c.form.short_conv.is_some() || family.has(Quirk::Sublayers);
    own(
        "attention.head_count_kv",
        if recurrent || family.has(Quirk::GlobalHeads) {
            I32s(all)
        } else {
            U32(c.kv_heads)
        },
    );
}

/// Neurons of the FFN of a layer without experts, or of a parallel one; by layer if not all have one.
pub(super) fn ffn_key(c: &ModelConfig) -> GgufValue {
    if families::of(&c.family).has(Quirk::Sublayers) {
        let neurons = |layer| {
            if c.has_ffn(layer) {
                c.ffn.cast_signed()
            } else {
                0
            }
        };
        return I32s((0..c.layers).map(neurons).collect());
    }
    U32(match &c.mixture {
        Some(mixture) if mixture.parallel_dense => mixture.shared,
        Some(mixture) if !mixture.dense_layers.is_empty() => mixture.dense_ffn,
        _ => c.ffn,
    })
}

/// Other mixers, rotary positions and caps.
pub(super) fn form_keys(c: &ModelConfig, own: &mut impl FnMut(&str, GgufValue)) {
    let form = &c.form;
    for (key, value) in form.mixers().flat_map(|of| of.gguf(c.sizes())) {
        own(key, U32(value));
    }
    if form.delta_net.is_some() {
        // of text, height and width; all equal the position in a text
        let pairs = (c.rope.dims / 2).cast_signed();
        let third = (c.rope.dims / 2).div_ceil(3).cast_signed();
        let sections = vec![third, third, pairs - 2 * third, 0];
        own("rope.dimension_sections", I32s(sections));
    }
    if families::of(&c.family).has(Quirk::Sublayers) {
        own("attention.layer_norm_epsilon", F32(c.rms_eps));
    }
    if let Some(local) = &form.local_rope {
        own("rope.freq_base_swa", F32(local.theta));
        own("rope.dimension_count_swa", U32(local.dims));
    }
    if let Some(cap) = form.logit_cap {
        own("final_logit_softcapping", F32(cap));
    }
}
