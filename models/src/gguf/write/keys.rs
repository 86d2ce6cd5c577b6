//! The keys of a header.

use std::path::Path;

use super::forms::{ffn_key, form_keys, head_keys};
use super::types::{GgufFile, GgufValue};
use super::vocab;
use crate::config::{Activation, Mixture, ModelConfig, RopeScaling, Scoring};
use crate::error::Error;
use crate::families::{self, Arch};
use crate::gguf::config::{HIDDEN_ACT, RELU_ON_UP};
use crate::gguf::experts::{SIGMOID, SOFTMAX};

/// `general.quantization_version`: the block formats as of 2023.
const QUANTIZATION_VERSION: u32 = 2;

/// Every key of the header, in file order.
pub(super) fn keys(
    path: &Path,
    arch: &Arch,
    file: &GgufFile<'_>,
) -> Result<Vec<(String, GgufValue)>, Error> {
    let mut keys = model_keys(path, arch, file)?;
    keys.extend(vocab::keys(file));
    keys.extend(file.extra.iter().cloned());
    Ok(keys)
}

/// Whether the model has only properties that are written.
pub(super) fn is_plain(c: &ModelConfig, arch: &Arch) -> bool {
    let mut form = c.form.clone();
    if arch.windows.have_a_key() {
        // these are the layers without a window
        form.nope_layers.clear();
    }
    let family = families::of(&c.family);
    // in every file of these families
    form.ffn_bias &= !family.ffn_bias;
    form.sinks &= !family.sinks;
    let plain = form.is_plain() && !c.ffn_kind.ungated && c.rope.dims == c.head_dim;
    plain && arch.names.fused.is_empty()
}

/// The property of the model that GGUF has no key for, as text.
fn inexpressible(c: &ModelConfig, arch: &Arch) -> Option<&'static str> {
    match c {
        c if !matches!(
            c.rope.scaling,
            RopeScaling::None | RopeScaling::Proportional { .. }
        ) =>
        {
            Some("a rotary scaling")
        }
        c if c.window.iter().any(|&w| w != 0) && !arch.windows.have_a_key() => {
            Some("a sliding window")
        }
        c if c.qkv_bias && arch.interleaved => Some("a bias on Q and K"),
        c if c
            .mixture
            .as_ref()
            .is_some_and(|m| m.dense_layers.iter().zip(0..).any(|(a, b)| *a != b)) =>
        {
            Some("dense layers after those with experts")
        }
        _ => None,
    }
}

/// The keys that describe the decoder.
fn model_keys(
    path: &Path,
    arch: &Arch,
    file: &GgufFile<'_>,
) -> Result<Vec<(String, GgufValue)>, Error> {
    use GgufValue::{Bool, F32, Text, U32};
    let c = file.config;
    if let Some(what) = inexpressible(c, arch) {
        return Err(Error::export(path, format!("{what} has no gguf form yet")));
    }
    let arch = arch.name;
    let act = match c.ffn_kind.activation {
        // other ones make the reader report a difference
        Activation::ClampedSwiglu { .. } if families::of(&c.family).clamped => None,
        Activation::Relu => Some("relu"),
        Activation::Relu2 => Some("relu2"),
        Activation::Silu => Some("silu"),
        Activation::Gelu => Some("gelu"),
        Activation::GeluTanh => Some("gelu_pytorch_tanh"),
        Activation::FatRelu { .. }
        | Activation::ClampedSwiglu { .. }
        | Activation::ClampedSilu { .. }
        | Activation::Xielu { .. } => {
            let reason = "the activation has no gguf form yet";
            return Err(Error::export(path, reason.into()));
        }
    };
    let mut keys = vec![
        ("general.architecture".into(), Text(arch.into())),
        ("general.name".into(), Text(c.name.clone())),
        ("general.file_type".into(), U32(file.encoding.file_type())),
        (
            "general.quantization_version".into(),
            U32(QUANTIZATION_VERSION),
        ),
    ];
    let mut own = |key: &str, value| keys.push((format!("{arch}.{key}"), value));
    own("vocab_size", U32(c.vocab));
    own("context_length", U32(c.max_context));
    own("embedding_length", U32(c.d_model));
    own("block_count", U32(c.layers));
    own("feed_forward_length", ffn_key(c));
    own("attention.head_count", U32(c.heads));
    head_keys(c, &mut own);
    own("attention.layer_norm_rms_epsilon", F32(c.rms_eps));
    own("rope.dimension_count", U32(c.rope.dims));
    own("rope.freq_base", F32(c.rope.theta));
    form_keys(c, &mut own);
    if let Some(mixture) = &c.mixture {
        expert_keys(c, mixture, &mut own);
    }
    if let Some(&window) = c.window.iter().find(|&&window| window != 0) {
        own("attention.sliding_window", U32(window));
    }
    if let Some(clip) = c.clip_qkv {
        own("attention.clamp_kqv", F32(clip));
    }
    if let Some(act) = act {
        keys.push((HIDDEN_ACT.into(), Text(act.into())));
    }
    keys.push((RELU_ON_UP.into(), Bool(c.ffn_kind.relu_on_up)));
    Ok(keys)
}

/// Keys of a mixture of experts.
fn expert_keys(c: &ModelConfig, mixture: &Mixture, own: &mut impl FnMut(&str, GgufValue)) {
    use GgufValue::{Bool, F32, U32};
    own("expert_count", U32(c.experts));
    own("expert_used_count", U32(mixture.chosen));
    own("expert_feed_forward_length", U32(c.ffn));
    own("expert_weights_norm", Bool(mixture.renormalise));
    if mixture.shared > 0 && !mixture.parallel_dense {
        own("expert_shared_feed_forward_length", U32(mixture.shared));
    }
    if mixture.early_router || mixture.scoring == Scoring::Sigmoid {
        let function = match mixture.scoring {
            Scoring::Sigmoid => SIGMOID,
            Scoring::Softmax | Scoring::SparseMixer | Scoring::SqrtSoftplus => SOFTMAX,
        };
        own("expert_gating_func", U32(function));
    }
    if mixture.scale != 1.0 {
        own("expert_weights_scale", F32(mixture.scale));
    }
    if let Some(groups) = mixture.groups {
        own("expert_group_count", U32(groups.count));
        own("expert_group_used_count", U32(groups.chosen));
    }
    if !mixture.dense_layers.is_empty() {
        let dense = mixture.dense_layers.len() as u32;
        own("leading_dense_block_count", U32(dense));
    }
    if mixture.shared_is_plain && !mixture.parallel_dense {
        own("expert_shared_count", U32(mixture.shared / c.ffn.max(1)));
    }
}
