//! AWQ ("gemm"): `qweight [inputs × outputs / 8]` in words of eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7,
//! `qzeros [groups × outputs / 8]` in the same order, `scales [groups × outputs]`: `w = (code − zero) · scale`.

use super::gptq::group_size;
use super::module::{FLOATS, Matrix, Method, Module};
use crate::dtype::DType;
use crate::error::Error;
use crate::hf::safetensors::Raw;
use crate::json::Keys;
use crate::store::{Elements, Groups, Offsets, Parts};

/// The end of the codes.
const CODES: &str = ".qweight";
/// The ends of zero points and scales.
const ENDS: [&str; 2] = [".qzeros", ".scales"];
/// Codes of a word.
const PER_WORD: usize = 8;

/// The format.
pub(super) struct Awq {
    /// `None` for one group of all inputs.
    group: Option<usize>,
}

impl Awq {
    pub(super) fn read(keys: &Keys) -> Result<Self, Error> {
        for key in ["bits", "w_bit"] {
            if keys.u32(key)?.is_some_and(|bits| bits != 4) {
                return Err(keys.unsupported(key, "4 bits are read"));
            }
        }
        for key in ["version", "format"] {
            let of = keys.str(key)?.map(str::to_lowercase);
            if of.is_some_and(|of| of != "gemm") {
                return Err(keys.unsupported(key, "gemm is read"));
            }
        }
        if keys.bool("zero_point")? == Some(false) {
            return Err(keys.unsupported("zero_point", "files with zero points are read"));
        }
        let group = group_size(keys)?;
        Ok(Self { group })
    }
}

impl Method for Awq {
    fn module<'a>(&self, raw: &'a Raw) -> Option<&'a str> {
        raw.name.strip_suffix(CODES)
    }

    fn ends(&self) -> &'static [&'static str] {
        &ENDS
    }

    fn matrix(&self, module: &mut Module) -> Result<Matrix, Error> {
        let [cols, words] = module.matrix_of_codes("I32")?;
        let rows = words.saturating_mul(PER_WORD);
        let group = self.group.unwrap_or(cols);
        let groups = cols.div_ceil(group);
        let bytes = module.bytes(&ENDS);
        let zeros = module.packed(ENDS[0], [groups, words], [groups, rows], Elements::Awq)?;
        let scales = module.numbers(ENDS[1], FLOATS, [groups, rows])?;
        Ok(Matrix::Packed(Parts {
            shape: [rows, cols],
            transposed: true,
            codes: module.code_table([cols, rows], Elements::Awq),
            scales,
            common: None,
            offsets: Offsets::Zeros(zeros),
            groups: Groups::Every(group),
            dtype: DType::Affine(4),
            bytes,
        }))
    }

    fn usual(&self) -> (DType, u64) {
        let more = self.group.map_or(0, |size| 8 * 20 / size as u64);
        (DType::Affine(4), 32 + more)
    }
}
