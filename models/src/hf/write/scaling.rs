//! The keys of rotary scalings.

use serde_json::{Value, json};

use crate::config::RopeScaling;

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
