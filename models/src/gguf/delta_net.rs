//! The gated DeltaNets of Qwen3-Next and Qwen3.5.

use super::value::Metadata;
use crate::config::{DeltaNetShape, DeltaNets};
use crate::error::Error;
use crate::families::{Arch, ValueHeads};

/// The layers with gated DeltaNets, all but every `full_attention_interval`-th, and their sizes.
pub(super) fn delta_nets(
    metadata: &Metadata,
    arch: &Arch,
    layers: u32,
    order: ValueHeads,
) -> Result<Option<DeltaNets>, Error> {
    let key = |rest: &str| format!("{}.{rest}", arch.name);
    let need = |rest: &str| {
        let value = metadata.u32(&key(rest))?;
        value.ok_or_else(|| metadata.missing(&key(rest), "an integer"))
    };
    let list = key("attention.recurrent_layers");
    let with: Vec<u32> = match metadata.flags(&list)? {
        Some(flags) if flags.len() >= layers as usize => {
            let all = (0..layers).zip(flags);
            all.filter(|(_, linear)| *linear).map(|all| all.0).collect()
        }
        Some(_) => return Err(metadata.bad(&list, &format!("a flag for each of {layers} layers"))),
        None => {
            let interval = metadata.u32(&key("full_attention_interval"))?.unwrap_or(4);
            if interval == 0 {
                return Err(metadata.bad(&key("full_attention_interval"), "1 or more"));
            }
            let linear = |layer: &u32| !(layer + 1).is_multiple_of(interval);
            (0..layers).filter(linear).collect()
        }
    };
    if with.is_empty() {
        return Ok(None);
    }
    let value_heads = need("ssm.time_step_rank")?;
    let values = need("ssm.inner_size")?;
    if value_heads == 0 || !values.is_multiple_of(value_heads) {
        let expected = format!("a multiple of ssm.time_step_rank = {value_heads}");
        return Err(metadata.bad(&key("ssm.inner_size"), &expected));
    }
    Ok(Some(DeltaNets {
        layers: with,
        shape: DeltaNetShape {
            taps: need("ssm.conv_kernel")?,
            key_heads: need("ssm.group_count")?,
            value_heads,
            key_dim: need("ssm.state_size")?,
            value_dim: values / value_heads,
            tiled: order == ValueHeads::Tiled,
        },
    }))
}
