//! The keys of `config.json`.

use std::path::Path;

use serde_json::{Value, json};

use super::scaling::scaling_json;
use super::{expert_keys, form_keys};
use crate::config::{Activation, ModelConfig, RopeScaling};
use crate::error::Error;
use crate::families::{self, Bias, QkNorm, Quirk, Windows};

pub(super) fn config_json(dir: &Path, c: &ModelConfig) -> Result<Value, Error> {
    let unsupported = |reason| Error::export(dir, reason);
    let family = families::of(&c.family);
    let Some(class) = family.class else {
        let reason = format!("family {:?} has no folder form", c.family);
        return Err(unsupported(reason));
    };
    let mut config = json!({
        "architectures": [class],
        "model_type": c.family,
        "vocab_size": c.vocab,
        "hidden_size": c.d_model,
        family.ffn: c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        family.kv_heads: c.kv_heads,
        "head_dim": c.head_dim,
        family.eps.unwrap_or("rms_norm_eps"): c.rms_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_context,
        "tie_word_embeddings": c.tied_head,
        "bos_token_id": c.bos,
        "eos_token_id": c.eos,
        "torch_dtype": "float32",
    });
    activation(c.ffn_kind.activation, family.act, &mut config);
    if c.rope.scaling != RopeScaling::None {
        config["rope_scaling"] = scaling_json(&c.rope.scaling, family.named_factors);
    } else if family.always_scaled {
        config["rope_scaling"] = json!({"rope_type": "default"});
    }
    // latent attention has its own key
    if family.rotated.is_some() && c.form.latent.is_none() {
        let share = f64::from(c.rope.dims) / f64::from(c.head_dim);
        config["partial_rotary_factor"] = json!(share);
    }
    if let Some(what) = form_keys::without_keys(c) {
        let reason = format!("{what} of family {:?} has no folder form", c.family);
        return Err(unsupported(reason));
    }
    form_keys::add(c, family, &mut config);
    match family.bias {
        Bias::AllBy(key, _) => config[key] = json!(c.o_bias),
        Bias::QkvBy(key, _) => config[key] = json!(c.qkv_bias),
        Bias::No | Bias::Qkv if c.o_bias => config["attention_bias"] = json!(true),
        Bias::No | Bias::All | Bias::Qkv => {}
    }
    match family.qk_norm {
        QkNorm::HeadBy(key) | QkNorm::LayersBy(key) => config[key] = json!(c.qk_norm),
        QkNorm::PlainUnless(key) => config[key] = json!(c.form.plain_qk_norm),
        _ => {}
    }
    if let Some(clip) = c.clip_qkv {
        config["clip_qkv"] = json!(clip);
    }
    if let Some(of) = &family.experts {
        expert_keys::add(c, of, &mut config);
    }
    windows_json(c, family.windows, &mut config).map_err(unsupported)?;
    if family.has(Quirk::OtherNames) {
        form_keys::rename(family, &mut config);
    }
    Ok(config)
}

/// The activation's name under `key`, and its parameters.
fn activation(act: Activation, key: &str, config: &mut Value) {
    config[key] = json!(match act {
        Activation::Relu => "relu",
        Activation::FatRelu { .. } => "fatrelu",
        Activation::Relu2 => "relu2",
        Activation::Silu | Activation::ClampedSwiglu { .. } | Activation::ClampedSilu { .. } => {
            "silu"
        }
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
        Activation::Xielu { .. } => "xielu",
    });
    match act {
        Activation::FatRelu { threshold } => config["hidden_act_param"] = json!(threshold),
        Activation::ClampedSwiglu { limit, alpha } => {
            config["swiglu_limit"] = json!(limit);
            config["swiglu_alpha"] = json!(alpha);
        }
        Activation::ClampedSilu { limit } => config["swiglu_limit"] = json!(limit),
        _ => {}
    }
}

/// Sliding windows, in the keys that the family's reader understands.
fn windows_json(c: &ModelConfig, of: Windows, config: &mut Value) -> Result<(), String> {
    let found = c.window.iter().find(|&&w| w != 0);
    if let Windows::Chunks(usual) = of {
        config["attention_chunk_size"] = json!(found.unwrap_or(&usual));
        config["layer_types"] = kinds(c, "chunked_attention");
        return Ok(());
    }
    let Some(&window) = found else {
        if matches!(
            of,
            Windows::Every | Windows::PatternOf(..) | Windows::Late(..)
        ) {
            // if absent, other programs would use the family's 4096
            config["sliding_window"] = Value::Null;
        }
        return Ok(());
    };
    let every = c.window.iter().all(|&w| w == window);
    let one_size = c.window.iter().all(|&w| w == 0 || w == window);
    match of {
        Windows::Every if every => config["sliding_window"] = json!(window),
        // in addition to pools
        Windows::Never if every && c.form.pooled.is_some() => {
            config["sliding_window"] = json!(window);
        }
        Windows::Layout if one_size => {
            let switch = |&w: &u32| u32::from(w != 0);
            config["sliding_window_size"] = json!(window);
            config["sliding_window_layout"] = c.window.iter().map(switch).collect();
        }
        Windows::Alternate
        | Windows::Pattern(_)
        | Windows::PatternOf(..)
        | Windows::Late(..)
        | Windows::Unrotated
        | Windows::ByLayer
            if one_size =>
        {
            config["sliding_window"] = json!(window);
            if matches!(of, Windows::Unrotated | Windows::ByLayer) {
                config["use_sliding_window"] = json!(true);
            }
            config["layer_types"] = kinds(c, "sliding_attention");
        }
        _ => {
            return Err(format!(
                "sliding windows {:?} of family {:?} have no folder form",
                c.window, c.family
            ));
        }
    }
    Ok(())
}

/// The kind of each layer: `windowed`, or attention to all positions.
fn kinds(c: &ModelConfig, windowed: &str) -> Value {
    let kind = |&window: &u32| match window {
        0 => "full_attention",
        _ => windowed,
    };
    c.window.iter().map(kind).collect()
}
