//! The parameters of xIELU, which folders store as tensors of one number.

use std::collections::HashMap;

use super::Shards;
use super::safetensors::DTYPES;
use crate::config::{Activation, ModelConfig, XieluParameters};
use crate::dtype::DType;
use crate::error::Error;
use crate::families::{self, Quirk};
use crate::store::shape_text;

/// Takes the parameters of every layer out of the tensors, into the configuration.
pub(super) fn take(shards: &mut Shards, config: &mut ModelConfig) -> Result<(), Error> {
    let family = families::of(&config.family);
    let has = family.has(Quirk::Xielu);
    if !has || !matches!(config.ffn_kind.activation, Activation::Xielu { .. }) {
        return Ok(());
    }
    let mut found = HashMap::new();
    for (file, header) in shards.iter_mut() {
        let is_one = |name: &str| name.contains(".mlp.act_fn.");
        for raw in header.iter().filter(|raw| is_one(&raw.name)) {
            found.insert(raw.name.clone(), number(file, raw)?);
        }
        header.retain(|raw| !is_one(&raw.name));
    }
    let Some((first, _)) = shards.first() else {
        return Ok(());
    };
    let path = first.path.clone();
    let prefix = family.names.layer_prefix;
    let of_layer = |layer: u32| -> Result<Activation, Error> {
        let mut of = |part: &str| {
            let name = format!("{prefix}{layer}.mlp.act_fn.{part}");
            found.remove(&name).ok_or_else(|| Error::MissingTensor {
                path: path.clone(),
                tensor: name,
                expected: shape_text(&[1]),
            })
        };
        let parameters = XieluParameters {
            alpha_p: of("alpha_p")?,
            alpha_n: of("alpha_n")?,
            beta: of("beta")?,
            eps: of("eps")?,
        };
        Ok(parameters.activation())
    };
    config.form.activations = (0..config.layers)
        .map(of_layer)
        .collect::<Result<_, Error>>()?;
    match found.into_keys().min() {
        None => config.validate(&path),
        Some(tensor) => Err(Error::UnexpectedTensor {
            path,
            tensor,
            family: config.family.clone(),
        }),
    }
}

/// The number in a tensor.
fn number(file: &crate::file::DataFile, raw: &super::safetensors::Raw) -> Result<f32, Error> {
    let (path, tensor) = (file.path.clone(), raw.name.clone());
    if !matches!(raw.shape[..], [] | [1]) {
        return Err(Error::WrongShape {
            path,
            tensor,
            found: shape_text(&raw.shape),
            expected: shape_text(&[1]),
        });
    }
    let dtype = match raw.dtype.as_str() {
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::Bf16,
        _ => {
            return Err(Error::WrongDtype {
                path,
                tensor,
                found: raw.dtype.clone(),
                supported: DTYPES.into(),
            });
        }
    };
    let mut bytes = vec![0; dtype.row_bytes(1).unwrap_or(0)];
    file.read_at(&mut bytes, raw.offset, &|| format!("tensor {}", raw.name))?;
    let mut value = [0.0];
    dtype.decode(&bytes, &mut value);
    Ok(value[0])
}
