//! Keys and names of dense families that differ from Llama in few points.

use std::path::Path;

use super::super::text_part::text_name;
use super::*;
use crate::config::Parallel;

/// The configuration of a family with further keys.
fn read(family: &str, more: Value) -> Result<ModelConfig, Error> {
    let mut value = json!({
        "model_type": family, "vocab_size": 320, "hidden_size": 36, "num_hidden_layers": 5,
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "hidden_act": "gelu",
        "intermediate_size": 50, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
    });
    for (key, more) in more.as_object().unwrap() {
        value[key] = more.clone();
    }
    config::model_config(Path::new("config.json"), &value, "tiny".into())
}

#[test]
fn gelu_of_gemma_is_its_approximation() {
    let act = |family| read(family, json!({})).unwrap().ffn_kind.activation;
    assert_eq!(act("gemma"), Activation::GeluTanh);
    assert_eq!(act("llama"), Activation::Gelu);
    let both = |name: &str| read("gemma", json!({"hidden_activation": name}));
    both("gelu_pytorch_tanh").unwrap();
    let refused = both("relu").unwrap_err();
    assert_refused!(refused, BadKey, "config.json", "hidden_activation");
}

/// transformers 5 gives layers with a window the usual base, earlier releases the given one.
#[test]
fn one_base_of_olmo3_is_that_of_all_layers() {
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64});
    let keys = |theta: f64| json!({"rope_theta": theta, "rope_scaling": yarn});
    let config = read("olmo3", keys(500_000.0)).unwrap();
    assert_eq!(config.window, [4096, 4096, 4096, 0, 4096]);
    let [full, local] = [3, 0].map(|layer| config.rope_of(layer));
    assert!(matches!(full.scaling, RopeScaling::Yarn { .. }));
    assert_eq!(local.scaling, RopeScaling::None);
    assert_eq!([full.theta, local.theta], [500_000.0; 2]);
    let refused = read("olmo3", keys(10_000.0)).unwrap_err();
    assert_refused!(refused, Unsupported, "config.json", "rope_theta");
    let kind = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
    let both = json!({"full_attention": kind(7e5), "sliding_attention": kind(3e4)});
    let config = read("olmo3", json!({"rope_parameters": both})).unwrap();
    let thetas = [3, 0].map(|layer| config.rope_of(layer).theta);
    assert_eq!(thetas, [7e5, 3e4]);
}

#[test]
fn a_key_tells_whether_attention_and_ffn_are_parallel() {
    let parallel = |family, more| read(family, more).unwrap().form.parallel;
    let key = |on: bool| json!({"use_parallel_residual": on});
    assert_eq!(parallel("gpt_neox", json!({})), Parallel::TwoNorms);
    assert_eq!(parallel("gpt_neox", key(false)), Parallel::No);
    assert_eq!(parallel("stablelm", json!({})), Parallel::No);
    assert_eq!(parallel("stablelm", key(true)), Parallel::OneNorm);
}

#[test]
fn gpt2_has_its_own_keys_and_a_prefix_that_releases_leave_out() {
    let keys = json!({
        "model_type": "gpt2", "vocab_size": 320, "n_embd": 36, "n_layer": 2, "n_head": 3,
        "n_positions": 509, "layer_norm_epsilon": 1e-5,
    });
    let of = |more: Value| {
        let mut keys = keys.clone();
        keys.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        config::model_config(Path::new("config.json"), &keys, "tiny".into())
    };
    let config = of(json!({})).unwrap();
    assert_eq!(
        (config.ffn, config.head_dim, config.position_rows()),
        (144, 12, 509)
    );
    assert_eq!(config.ffn_kind.activation, Activation::GeluTanh);
    assert!(config.qkv_bias && config.o_bias && config.form.ffn_bias && config.tied_head);
    for (key, value) in [
        ("scale_attn_weights", false),
        ("scale_attn_by_inverse_layer_idx", true),
        ("add_cross_attention", true),
    ] {
        let refused = of(json!({key: value})).unwrap_err();
        assert_refused!(refused, Unsupported, "config.json", key);
    }
    for name in ["h.1.ln_1.weight", "transformer.h.1.ln_1.weight"] {
        assert_eq!(
            text_name("gpt2", name).unwrap(),
            "transformer.h.1.ln_1.weight"
        );
    }
    assert_eq!(
        text_name("gpt2", "lm_head.weight").unwrap(),
        "lm_head.weight"
    );
}

#[test]
fn norms_of_heads_are_read_if_a_key_is_set() {
    for (family, key) in [("cohere", "use_qk_norm"), ("stablelm", "qk_layernorm")] {
        for on in [true, false] {
            let config = read(family, json!({key: on})).unwrap();
            assert_eq!([config.qk_norm, config.form.qk_layer_norms], [on; 2]);
        }
    }
}
