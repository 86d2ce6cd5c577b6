//! `config.json` → [`ModelConfig`].
//!
//! An absent key gets the default of the family's configuration class, if every release agrees on
//! one. A value that would change the output and is not implemented is an error.

use std::path::Path;

use serde_json::Value;

use super::experts::{self, ExpertKeys};
use super::foreign;
use super::form::{Sizes, Style, style_of};
use super::json::Keys;
use crate::config::{Activation, FfnKind, Form, MAX_COUNT, ModelConfig, Rope, RopeScaling};
use crate::error::Error;

/// What distinguishes the families from one another.
struct Family {
    name: &'static str,
    /// Q, K and V always carry a bias.
    qkv_bias: bool,
    /// `attention_bias` puts a bias on Q, K, V and O.
    optional_bias: bool,
    /// RMSNorm on each head of Q and K.
    qk_norm: bool,
    /// Over all heads together.
    qk_norm_whole: bool,
    /// `clip_qkv` clamps queries, keys and values.
    clip_qkv: bool,
    /// `head_dim` may be absent and then is `hidden_size / num_attention_heads`.
    head_dim_default: bool,
    /// ReLU on the up projection as well.
    relu_on_up: bool,
    /// The keys of its experts.
    experts: Option<ExpertKeys>,
    /// Base of the rotary frequencies if neither form of the key is present.
    theta: f32,
    /// `num_key_value_heads` may be absent and then equals the query heads.
    kv_heads_default: bool,
    windows: Windows,
}

/// Which layers a `sliding_window` applies to, if `layer_types` does not say.
enum Windows {
    /// None; the family does not use the key.
    Never,
    /// All.
    Every,
    /// Those from `max_window_layers` on, if `use_sliding_window` is set.
    ByLayer,
    /// None; releases disagree on what `use_sliding_window` means.
    Disputed,
    /// Those without rotary positions, if `use_sliding_window` is set.
    Unrotated,
    /// Every other one from the first on.
    Alternate,
}

/// Epsilon of PyTorch's LayerNorm.
const LAYER_NORM_EPS: f32 = 1e-5;

const PLAIN: Family = Family {
    name: "",
    qkv_bias: false,
    optional_bias: false,
    qk_norm: false,
    qk_norm_whole: false,
    clip_qkv: false,
    head_dim_default: true,
    relu_on_up: false,
    experts: None,
    theta: 10_000.0,
    kv_heads_default: false,
    windows: Windows::Never,
};

const FAMILIES: [Family; 19] = [
    Family {
        name: "llama",
        optional_bias: true,
        kv_heads_default: true,
        ..PLAIN
    },
    Family {
        name: "mistral",
        windows: Windows::Every,
        ..PLAIN
    },
    Family {
        name: "qwen2",
        qkv_bias: true,
        windows: Windows::ByLayer,
        ..PLAIN
    },
    Family {
        name: "qwen3",
        optional_bias: true,
        qk_norm: true,
        head_dim_default: false,
        windows: Windows::ByLayer,
        ..PLAIN
    },
    Family {
        name: "bamboo",
        relu_on_up: true,
        windows: Windows::Every,
        ..PLAIN
    },
    Family {
        name: "mixtral",
        windows: Windows::Every,
        experts: Some(ExpertKeys::Mixtral),
        theta: 1_000_000.0,
        ..PLAIN
    },
    Family {
        name: "qwen2_moe",
        windows: Windows::Disputed,
        experts: Some(ExpertKeys::Qwen { shared: true }),
        ..PLAIN
    },
    Family {
        name: "qwen3_moe",
        optional_bias: true,
        qk_norm: true,
        head_dim_default: false,
        windows: Windows::Disputed,
        experts: Some(ExpertKeys::Qwen { shared: false }),
        ..PLAIN
    },
    Family {
        name: "olmoe",
        optional_bias: true,
        qk_norm: true,
        qk_norm_whole: true,
        clip_qkv: true,
        kv_heads_default: true,
        experts: Some(ExpertKeys::Olmoe),
        ..PLAIN
    },
    Family {
        name: "olmo2",
        optional_bias: true,
        qk_norm: true,
        qk_norm_whole: true,
        kv_heads_default: true,
        ..PLAIN
    },
    Family {
        name: "phi3",
        kv_heads_default: true,
        windows: Windows::Every,
        ..PLAIN
    },
    Family {
        name: "granite",
        optional_bias: true,
        kv_heads_default: true,
        ..PLAIN
    },
    Family {
        name: "smollm3",
        optional_bias: true,
        theta: 2_000_000.0,
        windows: Windows::Unrotated,
        ..PLAIN
    },
    Family {
        name: "minicpm",
        kv_heads_default: true,
        ..PLAIN
    },
    Family {
        name: "starcoder2",
        windows: Windows::Every,
        ..PLAIN
    },
    Family {
        name: "opt",
        ..PLAIN
    },
    Family {
        name: "nemotron",
        optional_bias: true,
        kv_heads_default: true,
        ..PLAIN
    },
    Family {
        name: "falcon",
        kv_heads_default: true,
        ..PLAIN
    },
    Family {
        name: "gemma2",
        optional_bias: true,
        head_dim_default: false,
        windows: Windows::Alternate,
        ..PLAIN
    },
];

/// Translates a parsed `config.json`, with only the tokens it names itself; `name` is the model's.
pub(super) fn model_config(path: &Path, value: &Value, name: String) -> Result<ModelConfig, Error> {
    let keys = Keys::new(path, value)?;
    let model_type = keys.need_str("model_type")?;
    let Some(family) = FAMILIES.iter().find(|family| family.name == model_type) else {
        return Err(Error::UnknownFamily {
            path: path.to_owned(),
            found: format!("{model_type:?}"),
            supported: FAMILIES.map(|family| family.name).join(", "),
        });
    };
    let style = style_of(family.name);
    refuse_unsupported(&keys, family, style)?;

    let d_model = keys.need_u32("hidden_size")?;
    let layers = layer_count(&keys)?;
    let heads = keys.need_u32("num_attention_heads")?;
    let sizes = Sizes {
        d_model,
        layers,
        heads,
    };
    let head_dim = head_dim(&keys, family, d_model, heads)?;
    let experts = match family.experts {
        Some(of) => Some(experts::read(&keys, of, layers)?),
        None => None,
    };
    let clip_qkv = match family.clip_qkv {
        true => keys.f32("clip_qkv")?,
        false => None,
    };
    let form = style.form(&keys, sizes)?;
    let [qkv_bias, o_bias] = biases(&keys, family, style)?;
    // none with learned positions
    let rotated = head_dim * u32::from(form.learned_positions.is_none());
    Ok(ModelConfig {
        family: family.name.to_owned(),
        name,
        vocab: keys.need_u32("vocab_size")?,
        d_model,
        layers,
        heads,
        kv_heads: kv_heads(&keys, family, style, sizes)?,
        head_dim,
        ffn: match &experts {
            Some(experts) => experts.ffn,
            None => ffn(&keys, style, d_model)?,
        },
        experts: experts.as_ref().map_or(1, |experts| experts.count),
        ffn_kind: ffn_kind(path, &keys, family, style)?,
        rms_eps: match style.eps {
            Some(key) => keys.need_f32(key)?,
            None => LAYER_NORM_EPS,
        },
        rope: rope(&keys, family, style, rotated)?,
        window: windows(&keys, family, layers, &form)?,
        qkv_bias,
        o_bias,
        qk_norm: family.qk_norm,
        tied_head: keys.bool("tie_word_embeddings")?.unwrap_or(style.tied),
        max_context: keys.need_u32("max_position_embeddings")?,
        bos: keys.u32("bos_token_id")?,
        add_bos: false,
        eos: keys.tokens("eos_token_id")?,
        predictor_threshold: None,
        mixture: experts.map(|experts| experts.mixture),
        qk_norm_whole: family.qk_norm_whole,
        clip_qkv,
        form,
    })
}

/// The number of layers.
fn layer_count(keys: &Keys) -> Result<u32, Error> {
    match keys.need_u32("num_hidden_layers")? {
        layers if layers <= MAX_COUNT => Ok(layers),
        _ => Err(keys.bad("num_hidden_layers", &format!("at most {MAX_COUNT}"))),
    }
}

/// The number of heads of keys and values.
fn kv_heads(keys: &Keys, family: &Family, style: &Style, sizes: Sizes) -> Result<u32, Error> {
    match (
        style.fixed_kv_heads(keys, sizes)?,
        keys.u32(style.kv_heads)?,
    ) {
        (Some(kv_heads), _) | (None, Some(kv_heads)) => Ok(kv_heads),
        (None, None) if family.kv_heads_default => Ok(sizes.heads),
        (None, None) => Err(keys.missing(style.kv_heads, "an integer")),
    }
}

/// The biases of attention and the keys of their family: of queries, keys and values, and of the
/// output.
fn biases(keys: &Keys, family: &Family, style: &Style) -> Result<[bool; 2], Error> {
    if let Some(all) = style.attention_bias(keys)? {
        return Ok([all; 2]);
    }
    let output = keys.bool("attention_bias")?.unwrap_or(false);
    let qkv = match family.experts {
        Some(ExpertKeys::Qwen { shared: true }) => keys.bool("qkv_bias")?.unwrap_or(true),
        _ => family.qkv_bias,
    };
    Ok([qkv || output, output])
}

/// The number of the FFN's neurons.
fn ffn(keys: &Keys, style: &Style, d_model: u32) -> Result<u32, Error> {
    match keys.u32(style.ffn)? {
        Some(ffn) => Ok(ffn),
        // Falcon's default
        None if style.ffn == "ffn_hidden_size" => Ok(d_model.saturating_mul(4)),
        None => Err(keys.missing(style.ffn, "an integer")),
    }
}

fn refuse_unsupported(keys: &Keys, family: &Family, style: &Style) -> Result<(), Error> {
    for key in ["quantization_config", "compression_config"] {
        if keys.get(key).is_some() {
            return Err(keys.unsupported(key, "take the unquantised checkpoint, or a gguf file"));
        }
    }
    let has = foreign::Has {
        qk_norm: family.qk_norm,
        experts: family.experts.is_some(),
        clip_qkv: family.clip_qkv,
        reads: style.reads,
    };
    foreign::refuse(keys, has)?;
    if keys.bool("attention_bias")? == Some(true) && !family.optional_bias {
        return Err(keys.unsupported("attention_bias", "this family has no such option"));
    }
    Ok(())
}

fn head_dim(keys: &Keys, family: &Family, d_model: u32, heads: u32) -> Result<u32, Error> {
    match keys.u32("head_dim")? {
        Some(head_dim) => Ok(head_dim),
        None if !family.head_dim_default => Err(keys.missing("head_dim", "an integer")),
        None if heads > 0 && d_model.is_multiple_of(heads) => Ok(d_model / heads),
        None => Err(keys.bad(
            "num_attention_heads",
            &format!("a divisor of hidden_size = {d_model}, or head_dim"),
        )),
    }
}

/// Rejects an unknown activation: a wrong one would give plausible nonsense.
fn ffn_kind(path: &Path, keys: &Keys, family: &Family, style: &Style) -> Result<FfnKind, Error> {
    let found = match (keys.str(style.act)?, style.act_default) {
        (Some(found), _) | (None, Some(found)) => found,
        (None, None) => return Err(keys.missing(style.act, "a string")),
    };
    let activation = match found {
        "relu" => Activation::Relu,
        "fatrelu" => Activation::FatRelu {
            threshold: keys.need_f32("hidden_act_param")?,
        },
        "relu2" => Activation::Relu2,
        "silu" | "swish" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
        _ => {
            return Err(Error::UnknownActivation {
                path: path.to_owned(),
                key: style.act.into(),
                found: format!("{found:?}"),
                supported:
                    "relu, fatrelu (with hidden_act_param), relu2, silu, gelu, gelu_pytorch_tanh"
                        .into(),
            });
        }
    };
    let fatrelu = matches!(activation, Activation::FatRelu { .. });
    if !fatrelu && keys.f32("hidden_act_param")?.is_some_and(|p| p != 0.0) {
        return Err(keys.bad(
            "hidden_act_param",
            "0 or absent, as hidden_act is not fatrelu",
        ));
    }
    if family.relu_on_up && activation != Activation::Relu {
        return Err(keys.unsupported(style.act, "this family has relu on gate and up"));
    }
    Ok(FfnKind {
        activation,
        relu_on_up: family.relu_on_up,
        ungated: style.ungated,
    })
}

/// Rotary parameters from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`
/// (earlier). Values inside the object override those beside it.
fn rope(keys: &Keys, family: &Family, style: &Style, head_dim: u32) -> Result<Rope, Error> {
    let modern = keys.object("rope_parameters", "rope_parameters.")?;
    let old = keys.object("rope_scaling", "rope_scaling.")?;
    let mut theta = keys.f32("rope_theta")?;
    let mut scaling = None;
    let mut rotated = None;
    for object in [keys].into_iter().chain(&old).chain(&modern) {
        let share = object.f32("partial_rotary_factor")?;
        match (share, style.rotated) {
            (Some(share), None) if share != 1.0 => {
                return Err(object.unsupported(
                    "partial_rotary_factor",
                    "only 1 is implemented for this family",
                ));
            }
            (Some(share), Some(_)) if !(share > 0.0 && share <= 1.0) => {
                return Err(object.bad("partial_rotary_factor", "above 0, at most 1"));
            }
            (share, _) => rotated = share.or(rotated),
        }
    }
    for object in old.iter().chain(&modern) {
        let parsed = rope_scaling(keys, object)?;
        if scaling.as_ref().is_some_and(|earlier| *earlier != parsed) {
            return Err(keys.bad(
                "rope_scaling",
                "the same as rope_parameters where both are given",
            ));
        }
        scaling = Some(parsed);
        theta = object.f32("rope_theta")?.or(theta);
    }
    Ok(Rope {
        theta: theta.unwrap_or(family.theta),
        dims: (f64::from(head_dim) * f64::from(rotated.or(style.rotated).unwrap_or(1.0))) as u32,
        scaling: scaling.unwrap_or(RopeScaling::None),
    })
}

fn rope_scaling(top: &Keys, object: &Keys) -> Result<RopeScaling, Error> {
    if let Some((key, _)) = object.map().iter().find(|(_, value)| value.is_object()) {
        return Err(object.unsupported(key, "rotary parameters per layer type are not implemented"));
    }
    let key = if object.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    match object.str(key)? {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: object.need_f32("factor")?,
        }),
        Some("llama3") => {
            let original = "original_max_position_embeddings";
            let original_context = match object.u32(original)? {
                Some(context) => context,
                None => top
                    .u32(original)?
                    .ok_or_else(|| object.missing(original, "an integer"))?,
            };
            Ok(RopeScaling::Llama3 {
                factor: object.need_f32("factor")?,
                low_freq_factor: object.need_f32("low_freq_factor")?,
                high_freq_factor: object.need_f32("high_freq_factor")?,
                original_context,
            })
        }
        // longer contexts than this are not run, and up to there nothing is scaled
        Some("dynamic") if object.get("alpha").is_none() => Ok(RopeScaling::None),
        // the name in Phi-3's first releases
        Some("longrope" | "su") => long_rope(top, object),
        Some(_) => Err(object.unsupported(
            key,
            "implemented: default, linear, dynamic, llama3, longrope",
        )),
    }
}

/// `_compute_longrope_parameters` in transformers' `modeling_rope_utils.py`.
fn long_rope(top: &Keys, object: &Keys) -> Result<RopeScaling, Error> {
    let divisors = |key: &str| {
        let list = object.read(key, "a list of numbers", |value| {
            let number = |value: &Value| value.as_f64().map(|number| number as f32);
            value.as_array()?.iter().map(number).collect()
        })?;
        list.ok_or_else(|| object.missing(key, "a list of numbers"))
    };
    let original = "original_max_position_embeddings";
    let original_context = match (top.u32(original)?, object.u32(original)?) {
        (Some(context), _) | (None, Some(context)) => context,
        (None, None) => return Err(object.missing(original, "an integer")),
    };
    let most = top.need_u32("max_position_embeddings")?;
    let given = object.f32("factor")?.map(f64::from);
    let factor = given.unwrap_or(f64::from(most) / f64::from(original_context.max(1)));
    let attention_factor = match object.f32("attention_factor")? {
        Some(factor) => factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / f64::from(original_context).ln()).sqrt() as f32,
    };
    Ok(RopeScaling::Long {
        short: divisors("short_factor")?,
        long: divisors("long_factor")?,
        attention_factor,
        original_context,
    })
}

/// One window per layer, 0 for full attention.
fn windows(keys: &Keys, family: &Family, layers: u32, form: &Form) -> Result<Vec<u32>, Error> {
    let full = vec![0; layers as usize];
    let window = || -> Result<Option<u32>, Error> {
        match keys.u32("sliding_window")? {
            Some(0) => Err(keys.bad("sliding_window", "null, or 1 and more")),
            window => Ok(window),
        }
    };
    let kinds = keys.read("layer_types", "a list", Value::as_array)?;
    let used = keys.bool("use_sliding_window")?;
    let window = match family.windows {
        Windows::Never => None,
        Windows::Every | Windows::Alternate => window()?,
        Windows::ByLayer | Windows::Unrotated if used == Some(true) => window()?,
        Windows::Disputed if used == Some(true) => {
            let why = "releases of transformers give its layers different windows";
            return Err(keys.unsupported("use_sliding_window", why));
        }
        Windows::ByLayer | Windows::Disputed | Windows::Unrotated => None,
    };
    if let Some(kinds) = kinds {
        return by_layer_types(keys, kinds, window, layers);
    }
    let Some(window) = window else {
        return Ok(full);
    };
    let where_set = |set: &dyn Fn(u32) -> bool| {
        let of_layer = |layer| if set(layer) { window } else { 0 };
        (0..layers).map(of_layer).collect()
    };
    match family.windows {
        Windows::Unrotated => {
            return Ok(where_set(&|layer| form.nope_layers.contains(&layer)));
        }
        Windows::Alternate => return Ok(where_set(&|layer| layer.is_multiple_of(2))),
        _ => {}
    }
    if !matches!(family.windows, Windows::ByLayer) {
        // other programs disagree on the meaning of these
        if used == Some(false) {
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

fn by_layer_types(
    keys: &Keys,
    kinds: &[Value],
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
            (Some("sliding_attention"), Some(window)) => Ok(window),
            (Some("sliding_attention"), None) => Err(keys.bad(
                "layer_types",
                "no sliding_attention, for no window is set (sliding_window, in some families \
                 use_sliding_window too)",
            )),
            _ => Err(keys.bad("layer_types", "full_attention or sliding_attention")),
        })
        .collect()
}
