//! Lists of layers in `config.json`.

use serde_json::{Value, json};

use crate::error::Error;
use crate::json::Keys;

/// Names of layers with a recurrent mixer, and of those with attention.
pub(crate) const LINEAR: [&str; 2] = ["linear_attention", "full_attention"];

/// The layers with one of the names `wanted` in `layer_types`; the others must have one of the names
/// `others`.
pub(crate) fn named(
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

/// `layer_types`: `own` for the layers of the list, `others` for the rest.
pub(crate) fn write_names(
    with: Option<&Vec<u32>>,
    [own, others]: [&str; 2],
    layers: u32,
    config: &mut Value,
) {
    let has = |layer| with.is_some_and(|with| with.contains(&layer));
    let names = (0..layers).map(|layer| if has(layer) { own } else { others });
    config["layer_types"] = names.collect();
}

/// The layers that the list `key` lacks: it has those with attention.
pub(crate) fn all_but(keys: &Keys, key: &str, layers: u32) -> Result<Option<Vec<u32>>, Error> {
    let number = |value: &Value| {
        let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
        number.filter(|&layer| layer < layers)
    };
    let expected = format!("a list of some of {layers} layers");
    let listed = keys.read(key, &expected, |value| {
        value.as_array()?.iter().map(number).collect()
    })?;
    Ok(listed.map(|listed: Vec<u32>| others(Some(&listed), layers)))
}

/// All but the layers of a list.
pub(crate) fn others(list: Option<&Vec<u32>>, layers: u32) -> Vec<u32> {
    let has = |layer: &u32| list.is_some_and(|list| list.contains(layer));
    (0..layers).filter(|layer| !has(layer)).collect()
}

/// All but each `interval`-th layer.
pub(crate) fn all_but_nth(interval: u32, layers: u32) -> Vec<u32> {
    let has = |layer: &u32| !(layer + 1).is_multiple_of(interval);
    (0..layers).filter(has).collect()
}

/// Layers at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Periodic {
    pub(crate) period: u32,
    /// The first of them, below the period.
    pub(crate) offset: u32,
}

impl Periodic {
    /// Reads the two keys, each with the value without it.
    pub(crate) fn read(keys: &Keys, of: [(&str, u32); 2]) -> Result<Self, Error> {
        let [(period_key, period), (offset_key, offset)] = of;
        let period = keys.u32(period_key)?.unwrap_or(period);
        let offset = keys.u32(offset_key)?.unwrap_or(offset);
        if offset >= period {
            return Err(keys.bad(offset_key, &format!("below {period_key} = {period}")));
        }
        Ok(Self { period, offset })
    }

    /// Whether a layer is one of them.
    pub(crate) fn has(self, layer: u32) -> bool {
        layer % self.period.max(1) == self.offset
    }

    /// The layers of a list, of this many, under the two keys; other lists appear when the keys are read back.
    pub(crate) fn write(list: &[u32], keys: [(&str, u32); 2], layers: u32, config: &mut Value) {
        let [(period, _), (offset, _)] = keys;
        if let Some(of) = Self::of(list, layers) {
            config[period] = json!(of.period);
            config[offset] = json!(of.offset);
        }
    }

    /// The distances at which exactly the layers of `list` lie, of this many.
    fn of(list: &[u32], layers: u32) -> Option<Self> {
        let mut all = (1..=layers + 1)
            .flat_map(|period| (0..period).map(move |offset| Self { period, offset }));
        let fits = |of: &Self| {
            (0..layers)
                .filter(|&layer| of.has(layer))
                .eq(list.iter().copied())
        };
        all.find(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_give_back_their_distances() {
        let of = |period, offset| Periodic { period, offset };
        assert_eq!(Periodic::of(&[1, 3, 5], 7), Some(of(2, 1)));
        assert_eq!(Periodic::of(&[4], 7), Some(of(5, 4)));
        assert_eq!(Periodic::of(&[], 2), Some(of(3, 2)));
        assert_eq!(Periodic::of(&[0, 1], 7), None);
    }
}
