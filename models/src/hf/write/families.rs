//! Keys of families that depart from the plain decoder.

use serde_json::{Value, json};

use super::scaling::scaling_json;
use crate::config::{Form, ModelConfig, Parallel, RopeScaling};

/// Adds to `config`, or takes away, what the family's reader (`hf/form.rs`) looks for. Whatever they
/// cannot express shows when the keys are read back.
pub(super) fn add(c: &ModelConfig, config: &mut Value) {
    let form = &c.form;
    if matches!(c.family.as_str(), "phi3" | "smollm3") {
        // transformers' own may lie past the vocabulary
        config["pad_token_id"] = Value::Null;
    }
    if let (
        "phi3",
        RopeScaling::Long {
            original_context, ..
        },
    ) = (&*c.family, &c.rope.scaling)
    {
        // beside the object; transformers takes 4096 else
        config["original_max_position_embeddings"] = json!(original_context);
    }
    match c.family.as_str() {
        "llama" if form.ffn_bias => config["mlp_bias"] = json!(true),
        "olmo2" => config["attention_bias"] = json!(c.o_bias),
        "granite" => granite(c, config),
        "smollm3" => {
            let switches = (0..c.layers).map(|layer| u32::from(c.rotates(layer)));
            config["no_rope_layers"] = switches.collect();
            config["attention_bias"] = json!(c.o_bias);
            config["mlp_bias"] = json!(form.ffn_bias);
        }
        "minicpm" => {
            let depth = (c.layers as f32).sqrt();
            let width = c.d_model as f32;
            config["scale_emb"] = json!(form.embedding_scale);
            config["scale_depth"] = json!(near(form.residual_scale * depth, |x| {
                x / depth == form.residual_scale
            }));
            config["dim_model_base"] = json!(near(form.logit_scale * width, |x| {
                x / width == form.logit_scale
            }));
        }
        "starcoder2" => {
            config["use_bias"] = json!(c.o_bias);
            config["norm_type"] = json!("layer_norm");
        }
        "opt" => opt(c, config),
        "nemotron" => {
            config["attention_bias"] = json!(c.o_bias);
            config["mlp_bias"] = json!(form.ffn_bias);
        }
        "falcon" => falcon(c, config),
        "gemma2" | "gemma3_text" | "gemma3n_text" => gemma(c, config),
        _ => {}
    }
}

/// A number close to `value` that passes, or `value`.
fn near(value: f32, passes: impl Fn(f32) -> bool) -> f32 {
    let steps = (0..64i32).flat_map(|step| [step, -step]);
    let near = |step: i32| f32::from_bits(value.to_bits().wrapping_add_signed(step));
    steps.map(near).find(|x| passes(*x)).unwrap_or(value)
}

fn granite(c: &ModelConfig, config: &mut Value) {
    let form = &c.form;
    config["embedding_multiplier"] = json!(form.embedding_scale);
    config["residual_multiplier"] = json!(form.residual_scale);
    let usual = 1.0 / (c.head_dim as f32).sqrt();
    config["attention_multiplier"] = json!(form.attention_scale.unwrap_or(usual));
    let logits = near(1.0 / form.logit_scale, |x| 1.0 / x == form.logit_scale);
    config["logits_scaling"] = json!(logits);
    config["attention_bias"] = json!(c.o_bias);
    config["mlp_bias"] = json!(form.ffn_bias);
}

/// Removes keys that the family does not have.
fn remove(config: &mut Value, keys: &[&str]) {
    if let Some(map) = config.as_object_mut() {
        keys.iter().for_each(|key| {
            map.remove(*key);
        });
    }
}

fn opt(c: &ModelConfig, config: &mut Value) {
    let absent = [
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
    ];
    remove(config, &absent);
    config["enable_bias"] = json!(c.o_bias);
    config["do_layer_norm_before"] = json!(true);
    config["word_embed_proj_dim"] = json!(c.d_model);
}

fn falcon(c: &ModelConfig, config: &mut Value) {
    remove(config, &["head_dim", "num_kv_heads"]);
    let form = &c.form;
    let (new, norms) = match form.parallel {
        Parallel::TwoNorms => (true, Some(2)),
        Parallel::OneNorm if c.kv_heads > 1 => (true, Some(1)),
        Parallel::OneNorm | Parallel::No => (false, None),
    };
    config["new_decoder_architecture"] = json!(new);
    config["parallel_attn"] = json!(form.parallel != Parallel::No);
    config["bias"] = json!(c.o_bias);
    config["alibi"] = json!(false);
    if let Some(norms) = norms {
        config["num_ln_in_parallel_attn"] = json!(norms);
        config["num_kv_heads"] = json!(c.kv_heads);
    } else {
        config["multi_query"] = json!(c.kv_heads == 1);
    }
}

fn gemma(c: &ModelConfig, config: &mut Value) {
    let form = &c.form;
    if let Some(scale) = form.attention_scale
        && c.family != "gemma3n_text"
    {
        let scalar = near((1.0 / (scale * scale)).round(), |x| 1.0 / x.sqrt() == scale);
        // transformers takes integers alone
        config["query_pre_attn_scalar"] = match scalar.fract() == 0.0 {
            true => json!(scalar as u64),
            false => json!(scalar),
        };
    }
    if c.family == "gemma2" {
        config["attn_logit_softcapping"] = json!(form.attention_cap);
    }
    if c.family != "gemma3_text" {
        config["final_logit_softcapping"] = json!(form.logit_cap);
    }
    if c.family != "gemma3n_text" {
        config["attention_bias"] = json!(c.o_bias);
    }
    if let Some(local) = &form.local_rope {
        remove(config, &["rope_theta", "rope_scaling"]);
        let one = |rope: &crate::config::Rope| {
            let mut object = match scaling_json(&rope.scaling) {
                Value::Null => json!({"rope_type": "default"}),
                scaling => scaling,
            };
            object["rope_theta"] = json!(rope.theta);
            object
        };
        config["rope_parameters"] =
            json!({"full_attention": one(&c.rope), "sliding_attention": one(local)});
    }
    streams(c, form, config);
}

/// Gemma 3n.
fn streams(c: &ModelConfig, form: &Form, config: &mut Value) {
    let Some(streams) = form.streams else { return };
    config["altup_active_idx"] = json!(0);
    config["altup_num_inputs"] = json!(streams.count);
    config["altup_correct_scale"] = json!(streams.scaled);
    config["laurel_rank"] = json!(streams.laurel);
    config["hidden_size_per_layer_input"] = json!(streams.per_layer);
    config["vocab_size_per_layer_input"] = json!(streams.per_layer_vocab);
    config["num_kv_shared_layers"] = json!(form.shared_kv);
    let none = vec![0.0; c.layers as usize];
    config["activation_sparsity_pattern"] = match form.gate_top.is_empty() {
        true => json!(none),
        false => json!(form.gate_top),
    };
}
