//! The sliding windows of `config.json`.

use serde_json::Value;

use super::experts::switches;
use crate::config::Form;
use crate::error::Error;
use crate::families::Windows;
use crate::json::Keys;

/// A layer with a sliding window in `layer_types`.
const SLIDING: &str = "sliding_attention";

/// One window per layer, 0 for full attention.
pub(super) fn windows(
    keys: &Keys,
    of: Windows,
    layers: u32,
    form: &Form,
) -> Result<Vec<u32>, Error> {
    let full = vec![0; layers as usize];
    if of == Windows::None {
        return Ok(full);
    }
    if of == Windows::Layout {
        return by_layout(keys, full);
    }
    if let Windows::Chunks(usual) = of {
        return chunks(keys, usual, layers, form);
    }
    let window = || -> Result<Option<u32>, Error> {
        match keys.u32("sliding_window")? {
            Some(0) => Err(keys.bad("sliding_window", "null, or 1 and more")),
            window => Ok(window),
        }
    };
    let kinds = keys.read("layer_types", "a list", Value::as_array)?;
    let used = keys.bool("use_sliding_window")?;
    let window = match of {
        Windows::PatternOf(_, usual) | Windows::Late(_, usual)
            if !keys.map().contains_key("sliding_window") =>
        {
            Some(usual)
        }
        Windows::Every
        | Windows::Alternate
        | Windows::Pattern(_)
        | Windows::PatternOf(..)
        | Windows::Late(..) => window()?,
        Windows::ByLayer | Windows::Unrotated if used == Some(true) => window()?,
        Windows::Disputed if used == Some(true) => {
            let why = "releases of transformers give its layers different windows";
            return Err(keys.unsupported("use_sliding_window", why));
        }
        _ => None,
    };
    if let Some(kinds) = kinds {
        return by_layer_types(keys, kinds, SLIDING, window, layers);
    }
    let Some(window) = window else {
        return Ok(full);
    };
    by_rule(keys, of, layers, window, form)
}

/// The windows of this many layers, if no list names them.
fn by_rule(
    keys: &Keys,
    of: Windows,
    layers: u32,
    window: u32,
    form: &Form,
) -> Result<Vec<u32>, Error> {
    let where_set = |set: &dyn Fn(u32) -> bool| {
        let of_layer = |layer| if set(layer) { window } else { 0 };
        (0..layers).map(of_layer).collect()
    };
    let unrotated = |layer| form.nope_layers.contains(&layer);
    match of {
        Windows::Unrotated => return Ok(where_set(&unrotated)),
        Windows::Alternate => return Ok(where_set(&|layer| layer.is_multiple_of(2))),
        Windows::Late(usual, _) => {
            let first = keys.u32("max_window_layers")?.unwrap_or(usual);
            return Ok(where_set(&|layer| layer >= first));
        }
        Windows::Pattern(usual) | Windows::PatternOf(usual, _) => {
            let pattern = keys.u32("sliding_window_pattern")?.unwrap_or(usual);
            if pattern == 0 {
                return Err(keys.bad("sliding_window_pattern", "1 and more"));
            }
            return Ok(where_set(&|layer| !(layer + 1).is_multiple_of(pattern)));
        }
        _ => {}
    }
    if of != Windows::ByLayer {
        // programs disagree on the meaning of these
        if keys.bool("use_sliding_window")? == Some(false) {
            return Err(keys.bad(
                "use_sliding_window",
                "true or absent, as sliding_window is set",
            ));
        }
        if keys.get("max_window_layers").is_some() {
            let why = "this family has its window in every layer; name the layers in layer_types";
            return Err(keys.unsupported("max_window_layers", why));
        }
        return Ok(vec![window; layers as usize]);
    }
    let first = keys.need_u32("max_window_layers")?;
    Ok((0..layers)
        .map(|layer| if layer >= first { window } else { 0 })
        .collect())
}

/// Chunks of the layers named by `layer_types`, or of those with rotary positions.
fn chunks(keys: &Keys, usual: u32, layers: u32, form: &Form) -> Result<Vec<u32>, Error> {
    const SIZE: &str = "attention_chunk_size";
    let size = if keys.map().contains_key(SIZE) {
        keys.need_u32(SIZE)?
    } else {
        usual
    };
    if size == 0 {
        return Err(keys.bad(SIZE, "1 and more"));
    }
    if let Some(kinds) = keys.read("layer_types", "a list", Value::as_array)? {
        return by_layer_types(keys, kinds, "chunked_attention", Some(size), layers);
    }
    let of_layer = |layer| {
        if form.nope_layers.contains(&layer) {
            0
        } else {
            size
        }
    };
    Ok((0..layers).map(of_layer).collect())
}

/// The layers named by `sliding_window_layout`; the others are those of `full`.
fn by_layout(keys: &Keys, mut full: Vec<u32>) -> Result<Vec<u32>, Error> {
    let layers = full.len() as u32;
    let layout = switches(keys, "sliding_window_layout", layers)?;
    for (window, _) in (full.iter_mut().zip(layout.unwrap_or_default())).filter(|(_, on)| *on) {
        *window = keys.need_u32("sliding_window_size")?;
        if *window == 0 {
            return Err(keys.bad("sliding_window_size", "1 and more"));
        }
    }
    Ok(full)
}

fn by_layer_types(
    keys: &Keys,
    kinds: &[Value],
    windowed: &str,
    window: Option<u32>,
    layers: u32,
) -> Result<Vec<u32>, Error> {
    if kinds.len() != layers as usize {
        return Err(keys.bad(
            "layer_types",
            &format!("one entry for each of {layers} layers"),
        ));
    }
    kinds
        .iter()
        .map(|kind| match (kind.as_str(), window) {
            (Some("full_attention"), _) => Ok(0),
            (Some(kind), Some(window)) if kind == windowed => Ok(window),
            (Some(SLIDING), None) if windowed == SLIDING => Err(keys.bad(
                "layer_types",
                "no sliding_attention, for no window is set (sliding_window, in some families \
                 use_sliding_window too)",
            )),
            _ => Err(keys.bad("layer_types", &format!("full_attention or {windowed}"))),
        })
        .collect()
}
