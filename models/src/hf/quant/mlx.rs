//! MLX's affine quantization: `weight` in words of 32 bits, a stream of codes along each row, with `scales` and
//! `biases` for groups of a row: `w = scale · code + bias`. Embeddings and heads have it, too.

use std::collections::HashMap;

use super::module::{FLOATS, Matrix, Method, Module, WEIGHT};
use crate::dtype::DType;
use crate::error::Error;
use crate::hf::safetensors::Raw;
use crate::json::Keys;
use crate::limits::MAX_COUNT;
use crate::store::{Elements, Groups, Offsets, Parts};

/// The key of `config.json`.
pub(super) const KEY: &str = "quantization";
/// Its prefix in errors.
pub(super) const PREFIX: &str = "quantization.";
/// The ends of scales and biases.
const ENDS: [&str; 2] = [".scales", ".biases"];
/// The part of a module's name with the matrices of all experts.
const EXPERTS: &str = "switch_mlp.";

/// Columns of a group, and bits of a code.
#[derive(Debug, Clone, Copy)]
struct Of {
    group: usize,
    bits: usize,
}

/// The format, with what is said of single modules.
pub(super) struct Mlx {
    usual: Of,
    modules: HashMap<String, Of>,
}

impl Mlx {
    pub(super) fn read(keys: &Keys) -> Result<Self, Error> {
        let usual = Of::read(keys, Of { group: 64, bits: 4 })?;
        let mut modules = HashMap::new();
        let objects = keys.map().iter().filter(|(_, value)| value.is_object());
        for (name, _) in objects {
            if let Some(of) = keys.object(name, "quantization.*.")? {
                modules.insert(name.clone(), Of::read(&of, usual)?);
            }
        }
        Ok(Self { usual, modules })
    }
}

impl Of {
    fn read(keys: &Keys, absent: Self) -> Result<Self, Error> {
        if keys.str("mode")?.is_some_and(|mode| mode != "affine") {
            return Err(keys.unsupported("mode", "affine is read"));
        }
        let bits = keys.u32("bits")?.map_or(absent.bits, |bits| bits as usize);
        if !matches!(bits, 2..=6 | 8) {
            return Err(keys.unsupported("bits", "2, 3, 4, 5, 6 and 8 are read"));
        }
        let group = keys
            .u32("group_size")?
            .map_or(absent.group, |size| size as usize);
        if group == 0 {
            return Err(keys.bad("group_size", "a size above 0"));
        }
        Ok(Self { group, bits })
    }
}

impl Method for Mlx {
    fn module<'a>(&self, raw: &'a Raw) -> Option<&'a str> {
        raw.name.strip_suffix(WEIGHT).filter(|_| raw.dtype == "U32")
    }

    fn ends(&self) -> &'static [&'static str] {
        &ENDS
    }

    fn matrix(&self, module: &mut Module) -> Result<Matrix, Error> {
        let Of { group, bits } = self
            .modules
            .get(&module.name)
            .copied()
            .unwrap_or(self.usual);
        let (experts, [rows, words]) = match *module.codes().1 {
            [rows, words] => (1, [rows, words]),
            [experts @ ..=MAX_EXPERTS, rows, words] if module.name.contains(EXPERTS) => {
                (experts, [rows, words])
            }
            _ => return Err(module.wrong_codes("a matrix, or a matrix for each expert")),
        };
        // whole groups, of which each is whole words or not
        let cols = words.saturating_mul(32) / bits;
        let fits = (cols * bits).div_ceil(32) == words && cols.is_multiple_of(group) && cols > 0;
        let all = experts.checked_mul(rows).filter(|&all| all > 0 && fits);
        let Some(all) = all else {
            let expected = format!("rows of whole groups of {group} columns of {bits} bits");
            return Err(module.wrong_codes(&expected));
        };
        let bytes = module.bytes(&ENDS);
        let groups = cols / group;
        let [scales, biases] = ENDS.map(|end| {
            let (file, mut raw) = module.need(end, FLOATS)?;
            if let [of, rows, groups] = raw.shape[..]
                && of == experts
            {
                raw.shape = vec![of.saturating_mul(rows), groups];
            }
            module.table((file, raw), [all, groups])
        });
        let elements = Elements::Along {
            bits,
            row_bytes: 4 * words,
            add: 0,
        };
        let parts = Parts {
            shape: [all, cols],
            transposed: false,
            codes: module.code_table([all, cols], elements),
            scales: scales?,
            common: None,
            offsets: Offsets::Biases(biases?),
            groups: Groups::Every(group),
            dtype: DType::Affine(bits as u8),
            bytes,
        };
        Ok(match module.name.contains(EXPERTS) {
            true => Matrix::Experts(parts, rows),
            false => Matrix::Packed(parts),
        })
    }

    fn usual(&self) -> (DType, u64) {
        let Of { group, bits } = self.usual;
        (
            DType::Affine(bits as u8),
            (8 * bits + 8 * 32 / group) as u64,
        )
    }
}

/// Most experts of a matrix for each: every one gets a name.
const MAX_EXPERTS: usize = MAX_COUNT as usize;

/// The name of one expert's matrix, as in the folder that was converted.
pub(super) fn expert_name(module: &str, expert: usize) -> String {
    let (before, last) = module.split_once(EXPERTS).unwrap_or((module, ""));
    let last = match last {
        "gate_proj" if before.ends_with("block_sparse_moe.") => "w1",
        "down_proj" if before.ends_with("block_sparse_moe.") => "w2",
        "up_proj" if before.ends_with("block_sparse_moe.") => "w3",
        last => last,
    };
    format!("{before}experts.{expert}.{last}{WEIGHT}")
}
