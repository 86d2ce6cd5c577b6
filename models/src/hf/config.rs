//! `config.json` → [`ModelConfig`].
//!
//! An absent key gets the default of the family's configuration class, if all releases agree on
//! one. A value that would change the output and is not supported is an error.

use std::path::Path;

use serde_json::Value;

use super::deepseek4;
use super::experts;
use super::foreign;
use super::form;
use super::gemma4;
use super::latent;
use super::lfm2::adjusted_ffn;
use super::quant;
use super::rope::ropes;
use super::scales;
use super::text_part::text_part;
use super::windows::windows;
use crate::config::{
    Activation, FfnKind, Form, MAX_COUNT, ModelConfig, Rope, SWIGLU_ALPHA, SWIGLU_LIMIT,
};
use crate::error::Error;
use crate::families::{self, Bias, Family, QkNorm, Quirk};
use crate::json::Keys;
use crate::mixers::sublayers::sublayers;
use crate::mixers::{Sizes, pooled};
use crate::store::indexed_context;

/// The limit of every published DeepSeek-V4.
const CLAMPED_SILU_LIMIT: f32 = 10.0;

/// Epsilon of PyTorch's LayerNorm.
const LAYER_NORM_EPS: f32 = 1e-5;

/// Translates a parsed `config.json`, with only the tokens that it names; `name` is the model's.
pub(super) fn model_config(path: &Path, value: &Value, name: String) -> Result<ModelConfig, Error> {
    let (part, prefix) = text_part(path, value)?;
    let keys = Keys::new(path, &part)?.inside(prefix);
    let family = family_of(path, keys.need_str("model_type")?)?;
    let keys = keys.called(family.aliases);
    keys.expect_one_name()?;
    refuse_unsupported(&keys, family)?;

    let d_model = keys.need_u32("hidden_size")?;
    let layers = layer_count(&keys, family)?;
    let heads = keys.need_u32("num_attention_heads")?;
    let head_dim = head_dim(&keys, family, d_model, heads)?;
    let sizes = Sizes {
        d_model,
        layers,
        heads,
        head_dim,
        rotated: 0,
    };
    let experts = match &family.experts {
        Some(of) => experts::read(&keys, of, layers)?,
        None => None,
    };
    let [qkv_bias, o_bias] = biases(&keys, family)?;
    let mut form = form::form(&keys, family, sizes)?;
    let window = layer_windows(&keys, family, layers, &form)?;
    if family.has(Quirk::GlobalHeads) {
        gemma4::form(&keys, &window, &mut form)?;
    }
    let (rope, local_rope) = both_ropes(&keys, family, head_dim, &form)?;
    form.local_rope = local_rope;
    if form.latent.is_some() {
        latent::expect_rotated(&keys, &rope)?;
        form.attention_scale = latent::attention_scale(&keys, &rope.scaling, head_dim)?;
    }
    if family.has(Quirk::FullUnrotated) && has_windows(&keys) {
        let full = (0..).zip(&window).filter(|(_, window)| **window == 0);
        form.nope_layers = full.map(|(layer, _)| layer).collect();
    }
    Ok(ModelConfig {
        family: family.name.to_owned(),
        name,
        vocab: keys.need_u32("vocab_size")?,
        d_model,
        layers,
        heads,
        kv_heads: kv_heads(&keys, family, sizes)?,
        head_dim,
        ffn: (experts.as_ref()).map_or_else(|| ffn(&keys, family, d_model), |of| Ok(of.ffn))?,
        experts: experts.as_ref().map_or(1, |experts| experts.count),
        ffn_kind: ffn_kind(path, &keys, family)?,
        rms_eps: match family.eps {
            Some(key) => keys.need_f32(key)?,
            None => LAYER_NORM_EPS,
        },
        rope,
        window,
        qkv_bias,
        o_bias,
        qk_norm: qk_norm(&keys, family)?,
        tied_head: tied_head(&keys, family)?,
        max_context: max_context(path, &keys, family, &form)?,
        bos: keys.u32("bos_token_id")?,
        add_bos: false,
        eos: keys.tokens("eos_token_id")?,
        predictor_threshold: None,
        mixture: experts.map(|experts| experts.mixture),
        qk_norm_whole: family.qk_norm == QkNorm::Whole,
        clip_qkv: keys.f32("clip_qkv")?,
        form,
    })
}

/// One window for each layer.
fn layer_windows(
    keys: &Keys,
    family: &Family,
    layers: u32,
    form: &Form,
) -> Result<Vec<u32>, Error> {
    match form.pooled {
        Some(_) => Ok(vec![deepseek4::window(keys)?; layers as usize]),
        None => windows(keys, family.windows, layers, form),
    }
}

/// The rotary parameters, and those of layers with different ones.
fn both_ropes(
    keys: &Keys,
    family: &Family,
    head_dim: u32,
    form: &Form,
) -> Result<(Rope, Option<Rope>), Error> {
    if form.pooled.is_some() {
        let [rope, local] = deepseek4::ropes(keys, family, head_dim)?;
        return Ok((rope, Some(local)));
    }
    ropes(keys, family, rotated(keys, family, head_dim, form)?)
}

/// The rotatable elements of a head, in layers without and with a window; none with learned positions.
fn rotated(keys: &Keys, family: &Family, head_dim: u32, form: &Form) -> Result<[u32; 2], Error> {
    let local = match form.latent {
        Some(_) => latent::share_of(keys, head_dim)?,
        None => head_dim * u32::from(family.rotates()),
    };
    let global = form.global_heads.map_or(local, |heads| heads.head_dim);
    Ok([global, local])
}

/// The family of this name.
fn family_of(path: &Path, name: &str) -> Result<&'static Family, Error> {
    families::find(name).ok_or_else(|| Error::UnknownFamily {
        path: path.to_owned(),
        found: format!("{name:?}"),
        supported: (families::all().map(|family| family.name))
            .collect::<Vec<_>>()
            .join(", "),
    })
}

/// The context that the model was trained for, or the supported context.
fn max_context(path: &Path, keys: &Keys, family: &Family, form: &Form) -> Result<u32, Error> {
    // key of every class
    const USUAL: u32 = 2048;
    let trained = keys.need_u32("max_position_embeddings")?;
    if let Some(pooled) = &form.pooled {
        let most = pooled::most_positions(keys, pooled)?;
        let most = most.map(|most| indexed_context(path, "index_topk", trained, most));
        return Ok(most.unwrap_or(trained));
    }
    let Some([key, _]) = family.indexed() else {
        return Ok(trained);
    };
    let most = keys.u32(key)?.unwrap_or(USUAL);
    Ok(indexed_context(path, key, trained, most))
}

/// Whether the head is tied to the embedding.
fn tied_head(keys: &Keys, family: &Family) -> Result<bool, Error> {
    let other = family.quirks.iter().find_map(|quirk| match quirk {
        Quirk::Tied(key) => keys.bool(key).transpose(),
        _ => None,
    });
    let tied = other.transpose()?.or(keys.bool("tie_word_embeddings")?);
    Ok(tied.unwrap_or(family.tied))
}

/// Whether `sliding_window` is set; if absent, it has a default.
fn has_windows(keys: &Keys) -> bool {
    let key = keys.map().get("sliding_window");
    key.is_none_or(|key| !key.is_null())
}

/// Whether queries and keys are normed.
fn qk_norm(keys: &Keys, family: &Family) -> Result<bool, Error> {
    match family.qk_norm {
        QkNorm::HeadBy(key) | QkNorm::LayersBy(key) => Ok(keys.bool(key)?.unwrap_or(false)),
        QkNorm::PlainUnless(_) => Ok(false),
        norm => Ok(norm != QkNorm::No),
    }
}

/// The number of layers.
fn layer_count(keys: &Keys, family: &Family) -> Result<u32, Error> {
    let layers = if family.has(Quirk::Sublayers) {
        sublayers(keys)?.len() as u32
    } else {
        keys.need_u32("num_hidden_layers")?
    };
    match layers {
        layers if layers <= MAX_COUNT => Ok(layers),
        _ => Err(keys.bad("num_hidden_layers", &format!("at most {MAX_COUNT}"))),
    }
}

/// The number of heads of keys and values.
fn kv_heads(keys: &Keys, family: &Family, sizes: Sizes) -> Result<u32, Error> {
    match (
        form::fixed_kv_heads(keys, family, sizes)?,
        keys.u32(family.kv_heads)?,
    ) {
        (Some(kv_heads), _) | (None, Some(kv_heads)) => Ok(kv_heads),
        (None, None) if family.kv_heads_default => Ok(sizes.heads),
        (None, None) => Err(keys.missing(family.kv_heads, "an integer")),
    }
}

/// The biases of attention: of queries, keys and values, and of the output.
fn biases(keys: &Keys, family: &Family) -> Result<[bool; 2], Error> {
    let given = |key, absent| Ok(keys.bool(key)?.unwrap_or(absent));
    Ok(match family.bias {
        Bias::No => [false; 2],
        Bias::All => [true; 2],
        Bias::Qkv => [true, false],
        Bias::QkvBy(key, absent) => [given(key, absent)?, false],
        Bias::AllBy(key, absent) => [given(key, absent)?; 2],
    })
}

/// The number of the FFN's neurons.
fn ffn(keys: &Keys, family: &Family, d_model: u32) -> Result<u32, Error> {
    // a list in Gemma 3n
    if let Some(Value::Array(list)) = keys.get(family.ffn).filter(|_| family.ffn_list) {
        let of = |value: &Value| value.as_u64().and_then(|ffn| u32::try_from(ffn).ok());
        let first = list.first().and_then(of);
        return match first.filter(|_| list.iter().all(|value| of(value) == first)) {
            Some(ffn) => Ok(ffn),
            None => Err(keys.unsupported(family.ffn, "the layers' FFNs have different sizes")),
        };
    }
    let given = if family.has(Quirk::AdjustedFfn) {
        adjusted_ffn(keys, keys.u32(family.ffn)?)?
    } else {
        keys.u32(family.ffn)?
    };
    match (given, family.ffn_default) {
        (Some(ffn), _) => Ok(ffn),
        (None, Some(times)) => Ok(d_model.saturating_mul(times)),
        (None, None) => Err(keys.missing(family.ffn, "an integer")),
    }
}

fn refuse_unsupported(keys: &Keys, family: &Family) -> Result<(), Error> {
    let blocks = family.experts.is_some_and(|experts| experts.blocks)
        && (keys.object("quantization_config", "quantization_config.")?)
            .is_some_and(|object| object.get("quant_method") == Some(&"mxfp4".into()));
    let known = blocks || scales::block_of(keys)?.is_some() || quant::method(keys)?.is_some();
    for key in ["quantization_config", "compression_config"] {
        if keys.get(key).is_some() && !(known && key == "quantization_config") {
            return Err(keys.unsupported(key, quant::SUPPORTED));
        }
    }
    foreign::refuse(keys, family)?;
    let optional = match family.bias {
        Bias::QkvBy(key, _) | Bias::AllBy(key, _) => key == "attention_bias",
        Bias::No | Bias::All | Bias::Qkv => false,
    };
    if keys.bool("attention_bias")? == Some(true) && !optional {
        return Err(keys.unsupported("attention_bias", "this family has no such option"));
    }
    Ok(())
}

fn head_dim(keys: &Keys, family: &Family, d_model: u32, heads: u32) -> Result<u32, Error> {
    if let Some(of) = family.head_dim() {
        return (of.hf)(keys);
    }
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

/// Rejects an unknown activation: a wrong one would give plausible but incorrect text.
fn ffn_kind(path: &Path, keys: &Keys, family: &Family) -> Result<FfnKind, Error> {
    let found = match (keys.str(family.act)?, family.act_default) {
        (Some(found), _) | (None, Some(found)) => found,
        (None, None) => return Err(keys.missing(family.act, "a string")),
    };
    let activation = match found {
        "relu" => Activation::Relu,
        "fatrelu" => Activation::FatRelu {
            threshold: keys.need_f32("hidden_act_param")?,
        },
        "relu2" => Activation::Relu2,
        "silu" if family.clamped => Activation::ClampedSwiglu {
            limit: keys.f32("swiglu_limit")?.unwrap_or(SWIGLU_LIMIT),
            alpha: keys.f32("swiglu_alpha")?.unwrap_or(SWIGLU_ALPHA),
        },
        "silu" if family.has(Quirk::DeepSeek4) => Activation::ClampedSilu {
            limit: keys.f32("swiglu_limit")?.unwrap_or(CLAMPED_SILU_LIMIT),
        },
        "xielu" if family.has(Quirk::Xielu) => Activation::XIELU,
        "silu" | "swish" => Activation::Silu,
        "gelu" if family.has(Quirk::TanhGelu) => Activation::GeluTanh,
        "gelu" => Activation::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
        _ => {
            return Err(Error::UnknownActivation {
                path: path.to_owned(),
                key: family.act.into(),
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
        return Err(keys.unsupported(family.act, "this family has relu on gate and up"));
    }
    if family.one_act && family.act_default != Some(found) {
        return Err(keys.unsupported(family.act, "this family has another one"));
    }
    Ok(FfnKind {
        activation,
        relu_on_up: family.relu_on_up,
        ungated: family.ungated,
    })
}
