//! DeepSeek-V4: windows, hyper-connections, and two rotary embeddings.

use serde_json::Value;

use super::rope::rope_scaling;
use crate::config::{HyperConnections, Mixing, Rope, RopeScaling};
use crate::error::Error;
use crate::families::Family;
use crate::json::Keys;

/// Share of a head that is rotated, without a key.
const ROTATED: f64 = 64.0 / 512.0;
/// Default bases of the rotary frequencies of layers without and with pools.
const THETAS: [f32; 2] = [10_000.0, 160_000.0];
/// Positions of the window, without a key.
const WINDOW: u32 = 128;
/// Default constant added to weights of streams and to their sums.
const HYPER_EPS: f32 = 1e-6;

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
