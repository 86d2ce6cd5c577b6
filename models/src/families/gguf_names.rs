//! Names of tensors in GGUF.

use crate::mixers::attention::GGUF_GATED;
pub(super) use crate::mixers::attention::GGUF_NAMES as ATTENTION;
use crate::mixers::{delta_net, kda, latent, mamba, short_conv};
use crate::names::{ExpertNames, Fused, NameTable, Role, Spellings, Stack};

/// PowerInfer's name for the transposed Down.
pub(crate) const DOWN_T: &str = "ffn_down_t.weight";

/// Its bias.
pub(crate) const DOWN_T_BIAS: &str = "ffn_down_t.bias";

/// The table of learned positions.
pub(crate) const POSITIONS: &str = "position_embd.weight";

/// Only stacked ones are supported.
pub(super) const NO_EXPERTS: ExpertNames = ExpertNames {
    one: ("", &[]),
    shared: &[],
    stacked: &[],
};

const OUTSIDE: Spellings = &[
    (Role::Embed, "token_embd.weight"),
    (Role::Head, "output.weight"),
    (Role::FinalNorm, "output_norm.weight"),
    (Role::FinalNormBias, "output_norm.bias"),
];

pub(super) const POST_NORMS: Spellings = &[
    (Role::AttnPostNorm, "post_attention_norm.weight"),
    (Role::FfnPostNorm, "post_ffw_norm.weight"),
];

pub(super) const NORMS: Spellings = &[
    (Role::AttnNorm, "attn_norm.weight"),
    (Role::AttnNormBias, "attn_norm.bias"),
    (Role::FfnNorm, "ffn_norm.weight"),
    (Role::FfnNormBias, "ffn_norm.bias"),
];

pub(super) const FFN: Spellings = &[
    (Role::Gate, "ffn_gate.weight"),
    (Role::Up, "ffn_up.weight"),
    (Role::Down, "ffn_down.weight"),
    (Role::Down, DOWN_T),
    (Role::GateBias, "ffn_gate.bias"),
    (Role::UpBias, "ffn_up.bias"),
    (Role::DownBias, "ffn_down.bias"),
];

const TWO_MATRICES: Spellings = &[
    (Role::Gate, "ffn_up.weight"),
    (Role::GateBias, "ffn_up.bias"),
    (Role::Down, "ffn_down.weight"),
    (Role::DownBias, "ffn_down.bias"),
];

const STACKED: &[(Stack, &str)] = &[
    (Stack::One(Role::Gate), "ffn_gate_exps.weight"),
    (Stack::One(Role::Up), "ffn_up_exps.weight"),
    (Stack::One(Role::Down), "ffn_down_exps.weight"),
    (Stack::GateUp, "ffn_gate_up_exps.weight"),
];

/// llama and most others.
pub(super) const PLAIN: NameTable = NameTable {
    layer_prefix: "blk.",
    globals: OUTSIDE,
    numbered: &[],
    layers: &[
        ATTENTION,
        NORMS,
        FFN,
        POST_NORMS,
        &[
            (Role::Router, "ffn_gate_inp.weight"),
            (Role::SharedGate, "ffn_gate_inp_shexp.weight"),
            (Role::PredictorFc1, "fc1.weight"),
            (Role::PredictorFc2, "fc2.weight"),
        ],
    ],
    experts: ExpertNames {
        shared: &[
            (Role::Gate, "ffn_gate_shexp.weight"),
            (Role::Up, "ffn_up_shexp.weight"),
            (Role::Down, "ffn_down_shexp.weight"),
        ],
        stacked: STACKED,
        ..NO_EXPERTS
    },
    by_head: &[],
    fused: &[],
    parts: &[],
};

/// Its own converter may store Down transposed.
pub(super) const SMALL_THINKER: NameTable = NameTable {
    experts: ExpertNames {
        stacked: &[
            (Stack::One(Role::Gate), "ffn_gate_exps.weight"),
            (Stack::One(Role::Up), "ffn_up_exps.weight"),
            (Stack::EitherDown, "ffn_down_exps.weight"),
            (Stack::GateUp, "ffn_gate_up_exps.weight"),
        ],
        ..PLAIN.experts
    },
    ..PLAIN
};

/// The norm before the FFN is named after the attention before it.
pub(super) const GPT_OSS: NameTable = NameTable {
    layers: &[
        ATTENTION,
        &[
            (Role::AttnNorm, "attn_norm.weight"),
            (Role::FfnNorm, "post_attention_norm.weight"),
            (Role::Sinks, "attn_sinks.weight"),
            (Role::Router, "ffn_gate_inp.weight"),
            (Role::RouterBias, "ffn_gate_inp.bias"),
            (Role::GateBias, "ffn_gate_exps.bias"),
            (Role::UpBias, "ffn_up_exps.bias"),
            (Role::DownBias, "ffn_down_exps.bias"),
        ],
    ],
    experts: ExpertNames {
        stacked: STACKED,
        ..NO_EXPERTS
    },
    ..PLAIN
};

pub(super) const UNGATED: NameTable = NameTable {
    layers: &[ATTENTION, NORMS, TWO_MATRICES],
    experts: NO_EXPERTS,
    ..PLAIN
};

/// Additional or differently stored tensors in PowerInfer's files.
const POWERINFER: Spellings = &[
    (Role::Down, DOWN_T),
    (Role::PredictorFc1, "fc1.weight"),
    (Role::PredictorFc2, "fc2.weight"),
];

/// As PowerInfer's converter writes them (`OptModel` in `convert-hf-to-powerinfer-gguf.py`).
pub(super) const OPT: NameTable = NameTable {
    globals: &[
        (Role::Embed, "token_embd.weight"),
        (Role::Positions, POSITIONS),
        (Role::Head, "output.weight"),
        (Role::FinalNorm, "output_norm.weight"),
        (Role::FinalNormBias, "output_norm.bias"),
    ],
    layers: &[
        ATTENTION,
        NORMS,
        TWO_MATRICES,
        POWERINFER,
        &[(Role::DownBias, DOWN_T_BIAS)],
    ],
    ..UNGATED
};

pub(super) const FALCON: NameTable = NameTable {
    layers: &[ATTENTION, NORMS, TWO_MATRICES, POWERINFER],
    fused: &[(Fused::Qkv, "attn_qkv.weight")],
    ..UNGATED
};

pub(super) const FALCON_TWO_NORMS: NameTable = NameTable {
    layers: &[
        ATTENTION,
        TWO_MATRICES,
        POWERINFER,
        &[
            (Role::AttnNorm, "attn_norm_2.weight"),
            (Role::AttnNormBias, "attn_norm_2.bias"),
            (Role::FfnNorm, "attn_norm.weight"),
            (Role::FfnNormBias, "attn_norm.bias"),
        ],
    ],
    ..FALCON
};

pub(super) const PHI3: NameTable = NameTable {
    layers: &[
        NORMS,
        &[
            (Role::O, "attn_output.weight"),
            (Role::Down, "ffn_down.weight"),
        ],
    ],
    experts: NO_EXPERTS,
    fused: &[
        (Fused::Qkv, "attn_qkv.weight"),
        (Fused::GateUp, "ffn_up.weight"),
    ],
    ..PLAIN
};

pub(super) const ROUTER: Spellings = &[
    (Role::Router, "ffn_gate_inp.weight"),
    (Role::ChoiceBias, "exp_probs_b.bias"),
    // Hunyuan 3's spelling
    (Role::ChoiceBias, "exp_probs_b"),
];

/// Experts chosen by scores plus biases.
pub(super) const ROUTED: NameTable = NameTable {
    layers: &[ATTENTION, NORMS, FFN, ROUTER],
    ..PLAIN
};

/// Latent attention, with or without experts chosen by scores plus biases.
pub(super) const LATENT: NameTable = NameTable {
    layers: &[NORMS, FFN, ROUTER, latent::GGUF_NAMES],
    ..PLAIN
};

/// The same with Kimi Delta Attention in other layers.
pub(super) const KIMI_LINEAR: NameTable = NameTable {
    layers: &[NORMS, FFN, ROUTER, latent::GGUF_NAMES, kda::GGUF_NAMES],
    ..LATENT
};

/// The same with attention gates, and with full-rank projections to decays and gates.
pub(super) const BAILING_HYBRID: NameTable = NameTable {
    layers: &[
        NORMS,
        FFN,
        ROUTER,
        latent::GGUF_NAMES,
        kda::GGUF_DIRECT,
        kda::GGUF_NAMES,
    ],
    ..LATENT
};

/// The same as [`ROUTED`]; the norm before the FFN is named after the attention before it.
pub(super) const ROUTED_AFTER_ATTENTION: NameTable = NameTable {
    layers: &[
        ATTENTION,
        FFN,
        ROUTER,
        &[
            (Role::AttnNorm, "attn_norm.weight"),
            (Role::FfnNorm, "post_attention_norm.weight"),
        ],
    ],
    ..PLAIN
};

/// The norm before the head is named after the embedding.
pub(super) const LFM2: NameTable = NameTable {
    globals: &[
        (Role::Embed, "token_embd.weight"),
        (Role::Head, "output.weight"),
        (Role::FinalNorm, "token_embd_norm.weight"),
    ],
    layers: &[
        ATTENTION,
        NORMS,
        FFN,
        short_conv::GGUF_NAMES,
        &[
            (Role::Router, "ffn_gate_inp.weight"),
            (Role::ChoiceBias, "exp_probs_b.bias"),
        ],
    ],
    experts: ExpertNames {
        stacked: STACKED,
        ..NO_EXPERTS
    },
    ..PLAIN
};

/// Layers of attention and of Mamba-2.
pub(super) const GRANITE_HYBRID: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        FFN,
        mamba::GGUF_NAMES,
        &[(Role::Router, "ffn_gate_inp.weight")],
    ],
    ..PLAIN
};

/// Layers of one sublayer and one norm each. The `up` of its FFNs is Gate.
pub(super) const NEMOTRON_H: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        TWO_MATRICES,
        ROUTER,
        mamba::GGUF_NAMES,
        &[
            (Role::ExpertsIn, "ffn_latent_down.weight"),
            (Role::ExpertsOut, "ffn_latent_up.weight"),
        ],
    ],
    experts: ExpertNames {
        shared: &[
            (Role::Gate, "ffn_up_shexp.weight"),
            (Role::Down, "ffn_down_shexp.weight"),
        ],
        stacked: &[
            (Stack::One(Role::Gate), "ffn_up_exps.weight"),
            (Stack::One(Role::Down), "ffn_down_exps.weight"),
        ],
        ..NO_EXPERTS
    },
    ..PLAIN
};

/// Norms in files with DeltaNets, and the gate of the shared expert.
pub(super) const DELTA_NORMS: Spellings = &[
    (Role::AttnNorm, "attn_norm.weight"),
    (Role::FfnNorm, "post_attention_norm.weight"),
    (Role::SharedGate, "ffn_gate_inp_shexp.weight"),
];

/// β and the decay in one tensor, key head by key head.
pub(super) const QWEN3_NEXT: NameTable = NameTable {
    layers: &[GGUF_GATED, DELTA_NORMS, delta_net::GGUF_NAMES, FFN, ROUTER],
    fused: &[
        (Fused::GatedQ, "attn_q.weight"),
        (Fused::DeltaBa, "ssm_ba.weight"),
    ],
    ..PLAIN
};

/// The same in separate tensors.
pub(super) const QWEN3_5: NameTable = NameTable {
    layers: &[
        GGUF_GATED,
        DELTA_NORMS,
        delta_net::GGUF_NAMES,
        FFN,
        ROUTER,
        delta_net::GGUF_SHARES,
    ],
    fused: &[(Fused::GatedQ, "attn_q.weight")],
    ..PLAIN
};
