//! Names of the tensors of Qwen3.8-Flash-Next.

use super::{gguf_names, hf_names};
use crate::mixers::{attention, delta_net};
use crate::names::{NameTable, Role};

/// In safetensors.
pub(super) const HF: NameTable = NameTable {
    globals: &[
        (Role::Embed, "model.embed_tokens.weight"),
        (Role::Head, "lm_head.weight"),
        (
            Role::HyperHeadNorm,
            "model.hyper_connection_mixer.hc_norm.weight",
        ),
        (
            Role::HyperHeadDown,
            "model.hyper_connection_mixer.input_mix_weight_down.weight",
        ),
        (
            Role::HyperHeadUp,
            "model.hyper_connection_mixer.input_mix_weight_up.weight",
        ),
    ],
    layers: &[
        attention::HF_GATED,
        hf_names::FFN,
        delta_net::HF_NAMES,
        hf_names::ROUTER,
        delta_net::HF_INPUTS,
        &[
            (Role::HyperMixerNorm, "attn_hyper_connection.hc_norm.weight"),
            (
                Role::HyperMixerDown,
                "attn_hyper_connection.input_mix_weight_down.weight",
            ),
            (
                Role::HyperMixerUp,
                "attn_hyper_connection.input_mix_weight_up.weight",
            ),
            (
                Role::HyperMixerInject,
                "attn_hyper_connection.block_inject_weight.weight",
            ),
            (Role::HyperFfnNorm, "mlp_hyper_connection.hc_norm.weight"),
            (
                Role::HyperFfnDown,
                "mlp_hyper_connection.input_mix_weight_down.weight",
            ),
            (
                Role::HyperFfnUp,
                "mlp_hyper_connection.input_mix_weight_up.weight",
            ),
            (
                Role::HyperFfnInject,
                "mlp_hyper_connection.block_inject_weight.weight",
            ),
            (Role::NGramKey, "ple.key_proj.weight"),
            (Role::NGramValue, "ple.value_proj.weight"),
            (Role::NGramKeyNorm, "ple.norm_key.weight"),
            (Role::NGramQueryNorm, "ple.norm_query.weight"),
            (Role::NGramConvNorm, "ple.norm_conv.weight"),
            (Role::NGramConv, "ple.conv1d.weight"),
        ],
    ],
    ..hf_names::QWEN3_5
};

/// In GGUF.
pub(super) const GGUF: NameTable = NameTable {
    globals: &[
        (Role::Embed, "token_embd.weight"),
        (Role::Head, "output.weight"),
        (Role::HyperHeadNorm, "output_hc_norm.weight"),
        (Role::HyperHeadDown, "output_hc_down.weight"),
        (Role::HyperHeadUp, "output_hc_up.weight"),
        (Role::NGramTable, "per_layer_token_embd.weight"),
    ],
    layers: &[
        attention::GGUF_GATED,
        gguf_names::DELTA_NORMS,
        delta_net::GGUF_NAMES,
        gguf_names::FFN,
        gguf_names::ROUTER,
        delta_net::GGUF_SHARES,
        &[
            (Role::HyperMixerNorm, "hc_attn_norm.weight"),
            (Role::HyperMixerDown, "hc_attn_down.weight"),
            (Role::HyperMixerUp, "hc_attn_up.weight"),
            (Role::HyperMixerInject, "hc_attn_inject.weight"),
            (Role::HyperFfnNorm, "hc_ffn_norm.weight"),
            (Role::HyperFfnDown, "hc_ffn_down.weight"),
            (Role::HyperFfnUp, "hc_ffn_up.weight"),
            (Role::HyperFfnInject, "hc_ffn_inject.weight"),
            (Role::NGramKey, "ple_key.weight"),
            (Role::NGramValue, "ple_value.weight"),
            (Role::NGramKeyNorm, "ple_norm_key.weight"),
            (Role::NGramQueryNorm, "ple_norm_query.weight"),
            (Role::NGramConvNorm, "ple_norm_conv.weight"),
            (Role::NGramConv, "ple_conv1d.weight"),
        ],
    ],
    ..gguf_names::QWEN3_5
};
