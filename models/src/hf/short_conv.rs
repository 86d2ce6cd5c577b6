//! LFM2's short convolutions, and its derived sizes.

use serde_json::Value;

use super::json::Keys;
use crate::config::ShortConvs;
use crate::error::Error;

/// The layers without attention: by their kinds or, in older files, all but those of a list.
pub(super) fn short_convs(keys: &Keys, layers: u32) -> Result<Option<ShortConvs>, Error> {
    let named = layers_of(keys, [&["conv"], &["full_attention"]], layers)?;
    let convs = match (named, attention(keys, "full_attn_idxs", layers)?) {
        (Some(convs), _) => convs,
        (None, Some(attention)) => (0..layers).filter(|l| !attention.contains(l)).collect(),
        (None, None) => Vec::new(),
    };
    Ok(if convs.is_empty() {
        None
    } else {
        Some(ShortConvs {
            layers: convs,
            taps: keys.u32("conv_L_cache")?.unwrap_or(3),
        })
    })
}

/// The layers with one of the names `wanted` in `layer_types`; the others must have one of the names
/// `others`.
pub(super) fn layers_of(
    keys: &Keys,
    [wanted, others]: [&[&str]; 2],
    layers: u32,
) -> Result<Option<Vec<u32>>, Error> {
    const KEY: &str = "layer_types";
    let names = [wanted, others].concat().join(" or ");
    let expected = format!("{names} for each of {layers} layers");
    let is_wanted = |kind: &Value| match kind.as_str() {
        Some(kind) if others.contains(&kind) => Some(false),
        Some(kind) if wanted.contains(&kind) => Some(true),
        _ => None,
    };
    let kinds = keys.read(KEY, &expected, |value| {
        let kinds = value.as_array()?.iter().map(is_wanted);
        let kinds = kinds.collect::<Option<Vec<bool>>>()?;
        (kinds.len() == layers as usize).then_some(kinds)
    })?;
    let chosen = |kinds: Vec<bool>| (0..).zip(kinds).filter(|(_, wanted)| *wanted);
    Ok(kinds.map(|kinds| chosen(kinds).map(|(layer, _)| layer).collect()))
}

/// The layers in the list `key`, which are those with attention.
pub(super) fn attention(keys: &Keys, key: &str, layers: u32) -> Result<Option<Vec<u32>>, Error> {
    let number = |value: &Value| {
        let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
        number.filter(|&layer| layer < layers)
    };
    let expected = format!("a list of some of {layers} layers");
    keys.read(key, &expected, |value| {
        value.as_array()?.iter().map(number).collect()
    })
}

/// `Lfm2MLP`: the neurons of an FFN of size `ffn` by its key, which `block_ff_dim` overrides.
pub(super) fn adjusted_ffn(keys: &Keys, ffn: Option<u32>) -> Result<Option<u32>, Error> {
    let Some(ffn) = keys.u32("block_ff_dim")?.or(ffn) else {
        return Ok(None);
    };
    if !keys.bool("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(Some(ffn));
    }
    const FACTOR: &str = "block_ffn_dim_multiplier";
    // as computed by Python
    let factor = keys.read(FACTOR, "a number above 0", |value| {
        value.as_f64().filter(|factor| *factor > 0.0)
    })?;
    let two_thirds = u64::from(ffn) * 2 / 3;
    const UNIT: &str = "block_multiple_of";
    let unit = match keys.u32(UNIT)?.unwrap_or(256) {
        0 => return Err(keys.bad(UNIT, "1 or more")),
        unit => u64::from(unit),
    };
    // null means no rounding
    let is_null = keys.map().get(FACTOR).is_some_and(Value::is_null);
    let size = if is_null {
        Some(two_thirds)
    } else {
        ((factor.unwrap_or(1.0) * two_thirds as f64) as u64).checked_next_multiple_of(unit)
    };
    let size = size.and_then(|size| u32::try_from(size).ok());
    let expected = "a factor with a size below 2^32";
    size.map(Some).ok_or_else(|| keys.bad(FACTOR, expected))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn with<T>(value: Value, read: impl Fn(&Keys) -> Result<T, Error>) -> Result<T, Error> {
        let path = Path::new("config.json");
        read(&Keys::new(path, &value)?)
    }

    #[test]
    fn sizes_of_ffns_are_those_of_the_releases() {
        let ffn = |value: Value| with(value, |keys| adjusted_ffn(keys, Some(150))).unwrap();
        assert_eq!(ffn(json!({"block_ff_dim": 12288})), Some(8192));
        assert_eq!(ffn(json!({"block_ff_dim": 10240})), Some(6912));
        let off = json!({"block_ff_dim": 10752, "block_auto_adjust_ff_dim": false});
        assert_eq!(ffn(off), Some(10752));
        let odd = json!({"block_ffn_dim_multiplier": 0.7, "block_multiple_of": 7});
        assert_eq!(ffn(odd), Some(70));
        assert_eq!(ffn(json!({"block_ffn_dim_multiplier": null})), Some(100));
        let too_large = json!({"block_ffn_dim_multiplier": 1e300});
        assert!(with(too_large, |keys| adjusted_ffn(keys, Some(150))).is_err());
    }

    #[test]
    fn layers_are_told_by_kind_or_by_number() {
        let layers = |value: Value| {
            let convs = with(value, |keys| short_convs(keys, 3))?;
            Ok::<_, Error>(convs.map(|convs| (convs.layers, convs.taps)))
        };
        let kinds =
            json!({"layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [0]});
        assert_eq!(layers(kinds).unwrap(), Some((vec![0, 2], 3)));
        let numbers = json!({"full_attn_idxs": [0], "conv_L_cache": 5});
        assert_eq!(layers(numbers).unwrap(), Some((vec![1, 2], 5)));
        assert_eq!(layers(json!({})).unwrap(), None);
        assert!(layers(json!({"layer_types": ["conv"]})).is_err());
        assert!(layers(json!({"full_attn_idxs": [3]})).is_err());
        assert!(layers(json!({"layer_types": ["conv", "sliding_attention", "conv"]})).is_err());
    }
}
