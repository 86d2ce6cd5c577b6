//! The keys of `config.json`.

use std::path::Path;

use serde_json::{Value, json};

use super::families;
use super::scaling::scaling_json;
use crate::config::{Activation, Mixture, ModelConfig, RopeScaling, Scoring};
use crate::error::Error;
use crate::hf::form::style_of;

/// The class of transformers that runs a family.
fn class_of(family: &str) -> Option<&'static str> {
    Some(match family {
        "llama" => "LlamaForCausalLM",
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "bamboo" => "BambooForCausalLM",
        "mixtral" => "MixtralForCausalLM",
        "qwen2_moe" => "Qwen2MoeForCausalLM",
        "qwen3_moe" => "Qwen3MoeForCausalLM",
        "olmoe" => "OlmoeForCausalLM",
        "turbosparsemixtral" => "TurboSparseMixtralForCausalLM",
        "smallthinker" => "SmallThinkerForCausalLM",
        "olmo2" => "Olmo2ForCausalLM",
        "phi3" => "Phi3ForCausalLM",
        "granite" => "GraniteForCausalLM",
        "smollm3" => "SmolLM3ForCausalLM",
        "minicpm" => "MiniCPMForCausalLM",
        "starcoder2" => "Starcoder2ForCausalLM",
        "opt" => "OPTForCausalLM",
        "nemotron" => "NemotronForCausalLM",
        "falcon" => "FalconForCausalLM",
        "gemma2" => "Gemma2ForCausalLM",
        "gemma3_text" => "Gemma3ForCausalLM",
        "gemma3n_text" => "Gemma3nForCausalLM",
        _ => return None,
    })
}

pub(super) fn config_json(dir: &Path, c: &ModelConfig) -> Result<Value, Error> {
    let unsupported = |reason| Error::export(dir, reason);
    let act = c.ffn_kind.activation;
    let class = class_of(&c.family)
        .ok_or_else(|| unsupported(format!("family {:?} has no folder form", c.family)))?;
    let style = style_of(&c.family);
    let mut config = json!({
        "architectures": [class],
        "model_type": c.family,
        "vocab_size": c.vocab,
        "hidden_size": c.d_model,
        style.ffn: c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        style.kv_heads: c.kv_heads,
        "head_dim": c.head_dim,
        style.eps.unwrap_or("rms_norm_eps"): c.rms_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_context,
        "tie_word_embeddings": c.tied_head,
        "bos_token_id": c.bos,
        "eos_token_id": c.eos,
        "torch_dtype": "float32",
        style.act: match act {
            Activation::Relu => "relu",
            Activation::FatRelu { .. } => "fatrelu",
            Activation::Relu2 => "relu2",
            Activation::Silu | Activation::ClampedSwiglu { .. } => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
        },
    });
    if let Activation::FatRelu { threshold } = act {
        config["hidden_act_param"] = json!(threshold);
    }
    if c.rope.scaling != RopeScaling::None {
        config["rope_scaling"] = scaling_json(&c.rope.scaling);
    }
    if style.rotated.is_some() {
        let share = f64::from(c.rope.dims) / f64::from(c.head_dim);
        config["partial_rotary_factor"] = json!(share);
    }
    families::add(c, &mut config);
    // use_bias and enable_bias say so there
    let other_key = matches!(c.family.as_str(), "starcoder2" | "opt");
    let always = matches!(c.family.as_str(), "llama" | "qwen3" | "qwen3_moe" | "olmoe");
    if c.o_bias && !other_key || always {
        config["attention_bias"] = json!(c.o_bias);
    }
    if let Some(clip) = c.clip_qkv {
        config["clip_qkv"] = json!(clip);
    }
    if let Some(mixture) = &c.mixture {
        experts_json(c, mixture, &mut config);
    }
    if c.family == "smallthinker" {
        let rotated = |layer: u32| u32::from(c.rotates(layer));
        config["rope_layout"] = (0..c.layers).map(rotated).collect();
    }
    windows_json(c, &mut config).map_err(unsupported)?;
    Ok(config)
}

/// A mixture of experts, in the keys of its family.
fn experts_json(c: &ModelConfig, mixture: &Mixture, config: &mut Value) {
    if c.family == "smallthinker" {
        let softmax = mixture.scoring == Scoring::Softmax;
        config["moe_num_primary_experts"] = json!(c.experts);
        config["moe_num_active_primary_experts"] = json!(mixture.chosen);
        config["moe_ffn_hidden_size"] = json!(c.ffn);
        config["moe_enable_early_router"] = json!(mixture.early_router);
        config["moe_primary_router_apply_softmax"] = json!(softmax);
        return;
    }
    config["num_experts_per_tok"] = json!(mixture.chosen);
    if matches!(c.family.as_str(), "mixtral" | "turbosparsemixtral") {
        config["num_local_experts"] = json!(c.experts);
        return;
    }
    config["num_experts"] = json!(c.experts);
    config["norm_topk_prob"] = json!(mixture.renormalise);
    if c.family == "olmoe" {
        return;
    }
    config["moe_intermediate_size"] = json!(c.ffn);
    config["intermediate_size"] = json!(mixture.dense_ffn.max(c.ffn));
    config["mlp_only_layers"] = json!(mixture.dense_layers);
    config["decoder_sparse_step"] = json!(1);
    if c.family == "qwen2_moe" {
        config["shared_expert_intermediate_size"] = json!(mixture.shared);
        config["qkv_bias"] = json!(c.qkv_bias);
    }
}

/// Whether a family's windows are those of all layers.
fn has_window_everywhere(family: &str) -> bool {
    matches!(
        family,
        "mistral" | "bamboo" | "mixtral" | "turbosparsemixtral" | "phi3" | "starcoder2"
    )
}

/// Sliding windows, in the keys that the family's reader understands.
fn windows_json(c: &ModelConfig, config: &mut Value) -> Result<(), String> {
    let Some(&window) = c.window.iter().find(|&&w| w != 0) else {
        if has_window_everywhere(&c.family) {
            // if absent, other programs would use the family's 4096
            config["sliding_window"] = Value::Null;
        }
        return Ok(());
    };
    let every = c.window.iter().all(|&w| w == window);
    let one_size = c.window.iter().all(|&w| w == 0 || w == window);
    match c.family.as_str() {
        family if every && has_window_everywhere(family) => {
            config["sliding_window"] = json!(window);
        }
        "smallthinker" if one_size => {
            let switch = |&w: &u32| u32::from(w != 0);
            config["sliding_window_size"] = json!(window);
            config["sliding_window_layout"] = c.window.iter().map(switch).collect();
        }
        "gemma2" | "gemma3_text" | "gemma3n_text" | "smollm3" | "qwen2" | "qwen3" if one_size => {
            config["sliding_window"] = json!(window);
            if !c.family.starts_with("gemma") {
                config["use_sliding_window"] = json!(true);
            }
            config["layer_types"] = c
                .window
                .iter()
                .map(|&w| {
                    if w == 0 {
                        "full_attention"
                    } else {
                        "sliding_attention"
                    }
                })
                .collect();
        }
        family => {
            return Err(format!(
                "sliding windows {:?} of family {family:?} have no folder form",
                c.window
            ));
        }
    }
    Ok(())
}
