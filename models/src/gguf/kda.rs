//! Layers of Kimi Delta Attention: Kimi Linear, Ling 3.

use super::value::Metadata;
use crate::config::{KdaLayers, KdaShape};
use crate::error::Error;
use crate::families::Arch;

/// Sizes of the layers `layers`, with as many heads as attention; `None` without such layers. Decays of
/// full-rank projections have a bound.
pub(super) fn kda_layers(
    metadata: &Metadata,
    arch: &Arch,
    layers: Vec<u32>,
    direct: bool,
) -> Result<Option<KdaLayers>, Error> {
    let need = |rest: &str| {
        let key = format!("{}.{rest}", arch.name);
        let value = metadata.u32(&key)?;
        value.ok_or_else(|| metadata.missing(&key, "an integer"))
    };
    if layers.is_empty() {
        return Ok(None);
    }
    let is_bounded = metadata.bool(&format!("{}.kda.safe_gate", arch.name))?;
    let bound = if direct && is_bounded.unwrap_or(true) {
        Some(metadata.need_f32(&format!("{}.kda.gate_lower_bound", arch.name))?)
    } else {
        None
    };
    Ok(Some(KdaLayers {
        layers,
        shape: KdaShape {
            taps: need("ssm.conv_kernel")?,
            heads: need("attention.head_count")?,
            dim: need("kda.head_dim")?,
            direct,
            bound,
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
    fn all_sizes_are_needed() {
        let (_, arch) = families::find_arch("kimi-linear").unwrap();
        let sizes = [
            ("ssm.conv_kernel", 3),
            ("attention.head_count", 6),
            ("kda.head_dim", 5),
        ];
        let read = |sizes: &[(&str, u64)], layers: Vec<u32>| {
            let mut metadata = Metadata::new(Path::new("model.gguf"));
            for &(key, size) in sizes {
                let key = format!("kimi-linear.{key}");
                metadata.insert(key, Value::Uint(size)).unwrap();
            }
            kda_layers(&metadata, arch, layers, false)
        };
        let shape = read(&sizes, vec![0, 2]).unwrap().unwrap().shape;
        assert_eq!((shape.taps, shape.heads, shape.values()), (3, 6, 30));
        assert_eq!(read(&sizes, Vec::new()).unwrap(), None);
        for left_out in 0..sizes.len() {
            let mut some = sizes.to_vec();
            let (key, _) = some.remove(left_out);
            let refused = read(&some, vec![0]).unwrap_err().to_string();
            assert!(refused.contains(key), "{refused}");
        }
    }

    #[test]
    fn projections_in_one_step_have_decays_with_a_bound() {
        let (_, arch) = families::find_arch("bailingmoe3").unwrap();
        let read = |more: &[(&str, Value)]| {
            let mut metadata = Metadata::new(Path::new("model.gguf"));
            let sizes = ["ssm.conv_kernel", "attention.head_count", "kda.head_dim"];
            let sizes = sizes.map(|key| (key, Value::Uint(4)));
            for (key, value) in sizes.iter().chain(more) {
                let key = format!("bailingmoe3.{key}");
                metadata.insert(key, value.clone()).unwrap();
            }
            kda_layers(&metadata, arch, vec![0], true)
        };
        let bound = ("kda.gate_lower_bound", Value::Float(-5.0));
        let shape = read(std::slice::from_ref(&bound)).unwrap().unwrap().shape;
        assert_eq!((shape.direct, shape.bound), (true, Some(-5.0)));
        let off = ("kda.safe_gate", Value::Bool(false));
        let shape = read(&[bound, off]).unwrap().unwrap().shape;
        assert_eq!((shape.direct, shape.bound), (true, None));
        let refused = read(&[]).unwrap_err().to_string();
        assert!(refused.contains("gate_lower_bound"), "{refused}");
    }
}
