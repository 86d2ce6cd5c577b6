//! compressed-tensors. The tensors of a module `m`, by format:
//!
//! - `pack-quantized`: `m.weight_packed` I32, a stream of codes along each row; `m.weight_scale`;
//!   `m.weight_zero_point` of an asymmetric scheme, packed along the rows; `m.weight_shape`; `m.weight_g_idx` where
//!   groups are not consecutive
//! - `int-quantized`: `m.weight` I8, `m.weight_scale`
//! - `nvfp4-pack-quantized`: `m.weight_packed` U8, `m.weight_scale` F8_E4M3 for each 16 columns, divided by
//!   `m.weight_global_scale`
//! - `mxfp4-pack-quantized`: `m.weight_packed` U8, `m.weight_scale` U8, a power of two for each 32 columns
//! - `float-quantized`: as FP8 elsewhere, see `scales`

use super::modelopt::nvfp4;
use super::module::{FLOATS, Matrix, Method, Module, PREFIX, WEIGHT};
use crate::dtype::DType;
use crate::error::Error;
use crate::hf::safetensors::Raw;
use crate::json::Keys;
use crate::store::{Common, Elements, Groups, Offsets, Parts};

/// The end of codes.
const CODES: &str = ".weight_packed";
const SCALES: &str = ".weight_scale";
const ZEROS: &str = ".weight_zero_point";
const SHAPE: &str = ".weight_shape";
const LISTED: &str = ".weight_g_idx";
const GLOBAL: &str = ".weight_global_scale";
/// The ends of the others.
const ENDS: [&str; 5] = [SCALES, ZEROS, SHAPE, LISTED, GLOBAL];
/// Columns with one power of two in MXFP4.
const MX_GROUP: usize = 32;
/// Formats that are read.
const FORMATS: [&str; 8] = [
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
];

/// How the weights of a group of modules are stored.
#[derive(Debug, Clone, Copy)]
enum Scheme {
    Int {
        bits: usize,
        /// `None` for a scale of a row or of the matrix.
        group: Option<usize>,
        symmetric: bool,
    },
    /// Eight-bit floats; rows and columns of a block.
    Float8([usize; 2]),
    Float4,
}

/// The format.
pub(super) struct Compressed {
    schemes: Vec<Scheme>,
}

/// Rows and columns of the blocks of eight-bit floats of a `quantization_config`; `None` if it has none. Scales of
/// rows or of whole matrices show in their shapes.
pub(in crate::hf) fn eight_bits(keys: &Keys) -> Result<Option<[usize; 2]>, Error> {
    let schemes = Compressed::read(keys)?.schemes;
    Ok(schemes.iter().find_map(|scheme| match scheme {
        Scheme::Float8(block) => Some(*block),
        _ => None,
    }))
}

impl Compressed {
    pub(super) fn read(keys: &Keys) -> Result<Self, Error> {
        expect_format(keys)?;
        for key in ["transform_config", "sparsity_config"] {
            let Some(of) = keys.object(key, PREFIX)? else {
                continue;
            };
            let plain = key == "sparsity_config" && of.str("format")? == Some("dense");
            if !plain && !of.map().is_empty() {
                return Err(keys.unsupported(key, "it changes what a module computes"));
            }
        }
        let groups = keys.object("config_groups", "quantization_config.config_groups.")?;
        let groups = groups.ok_or_else(|| keys.missing("config_groups", "an object"))?;
        let mut schemes = Vec::new();
        for name in groups.map().keys() {
            const PLACE: &str = "quantization_config.config_groups.*.";
            let Some(group) = groups.object(name, PLACE)? else {
                continue;
            };
            expect_format(&group)?;
            let weights = "quantization_config.config_groups.*.weights.";
            if let Some(weights) = group.object("weights", weights)? {
                schemes.push(Scheme::read(&weights)?);
            }
        }
        Ok(Self { schemes })
    }

    /// The integers of a module: bits, columns, and whether zero points belong to them.
    fn scheme_of(
        &self,
        [words, groups]: [usize; 2],
        cols: Option<usize>,
    ) -> Option<(usize, usize, bool)> {
        let fits = |scheme: &Scheme| {
            let Scheme::Int {
                bits,
                group,
                symmetric,
            } = *scheme
            else {
                return None;
            };
            let of_words = words.saturating_mul(32) / bits;
            let cols = cols.or(group.map(|size| size.saturating_mul(groups)));
            let cols = cols.unwrap_or(of_words);
            let in_words = cols.checked_mul(bits)?.div_ceil(32) == words;
            let in_groups = match group {
                Some(size) => size.checked_mul(groups) == Some(cols),
                None => groups == 1,
            };
            (in_words && in_groups && cols > 0).then_some((bits, cols, symmetric))
        };
        self.schemes.iter().find_map(fits)
    }

    fn integers(&self, module: &mut Module) -> Result<Matrix, Error> {
        let [rows, words] = module.matrix_of_codes("I32")?;
        let bytes = module.bytes(&ENDS);
        let of_scales = module.shape_of(SCALES)?;
        let stored = module.stored_shape(SHAPE)?;
        if stored.is_some_and(|[found, _]| found != rows) {
            return Err(module.wrong_codes("the rows of its weight_shape"));
        }
        let groups = of_scales[1];
        let scheme = self.scheme_of([words, groups], stored.map(|shape| shape[1]));
        let Some((bits, cols, symmetric)) = scheme else {
            let expected = format!("codes and {groups} scales in a row, as config_groups says");
            return Err(module.wrong_codes(&expected));
        };
        let group = cols / groups;
        let one = if of_scales == [1, 1] { 1 } else { rows };
        let scales = module.numbers(SCALES, FLOATS, [one, groups])?;
        let offsets = if symmetric && !module.has(ZEROS) {
            Offsets::Zero((1 << (bits - 1)) as f32)
        } else {
            let stored = [(rows * bits).div_ceil(32), groups];
            let across = Elements::Across(bits);
            Offsets::Zeros(module.packed(ZEROS, stored, [rows, groups], across)?)
        };
        let groups = match module.has(LISTED) {
            true => Groups::Listed(module.numbers(LISTED, &["I32"], [1, cols])?),
            false => Groups::Every(group),
        };
        let plain = matches!((&offsets, &groups), (Offsets::Zero(_), Groups::Every(_)));
        let plain = plain && group.is_multiple_of(32) && bits == 4;
        let elements = Elements::Along {
            bits,
            row_bytes: 4 * words,
            add: 0,
        };
        Ok(Matrix::Packed(Parts {
            shape: [rows, cols],
            transposed: false,
            codes: module.code_table([rows, cols], elements),
            scales,
            common: None,
            offsets,
            groups,
            dtype: if plain {
                DType::Int4
            } else {
                DType::Affine(bits as u8)
            },
            bytes,
        }))
    }

    /// Integers that are not packed.
    fn bytes(&self, module: &mut Module) -> Result<Matrix, Error> {
        let [rows, cols] = module.matrix_of_codes("I8")?;
        let bytes = module.bytes(&ENDS);
        let of_scales = module.shape_of(SCALES)?;
        let scheme = self.scheme_of([cols.div_ceil(4), of_scales[1]], Some(cols));
        let Some((8, ..)) = scheme else {
            return Err(module.wrong_codes("scales as config_groups says, of codes of 8 bits"));
        };
        let one = if of_scales == [1, 1] { 1 } else { rows };
        let scales = module.numbers(SCALES, FLOATS, [one, of_scales[1]])?;
        let offsets = match module.has(ZEROS) {
            true => Offsets::Zeros(module.numbers(ZEROS, &["I8"], [one, of_scales[1]])?),
            false => Offsets::Zero(0.0),
        };
        Ok(Matrix::Packed(Parts {
            shape: [rows, cols],
            transposed: false,
            codes: module.code_table([rows, cols], Elements::Plain(DType::I8)),
            scales,
            common: None,
            offsets,
            groups: Groups::Every(cols / of_scales[1]),
            dtype: DType::Affine(8),
            bytes,
        }))
    }

    fn floats(&self, module: &mut Module) -> Result<Matrix, Error> {
        if !self
            .schemes
            .iter()
            .any(|scheme| matches!(scheme, Scheme::Float4))
        {
            return Err(module.wrong_codes("codes in I32, as config_groups says"));
        }
        let bytes = module.bytes(&ENDS);
        drop(module.take(SHAPE));
        if module.has(GLOBAL) {
            let divisor = module.numbers(GLOBAL, &["F32"], [1, 1])?;
            return nvfp4(module, SCALES, Common::Divisor(divisor), bytes);
        }
        let [rows, half] = module.matrix_of_codes("U8")?;
        let cols = half.saturating_mul(2);
        if !cols.is_multiple_of(MX_GROUP) {
            return Err(module.wrong_codes("rows of a multiple of 16 bytes"));
        }
        let powers = module.need(SCALES, &["U8", "F8_E8M0"])?;
        let powers = module.table(powers, [rows, cols / MX_GROUP])?;
        Ok(Matrix::Mxfp4([rows, cols], (powers.file, powers.offset)))
    }
}

fn expect_format(keys: &Keys) -> Result<(), Error> {
    match keys.str("format")? {
        Some(format) if !FORMATS.contains(&format) => {
            let why = format!("read are {}", FORMATS.join(", "));
            Err(keys.unsupported("format", &why))
        }
        _ => Ok(()),
    }
}

impl Scheme {
    fn read(keys: &Keys) -> Result<Self, Error> {
        let bits = keys.need_u32("num_bits")? as usize;
        let group = keys.read("group_size", "a size above 0", |value| {
            match value.as_i64()? {
                -1 => Some(None),
                size => usize::try_from(size)
                    .ok()
                    .filter(|&size| size > 0)
                    .map(Some),
            }
        })?;
        let group = group.flatten();
        let strategy = keys.str("strategy")?;
        let strategy = strategy.unwrap_or(if group.is_some() { "group" } else { "tensor" });
        let by_group = matches!(strategy, "group" | "tensor_group");
        match (keys.str("type")?.unwrap_or("int"), bits, strategy) {
            ("int", 2 | 4 | 8, "tensor" | "channel" | "group") => Ok(Self::Int {
                bits,
                group: group.filter(|_| by_group),
                symmetric: keys.bool("symmetric")?.unwrap_or(true),
            }),
            ("float", 8, "tensor" | "channel") => Ok(Self::Float8([usize::MAX; 2])),
            ("float", 8, "block") => {
                const BLOCK: &str = "block_structure";
                let block = keys.read(BLOCK, "two sizes above 0", |value| {
                    let sizes = value.as_array()?.iter().map(|size| {
                        let size = usize::try_from(size.as_u64()?).ok();
                        size.filter(|&size| size > 0)
                    });
                    <[usize; 2]>::try_from(sizes.collect::<Option<Vec<_>>>()?).ok()
                })?;
                let block = block.ok_or_else(|| keys.missing(BLOCK, "two sizes above 0"))?;
                Ok(Self::Float8(block))
            }
            ("float", 8, "group") => match group {
                Some(size) => Ok(Self::Float8([1, size])),
                None => Err(keys.missing("group_size", "a size above 0")),
            },
            ("float", 4, "group" | "tensor_group") => Ok(Self::Float4),
            ("int", 2 | 4 | 8, _) | ("float", 4 | 8, _) => {
                let why = "read are tensor, channel, group, and block of eight-bit floats";
                Err(keys.unsupported("strategy", why))
            }
            ("int", ..) => {
                Err(keys.unsupported("num_bits", "integers of 2, 4 and 8 bits are read"))
            }
            ("float", ..) => Err(keys.unsupported("num_bits", "floats of 4 and 8 bits are read")),
            _ => Err(keys.unsupported("type", "int and float are read")),
        }
    }
}

impl Method for Compressed {
    fn module<'a>(&self, raw: &'a Raw) -> Option<&'a str> {
        let integers = || raw.name.strip_suffix(WEIGHT).filter(|_| raw.dtype == "I8");
        raw.name.strip_suffix(CODES).or_else(integers)
    }

    fn ends(&self) -> &'static [&'static str] {
        &ENDS
    }

    fn unread(&self) -> &'static [&'static str] {
        &[
            ".input_global_scale",
            ".input_scale",
            ".input_zero_point",
            ".output_scale",
            ".q_scale",
            ".k_scale",
            ".v_scale",
        ]
    }

    fn matrix(&self, module: &mut Module) -> Result<Matrix, Error> {
        match module.codes().0 {
            "I8" => self.bytes(module),
            "U8" => self.floats(module),
            _ => self.integers(module),
        }
    }

    fn usual(&self) -> (DType, u64) {
        let of = |scheme: &Scheme| match *scheme {
            Scheme::Int {
                bits,
                group,
                symmetric,
            } => {
                let plain = symmetric && bits == 4 && group.is_none_or(|n| n.is_multiple_of(32));
                let dtype = if plain {
                    DType::Int4
                } else {
                    DType::Affine(bits as u8)
                };
                let more = group.map_or(0, |size| 8 * 16 / size as u64);
                (dtype, 8 * bits as u64 + more)
            }
            Scheme::Float8(_) => (DType::F8E4M3, 64),
            Scheme::Float4 => (DType::Nvfp4, 36),
        };
        // the one with the most bits
        let all = self.schemes.iter().map(of);
        all.max_by_key(|(_, bits)| *bits)
            .unwrap_or((DType::Bf16, 128))
    }
}
