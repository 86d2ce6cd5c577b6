//! Separately stored scales: exponents of four-bit blocks (gpt-oss), and numbers for blocks of eight-bit
//! floats, as in DeepSeek-V3 and other releases (`W = W8 · scale` over blocks of `weight_block_size`), or for
//! whole matrices (Ministral 3), or for rows (compressed-tensors).

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::quant;
use super::safetensors::Raw;
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::families;
use crate::file::DataFile;
use crate::json::Keys;
use crate::store::{ScaleKind, Scales, shape_text};

/// Suffixes of four-bit blocks, and of their scales.
const FOUR_BITS: [&str; 2] = ["_blocks", "_scales"];
/// Suffixes of scales after the name of a tensor of eight-bit floats. Both are factors of the numbers.
const EIGHT_BITS: [&str; 2] = ["_scale_inv", "_scale"];
/// Ends of the names of scales of activations. Activations are not in eight-bit floats here.
const OF_ACTIVATIONS: [&str; 2] = ["activation_scale", "input_scale"];
/// Or the ending that replaces that of the tensor's name (DeepSeek-V4).
const POWERS: &str = ".scale";
const WEIGHT: &str = ".weight";

/// Elements of a row that share a scale, for four-bit floats.
const GROUP: usize = 32;

/// Rows and columns of a block that is any matrix.
const WHOLE: [usize; 2] = [usize::MAX; 2];
/// Rows and columns of a block if `quantization_config` does not name them, as in transformers.
const USUAL: [usize; 2] = [128, 128];

/// The tensors of scales, by name, with the index of their file.
pub(super) struct ScaleTensors {
    found: BTreeMap<String, (usize, Raw)>,
    /// Rows and columns of a block of eight-bit floats.
    block: Option<[usize; 2]>,
}

impl ScaleTensors {
    /// Extracts them from the shards, without those of activations; `block` is that of eight-bit floats, if
    /// the weights have this type.
    pub(super) fn take(
        shards: &mut [(DataFile, Vec<Raw>)],
        config: &ModelConfig,
        block: Option<[usize; 2]>,
    ) -> Self {
        let mut found = BTreeMap::new();
        let four = families::of(&config.family)
            .experts
            .is_some_and(|experts| experts.blocks);
        let is_one = |raw: &Raw| {
            four && raw.name.ends_with(FOUR_BITS[1]) && raw.dtype == "U8"
                || block.is_some() && is_of_eight_bits(&raw.name)
                || block.is_some() && raw.name.ends_with(POWERS) && raw.dtype == "F8_E8M0"
        };
        let of_activations =
            |raw: &Raw| block.is_some() && OF_ACTIVATIONS.iter().any(|end| raw.name.ends_with(end));
        for (file, (_, header)) in shards.iter_mut().enumerate() {
            header.retain(|raw| !of_activations(raw));
            for raw in header.extract_if(.., |raw| is_one(raw)) {
                found.insert(raw.name.clone(), (file, raw));
            }
        }
        Self { found, block }
    }

    /// Attaches the scales of `raw`, if it has any.
    ///
    /// # Errors
    /// Scales that are missing, or whose number is not one per block.
    pub(super) fn of(&mut self, raw: &Raw, file: &DataFile) -> Result<Option<Scales>, Error> {
        if raw.packed.is_some() {
            return Ok(None);
        }
        if let Some((file, offset)) = raw.powers {
            return Ok(Some(Scales {
                file,
                offset,
                kind: ScaleKind::Exponents,
            }));
        }
        if let (Some(_), "I8", [rows, half]) = (self.block, &raw.dtype[..], &raw.shape[..]) {
            return self.of_pairs(raw, file, [*rows, half.saturating_mul(2)]);
        }
        let four = (raw.name.strip_suffix(FOUR_BITS[0])).filter(|_| raw.dtype == "U8");
        let eight = self.block.filter(|_| raw.dtype == "F8_E4M3");
        if eight.is_some() && raw.shape.len() != 2 {
            return Err(Error::WrongShape {
                path: file.path.clone(),
                tensor: raw.name.clone(),
                found: shape_text(&raw.shape),
                expected: "a matrix, in eight-bit floats with scales".into(),
            });
        }
        let eight = eight.map(|block| self.block_of(raw, block));
        let (name, blocks) = match (four, eight) {
            (Some(name), _) => {
                let blocks = &raw.shape[..raw.shape.len().saturating_sub(1)];
                (format!("{name}{}", FOUR_BITS[1]), blocks.to_vec())
            }
            (None, Some(block)) => {
                let sizes = raw.shape.iter().zip(block);
                let blocks = sizes.map(|(size, block)| size.div_ceil(block));
                (self.name_of(&raw.name), blocks.collect())
            }
            (None, None) => return Ok(None),
        };
        let expected = shape_text(&blocks);
        let path = file.path.clone();
        let Some((at, scales)) = self.found.remove(&name) else {
            return Err(Error::MissingTensor {
                path,
                tensor: name,
                expected,
            });
        };
        // Of any number of dimensions. Beside blocks, it is the scale of a matrix within one block.
        let one_block = blocks.iter().product::<usize>() == 1;
        let is_single = one_block && eight.is_some() && scales.shape.iter().all(|&size| size == 1);
        if scales.shape != blocks && !is_single {
            return Err(Error::WrongShape {
                path,
                tensor: name,
                found: shape_text(&scales.shape),
                expected,
            });
        }
        let kind = match (eight, type_of(&scales.dtype)) {
            (None, _) => ScaleKind::Exponents,
            (Some(block), Some(dtype)) => ScaleKind::Grid {
                dtype,
                block: if is_single { WHOLE } else { block },
                in_a_row: if is_single { 1 } else { blocks[1] },
                first: 0,
            },
            _ => {
                return Err(Error::WrongDtype {
                    path,
                    tensor: name,
                    found: scales.dtype,
                    supported: "F32, BF16, F16, F8_E8M0".into(),
                });
            }
        };
        Ok(Some(Scales {
            file: at,
            offset: scales.offset,
            kind,
        }))
    }

    /// Rows and columns of a block of `raw`: a row, if there is a scale for each, else `block`.
    fn block_of(&self, raw: &Raw, block: [usize; 2]) -> [usize; 2] {
        let scales = self.found.get(&self.name_of(&raw.name));
        let by_row = scales.is_some_and(|scales| match scales.1.shape[..] {
            [rows, 1] => rows > 1 && raw.shape.first() == Some(&rows),
            _ => false,
        });
        if by_row { [1, usize::MAX] } else { block }
    }

    /// The name of the scales of eight-bit floats.
    fn name_of(&self, tensor: &str) -> String {
        let powers = tensor
            .strip_suffix(WEIGHT)
            .map(|name| format!("{name}{POWERS}"));
        let named = EIGHT_BITS.map(|suffix| format!("{tensor}{suffix}"));
        let usual = named[0].clone();
        let mut names = powers.into_iter().chain(named);
        names
            .find(|name| self.found.contains_key(name))
            .unwrap_or(usual)
    }

    /// The scales of pairs of four-bit floats, a power of two for each [`GROUP`] of a row.
    fn of_pairs(
        &mut self,
        raw: &Raw,
        file: &DataFile,
        [rows, cols]: [usize; 2],
    ) -> Result<Option<Scales>, Error> {
        let name = self.name_of(&raw.name);
        let expected = shape_text(&[rows, cols / GROUP]);
        let path = file.path.clone();
        let Some((at, scales)) = self.found.remove(&name) else {
            return Err(Error::MissingTensor {
                path,
                tensor: name,
                expected,
            });
        };
        if !cols.is_multiple_of(GROUP)
            || scales.shape != [rows, cols / GROUP]
            || scales.dtype != "F8_E8M0"
        {
            return Err(Error::WrongShape {
                path,
                tensor: name,
                found: format!("{} {}", scales.dtype, shape_text(&scales.shape)),
                expected: format!("F8_E8M0 {expected}"),
            });
        }
        Ok(Some(Scales {
            file: at,
            offset: scales.offset,
            kind: ScaleKind::Exponents,
        }))
    }

    /// Scales without a tensor: file and name.
    pub(super) fn rest(self) -> Option<(usize, String)> {
        let (name, (file, _)) = self.found.into_iter().next()?;
        Some((file, name))
    }
}

/// The type of scales of eight-bit floats, by its name.
fn type_of(name: &str) -> Option<DType> {
    match name {
        "F32" => Some(DType::F32),
        "BF16" => Some(DType::Bf16),
        "F16" => Some(DType::F16),
        "F8_E8M0" => Some(DType::E8M0),
        _ => None,
    }
}

/// Whether a tensor has this name only if it holds scales of eight-bit floats.
fn is_of_eight_bits(name: &str) -> bool {
    let [inverse, plain] = EIGHT_BITS;
    name.ends_with(inverse)
        || name
            .strip_suffix(plain)
            .is_some_and(|tensor| tensor.ends_with(WEIGHT))
}

/// Rows and columns of the blocks of eight-bit floats; `None` if the weights have another type.
///
/// # Errors
/// [`Error::Unsupported`] for formats other than e4m3, [`Error::BadKey`] for other sizes.
pub(super) fn fp8_block(path: &Path, config: &Value) -> Result<Option<[usize; 2]>, Error> {
    let keys = Keys::new(path, config)?;
    let inner = keys.object("text_config", "text_config.")?;
    for keys in [Some(keys), inner].into_iter().flatten() {
        if let Some(block) = block_of(&keys)? {
            return Ok(Some(block));
        }
    }
    Ok(None)
}

/// The same for a model's own keys.
pub(super) fn block_of(keys: &Keys) -> Result<Option<[usize; 2]>, Error> {
    let Some(object) = keys.object("quantization_config", "quantization_config.")? else {
        return Ok(None);
    };
    match object.str("quant_method")? {
        Some("fp8") => {}
        Some("compressed-tensors") => return quant::eight_bits(&object),
        Some("modelopt") => return Ok(Some(WHOLE)),
        _ => return Ok(None),
    }
    if (object.str("fmt")?).is_some_and(|fmt| !matches!(fmt, "e4m3" | "float8_e4m3fn")) {
        return Err(object.unsupported("fmt", "implemented: e4m3, float8_e4m3fn"));
    }
    const BLOCK: &str = "weight_block_size";
    const SIZES: &str = "two sizes above 0, or null for one scale of a matrix";
    if object.map().get(BLOCK).is_some_and(Value::is_null) {
        return Ok(Some(WHOLE));
    }
    let size = |value: &Value| {
        usize::try_from(value.as_u64()?)
            .ok()
            .filter(|size| *size > 0)
    };
    let block = object.read(BLOCK, SIZES, |value| {
        let sizes = value.as_array()?.iter().map(size);
        let sizes: Vec<usize> = sizes.collect::<Option<_>>()?;
        <[usize; 2]>::try_from(sizes).ok()
    })?;
    Ok(Some(block.unwrap_or(USUAL)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_e4m3_by_blocks_or_by_matrices_is_read() {
        let path = Path::new("config.json");
        let of =
            |quantization: Value| fp8_block(path, &json!({"quantization_config": quantization}));
        let usual = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]});
        assert_eq!(of(usual.clone()).unwrap(), Some([128, 64]));
        // as MiniMax-M2 says it
        let mut by_type = usual.clone();
        by_type["fmt"] = json!("float8_e4m3fn");
        assert_eq!(of(by_type).unwrap(), Some([128, 64]));
        let inner = json!({"text_config": {"quantization_config": usual}});
        assert_eq!(fp8_block(path, &inner).unwrap(), Some([128, 64]));
        assert_eq!(of(json!({"quant_method": "mxfp4"})).unwrap(), None);
        // as Ministral 3 says it
        let whole = json!({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": null});
        assert_eq!(of(whole).unwrap(), Some(WHOLE));
        assert_eq!(of(json!({"quant_method": "fp8"})).unwrap(), Some(USUAL));
        for bad in [
            json!({"quant_method": "fp8", "weight_block_size": [128]}),
            json!({"quant_method": "fp8", "weight_block_size": [0, 128]}),
            json!({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}),
        ] {
            assert!(of(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn one_scale_is_of_a_whole_matrix_or_of_its_only_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, [0; 8]).unwrap();
        let file = DataFile::open(&path).unwrap();
        let raw = |name: &str, dtype: &str, shape: &[usize]| Raw {
            name: name.into(),
            dtype: dtype.into(),
            shape: shape.to_vec(),
            offset: 0,
            packed: None,
            powers: None,
        };
        for (block, size, fits) in [
            ([128, 128], 4096, false),
            ([128, 128], 128, true),
            (WHOLE, 4096, true),
        ] {
            let scale = raw("w.weight_scale_inv", "F32", &[1]);
            let mut scales = ScaleTensors {
                found: BTreeMap::from([(scale.name.clone(), (0, scale))]),
                block: Some(block),
            };
            let read = scales.of(&raw("w.weight", "F8_E4M3", &[size, size]), &file);
            match read {
                Ok(_) => assert!(fits, "{block:?} {size}"),
                Err(e) => assert!(!fits && e.to_string().contains("[32, 32]"), "{e}"),
            }
        }
    }
}
