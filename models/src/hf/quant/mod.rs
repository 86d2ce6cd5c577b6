//! Folders whose matrices are stored as codes of a few bits, with scales and zero points in tensors of their own.
//!
//! A [`Method`] knows the names and shapes of one format. The tensors of a matrix become one, with the name that it
//! has in a folder of plain numbers, so nothing else knows the formats; [`Packed`] decodes them. Which matrices are
//! packed follows from the tensors that there are, not from lists of names in the configuration.

mod awq;
mod compressed;
mod gptq;
mod mlx;
mod modelopt;
mod module;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

pub(super) use self::compressed::eight_bits;
use self::module::{KEY, Matrix, Method, Module, PREFIX, WEIGHT};
use super::safetensors::Raw;
use crate::error::Error;
use crate::file::DataFile;
use crate::json::Keys;
use crate::store::Packed;

/// What is read, for errors.
pub(super) const SUPPORTED: &str = "read are fp8, mxfp4 (gpt-oss), compressed-tensors, gptq, awq, modelopt (NVFP4, \
    FP8) and MLX's affine quantization; take one of these, the unquantised checkpoint, or a gguf file";

/// The format that a configuration names; `None` for one of other formats, or of plain numbers.
///
/// # Errors
/// Variants that are not read.
pub(super) fn method(keys: &Keys) -> Result<Option<Box<dyn Method>>, Error> {
    let config = keys.object(KEY, PREFIX)?;
    let named = config.map_or(Ok(None), |of| of.str("quant_method"))?;
    if let (None, Some(of)) = (named, keys.object(mlx::KEY, mlx::PREFIX)?) {
        return Ok(Some(Box::new(mlx::Mlx::read(&of)?)));
    }
    let Some(of) = config else {
        return Ok(None);
    };
    Ok(match named {
        Some("gptq") => Some(Box::new(gptq::Gptq::read(&of)?)),
        Some("awq") => Some(Box::new(awq::Awq::read(&of)?)),
        Some("compressed-tensors") => Some(Box::new(compressed::Compressed::read(&of)?)),
        Some("modelopt") => Some(Box::new(modelopt::ModelOpt::read(&of)?)),
        _ => None,
    })
}

/// The same for a parsed `config.json`, whose text model may be a part of a whole.
pub(super) fn method_of(path: &Path, config: &Value) -> Result<Option<Box<dyn Method>>, Error> {
    let keys = Keys::new(path, config)?;
    let inner = keys.object("text_config", "text_config.")?;
    for keys in [Some(keys), inner].into_iter().flatten() {
        if let Some(method) = method(&keys)? {
            return Ok(Some(method));
        }
    }
    Ok(None)
}

/// Replaces the tensors of packed matrices by one for each matrix.
pub(super) fn join(
    shards: &mut [(DataFile, Vec<Raw>)],
    method: &dyn Method,
    family: &str,
) -> Result<(), Error> {
    let mut modules: BTreeMap<String, Modules> = BTreeMap::new();
    for (file, (of, header)) in shards.iter_mut().enumerate() {
        header.retain(|raw| !method.unread().iter().any(|end| raw.name.ends_with(end)));
        for raw in header.extract_if(.., |raw| method.module(raw).is_some()) {
            let name = method.module(&raw).unwrap_or_default().to_owned();
            let others = HashMap::new();
            if let Some(((_, before), _)) = modules.insert(name, ((file, raw), others)) {
                return Err(twice(of, before));
            }
        }
    }
    for (file, (path, header)) in shards.iter_mut().enumerate() {
        for &end in method.ends() {
            let module = |raw: &Raw| raw.name.strip_suffix(end).map(str::to_owned);
            let is_one =
                |raw: &mut Raw| module(raw).is_some_and(|name| modules.contains_key(&name));
            for raw in header.extract_if(.., is_one).collect::<Vec<_>>() {
                let of = module(&raw).and_then(|name| modules.get_mut(&name));
                if let Some((_, others)) = of
                    && let Some((_, before)) = others.insert(end, (file, raw))
                {
                    return Err(twice(path, before));
                }
            }
        }
    }
    for (name, (codes, others)) in modules {
        let file = codes.0;
        let mut module = Module {
            name,
            shards,
            codes,
            others,
        };
        let matrix = method.matrix(&mut module)?;
        if let Some((file, raw)) = module.others.into_values().next() {
            return Err(Error::UnexpectedTensor {
                path: shards[file].0.path.clone(),
                tensor: raw.name,
                family: family.to_owned(),
            });
        }
        let joined = tensors(&module.name, module.codes.1.offset, matrix);
        shards[file].1.extend(joined);
    }
    Ok(())
}

/// A module has two tensors of one kind.
fn twice(file: &DataFile, raw: Raw) -> Error {
    Error::Duplicate {
        path: file.path.clone(),
        what: "tensor of a matrix",
        name: raw.name,
    }
}

/// The tensor of codes and the others of a module.
type Modules = ((usize, Raw), HashMap<&'static str, (usize, Raw)>);

/// The tensors of a matrix under the names that they have in a folder of plain numbers.
fn tensors(module: &str, offset: u64, matrix: Matrix) -> Vec<Raw> {
    let raw = |name: String, shape: [usize; 2]| Raw {
        name,
        dtype: "U8".into(),
        shape: shape.to_vec(),
        offset,
        packed: None,
        powers: None,
    };
    let name = format!("{module}{WEIGHT}");
    match matrix {
        Matrix::Packed(parts) => {
            let plain = raw(name, parts.shape);
            let parts = Arc::new(parts);
            let packed = Some(Packed { parts, first: 0 });
            vec![Raw { packed, ..plain }]
        }
        Matrix::Experts(parts, rows) => {
            let [all, cols] = parts.shape;
            let whole = Packed {
                parts: Arc::new(parts),
                first: 0,
            };
            let one = |expert: usize| Raw {
                packed: Some(whole.after_rows(expert * rows)),
                ..raw(mlx::expert_name(module, expert), [rows, cols])
            };
            (0..all / rows.max(1)).map(one).collect()
        }
        Matrix::Mxfp4(shape, powers) => {
            let plain = raw(name, shape);
            let powers = Some(powers);
            vec![Raw { powers, ..plain }]
        }
    }
}
