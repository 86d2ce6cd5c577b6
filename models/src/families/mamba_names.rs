//! Names of the tensors of Mamba-2 and Mamba-1 layers, and of their sizes.

use crate::names::{Role, Spellings};

/// In safetensors.
pub(super) const HF: Spellings = &[
    (Role::MambaIn, "mamba.in_proj.weight"),
    (Role::MambaConv, "mamba.conv1d.weight"),
    (Role::MambaConvBias, "mamba.conv1d.bias"),
    (Role::MambaStep, "mamba.dt_bias"),
    (Role::MambaRate, "mamba.A_log"),
    (Role::MambaSkip, "mamba.D"),
    (Role::MambaNorm, "mamba.norm.weight"),
    (Role::MambaOut, "mamba.out_proj.weight"),
];

/// Those of Mamba-1, in addition.
pub(super) const HF1: Spellings = &[
    (Role::MambaMix, "mamba.x_proj.weight"),
    (Role::MambaSteps, "mamba.dt_proj.weight"),
    (Role::MambaStep, "mamba.dt_proj.bias"),
    (Role::MambaRates, "mamba.A_log"),
    (Role::MambaStepNorm, "mamba.dt_layernorm.weight"),
    (Role::MambaWriteNorm, "mamba.b_layernorm.weight"),
    (Role::MambaReadNorm, "mamba.c_layernorm.weight"),
];

/// In GGUF.
pub(super) const GGUF: Spellings = &[
    (Role::MambaIn, "ssm_in.weight"),
    (Role::MambaConv, "ssm_conv1d.weight"),
    (Role::MambaConvBias, "ssm_conv1d.bias"),
    (Role::MambaStep, "ssm_dt.bias"),
    (Role::MambaRate, "ssm_a"),
    (Role::MambaSkip, "ssm_d"),
    (Role::MambaNorm, "ssm_norm.weight"),
    (Role::MambaOut, "ssm_out.weight"),
];

/// Those of Mamba-1, in addition.
pub(super) const GGUF1: Spellings = &[
    (Role::MambaMix, "ssm_x.weight"),
    (Role::MambaSteps, "ssm_dt.weight"),
    (Role::MambaRates, "ssm_a"),
    (Role::MambaStepNorm, "ssm_dt_norm.weight"),
    (Role::MambaWriteNorm, "ssm_b_norm.weight"),
    (Role::MambaReadNorm, "ssm_c_norm.weight"),
];

/// Keys of their sizes in GGUF.
pub(super) const GGUF_KEYS: &[&str] = &[
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
];
