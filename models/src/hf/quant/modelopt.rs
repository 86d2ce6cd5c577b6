//! ModelOpt: NVFP4 as `weight` of two four-bit floats in a byte, `weight_scale` in eight-bit floats for each 16 columns
//! and `weight_scale_2` for all; FP8 with one scale for a matrix.

use super::module::{Matrix, Method, Module, WEIGHT};
use crate::dtype::DType;
use crate::error::Error;
use crate::hf::safetensors::Raw;
use crate::json::Keys;
use crate::store::{Common, Elements, Groups, Offsets, Parts, Table};

/// Columns with one scale in NVFP4.
pub(super) const GROUP: usize = 16;
/// The ends of scales for groups and for all.
const ENDS: [&str; 2] = [".weight_scale", ".weight_scale_2"];

/// The format.
pub(super) struct ModelOpt {
    four: bool,
}

impl ModelOpt {
    pub(super) fn read(keys: &Keys) -> Result<Self, Error> {
        match keys.str("quant_algo")? {
            Some("NVFP4") => Ok(Self { four: true }),
            Some("FP8") => Ok(Self { four: false }),
            _ => Err(keys.unsupported("quant_algo", "NVFP4 and FP8 are read")),
        }
    }
}

impl Method for ModelOpt {
    fn module<'a>(&self, raw: &'a Raw) -> Option<&'a str> {
        let is_packed = raw.dtype == "U8" && self.four;
        raw.name.strip_suffix(WEIGHT).filter(|_| is_packed)
    }

    fn ends(&self) -> &'static [&'static str] {
        &ENDS
    }

    fn unread(&self) -> &'static [&'static str] {
        &[".input_scale", ".k_scale", ".v_scale"]
    }

    fn matrix(&self, module: &mut Module) -> Result<Matrix, Error> {
        let bytes = module.bytes(&ENDS);
        let factor = module.numbers(ENDS[1], &["F32"], [1, 1])?;
        nvfp4(module, ENDS[0], Common::Factor(factor), bytes)
    }

    fn usual(&self) -> (DType, u64) {
        match self.four {
            true => (DType::Nvfp4, 36),
            false => (DType::F8E4M3, 64),
        }
    }
}

/// A matrix of four-bit floats with eight-bit floats for each 16.
pub(super) fn nvfp4(
    module: &mut Module,
    scales: &'static str,
    common: Common,
    bytes: u64,
) -> Result<Matrix, Error> {
    let [rows, half] = module.matrix_of_codes("U8")?;
    let cols = half.saturating_mul(2);
    if !cols.is_multiple_of(GROUP) {
        return Err(module.wrong_codes("rows of a multiple of 8 bytes"));
    }
    let scales: Table = module.numbers(scales, &["F8_E4M3"], [rows, cols / GROUP])?;
    Ok(Matrix::Packed(Parts {
        shape: [rows, cols],
        transposed: false,
        codes: module.code_table([rows, cols], Elements::Floats4),
        scales,
        common: Some(common),
        offsets: Offsets::Zero(0.0),
        groups: Groups::Every(GROUP),
        dtype: DType::Nvfp4,
        bytes,
    }))
}
