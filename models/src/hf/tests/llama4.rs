//! Keys of `config.json` of Llama 4.

use std::path::Path;

use super::*;
use crate::config::{QueryScale, Reach};

/// The multimodal configuration with Scout's keys; `change` changes those of the text model.
fn read(change: impl FnOnce(&mut Value)) -> Result<ModelConfig, Error> {
    let mut text = json!({
        "model_type": "llama4_text", "vocab_size": 320, "hidden_size": 36, "num_hidden_layers": 8,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "intermediate_size": 27, "intermediate_size_mlp": 50, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "attention_bias": false, "attn_temperature_tuning": 4,
        "no_rope_layers": [], "rope_theta": 500000.0, "use_qk_norm": true,
    });
    change(&mut text);
    let whole = json!({"model_type": "llama4", "text_config": text});
    config::model_config(Path::new("config.json"), &whole, "scout".into())
}

#[test]
fn absent_keys_are_those_of_the_releases() {
    let config = read(|_| ()).unwrap();
    assert_eq!(config.form.nope_layers, [3, 7]);
    assert_eq!(config.reach(2), Reach::Chunk(8192));
    assert_eq!(config.reach(3), Reach::All);
    assert_eq!(config.form.query_scale, Some(QueryScale::LLAMA4));
    assert!(config.form.plain_qk_norm && !config.qk_norm);
    let mixture = config.mixture.unwrap();
    assert!(mixture.scales_input && mixture.shared_is_plain && mixture.dense_layers.is_empty());
    assert_eq!(mixture.shared, 27);
}

#[test]
fn queries_without_positions_grow_unless_the_switch_is_off() {
    let of = |switch: Value| {
        let config = read(|text| text["attn_temperature_tuning"] = switch);
        config.map(|config| config.form.query_scale.is_some())
    };
    for (switch, grows) in [
        (json!(true), true),
        (json!(4.0), true),
        (json!(false), false),
        (json!(0), false),
    ] {
        assert_eq!(of(switch).unwrap(), grows);
    }
    assert_refused!(
        of(json!("on")).unwrap_err(),
        BadKey,
        "config.json",
        "attn_temperature_tuning"
    );
    let scale = QueryScale {
        beta: 0.5,
        original_context: 4,
        unrotated: true,
    };
    assert_eq!(scale.at(3, true), 1.0);
    assert_eq!(scale.at(2, false), 1.0);
    assert_eq!(scale.at(3, false), 1.0 + 0.5 * libm::logf(2.0));
}

#[test]
fn a_list_or_a_step_names_the_layers_with_experts() {
    let dense = |key: &str, value: Value| {
        let mixture = read(|text| text[key] = value).unwrap().mixture.unwrap();
        (mixture.dense_layers, mixture.dense_ffn)
    };
    let every_second = dense("interleave_moe_layer_step", json!(2));
    assert_eq!(every_second, (vec![0, 2, 4, 6], 50));
    let named = dense("moe_layers", json!([0, 1, 2, 3, 4, 6, 7]));
    assert_eq!(named, (vec![5], 50));
}

#[test]
fn what_is_no_chunk_is_refused() {
    for (key, value) in [
        ("attention_chunk_size", Value::Null),
        ("attention_chunk_size", json!(0)),
        ("floor_scale", json!(0)),
        ("interleave_moe_layer_step", json!(0)),
        ("layer_types", vec!["sliding_attention"; 8].into()),
    ] {
        let error = read(|text| text[key] = value).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(key), "{message}");
    }
    let full = read(|text| text["layer_types"] = vec!["full_attention"; 8].into()).unwrap();
    assert_eq!(full.reach(0), Reach::All);
    assert!(full.rotates(0));
}
