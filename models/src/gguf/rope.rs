//! Rotary parameters: keys of the metadata, and tensors of divisors.

use super::header::Raw;
use crate::config::{ModelConfig, Rope, RopeScaling, yarn_attention};
use crate::dtype::DType;
use crate::error::Error;
use crate::families::{self, Arch, Family, Quirk};
use crate::file::DataFile;
use crate::metadata::{ArchKeys, Metadata};
use crate::store::shape_text;

/// The tensor with a divisor for each rotary frequency.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// The tensors of LongRoPE, for short and for long contexts.
pub(super) const LONG_FACTORS: [&str; 2] =
    ["rope_factors_short.weight", "rope_factors_long.weight"];
/// Base of the rotary frequencies if the key is absent, as in llama.cpp.
const DEFAULT_ROPE_THETA: f32 = 10_000.0;

/// Factor of queries and keys with LongRoPE, whose divisors are tensors.
const ATTENTION_FACTOR: &str = "rope.scaling.attn_factor";
/// Factor of the logarithm of YaRN's factor, in the divisor of its query and key factor.
const YARN_ALL: &str = "rope.scaling.yarn_log_multiplier";
/// Base of the rotary frequencies in layers with a window.
const LOCAL_BASE: &str = "rope.freq_base_swa";

/// Rotary parameters of layers without a window and, if different, of layers with one, whose heads
/// have `head_dim` elements.
pub(super) fn ropes(
    metadata: &Metadata,
    family: &Family,
    arch: &Arch,
    head_dim: u32,
    windowed: bool,
) -> Result<(Rope, Option<Rope>), Error> {
    let keys = arch.keys(metadata);
    let global = if family.has(Quirk::GlobalHeads) {
        keys.u32("attention.key_length")?
    } else {
        None
    };
    let full = rope(metadata, family, arch, global.unwrap_or(head_dim))?;
    let dims = global.map_or(full.dims, |_| head_dim);
    let usual = if family.has(Quirk::OneBase) {
        full.theta
    } else {
        DEFAULT_ROPE_THETA
    };
    let local = (family.two_ropes && windowed).then(|| local_rope(keys, dims, usual));
    Ok((full, local.transpose()?))
}

fn rope(metadata: &Metadata, family: &Family, arch: &Arch, head_dim: u32) -> Result<Rope, Error> {
    let keys = arch.keys(metadata);
    let head_dim = head_dim * u32::from(family.rotates());
    // files have the key even if nothing is rotated
    let dims = keys.u32("rope.dimension_count")?;
    let dims = dims.filter(|_| family.rotates()).unwrap_or(head_dim);
    if dims != head_dim && family.rotated.is_none() && !arch.part_rotated {
        let why = format!("only {head_dim}, the whole head, is implemented");
        return Err(keys.unsupported("rope.dimension_count", &why));
    }
    let factor = match keys.f32("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.f32("rope.scale_linear")?,
    };
    // A factor of 0 means none; one without a type is linear.
    let factor = factor.filter(|factor| *factor != 0.0);
    let scaling = match metadata.text(&keys.key("rope.scaling.type"))?.as_deref() {
        Some("none") => RopeScaling::None,
        Some("linear") | None => {
            factor.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor })
        }
        Some("yarn") => {
            let given = |rest: &str| Ok(keys.f32(rest)?.filter(|beta| *beta != 0.0));
            let Some(factor) = factor else {
                return Err(keys.missing("rope.scaling.factor", "a number"));
            };
            RopeScaling::Yarn {
                factor,
                beta_fast: given("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: given("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                original_context: keys.need("rope.scaling.original_context_length")?,
                attention_factor: yarn_attention(factor, 1.0)
                    / given(YARN_ALL)?.map_or(1.0, |all| yarn_attention(factor, all)),
                truncate: arch.yarn_truncate,
            }
        }
        Some(_) => {
            let why = "implemented: none, linear, yarn";
            return Err(keys.unsupported("rope.scaling.type", why));
        }
    };
    Ok(Rope {
        theta: keys.f32("rope.freq_base")?.unwrap_or(DEFAULT_ROPE_THETA),
        dims,
        scaling,
    })
}

/// The parameters of layers with a window, which are never scaled; `usual` is the base of files without its
/// key.
fn local_rope(keys: ArchKeys<'_>, dims: u32, usual: f32) -> Result<Rope, Error> {
    Ok(Rope {
        theta: keys.f32(LOCAL_BASE)?.unwrap_or(usual),
        dims,
        scaling: RopeScaling::None,
    })
}

/// The llama3 scaling with the divisors `factors`, one per frequency.
///
/// Converters store Llama 3's scaling only as these divisors. Its band limits have always been 1
/// and 4, or 1 and 1 in Llama 4; the original context is searched among powers of two, the
/// published one first. `None` if no such scaling matches.
/// published one first. `None` if no such scaling matches.
pub(super) fn llama3_from_factors(theta: f32, dims: u32, factors: &[f32]) -> Option<RopeScaling> {
    const TOLERANCE: f32 = 1e-4;
    if factors.iter().any(|divisor| !divisor.is_finite()) {
        return None;
    }
    let factor = factors.iter().copied().fold(1.0, f32::max);
    if factors.iter().all(|&divisor| divisor == 1.0) {
        return Some(RopeScaling::None);
    }
    let contexts = [8192]
        .into_iter()
        .chain((4..=20).map(|power| 1u32 << power));
    let contexts = contexts.flat_map(|context| [(context, 4.0), (context, 1.0)]);
    contexts.into_iter().find_map(|(original_context, high)| {
        let fits = factors.iter().enumerate().all(|(i, &stored)| {
            let exponent = 2.0 * i as f64 / f64::from(dims);
            let wavelength = std::f64::consts::TAU * f64::from(theta).powf(exponent);
            let turns = f64::from(original_context) / wavelength;
            let smooth = if high > 1.0 {
                ((turns - 1.0) / (high - 1.0)).clamp(0.0, 1.0)
            } else {
                f64::from(u8::from(turns > 1.0))
            };
            let divisor = 1.0 / ((1.0 - smooth) / f64::from(factor) + smooth);
            (stored - divisor as f32).abs() <= TOLERANCE * stored.abs()
        });
        fits.then_some(RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: high as f32,
            original_context,
        })
    })
}

/// The divisors of the rotary frequencies in a tensor.
pub(super) fn read_factors(
    config: &ModelConfig,
    file: &DataFile,
    raw: &Raw,
) -> Result<Vec<f32>, Error> {
    let (path, tensor) = (file.path.clone(), raw.name.clone());
    let count = config.rope.dims as usize / 2;
    if raw.shape != [count] {
        let (found, expected) = (shape_text(&raw.shape), shape_text(&[count]));
        return Err(Error::WrongShape {
            path,
            tensor,
            found,
            expected,
        });
    }
    if raw.dtype != DType::F32 {
        let (found, supported) = (raw.dtype.name().into(), "F32".into());
        return Err(Error::WrongDtype {
            path,
            tensor,
            found,
            supported,
        });
    }
    let mut bytes = vec![0; count * 4];
    file.read_at(&mut bytes, raw.offset, &|| format!("tensor {}", raw.name))?;
    let mut factors = vec![0.0; count];
    raw.dtype.decode(&bytes, &mut factors);
    Ok(factors)
}

/// The scaling of LongRoPE, if the file has its divisors, short contexts first.
pub(super) fn long_rope(
    config: &mut ModelConfig,
    keys: ArchKeys<'_>,
    factors: [Option<Vec<f32>>; 2],
) -> Result<(), Error> {
    let attention_factor = keys.f32(ATTENTION_FACTOR)?.filter(|factor| *factor != 0.0);
    let [short, long] = factors;
    match (short, long) {
        (None, None) => match attention_factor {
            Some(factor) if factor != 1.0 => {
                Err(keys.unsupported(ATTENTION_FACTOR, "there are no divisors of the frequencies"))
            }
            _ => Ok(()),
        },
        (Some(short), Some(long)) if config.rope.scaling == RopeScaling::None => {
            config.rope.scaling = RopeScaling::Long {
                short,
                long,
                attention_factor: attention_factor.unwrap_or(1.0),
                long_attention_factor: None,
                original_context: keys.need("rope.scaling.original_context_length")?,
            };
            Ok(())
        }
        _ => {
            let why = "one of the tensors rope_factors_short.weight and rope_factors_long.weight is \
                       missing, or the metadata asks for another rotary scaling";
            Err(keys.unsupported("rope.scaling.type", why))
        }
    }
}

/// The rotated pairs, if the others have the huge divisors of Gemma 4.
fn proportional(factors: &[f32]) -> Option<u32> {
    const ENORMOUS: f32 = 1e30;
    let pairs = factors
        .iter()
        .take_while(|&&divisor| divisor == 1.0)
        .count();
    let rest = &factors[pairs..];
    let fits = !rest.is_empty() && rest.iter().all(|&divisor| divisor >= ENORMOUS);
    fits.then_some(pairs as u32)
}

/// Converts the frequency divisors to a scaling.
pub(super) fn scale_rope(
    config: &mut ModelConfig,
    file: &DataFile,
    raw: &Raw,
) -> Result<(), Error> {
    let path = file.path.clone();
    let unsupported = |found: String, why: &str| {
        Err(Error::Unsupported {
            path: path.clone(),
            key: ROPE_FACTORS.into(),
            found,
            why: why.into(),
        })
    };
    let factors = read_factors(config, file, raw)?;
    let of_gemma4 = families::of(&config.family).has(Quirk::GlobalHeads);
    let scaling = match proportional(&factors).filter(|_| of_gemma4) {
        Some(pairs) => Some(RopeScaling::Proportional { pairs }),
        None => llama3_from_factors(config.rope.theta, config.rope.dims, &factors),
    };
    let Some(scaling) = scaling else {
        return unsupported(
            format!("{factors:?}"),
            "these divisors are not those of a llama3 scaling",
        );
    };
    if scaling != RopeScaling::None && config.rope.scaling != RopeScaling::None {
        return unsupported(
            "present".into(),
            "the metadata asks for another rotary scaling",
        );
    }
    if scaling != RopeScaling::None {
        config.rope.scaling = scaling;
    }
    Ok(())
}
