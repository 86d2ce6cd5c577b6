//! GPTQ: `qweight [inputs · bits / 32 × outputs]` in words of 32 bits along the inputs, `scales [groups × outputs]`,
//! `qzeros [groups × outputs · bits / 32]`, and the group of each input in `g_idx`: `w = (code − zero) · scale`.
//!
//! In the first version of the format zero points are stored less one. Its writers subtract one from each code of a
//! word at once, so one is added to the codes of a word at once, too.

use super::module::{FLOATS, Matrix, Method, Module};
use crate::dtype::DType;
use crate::error::Error;
use crate::hf::safetensors::Raw;
use crate::json::Keys;
use crate::store::{Elements, Groups, Offsets, Parts};

/// The end of the codes.
const CODES: &str = ".qweight";
/// The ends of zero points, scales and groups.
const ENDS: [&str; 3] = [".qzeros", ".scales", ".g_idx"];

/// The format.
pub(super) struct Gptq {
    bits: usize,
    /// `None` for one group of all inputs.
    group: Option<usize>,
    /// Whether zero points are stored less one.
    less_one: bool,
    /// Whether groups are consecutive and zero points in the middle.
    plain: bool,
}

impl Gptq {
    pub(super) fn read(keys: &Keys) -> Result<Self, Error> {
        let bits = keys.need_u32("bits")? as usize;
        if !matches!(bits, 2 | 4 | 8) {
            return Err(keys.unsupported("bits", "2, 4 and 8 are read"));
        }
        let mut less_one = true;
        for key in ["checkpoint_format", "format"] {
            match keys.str(key)? {
                None | Some("gptq") => {}
                Some("gptq_v2") => less_one = false,
                Some(_) => return Err(keys.unsupported(key, "gptq and gptq_v2 are read")),
            }
        }
        if keys.bool("is_marlin_format")? == Some(true) {
            return Err(keys.unsupported("is_marlin_format", "gptq and gptq_v2 are read"));
        }
        if keys.str("pack_dtype")?.is_some_and(|word| word != "int32") {
            return Err(keys.unsupported("pack_dtype", "int32 is read"));
        }
        let group = group_size(keys)?;
        let ordered = keys.bool("desc_act")? == Some(true);
        let whole = group.is_none_or(|size| size.is_multiple_of(32));
        Ok(Self {
            bits,
            group,
            less_one,
            plain: whole && !ordered && keys.bool("sym")? == Some(true),
        })
    }
}

/// The inputs of a group; `None` if it is -1, which stands for all.
pub(super) fn group_size(keys: &Keys) -> Result<Option<usize>, Error> {
    const EXPECTED: &str = "a size above 0, or -1";
    let size = keys.read("group_size", EXPECTED, |value| match value.as_i64()? {
        -1 => Some(None),
        size => usize::try_from(size)
            .ok()
            .filter(|&size| size > 0)
            .map(Some),
    })?;
    size.ok_or_else(|| keys.missing("group_size", EXPECTED))
}

impl Method for Gptq {
    fn module<'a>(&self, raw: &'a Raw) -> Option<&'a str> {
        raw.name.strip_suffix(CODES)
    }

    fn ends(&self) -> &'static [&'static str] {
        &ENDS
    }

    fn matrix(&self, module: &mut Module) -> Result<Matrix, Error> {
        let bits = self.bits;
        let [words, rows] = module.matrix_of_codes("I32")?;
        let cols = words.saturating_mul(32 / bits);
        let group = self.group.unwrap_or(cols);
        let groups = cols.div_ceil(group);
        let bytes = module.bytes(&ENDS);
        let of_zeros = (rows * bits).div_ceil(32);
        let add = if self.less_one {
            u32::MAX / ((1 << bits) - 1)
        } else {
            0
        };
        let along = Elements::Along {
            bits,
            row_bytes: 4 * of_zeros,
            add,
        };
        let zeros = module.packed(ENDS[0], [groups, of_zeros], [groups, rows], along)?;
        let scales = module.numbers(ENDS[1], FLOATS, [groups, rows])?;
        let listed = match module.has(ENDS[2]) {
            true => Some(module.numbers(ENDS[2], &["I32"], [1, cols])?),
            false => None,
        };
        Ok(Matrix::Packed(Parts {
            shape: [rows, cols],
            transposed: true,
            codes: module.code_table([cols, rows], Elements::Across(bits)),
            scales,
            common: None,
            offsets: Offsets::Zeros(zeros),
            groups: listed.map_or(Groups::Every(group), Groups::Listed),
            dtype: self.usual().0,
            bytes,
        }))
    }

    fn usual(&self) -> (DType, u64) {
        let bits = self.bits as u64;
        let dtype = match self.plain && bits == 4 {
            true => DType::Int4,
            false => DType::Affine(bits as u8),
        };
        let more = self.group.map_or(0, |size| 8 * (16 + bits) / size as u64);
        (dtype, 8 * bits + more)
    }
}
