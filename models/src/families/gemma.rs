//! Gemma 1, 2, 3, 3n and 4, and VaultGemma.

use super::Preset::{Float, Int, Text};
use super::experts::{EXPERTS, Experts, Renormalise, Shared};
use super::keys::{By, Key, Sets, Spelled};
use super::{Arch, Check, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk, Windows};
use super::{gemma_names, hf_names};
use crate::config::Activation;

const GEMMA: Arch = Arch {
    act: Activation::GeluTanh,
    ..PLAIN_ARCH
};

/// Scores are divided by the root of this key.
const QUERY_SCALAR: Key = Key::new(
    Sets::AttentionScale,
    Spelled::or("query_pre_attn_scalar", 256.0).by(By::RootReciprocal),
    Spelled::NONE,
);

/// llama.cpp caps logits of Gemma 2 and 3n at 30 regardless of the file.
const LOGIT_CAP: Key = Key::new(
    Sets::LogitCap,
    Spelled::or_null("final_logit_softcapping", 30.0),
    Spelled::or("final_logit_softcapping", 30.0),
);

/// `modeling_gemma.py`: embeddings times `sqrt(hidden_size)`, norms stored minus one.
const GEMMA1: Family = Family {
    name: "gemma",
    class: Some("GemmaForCausalLM"),
    gguf: Some(Arch {
        name: "gemma",
        ..GEMMA
    }),
    plus_one: true,
    bias: OPTIONAL_BIAS,
    width_scale: true,
    act_default: Some("gelu_pytorch_tanh"),
    head_dim_default: false,
    tied: true,
    checks: &[Check::Flag("use_bidirectional_attention", false)],
    quirks: &[Quirk::TanhGelu],
    ..PLAIN
};

/// `modeling_gemma2.py`: embeddings times `sqrt(hidden_size)`, scores divided by
/// `sqrt(query_pre_attn_scalar)` and capped, logits capped, norms on both sides of attention and FFN.
const GEMMA2: Family = Family {
    name: "gemma2",
    class: Some("Gemma2ForCausalLM"),
    names: &hf_names::GEMMA2,
    gguf: Some(Arch {
        name: "gemma2",
        windows: Windows::Alternate,
        widest: Some(46),
        ..GEMMA
    }),
    post_norm: true,
    plus_one: true,
    bias: OPTIONAL_BIAS,
    width_scale: true,
    act: "hidden_activation",
    head_dim_default: false,
    tied: true,
    windows: Windows::Alternate,
    keys: &[
        QUERY_SCALAR,
        Key::new(
            Sets::AttentionCap,
            Spelled::or_null("attn_logit_softcapping", 50.0),
            Spelled::or("attn_logit_softcapping", 50.0),
        ),
        LOGIT_CAP,
    ],
    checks: &[Check::Flag("use_bidirectional_attention", false)],
    ..PLAIN
};

/// `modeling_vaultgemma.py`: Gemma 2 without norms of outputs.
const VAULT_GEMMA: Family = Family {
    name: "vaultgemma",
    class: Some("VaultGemmaForCausalLM"),
    names: &hf_names::VAULT_GEMMA,
    gguf: None,
    post_norm: false,
    ..GEMMA2
};

/// `modeling_gemma3.py`: as Gemma 2, with norms of queries and keys instead of caps, and another
/// rotary base in layers with a window.
const GEMMA3: Family = Family {
    name: "gemma3_text",
    whole: Some("gemma3"),
    class: Some("Gemma3ForCausalLM"),
    defaults: &[
        ("vocab_size", Int(262_208)),
        ("num_attention_heads", Int(8)),
        ("num_key_value_heads", Int(4)),
        ("head_dim", Int(256)),
        ("hidden_activation", Text("gelu_pytorch_tanh")),
        ("max_position_embeddings", Int(131_072)),
        ("rms_norm_eps", Float(1e-6)),
        ("sliding_window", Int(4096)),
    ],
    gguf: Some(Arch {
        name: "gemma3",
        windows: Windows::Pattern(6),
        widest: Some(62),
        reads: &["attention.sliding_window_pattern", "rope.freq_base_swa"],
        ..GEMMA
    }),
    qk_norm: QkNorm::Head,
    ffn_list: true,
    windows: Windows::Pattern(6),
    theta: 1_000_000.0,
    two_ropes: true,
    keys: &[
        QUERY_SCALAR,
        Key::new(
            Sets::LogitCap,
            Spelled::NONE,
            Spelled::or_kept("final_logit_softcapping"),
        ),
    ],
    reads: &["sliding_window_pattern"],
    ..GEMMA2
};

/// `modeling_gemma3n.py`: unscaled scores, norms of values, and [`Quirk::Streams`].
const GEMMA3N: Family = Family {
    name: "gemma3n_text",
    whole: Some("gemma3n"),
    class: Some("Gemma3nForCausalLM"),
    defaults: &[
        ("vocab_size", Int(262_400)),
        ("num_attention_heads", Int(8)),
        ("num_key_value_heads", Int(2)),
        ("head_dim", Int(256)),
        ("hidden_activation", Text("gelu_pytorch_tanh")),
        ("max_position_embeddings", Int(32_768)),
        ("rms_norm_eps", Float(1e-6)),
        ("sliding_window", Int(512)),
        ("vocab_size_per_layer_input", Int(262_144)),
        ("hidden_size_per_layer_input", Int(256)),
        ("altup_num_inputs", Int(4)),
        ("laurel_rank", Int(64)),
        ("num_kv_shared_layers", Int(15)),
    ],
    names: &gemma_names::HF_GEMMA3N,
    gguf: Some(Arch {
        name: "gemma3n",
        names: &gemma_names::GGUF_GEMMA3N,
        windows: Windows::Pattern(5),
        reads: &[
            "attention.sliding_window_pattern",
            "rope.freq_base_swa",
            "altup.num_inputs",
            "altup.active_idx",
            "embedding_length_per_layer_input",
            "attention.shared_kv_layers",
            "activation_sparsity_scale",
        ],
        ..GEMMA
    }),
    plus_one: false,
    value_norm: true,
    bias: super::Bias::No,
    attention_scale: Some(1.0),
    windows: Windows::Pattern(5),
    keys: &[LOGIT_CAP],
    checks: &[
        Check::Flag("use_bidirectional_attention", false),
        Check::Zero("altup_active_idx"),
    ],
    reads: &["num_kv_shared_layers"],
    quirks: &[Quirk::Streams],
    ..GEMMA3
};

/// `modeling_gemma4.py`: other heads in layers without a window, experts in parallel with a dense FFN, and
/// [`Quirk::GlobalHeads`].
const GEMMA4: Family = Family {
    name: "gemma4_text",
    whole: Some("gemma4"),
    class: Some("Gemma4ForCausalLM"),
    defaults: &[
        ("vocab_size", Int(262_144)),
        ("hidden_size", Int(2304)),
        ("intermediate_size", Int(9216)),
        ("num_hidden_layers", Int(30)),
        ("num_attention_heads", Int(8)),
        ("num_key_value_heads", Int(4)),
        ("head_dim", Int(256)),
        ("hidden_activation", Text("gelu_pytorch_tanh")),
        ("max_position_embeddings", Int(131_072)),
        ("rms_norm_eps", Float(1e-6)),
        ("sliding_window", Int(512)),
        ("vocab_size_per_layer_input", Int(262_144)),
    ],
    names: &gemma_names::HF_GEMMA4,
    gguf: Some(Arch {
        name: "gemma4",
        names: &gemma_names::GGUF_GEMMA4,
        windows: Windows::Pattern(6),
        reads: &[
            "attention.sliding_window_pattern",
            "attention.key_length_swa",
            "attention.value_length_swa",
            "attention.shared_kv_layers",
            "rope.freq_base_swa",
            "rope.dimension_count_swa",
            "embedding_length_per_layer_input",
        ],
        ..GEMMA
    }),
    plus_one: false,
    value_norm: true,
    bias: super::Bias::No,
    attention_scale: Some(1.0),
    ffn_list: false,
    experts: Some(Experts {
        chosen: "top_k_experts",
        ffn: "moe_intermediate_size",
        renormalise: Renormalise::Always,
        gguf_renormalise: true,
        shared: Some(Shared::Plain("intermediate_size")),
        parallel_dense: Some("enable_moe_block"),
        ..EXPERTS
    }),
    keys: &[Key::new(
        Sets::LogitCap,
        Spelled::or_kept("final_logit_softcapping"),
        Spelled::or_kept("final_logit_softcapping"),
    )],
    checks: &[
        Check::Word("use_bidirectional_attention", "vision"),
        Check::Flag("attention_bias", false),
    ],
    reads: &["num_kv_shared_layers", "use_bidirectional_attention"],
    quirks: &[Quirk::GlobalHeads],
    ..GEMMA3
};

pub(super) const FAMILIES: [Family; 6] = [GEMMA1, GEMMA2, VAULT_GEMMA, GEMMA3, GEMMA3N, GEMMA4];
