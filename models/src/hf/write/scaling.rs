//! The keys of rotary scalings.

use serde_json::{Value, json};

use crate::config::{ModelConfig, RopeScaling, yarn_attention};

/// A rotary scaling; null for none. LongRoPE's factors of queries and keys may have separate keys.
pub(super) fn scaling_json(scaling: &RopeScaling, named_factors: bool) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Long {
            short,
            long,
            attention_factor,
            long_attention_factor,
            original_context,
        } => {
            let mut object = json!({
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "original_max_position_embeddings": original_context,
            });
            if named_factors {
                object["short_mscale"] = json!(attention_factor);
                object["long_mscale"] = json!(long_attention_factor);
            } else {
                object["attention_factor"] = json!(attention_factor);
            }
            object
        }
        // The share of pairs depends on the width of a head, which the caller knows.
        RopeScaling::Proportional { .. } => json!({"rope_type": "proportional"}),
        RopeScaling::Linear { factor } => {
            json!({"rope_type": "linear", "factor": factor})
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_context,
            })
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_context,
            attention_factor,
            truncate,
        } => {
            json!({
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "original_max_position_embeddings": original_context,
                "attention_factor": attention_factor,
                "truncate": truncate,
            })
        }
    }
}

/// Latent attention: the scale of its scores, next to the rotary scaling.
pub(super) fn add_attention_scale(c: &ModelConfig, config: &mut Value) {
    if let (RopeScaling::Yarn { factor, .. }, Some(scale)) =
        (&c.rope.scaling, c.form.attention_scale)
    {
        let weight = weight_of(*factor, scale, c.head_dim);
        config["rope_scaling"]["mscale_all_dim"] = json!(weight);
    }
}

/// The weight of YaRN's logarithm that gives scores of heads of `head_dim` elements the factor `scale`,
/// exact if there is one.
fn weight_of(factor: f32, scale: f32, head_dim: u32) -> f32 {
    let root = (head_dim as f32).sqrt();
    let gives = |weight: f32| {
        let one = yarn_attention(factor, weight);
        one * one / root
    };
    let one = (f64::from(scale) * f64::from(root)).sqrt();
    let about = ((one - 1.0) / (0.1 * f64::from(factor).ln())) as f32;
    // as releases write it
    let rounded = (f64::from(about) * 1e4).round() / 1e4;
    let near = (0..512i32).flat_map(|step| [step, -step]);
    let near = near.map(|step| f32::from_bits(about.to_bits().wrapping_add_signed(step)));
    let mut all = std::iter::once(rounded as f32).chain(near);
    all.find(|&weight| gives(weight) == scale).unwrap_or(about)
}
