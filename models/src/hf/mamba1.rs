//! The Mamba-1 layers of Jamba.

use serde_json::Value;

use super::json::Keys;
use super::values::Sizes;
use crate::config::{Mamba1Layers, Mamba1Shape};
use crate::error::Error;

/// Elements of the residual stream for each element from which steps are projected, if no key gives their number.
const PER_STEP: u32 = 16;

/// The layers at these distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Periodic {
    pub(super) period: u32,
    /// The first of them, below the period.
    pub(super) offset: u32,
}

impl Periodic {
    /// Reads the two keys, each with the value without it.
    pub(super) fn read(keys: &Keys, of: [(&str, u32); 2]) -> Result<Self, Error> {
        let [(period_key, period), (offset_key, offset)] = of;
        let period = keys.u32(period_key)?.unwrap_or(period);
        let offset = keys.u32(offset_key)?.unwrap_or(offset);
        if offset >= period {
            return Err(keys.bad(offset_key, &format!("below {period_key} = {period}")));
        }
        Ok(Self { period, offset })
    }

    /// Whether a layer is one of them.
    pub(super) fn has(self, layer: u32) -> bool {
        layer % self.period.max(1) == self.offset
    }

    /// The distances at which exactly the layers of `list` lie, of this many.
    pub(super) fn of(list: &[u32], layers: u32) -> Option<Self> {
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

/// The keys of the layers with attention, and their values without them.
pub(super) const ATTENTION: [(&str, u32); 2] = [("attn_layer_period", 8), ("attn_layer_offset", 4)];

/// The layers with Mamba-1, and its sizes; absent keys have the values of the configuration class.
pub(super) fn mamba1_layers(keys: &Keys, sizes: Sizes) -> Result<Option<Mamba1Layers>, Error> {
    let attention = Periodic::read(keys, ATTENTION)?;
    let layers: Vec<u32> = (0..sizes.layers)
        .filter(|&layer| !attention.has(layer))
        .collect();
    if layers.is_empty() {
        return Ok(None);
    }
    let size = |key, usual| Ok::<_, Error>(keys.u32(key)?.unwrap_or(usual));
    const RANK: &str = "mamba_dt_rank";
    let rank = match keys.get(RANK).and_then(Value::as_str) {
        Some("auto") => None,
        _ => keys.u32(RANK)?,
    };
    Ok(Some(Mamba1Layers {
        layers,
        shape: Mamba1Shape {
            taps: size("mamba_d_conv", 4)?,
            channels: sizes.d_model.saturating_mul(size("mamba_expand", 2)?),
            state_dim: size("mamba_d_state", 16)?,
            rank: rank.unwrap_or(sizes.d_model.div_ceil(PER_STEP)),
        },
    }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Option<Mamba1Layers>, Error> {
        let sizes = Sizes {
            d_model: 36,
            layers: 7,
            heads: 6,
        };
        mamba1_layers(&Keys::new(Path::new("config.json"), &value)?, sizes)
    }

    #[test]
    fn attention_is_periodic_and_sizes_have_defaults() {
        let found = read(json!({})).unwrap().unwrap();
        assert_eq!(found.layers, [0, 1, 2, 3, 5, 6]);
        let expected = Mamba1Shape {
            taps: 4,
            channels: 72,
            state_dim: 16,
            rank: 3,
        };
        assert_eq!(found.shape, expected);
        let often = json!({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 5});
        let found = read(often).unwrap().unwrap();
        assert_eq!((found.layers, found.shape.rank), (vec![0, 2, 4, 6], 5));
        let auto = json!({"mamba_dt_rank": "auto"});
        assert_eq!(read(auto).unwrap().unwrap().shape.rank, 3);
        for bad in [
            json!({"attn_layer_period": 4}),
            json!({"attn_layer_period": 0}),
            json!({"mamba_dt_rank": "wide"}),
        ] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn layers_give_back_their_distances() {
        let of = |period, offset| Periodic { period, offset };
        assert_eq!(Periodic::of(&[1, 3, 5], 7), Some(of(2, 1)));
        assert_eq!(Periodic::of(&[4], 7), Some(of(5, 4)));
        assert_eq!(Periodic::of(&[], 2), Some(of(3, 2)));
        assert_eq!(Periodic::of(&[0, 1], 7), None);
    }
}
