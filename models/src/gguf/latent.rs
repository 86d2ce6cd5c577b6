//! Latent attention (MLA) of DeepSeek-V2 and its successors.

use super::value::Metadata;
use crate::config::{Form, LatentShape, Rope, RopeScaling, yarn_attention};
use crate::error::Error;
use crate::families::Arch;
use crate::hf::LATENT_EPS;

/// Factor of the logarithm of YaRN's factor, in the root of the scores' factor: for these
/// architectures, a tenth of the usual value of this key.
const YARN_ALL: &str = "rope.scaling.yarn_log_multiplier";
const TENTH: f32 = 0.1;

/// The keys read for it, after the architecture.
pub(super) const KEYS: [&str; 5] = [
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
    YARN_ALL,
];

/// Width of a query. Files older than these keys store keys and values in one matrix.
pub(super) fn head_dim(metadata: &Metadata, arch: &Arch) -> Result<u32, Error> {
    let key = format!("{}.attention.key_length_mla", arch.name);
    let expected =
        "an integer; a file without it is from an old converter: convert the model again";
    (metadata.u32(&key)?).ok_or_else(|| metadata.missing(&key, expected))
}

/// Sets latent attention in the form; all layers have it unless the model is `mixed`.
pub(super) fn latent(
    metadata: &Metadata,
    arch: &Arch,
    rope: &mut Rope,
    head_dim: u32,
    form: &mut Form,
    mixed: bool,
) -> Result<(), Error> {
    let key = |rest: &str| format!("{}.attention.{rest}", arch.name);
    let need = |rest: &str| {
        let value = metadata.u32(&key(rest))?;
        value.ok_or_else(|| metadata.missing(&key(rest), "an integer"))
    };
    let rank = need("kv_lora_rank")?;
    // widths of the stored vectors; the converter of mixed models writes only those of keys
    for (rest, expected) in [
        ("key_length", rank.saturating_add(rope.dims)),
        ("value_length", rank),
        ("head_count_kv", 1),
    ]
    .into_iter()
    .take(if mixed { 1 } else { 3 })
    {
        if metadata
            .uniform_u32(&key(rest))?
            .is_some_and(|found| found != expected)
        {
            return Err(metadata.bad(&key(rest), &expected.to_string()));
        }
    }
    form.latent = Some(LatentShape {
        query_rank: metadata.u32(&key("q_lora_rank"))?.filter(|rank| *rank != 0),
        rank,
        value_dim: need("value_length_mla")?,
        norm_eps: LATENT_EPS,
        gated: false,
    });
    let all = metadata.f32(&format!("{}.{YARN_ALL}", arch.name))?;
    let RopeScaling::Yarn {
        factor,
        attention_factor,
        ..
    } = &mut rope.scaling
    else {
        return Ok(());
    };
    if let Some(all) = all.filter(|all| *all != 0.0) {
        let scale = yarn_attention(*factor, all / TENTH);
        form.attention_scale = Some(scale * scale / (head_dim as f32).sqrt());
        // queries and keys have only the factor of the scores
        *attention_factor = 1.0;
    }
    Ok(())
}
