//! Attention over pools of positions (DeepSeek-V4).

use serde_json::Value;

use super::json::Keys;
use super::rope::rope_scaling;
use crate::config::{HyperConnections, Mixing, PooledAttention, Rope, RopeScaling};
use crate::error::Error;
use crate::families::Family;

/// Kinds of layers, and the positions of their pools in releases.
const KINDS: [(&str, u32); 3] = [
    ("sliding_attention", 0),
    ("compressed_sparse_attention", 4),
    ("heavily_compressed_attention", 128),
];
/// Indices of the kinds with pools.
const OVERLAPPING: usize = 1;
const LARGE: usize = 2;

/// Share of a head that is rotated, without a key.
const ROTATED: f64 = 64.0 / 512.0;
/// Default bases of the rotary frequencies of layers without and with pools.
const THETAS: [f32; 2] = [10_000.0, 160_000.0];
/// Positions of the window, without a key.
const WINDOW: u32 = 128;
/// Default number of entries that an indexer chooses.
const CHOSEN: u32 = 512;
/// Default constant added to weights of streams and to their sums.
const HYPER_EPS: f32 = 1e-6;

/// Sets it in the form; absent keys have the values of the configuration class.
pub(super) fn pooled(keys: &Keys, layers: u32) -> Result<PooledAttention, Error> {
    let kinds = kinds(keys, layers)?;
    let sizes = sizes(keys)?;
    let has = |kind| kinds.contains(&kind);
    if has(OVERLAPPING) && has(LARGE) && sizes[OVERLAPPING] == sizes[LARGE] {
        let expected = "two sizes of pools, one for each kind of layers";
        return Err(keys.bad("compress_rates", expected));
    }
    Ok(PooledAttention {
        query_rank: keys.u32("q_lora_rank")?.unwrap_or(1024),
        groups: keys.u32("o_groups")?.unwrap_or(8),
        group_rank: keys.u32("o_lora_rank")?.unwrap_or(1024),
        pools: kinds.iter().map(|&kind| sizes[kind]).collect(),
        overlapping: if has(OVERLAPPING) {
            sizes[OVERLAPPING]
        } else {
            0
        },
    })
}

/// The window of every layer, in addition to pools.
pub(super) fn window(keys: &Keys) -> Result<u32, Error> {
    const KEY: &str = "sliding_window";
    if keys.map().contains_key(KEY) {
        keys.need_u32(KEY)
    } else {
        Ok(WINDOW)
    }
}

/// Its hyper-connections.
pub(super) fn hyper_connections(keys: &Keys) -> Result<HyperConnections, Error> {
    Ok(HyperConnections {
        count: keys.u32("hc_mult")?.unwrap_or(4),
        mixing: Mixing::Sinkhorn {
            iterations: keys.u32("hc_sinkhorn_iters")?.unwrap_or(20),
            eps: keys.f32("hc_eps")?.unwrap_or(HYPER_EPS),
        },
    })
}

/// The kind of each layer.
fn kinds(keys: &Keys, layers: u32) -> Result<Vec<usize>, Error> {
    const LIST: &str = "layer_types";
    const RATIOS: &str = "compress_ratios";
    let layers = layers as usize;
    let named = |key, expected: &str, of: &dyn Fn(&Value) -> Option<usize>| {
        keys.read(key, expected, |value| {
            let list = value.as_array()?;
            // releases also list those that predict further tokens
            let list = (list.len() >= layers).then(|| &list[..layers])?;
            list.iter().map(of).collect::<Option<Vec<usize>>>()
        })
    };
    let by_name = |value: &Value| KINDS.iter().position(|kind| value.as_str() == Some(kind.0));
    let by_ratio = |value: &Value| {
        let ratio = value.as_u64()?;
        KINDS.iter().position(|kind| u64::from(kind.1) == ratio)
    };
    let expected = format!(
        "sliding_attention, compressed_sparse_attention or heavily_compressed_attention for each of {layers} layers"
    );
    if let Some(kinds) = named(LIST, &expected, &by_name)? {
        return Ok(kinds);
    }
    let expected = format!("0, 4 or 128 for each of {layers} layers");
    if let Some(kinds) = named(RATIOS, &expected, &by_ratio)? {
        return Ok(kinds);
    }
    let usual = |layer: usize| match layer {
        0 | 1 => LARGE,
        _ if layer.is_multiple_of(2) => LARGE,
        _ => OVERLAPPING,
    };
    Ok((0..layers).map(usual).collect())
}

/// Positions of a pool by kind.
fn sizes(keys: &Keys) -> Result<[u32; 3], Error> {
    let object = keys.object("compress_rates", "compress_rates.")?;
    let mut sizes = KINDS.map(|kind| kind.1);
    for (kind, key) in [
        (OVERLAPPING, "compress_rate_csa"),
        (LARGE, "compress_rate_hca"),
    ] {
        let name = KINDS[kind].0;
        let inner = object
            .as_ref()
            .map_or(Ok(None), |object| object.u32(name))?;
        sizes[kind] = keys.u32(key)?.or(inner).unwrap_or(sizes[kind]);
        if sizes[kind] == 0 {
            return Err(keys.bad(key, "1 or more"));
        }
    }
    Ok(sizes)
}

/// The context in which an indexer would choose every pool, for a model trained for `trained`
/// positions. `None` if no layer has an indexer.
pub(super) fn most_positions(keys: &Keys, pooled: &PooledAttention) -> Result<Option<u32>, Error> {
    let chosen = keys.u32("index_topk")?.unwrap_or(CHOSEN);
    Ok(pooled.most_positions(chosen))
}

/// Rotary parameters of layers with pools, and of those without.
pub(super) fn ropes(keys: &Keys, family: &Family, head_dim: u32) -> Result<[Rope; 2], Error> {
    const BASES: [&str; 2] = ["rope_theta", "compress_rope_theta"];
    let share = match keys.read("partial_rotary_factor", "a number", Value::as_f64)? {
        Some(share) => share,
        None => match keys.u32("qk_rope_head_dim")? {
            Some(dims) => f64::from(dims) / f64::from(head_dim.max(1)),
            None => ROTATED,
        },
    };
    let modern = keys.object("rope_parameters", "rope_parameters.")?;
    let old = keys.object("rope_scaling", "rope_scaling.")?;
    if let (Some(_), Some(_)) = (&modern, &old) {
        return Err(keys.bad("rope_scaling", "absent, as rope_parameters is given"));
    }
    let thetas = [
        keys.f32(BASES[0])?.unwrap_or(THETAS[0]),
        keys.f32(BASES[1])?.unwrap_or(THETAS[1]),
    ];
    let rope = |theta, share: f64, scaling| Rope {
        theta,
        dims: (f64::from(head_dim) * share) as u32,
        scaling,
    };
    let nested = match &modern {
        Some(modern) => [
            modern.object("main", "rope_parameters.main.")?,
            modern.object("compress", "rope_parameters.compress.")?,
        ],
        None => [None, None],
    };
    if let [Some(main), Some(compress)] = &nested {
        let one = |object: &Keys| -> Result<Rope, Error> {
            let share = object.read("partial_rotary_factor", "a number", Value::as_f64)?;
            let theta = object.need_f32("rope_theta")?;
            let scaling = rope_scaling(keys, object, family)?;
            Ok(rope(theta, share.unwrap_or(1.0), scaling))
        };
        return Ok([one(compress)?, one(main)?]);
    }
    let mut scaling = RopeScaling::None;
    if let Some(object) = modern.as_ref().or(old.as_ref()) {
        scaling = rope_scaling(keys, object, family)?;
        if object
            .f32("rope_theta")?
            .is_some_and(|theta| theta != thetas[0])
        {
            let expected = "absent, or equal to that outside the parameters";
            return Err(object.bad("rope_theta", expected));
        }
        let given = object.f32("attention_factor")?;
        if let RopeScaling::Yarn {
            attention_factor, ..
        } = &mut scaling
        {
            // queries and keys have no factor unless a key gives one
            *attention_factor = given.unwrap_or(1.0);
        }
    }
    Ok([
        rope(thetas[1], share, scaling),
        rope(thetas[0], share, RopeScaling::None),
    ])
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn read(config: &Value, layers: u32) -> Result<PooledAttention, Error> {
        let path = Path::new("config.json");
        pooled(&Keys::new(path, config).unwrap(), layers)
    }

    #[test]
    fn layers_are_named_by_kind_or_by_ratio() {
        let pools = |config: Value| read(&config, 5).unwrap().pools;
        assert_eq!(pools(json!({})), [128, 128, 128, 4, 128]);
        let ratios = json!({"compress_ratios": [0, 128, 4, 0, 4, 0]});
        assert_eq!(pools(ratios), [0, 128, 4, 0, 4]);
        let [sliding, sparse, heavy] = KINDS.map(|kind| kind.0);
        let kinds = json!({
            "layer_types": [sliding, sparse, heavy, heavy, sparse],
            "compress_rates": {sparse: 3, heavy: 7},
            "compress_rate_hca": 9,
        });
        assert_eq!(pools(kinds), [0, 3, 9, 9, 3]);
        for bad in [
            json!({"compress_ratios": [0, 128, 4, 0]}),
            json!({"compress_ratios": [0, 128, 5, 0, 4]}),
            json!({"layer_types": ["full_attention", sparse, sparse, sparse, sparse]}),
            json!({"compress_rates": {sparse: 3, heavy: 3}}),
            json!({"compress_rate_csa": 0}),
        ] {
            assert!(read(&bad, 5).is_err(), "{bad}");
        }
    }
}
