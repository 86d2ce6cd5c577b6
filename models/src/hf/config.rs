//! `config.json` → [`ModelConfig`].
//!
//! An absent key gets the default of the family's configuration class, if every release agrees on
//! one. A value that would change the output and is not implemented is an error.

use std::path::Path;

use serde_json::Value;

use super::experts::{self, ExpertKeys};
use super::foreign;
use super::form::{Style, style_of};
use super::json::Keys;
use super::rope::ropes;
use super::text_part::text_part;
use super::values::Sizes;
use super::windows::{Windows, windows};
use crate::config::{Activation, FfnKind, MAX_COUNT, ModelConfig, SWIGLU_ALPHA, SWIGLU_LIMIT};
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

/// Epsilon of PyTorch's LayerNorm.
const LAYER_NORM_EPS: f32 = 1e-5;

const PLAIN: Family = Family {
    name: "",
    qkv_bias: false,
    optional_bias: false,
    qk_norm: false,
    qk_norm_whole: false,
    head_dim_default: true,
    relu_on_up: false,
    experts: None,
    theta: 10_000.0,
    kv_heads_default: false,
    windows: Windows::Never,
};

const FAMILIES: [Family; 25] = [
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
        windows: Windows::Layout,
        experts: Some(ExpertKeys::SmallThinker),
        ..PLAIN
    },
    Family {
        name: "gpt_oss",
        optional_bias: true,
        windows: Windows::Alternate,
        experts: Some(ExpertKeys::GptOss),
        theta: 150_000.0,
        ..PLAIN
    },
    Family {
        name: "phimoe",
        optional_bias: true,
        kv_heads_default: true,
        windows: Windows::Every,
        experts: Some(ExpertKeys::PhiMoe),
        theta: 1_000_000.0,
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
    Family {
        name: "gemma3_text",
        optional_bias: true,
        qk_norm: true,
        head_dim_default: false,
        theta: 1_000_000.0,
        windows: Windows::Pattern(6),
        ..PLAIN
    },
    Family {
        name: "gemma3n_text",
        qk_norm: true,
        head_dim_default: false,
        theta: 1_000_000.0,
        windows: Windows::Pattern(5),
        ..PLAIN
    },
];

/// Translates a parsed `config.json`, with only the tokens it names itself; `name` is the model's.
pub(super) fn model_config(path: &Path, value: &Value, name: String) -> Result<ModelConfig, Error> {
    let (part, prefix) = text_part(path, value)?;
    let keys = Keys::new(path, &part)?.inside(prefix);
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
    let [qkv_bias, o_bias] = biases(&keys, family, style)?;
    let mut form = style.form(&keys, sizes)?;
    // none with learned positions
    let rotated = head_dim * u32::from(form.learned_positions.is_none());
    let (rope, local_rope) = ropes(&keys, style, family.theta, rotated)?;
    form.local_rope = local_rope;
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
        rope,
        window: windows(&keys, family.windows, layers, &form)?,
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
        clip_qkv: keys.f32("clip_qkv")?,
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
    // a list in Gemma 3n
    if let Some(Value::Array(list)) = keys.get(style.ffn).filter(|_| style.two_ropes) {
        let of = |value: &Value| value.as_u64().and_then(|ffn| u32::try_from(ffn).ok());
        let first = list.first().and_then(of);
        return match first.filter(|_| list.iter().all(|value| of(value) == first)) {
            Some(ffn) => Ok(ffn),
            None => Err(keys.unsupported(style.ffn, "the layers' FFNs are not of one size")),
        };
    }
    match keys.u32(style.ffn)? {
        Some(ffn) => Ok(ffn),
        // Falcon's default
        None if style.ffn == "ffn_hidden_size" => Ok(d_model.saturating_mul(4)),
        None => Err(keys.missing(style.ffn, "an integer")),
    }
}

fn refuse_unsupported(keys: &Keys, family: &Family, style: &Style) -> Result<(), Error> {
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
    if style.one_act && style.act_default != Some(found) {
        return Err(keys.unsupported(style.act, "this family's experts have another one"));
    }
    Ok(FfnKind {
        activation,
        relu_on_up: family.relu_on_up,
        ungated: style.ungated,
    })
}
