//! Qwen3.8-Flash-Next: hyper-connections and n-gram rows.

use serde_json::Value;

use super::safetensors::Raw;
use crate::config::{Form, HyperConnections, Mixing, ModelConfig, NGrams};
use crate::error::Error;
use crate::families;
use crate::file::DataFile;
use crate::json::Keys;
use crate::mixers::Sizes;
use crate::names::{Role, TensorId};

/// Added to the seed, and factors of `splitmix64`.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
const MIX: [u64; 2] = [0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB];

/// The table inside a layer.
const TABLE: &str = "ple.ple_embedding.ngram_embedding.";

/// Numbers that follow from the configuration but are stored in releases.
const STORED: [&str; 3] = [
    ".ple.ple_embedding.layer_multipliers",
    ".ple.ple_embedding.ngram_heads_offsets",
    ".ple.ple_embedding.ngram_heads_vocab_sizes",
];

/// `Qwen4ExpTextConfig`: the streams and the rows; absent keys have its defaults.
pub(super) fn form(keys: &Keys, sizes: Sizes, form: &mut Form) -> Result<(), Error> {
    let size = |key, usual| Ok::<_, Error>(keys.u32(key)?.unwrap_or(usual));
    form.hyper = Some(HyperConnections {
        count: size("hc_count", 4)?,
        mixing: Mixing::Gated {
            rank: size("hc_lowrank", 320)?,
        },
    });
    form.ngrams = match layer(keys, sizes.layers)? {
        Some(layer) => Some(ngrams(keys, sizes, layer)?),
        None => None,
    };
    Ok(())
}

/// The layer that reads the rows.
fn layer(keys: &Keys, layers: u32) -> Result<Option<u32>, Error> {
    const KEY: &str = "ple_layer_ids";
    let expected = format!("a list of numbers from 1 to {layers}");
    let number = |value: &Value| {
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.filter(|number| (1..=layers).contains(number))
    };
    let list = keys.read(KEY, &expected, |value| {
        value
            .as_array()?
            .iter()
            .map(number)
            .collect::<Option<Vec<u32>>>()
    })?;
    match list.as_deref() {
        None | Some([]) => Ok(None),
        Some([first, others @ ..]) if others.iter().all(|other| other == first) => {
            Ok(Some(first - 1))
        }
        _ => Err(keys.unsupported(KEY, "only one such layer is implemented")),
    }
}

/// `Qwen4ExpTextNGramEmbedding`: the heads' rows and the tokens' factors.
fn ngrams(keys: &Keys, sizes: Sizes, layer: u32) -> Result<NGrams, Error> {
    let size = |key, usual| Ok::<_, Error>(keys.u32(key)?.unwrap_or(usual));
    let longest = size("ngram_size", 3)?;
    if !(2..=8).contains(&longest) {
        return Err(keys.bad("ngram_size", "2 to 8"));
    }
    let heads = u64::from(longest - 1) * u64::from(size("heads_per_ngram", 8)?);
    let embedding = size("ple_embed_dim", sizes.d_model)?;
    if heads == 0 || heads > embedding.into() || !u64::from(embedding).is_multiple_of(heads) {
        let expected = format!("a multiple of {heads}, the number of heads");
        return Err(keys.bad("ple_embed_dim", &expected));
    }
    const BASE: &str = "ngram_vocab_size_base";
    let (mut prime, mut first) = (size(BASE, 20_000_000)?, 0u32);
    let mut rows = Vec::new();
    for _ in 0..heads {
        let next = (prime..=u32::MAX).find(|&number| is_prime(number));
        let end = next.and_then(|next| first.checked_add(next));
        let (Some(next), Some(end)) = (next, end) else {
            return Err(keys.bad(BASE, &format!("less, for {heads} heads of so many rows")));
        };
        rows.push([first, next]);
        (prime, first) = (next.saturating_add(1), end);
    }
    const DIVISOR: &str = "make_ngram_vocab_size_divisible_by";
    let divisor = size(DIVISOR, 128)?;
    let padded = first.div_ceil(divisor.max(1)).checked_mul(divisor);
    let Some(padded) = padded.filter(|_| divisor > 0) else {
        return Err(keys.bad(DIVISOR, "1 or more"));
    };
    let vocab = u64::from(keys.need_u32("vocab_size")?.max(1));
    let seed = keys
        .read("seed", "an integer", Value::as_i64)?
        .unwrap_or(1234);
    let end = keys.tokens("eos_token_id")?.first().copied();
    Ok(NGrams {
        layer,
        rows: padded,
        width: embedding / heads as u32,
        taps: size("ple_conv_kernel_size", 4)?,
        end: end.ok_or_else(|| keys.missing("eos_token_id", "a token"))?,
        factors: (1..=longest.into())
            .map(|at| factor(seed as u64, vocab, at))
            .collect(),
        heads: rows,
    })
}

/// Factor of the `at`-th token from the end: odd, and small enough that no product overflows.
fn factor(seed: u64, vocab: u64, at: u64) -> u64 {
    let bound = (i64::MAX as u64 / vocab / 2).max(1);
    let mut value = seed
        .wrapping_add(GAMMA.wrapping_mul(at))
        .wrapping_add(GAMMA);
    value = (value ^ (value >> 30)).wrapping_mul(MIX[0]);
    value = (value ^ (value >> 27)).wrapping_mul(MIX[1]);
    2 * ((value ^ (value >> 31)) % bound) + 1
}

/// A seed with these factors; the candidates have the first factor as a remainder, and each comes from
/// exactly one seed, as every step of [`factor`] has an inverse.
pub(super) fn seed_of(factors: &[u64], vocab: u32) -> Option<i64> {
    let vocab = u64::from(vocab.max(1));
    let bound = (i64::MAX as u64 / vocab / 2).max(1);
    let rest = factors.first()? / 2;
    let unshifted = |value: u64, by: u32| (0..64 / by).fold(value, |x, _| value ^ (x >> by));
    let of = |mixed: u64| {
        let value = unshifted(mixed, 31).wrapping_mul(inverse(MIX[1]));
        let value = unshifted(value, 27).wrapping_mul(inverse(MIX[0]));
        unshifted(value, 30).wrapping_sub(GAMMA.wrapping_mul(2))
    };
    let gives = |seed: &u64| {
        let mut numbered = (1..).zip(factors);
        numbered.all(|(at, &expected)| factor(*seed, vocab, at) == expected)
    };
    let mixed = (0..=u64::MAX / bound).filter_map(|n| rest.checked_add(n.checked_mul(bound)?));
    mixed.map(of).find(gives).map(u64::cast_signed)
}

/// The inverse of an odd number modulo 2^64 (Newton's iteration).
fn inverse(odd: u64) -> u64 {
    (0..6).fold(odd, |x, _| {
        x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)))
    })
}

fn is_prime(number: u32) -> bool {
    let square = |divisor: u64| divisor * divisor <= number.into();
    number > 1
        && (2..)
            .take_while(|&divisor| square(divisor))
            .all(|divisor| !u64::from(number).is_multiple_of(divisor))
}

/// The name of the tensor with the whole table.
pub(super) fn table_name(config: &ModelConfig) -> String {
    let prefix = families::of(&config.family).names.layer_prefix;
    let layer = config.form.ngrams.as_ref().map_or(0, |of| of.layer);
    format!("{prefix}{layer}.{TABLE}weight")
}

/// The part of the table, or all of it, in a tensor; `name` is without the prefix of layers.
pub(super) fn table_part(name: &str, config: &ModelConfig) -> Option<TensorId> {
    let ngrams = config.form.ngrams.as_ref()?;
    let inside = name.strip_prefix(&format!("{}.", ngrams.layer))?;
    let inside = inside.strip_prefix(TABLE)?;
    if inside == "weight" {
        return Some(TensorId::global(Role::NGramTable));
    }
    let number = inside.strip_prefix("shard_")?.strip_suffix(".weight")?;
    let part: u32 = number.parse().ok()?;
    (part.to_string() == number).then(|| TensorId::numbered(Role::NGramTable, part))
}

/// Whether a tensor repeats numbers that follow from the configuration.
///
/// # Errors
/// [`Error::Unsupported`] if it has other numbers.
pub(super) fn is_repeated(raw: &Raw, file: &DataFile, config: &ModelConfig) -> Result<bool, Error> {
    let Some(ngrams) = &config.form.ngrams else {
        return Ok(false);
    };
    let Some(which) = STORED.iter().position(|end| raw.name.ends_with(end)) else {
        return Ok(false);
    };
    let numbers: Vec<u64> = match which {
        0 => ngrams.factors.clone(),
        _ => (ngrams.heads.iter().map(|head| head[which - 1].into())).collect(),
    };
    let mut bytes = vec![0; 8 * numbers.len()];
    let alike = raw.dtype == "I64" && raw.shape == [numbers.len()];
    if alike {
        file.read_at(&mut bytes, raw.offset, &|| format!("tensor {}", raw.name))?;
    }
    let expected = numbers.iter().flat_map(|number| number.to_le_bytes());
    if !(alike && expected.eq(bytes)) {
        return Err(Error::Unsupported {
            path: file.path.clone(),
            key: raw.name.clone(),
            found: "other numbers".into(),
            why: "config.json says which rows a token has, and the tensor differs from it".into(),
        });
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_give_a_seed_that_gives_them() {
        for (seed, vocab) in [(1234, 320), (77, 248_320), (-5i64, 1000), (i64::MAX, 7)] {
            let of = |seed: i64| {
                let all = (1..=3).map(|at| factor(seed as u64, vocab.into(), at));
                all.collect::<Vec<u64>>()
            };
            let found = seed_of(&of(seed), vocab).unwrap();
            assert_eq!(of(found), of(seed), "{seed}");
        }
        assert_eq!(seed_of(&[3, 5, 7, 9], 320), None);
    }
}
