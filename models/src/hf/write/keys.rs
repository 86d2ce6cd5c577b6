//! The keys of `config.json`.

use std::path::Path;

use serde_json::{Value, json};

use super::form_keys;
use super::scaling::scaling_json;
use crate::config::{Activation, Mixture, ModelConfig, RopeScaling, Scoring};
use crate::error::Error;
use crate::families::{
    self, Bias, Dense, Experts, QkNorm, Renormalise, ScoringBy, Shared, Windows,
};

pub(super) fn config_json(dir: &Path, c: &ModelConfig) -> Result<Value, Error> {
    let unsupported = |reason| Error::export(dir, reason);
    let act = c.ffn_kind.activation;
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
        family.act: match act {
            Activation::Relu => "relu",
            Activation::FatRelu { .. } => "fatrelu",
            Activation::Relu2 => "relu2",
            Activation::Silu
            | Activation::ClampedSwiglu { .. }
            | Activation::ClampedSilu { .. } => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
        },
    });
    if let Activation::FatRelu { threshold } = act {
        config["hidden_act_param"] = json!(threshold);
    }
    if c.rope.scaling != RopeScaling::None {
        config["rope_scaling"] = scaling_json(&c.rope.scaling, family.named_factors);
    }
    if family.rotated.is_some() {
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
        Bias::No | Bias::Qkv => {}
    }
    if let QkNorm::HeadBy(key) = family.qk_norm {
        config[key] = json!(c.qk_norm);
    }
    if let Some(clip) = c.clip_qkv {
        config["clip_qkv"] = json!(clip);
    }
    if let (Some(mixture), Some(of)) = (&c.mixture, &family.experts) {
        experts_json(c, mixture, of, &mut config);
    }
    windows_json(c, family.windows, &mut config).map_err(unsupported)?;
    Ok(config)
}

/// A mixture of experts, in the keys of its family.
fn experts_json(c: &ModelConfig, mixture: &Mixture, of: &Experts, config: &mut Value) {
    config[of.count] = json!(c.experts);
    config[of.chosen] = json!(mixture.chosen);
    config[of.ffn] = json!(c.ffn);
    if let Some(key) = of.early_router {
        config[key] = json!(mixture.early_router);
    }
    if let ScoringBy::SoftmaxIf(key) = of.scoring {
        config[key] = json!(mixture.scoring == Scoring::Softmax);
    }
    if let Renormalise::Key(_) = of.renormalise {
        config["norm_topk_prob"] = json!(mixture.renormalise);
    }
    if of.dense == Dense::Steps {
        config["intermediate_size"] = json!(mixture.dense_ffn.max(c.ffn));
        config["mlp_only_layers"] = json!(mixture.dense_layers);
        config["decoder_sparse_step"] = json!(1);
    }
    match of.shared {
        Some(Shared::Gated(key) | Shared::Plain(key)) => config[key] = json!(mixture.shared),
        Some(Shared::Experts(key, _)) => config[key] = json!(mixture.shared / c.ffn),
        Some(Shared::AsOthers) | None => {}
    }
    let dense = mixture.dense_layers.len();
    if let Dense::First(key, _) = of.dense {
        config[key] = json!(dense);
        config["intermediate_size"] = json!(mixture.dense_ffn.max(c.ffn));
    }
    if mixture.scoring == Scoring::SparseMixer {
        config["router_jitter_noise"] = json!(mixture.jitter);
    }
    if let Dense::Kinds(key, ..) = of.dense {
        let kind = |layer| match c.mixture_of(layer) {
            Some(_) => "sparse",
            None => "dense",
        };
        config[key] = (0..c.layers).map(kind).collect();
        config["intermediate_size"] = json!(mixture.dense_ffn.max(c.ffn));
    }
    if let Some((key, _)) = of.scale {
        config[key] = json!(mixture.scale);
    }
    if let Some(groups) = mixture.groups {
        config["n_group"] = json!(groups.count);
        config["topk_group"] = json!(groups.chosen);
    }
}

/// Sliding windows, in the keys that the family's reader understands.
fn windows_json(c: &ModelConfig, of: Windows, config: &mut Value) -> Result<(), String> {
    let Some(&window) = c.window.iter().find(|&&w| w != 0) else {
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
            let kind = |&w: &u32| match w {
                0 => "full_attention",
                _ => "sliding_attention",
            };
            config["layer_types"] = c.window.iter().map(kind).collect();
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
