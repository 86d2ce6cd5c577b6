//! Hunyuan (Tencent).

use super::experts::{EXPERTS, Experts, Renormalise, Shared};
use super::{Arch, Check, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk};
use super::{gguf_names, hf_names};

/// `modeling_hunyuan_v1_dense.py`: norms of queries and keys after the rotation.
const HUNYUAN_V1_DENSE: Family = Family {
    name: "hunyuan_v1_dense",
    class: Some("HunYuanDenseV1ForCausalLM"),
    names: &hf_names::HUNYUAN,
    gguf: Some(Arch::named("hunyuan-dense")),
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::HeadRotated,
    kv_heads_default: true,
    checks: &[Check::Flag("use_cla", false), Check::Flag("use_mla", false)],
    quirks: &[Quirk::NtkAlpha],
    ..PLAIN
};

/// `modeling_hunyuan_v1_moe.py` (A13B): the same with experts and a shared expert.
const HUNYUAN_V1_MOE: Family = Family {
    name: "hunyuan_v1_moe",
    class: Some("HunYuanMoEV1ForCausalLM"),
    gguf: Some(Arch {
        name: "hunyuan-moe",
        names: &gguf_names::PLAIN,
        reads: &["expert_shared_count"],
        ..PLAIN_ARCH
    }),
    experts: Some(Experts {
        count: "num_experts",
        chosen: "moe_topk",
        renormalise: Renormalise::Always,
        gguf_renormalise: true,
        shared: Some(Shared::Experts("num_shared_expert", 1)),
        ..EXPERTS
    }),
    ..HUNYUAN_V1_DENSE
};

pub(super) const FAMILIES: [Family; 2] = [HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE];
