//! GPT-2 and GPT-NeoX: LayerNorms and biases everywhere, Q, K and V in one tensor.

use super::{Arch, Bias, Check, Family, PLAIN, PLAIN_ARCH, Quirk};
use super::{gguf_names, hf_names};
use crate::config::{Activation, Parallel};
use crate::names::{Fused, NameTable, Role};

const HF_GPT2: NameTable = NameTable {
    layer_prefix: "transformer.h.",
    globals: &[
        (Role::Embed, "transformer.wte.weight"),
        (Role::Positions, "transformer.wpe.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "transformer.ln_f.weight"),
        (Role::FinalNormBias, "transformer.ln_f.bias"),
    ],
    layers: &[&[
        (Role::AttnNorm, "ln_1.weight"),
        (Role::AttnNormBias, "ln_1.bias"),
        (Role::O, "attn.c_proj.weight"),
        (Role::OBias, "attn.c_proj.bias"),
        (Role::FfnNorm, "ln_2.weight"),
        (Role::FfnNormBias, "ln_2.bias"),
        (Role::Gate, "mlp.c_fc.weight"),
        (Role::GateBias, "mlp.c_fc.bias"),
        (Role::Down, "mlp.c_proj.weight"),
        (Role::DownBias, "mlp.c_proj.bias"),
    ]],
    experts: hf_names::NO_EXPERTS,
    fused: &[
        (Fused::QkvColumns, "attn.c_attn.weight"),
        (Fused::QkvBias, "attn.c_attn.bias"),
    ],
    ..hf_names::PLAIN
};

const HF_GPT_NEOX: NameTable = NameTable {
    layer_prefix: "gpt_neox.layers.",
    globals: &[
        (Role::Embed, "gpt_neox.embed_in.weight"),
        (Role::Head, "embed_out.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "gpt_neox.final_layer_norm.weight"),
        (Role::FinalNormBias, "gpt_neox.final_layer_norm.bias"),
    ],
    layers: &[
        hf_names::NORMS,
        &[
            (Role::O, "attention.dense.weight"),
            (Role::OBias, "attention.dense.bias"),
            (Role::Gate, "mlp.dense_h_to_4h.weight"),
            (Role::GateBias, "mlp.dense_h_to_4h.bias"),
            (Role::Down, "mlp.dense_4h_to_h.weight"),
            (Role::DownBias, "mlp.dense_4h_to_h.bias"),
        ],
    ],
    experts: hf_names::NO_EXPERTS,
    fused: &[
        (Fused::QkvByGroup, "attention.query_key_value.weight"),
        (Fused::QkvBiasByGroup, "attention.query_key_value.bias"),
    ],
    ..hf_names::PLAIN
};

const GGUF: NameTable = NameTable {
    globals: gguf_names::OPT.globals,
    fused: &[
        (Fused::Qkv, "attn_qkv.weight"),
        (Fused::QkvBias, "attn_qkv.bias"),
    ],
    ..gguf_names::UNGATED
};

const GPT: Family = Family {
    layer_norm: true,
    bias: Bias::All,
    ffn_bias: true,
    ungated: true,
    ..PLAIN
};

/// `modeling_gpt2.py`: learned positions, matrices stored transposed.
const GPT2: Family = Family {
    name: "gpt2",
    class: Some("GPT2LMHeadModel"),
    aliases: &[
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("max_position_embeddings", "n_positions"),
    ],
    names: &HF_GPT2,
    gguf: Some(Arch {
        name: "gpt2",
        names: &GGUF,
        act: Activation::GeluTanh,
        eps: "attention.layer_norm_epsilon",
        ..PLAIN_ARCH
    }),
    learned_positions: Some(0),
    eps: Some("layer_norm_epsilon"),
    act: "activation_function",
    act_default: Some("gelu_new"),
    ffn: "n_inner",
    ffn_default: Some(4),
    tied: true,
    checks: &[
        Check::Flag("scale_attn_weights", true),
        Check::Flag("scale_attn_by_inverse_layer_idx", false),
    ],
    quirks: &[
        Quirk::OneKvHeadEach,
        Quirk::Conv1d,
        Quirk::Prefix("transformer."),
        Quirk::OtherNames,
        Quirk::Lacks(&["head_dim", "num_key_value_heads", "rope_theta"]),
    ],
    ..GPT
};

/// `modeling_gpt_neox.py` (Pythia, GPT-NeoX-20B): attention and FFN in parallel after two norms, part of
/// each head rotated.
const GPT_NEOX: Family = Family {
    name: "gpt_neox",
    class: Some("GPTNeoXForCausalLM"),
    aliases: &[
        ("partial_rotary_factor", "rotary_pct"),
        ("rope_theta", "rotary_emb_base"),
    ],
    names: &HF_GPT_NEOX,
    gguf: Some(Arch {
        name: "gptneox",
        names: &GGUF,
        act: Activation::Gelu,
        eps: "attention.layer_norm_epsilon",
        reads: &["use_parallel_residual"],
        ..PLAIN_ARCH
    }),
    parallel: Parallel::TwoNorms,
    bias: Bias::AllBy("attention_bias", true),
    eps: Some("layer_norm_eps"),
    act_default: Some("gelu"),
    rotated: Some(0.25),
    reads: &["use_parallel_residual"],
    quirks: &[
        Quirk::OneKvHeadEach,
        Quirk::ParallelIf("use_parallel_residual", true),
        Quirk::OtherNames,
        Quirk::Lacks(&["head_dim", "num_key_value_heads"]),
    ],
    ..GPT
};

pub(super) const FAMILIES: [Family; 2] = [GPT2, GPT_NEOX];
