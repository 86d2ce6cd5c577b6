//! The gated DeltaNets of Qwen3-Next and Qwen3.5.

use super::value::Metadata;
use crate::config::{DeltaNetShape, DeltaNets};
use crate::error::Error;
use crate::families::{Arch, ValueHeads};

/// The keys that are read for them, after the architecture, and those of M-RoPE (plain RoPE in texts) of models that
/// have them.
pub(super) const KEYS: [&str; 8] = [
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
    "attention.recurrent_layers",
    "full_attention_interval",
    "rope.dimension_sections",
];

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
        // including those for multi-token prediction
        Some(flags) if flags.len() >= layers as usize => {
            let all = (0..layers).zip(flags);
            all.filter(|(_, linear)| *linear).map(|all| all.0).collect()
        }
        Some(_) => return Err(metadata.bad(&list, &format!("a flag for each of {layers} layers"))),
        None if metadata.has(&list) => return Err(metadata.bad(&list, "a list of flags")),
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
            sigmoid_gate: false,
            signed: false,
            norm_eps: None,
        },
    }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::families;
    use crate::gguf::value::Value;

    #[test]
    fn layers_are_told_by_flags_or_by_an_interval() {
        let (_, arch) = families::find_arch("qwen35").unwrap();
        let found = |more: &[(&str, Value)]| {
            let sizes = [
                ("ssm.conv_kernel", 4),
                ("ssm.state_size", 6),
                ("ssm.group_count", 2),
                ("ssm.time_step_rank", 6),
                ("ssm.inner_size", 30),
            ];
            let sizes = sizes.map(|(key, size)| (key, Value::Uint(size)));
            let mut metadata = Metadata::new(Path::new("model.gguf"));
            for (key, value) in sizes.iter().chain(more) {
                metadata
                    .insert(format!("qwen35.{key}"), value.clone())
                    .unwrap();
            }
            delta_nets(&metadata, arch, 5, ValueHeads::Tiled)
        };
        let layers = |more: &[(&str, Value)]| found(more).unwrap().map(|nets| nets.layers);
        let flags = |flags: &[bool]| {
            let flags = flags.iter().copied().map(Value::Bool).collect();
            [("attention.recurrent_layers", Value::List(flags))]
        };
        assert_eq!(layers(&[]), Some(vec![0, 1, 2, 4]));
        let second = [("full_attention_interval", Value::Uint(2))];
        assert_eq!(layers(&second), Some(vec![0, 2, 4]));
        // one more layer, for multi-token prediction
        let some = flags(&[true, false, false, true, false, false]);
        assert_eq!(layers(&some), Some(vec![0, 3]));
        assert_eq!(layers(&flags(&[false; 5])), None);
        let shape = found(&[]).unwrap().unwrap().shape;
        assert_eq!((shape.value_dim, shape.channels()), (5, 54));
        assert!(found(&flags(&[true; 4])).is_err());
        assert!(found(&[("attention.recurrent_layers", Value::Bool(true))]).is_err());
        assert!(found(&[("full_attention_interval", Value::Uint(0))]).is_err());
    }
}
