//! The Mamba-2 layers of Granite 4 H and Falcon-H1, and the Mamba-1 layers of Jamba.

use super::value::Metadata;
use crate::config::{Mamba1Layers, Mamba1Shape, MambaLayers, MambaShape, ModelConfig};
use crate::error::Error;
use crate::families::Arch;
use crate::names::Role;

/// The sizes of the Mamba-2 layers `layers`.
pub(super) fn mamba_layers(
    metadata: &Metadata,
    arch: &Arch,
    layers: Vec<u32>,
) -> Result<MambaLayers, Error> {
    let key = |rest: &str| format!("{}.ssm.{rest}", arch.name);
    let need = |rest: &str| {
        let value = metadata.u32(&key(rest))?;
        value.ok_or_else(|| metadata.missing(&key(rest), "an integer"))
    };
    let heads = need("time_step_rank")?;
    let values = need("inner_size")?;
    if heads == 0 || !values.is_multiple_of(heads) {
        let expected = format!("a multiple of ssm.time_step_rank = {heads}");
        return Err(metadata.bad(&key("inner_size"), &expected));
    }
    Ok(MambaLayers {
        layers,
        shape: MambaShape {
            taps: need("conv_kernel")?,
            heads,
            head_dim: values / heads,
            groups: need("group_count")?,
            state_dim: need("state_size")?,
            unnormed: false,
        },
        beside: false,
    })
}

/// The sizes of the Mamba-1 layers `layers`.
pub(super) fn mamba1_layers(
    metadata: &Metadata,
    arch: &Arch,
    layers: Vec<u32>,
) -> Result<Mamba1Layers, Error> {
    let need = |rest: &str| {
        let key = format!("{}.ssm.{rest}", arch.name);
        let value = metadata.u32(&key)?;
        value.ok_or_else(|| metadata.missing(&key, "an integer"))
    };
    Ok(Mamba1Layers {
        layers,
        shape: Mamba1Shape {
            taps: need("conv_kernel")?,
            channels: need("inner_size")?,
            state_dim: need("state_size")?,
            rank: need("time_step_rank")?,
        },
    })
}

/// The length of a vector that llama.cpp stores as a matrix: one number for each head, or the norm group
/// by group.
pub(super) fn vector_len(role: Role, shape: [usize; 2], config: &ModelConfig) -> Option<usize> {
    let mamba = config.form.mamba.as_ref()?.shape;
    let [outer, inner] = shape;
    let is_vector = match role {
        Role::MambaRate | Role::MambaSkip => inner == 1,
        Role::MambaNorm => outer == mamba.groups as usize,
        _ => false,
    };
    is_vector.then(|| outer.saturating_mul(inner))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::families;
    use crate::gguf::value::Value;

    fn read(sizes: &[(&str, u64)]) -> Result<MambaLayers, Error> {
        let (_, arch) = families::find_arch("granitehybrid").unwrap();
        let mut metadata = Metadata::new(Path::new("model.gguf"));
        for &(key, size) in sizes {
            let key = format!("granitehybrid.ssm.{key}");
            metadata.insert(key, Value::Uint(size)).unwrap();
        }
        mamba_layers(&metadata, arch, vec![0, 2])
    }

    #[test]
    fn all_sizes_are_needed_and_heads_divide_the_width() {
        let sizes = [
            ("conv_kernel", 4),
            ("inner_size", 72),
            ("state_size", 6),
            ("time_step_rank", 9),
            ("group_count", 3),
        ];
        let found = read(&sizes).unwrap();
        let expected = MambaShape {
            taps: 4,
            heads: 9,
            head_dim: 8,
            groups: 3,
            state_dim: 6,
            unnormed: false,
        };
        assert_eq!((found.layers, found.shape), (vec![0, 2], expected));
        let groups: Vec<u32> = (0..9).map(|head| expected.group_of(head)).collect();
        assert_eq!(groups, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
        for left_out in 0..sizes.len() {
            let mut sizes = sizes.to_vec();
            let (key, _) = sizes.remove(left_out);
            let refused = read(&sizes).unwrap_err().to_string();
            assert!(refused.contains(key), "{refused}");
        }
        for heads in [0, 7] {
            let mut sizes = sizes;
            sizes[3].1 = heads;
            assert!(read(&sizes).is_err());
        }
    }
}
