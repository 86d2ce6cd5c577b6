//! `config.json` → [`ModelConfig`].
//!
//! An absent key gets the default of the family's configuration class, if every release agrees on
//! one. A value that would change the output and is not implemented is an error.

use std::path::Path;

use serde_json::Value;

use super::experts::{self, ExpertKeys};
use super::foreign;
use super::json::Keys;
use crate::config::{
    Activation, FfnKind, MAX_COUNT, ModelConfig, Rope, RopeScaling, SWIGLU_ALPHA, SWIGLU_LIMIT,
    yarn_attention,
};
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
    /// Keys that only this family understands.
    own: &'static [&'static str],
    /// The activation where `hidden_act` is absent.
    activation: Option<&'static str>,
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
    /// Those of `sliding_window_layout`, of `sliding_window_size`.
    Layout,
    /// Every second one from the first on.
    Alternate,
}

const PLAIN: Family = Family {
    name: "",
    qkv_bias: false,
    optional_bias: false,
    qk_norm: false,
    qk_norm_whole: false,
    own: &[],
    activation: None,
    head_dim_default: true,
    relu_on_up: false,
    experts: None,
    theta: 10_000.0,
    kv_heads_default: false,
    windows: Windows::Never,
};

const FAMILIES: [Family; 12] = [
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
        own: &["clip_qkv"],
        kv_heads_default: true,
        experts: Some(ExpertKeys::Olmoe),
        ..PLAIN
    },
    Family {
        name: "turbosparsemixtral",
        relu_on_up: true,
        windows: Windows::Every,
        experts: Some(ExpertKeys::Mixtral),
        theta: 1_000_000.0,
        ..PLAIN
    },
    Family {
        name: "smallthinker",
        own: &[
            "moe_primary_router_apply_softmax",
            "moe_num_primary_experts",
            "moe_layer_layout",
            "rope_layout",
            "sliding_window_layout",
        ],
        activation: Some("relu"),
        windows: Windows::Layout,
        experts: Some(ExpertKeys::SmallThinker),
        ..PLAIN
    },
    Family {
        name: "gpt_oss",
        qkv_bias: true,
        optional_bias: true,
        own: &["swiglu_limit", "swiglu_alpha"],
        activation: Some("silu"),
        windows: Windows::Alternate,
        experts: Some(ExpertKeys::GptOss),
        theta: 150_000.0,
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
    refuse_unsupported(&keys, family)?;

    let d_model = keys.need_u32("hidden_size")?;
    let layers = keys.need_u32("num_hidden_layers")?;
    if layers > MAX_COUNT {
        return Err(keys.bad("num_hidden_layers", &format!("at most {MAX_COUNT}")));
    }
    let heads = keys.need_u32("num_attention_heads")?;
    let kv_heads = match keys.u32("num_key_value_heads")? {
        Some(kv_heads) => kv_heads,
        None if family.kv_heads_default => heads,
        None => return Err(keys.missing("num_key_value_heads", "an integer")),
    };
    let head_dim = head_dim(&keys, family, d_model, heads)?;
    let gpt_oss = family.experts == Some(ExpertKeys::GptOss);
    let attention_bias = keys.bool("attention_bias")?.unwrap_or(gpt_oss);
    let experts = match family.experts {
        Some(of) => Some(experts::read(&keys, of, layers)?),
        None => None,
    };
    let qkv_bias = match family.experts {
        Some(ExpertKeys::Qwen { shared: true }) => keys.bool("qkv_bias")?.unwrap_or(true),
        Some(ExpertKeys::GptOss) => attention_bias,
        _ => family.qkv_bias,
    };
    Ok(ModelConfig {
        family: family.name.to_owned(),
        name,
        vocab: keys.need_u32("vocab_size")?,
        d_model,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn: match &experts {
            Some(experts) => experts.ffn,
            None => keys.need_u32("intermediate_size")?,
        },
        experts: experts.as_ref().map_or(1, |experts| experts.count),
        ffn_kind: ffn_kind(path, &keys, family)?,
        rms_eps: keys.need_f32("rms_norm_eps")?,
        rope: rope(&keys, family, head_dim)?,
        window: windows(&keys, family, layers)?,
        qkv_bias: qkv_bias || attention_bias,
        o_bias: attention_bias,
        qk_norm: family.qk_norm,
        tied_head: keys.bool("tie_word_embeddings")?.unwrap_or(false),
        max_context: keys.need_u32("max_position_embeddings")?,
        bos: keys.u32("bos_token_id")?,
        add_bos: false,
        eos: keys.tokens("eos_token_id")?,
        predictor_threshold: None,
        mixture: experts.map(|experts| experts.mixture),
        qk_norm_whole: family.qk_norm_whole,
        clip_qkv: keys.f32("clip_qkv")?,
        unrotated: unrotated(&keys, layers)?,
        sinks: gpt_oss,
    })
}

fn refuse_unsupported(keys: &Keys, family: &Family) -> Result<(), Error> {
    let blocks = family.experts == Some(ExpertKeys::GptOss)
        && (keys.object("quantization_config", "quantization_config.")?)
            .is_some_and(|object| object.get("quant_method") == Some(&"mxfp4".into()));
    for key in ["quantization_config", "compression_config"] {
        if keys.get(key).is_some() && !(blocks && key == "quantization_config") {
            return Err(keys.unsupported(key, "take the unquantised checkpoint, or a gguf file"));
        }
    }
    let has = foreign::Has {
        qk_norm: family.qk_norm,
        experts: family.experts.is_some(),
        own: family.own,
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
fn ffn_kind(path: &Path, keys: &Keys, family: &Family) -> Result<FfnKind, Error> {
    let found = match (keys.str("hidden_act")?, family.activation) {
        (Some(found), _) | (None, Some(found)) => found,
        (None, None) => return Err(keys.missing("hidden_act", "a string")),
    };
    let activation = match found {
        "relu" => Activation::Relu,
        "fatrelu" => Activation::FatRelu {
            threshold: keys.need_f32("hidden_act_param")?,
        },
        "relu2" => Activation::Relu2,
        "silu" if family.experts == Some(ExpertKeys::GptOss) => Activation::ClampedSwiglu {
            limit: keys.f32("swiglu_limit")?.unwrap_or(SWIGLU_LIMIT),
            alpha: keys.f32("swiglu_alpha")?.unwrap_or(SWIGLU_ALPHA),
        },
        "silu" | "swish" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
        _ => {
            return Err(Error::UnknownActivation {
                path: path.to_owned(),
                key: "hidden_act".into(),
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
        return Err(keys.unsupported("hidden_act", "this family has relu on gate and up"));
    }
    if family.activation.is_some_and(|only| only != found) {
        return Err(keys.unsupported("hidden_act", "this family's experts have another one"));
    }
    Ok(FfnKind {
        activation,
        relu_on_up: family.relu_on_up,
    })
}

/// Rotary parameters from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`
/// (earlier). Values inside the object override those beside it.
fn rope(keys: &Keys, family: &Family, head_dim: u32) -> Result<Rope, Error> {
    let modern = keys.object("rope_parameters", "rope_parameters.")?;
    let old = keys.object("rope_scaling", "rope_scaling.")?;
    let mut theta = keys.f32("rope_theta")?;
    let mut scaling = None;
    for object in [keys].into_iter().chain(&old).chain(&modern) {
        if object
            .f32("partial_rotary_factor")?
            .is_some_and(|factor| factor != 1.0)
        {
            return Err(object.unsupported(
                "partial_rotary_factor",
                "only 1 is implemented for this family",
            ));
        }
    }
    for object in old.iter().chain(&modern) {
        let parsed = rope_scaling(keys, object)?;
        if scaling.is_some_and(|earlier| earlier != parsed) {
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
        dims: head_dim,
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
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: object.need_f32("factor")?,
            low_freq_factor: object.need_f32("low_freq_factor")?,
            high_freq_factor: object.need_f32("high_freq_factor")?,
            original_context: original_context(top, object)?,
        }),
        Some("yarn") => yarn(top, object),
        Some(_) => Err(object.unsupported(key, "implemented: default, linear, llama3, yarn")),
    }
}

/// The context length before scaling, named inside the object or beside it.
fn original_context(top: &Keys, object: &Keys) -> Result<u32, Error> {
    let original = "original_max_position_embeddings";
    match object.u32(original)? {
        Some(context) => Ok(context),
        None => top
            .u32(original)?
            .ok_or_else(|| object.missing(original, "an integer")),
    }
}

/// The parameters of YaRN, with the defaults of transformers.
fn yarn(top: &Keys, object: &Keys) -> Result<RopeScaling, Error> {
    let factor = object.need_f32("factor")?;
    let given = |key: &str| Ok(object.f32(key)?.filter(|value| *value != 0.0));
    let scales = [given("mscale")?, given("mscale_all_dim")?];
    let attention_factor = match (object.f32("attention_factor")?, scales) {
        (Some(attention_factor), _) => attention_factor,
        (None, [Some(one), Some(all)]) => yarn_attention(factor, one) / yarn_attention(factor, all),
        (None, _) => yarn_attention(factor, 1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: given("beta_fast")?.unwrap_or(32.0),
        beta_slow: given("beta_slow")?.unwrap_or(1.0),
        original_context: original_context(top, object)?,
        attention_factor,
        truncate: object.bool("truncate")?.unwrap_or(true),
    })
}

/// One window per layer, 0 for full attention.
fn windows(keys: &Keys, family: &Family, layers: u32) -> Result<Vec<u32>, Error> {
    let full = vec![0; layers as usize];
    if matches!(family.windows, Windows::Layout) {
        return by_layout(keys, full);
    }
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
        Windows::ByLayer if used == Some(true) => window()?,
        Windows::Disputed if used == Some(true) => {
            let why = "releases of transformers give its layers different windows";
            return Err(keys.unsupported("use_sliding_window", why));
        }
        Windows::ByLayer | Windows::Disputed | Windows::Layout => None,
    };
    if let Some(kinds) = kinds {
        return by_layer_types(keys, kinds, window, layers);
    }
    let Some(window) = window else {
        return Ok(full);
    };
    if matches!(family.windows, Windows::Alternate) {
        let of = |layer: u32| if layer.is_multiple_of(2) { window } else { 0 };
        return Ok((0..layers).map(of).collect());
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

/// The layers that `sliding_window_layout` names; the others are those of `full`.
fn by_layout(keys: &Keys, mut full: Vec<u32>) -> Result<Vec<u32>, Error> {
    let layers = full.len() as u32;
    let layout = experts::switches(keys, "sliding_window_layout", layers)?;
    for (window, _) in (full.iter_mut().zip(layout.unwrap_or_default())).filter(|(_, on)| *on) {
        *window = keys.need_u32("sliding_window_size")?;
        if *window == 0 {
            return Err(keys.bad("sliding_window_size", "1 and more"));
        }
    }
    Ok(full)
}

/// The layers that `rope_layout` leaves without rotation.
fn unrotated(keys: &Keys, layers: u32) -> Result<Vec<u32>, Error> {
    let layout = experts::switches(keys, "rope_layout", layers)?.unwrap_or_default();
    let layers = (0..).zip(layout).filter(|(_, rotated)| !rotated);
    Ok(layers.map(|(layer, _)| layer).collect())
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
