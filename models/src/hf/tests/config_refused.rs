//! One test for each kind of invalid text file of a folder.

use super::*;

/// The error for a folder of `family` whose configuration was changed.
fn refused(family: &str, change: impl FnOnce(&mut Value)) -> Error {
    let mut folder = Folder::new(family);
    change(&mut folder.config);
    folder.refused()
}

#[test]
fn a_folder_without_a_configuration() {
    let folder = Folder::new("llama");
    folder.write_tensors("model.safetensors", |_| true);
    let error = crate::open(folder.path()).err().unwrap();
    assert_refused!(
        error,
        NotACheckpoint,
        folder.path().to_str().unwrap(),
        "config.json"
    );
}

#[test]
fn a_path_that_does_not_exist() {
    let folder = Folder::new("llama");
    assert_refused!(
        crate::open(&folder.file("nowhere")).err().unwrap(),
        Io,
        "nowhere",
        "open"
    );
}

#[test]
fn a_file_of_another_kind() {
    let folder = Folder::new("llama");
    std::fs::write(folder.file("notes.txt"), "hello").unwrap();
    assert_refused!(
        crate::open(&folder.file("notes.txt")).err().unwrap(),
        NotACheckpoint,
        "notes.txt",
        "hell"
    );
}

#[test]
fn a_folder_without_weights() {
    let folder = Folder::new("llama");
    folder.write_texts();
    assert_refused!(
        crate::open(folder.path()).err().unwrap(),
        MissingFile,
        "model.safetensors",
        ".bin"
    );
}

#[test]
fn a_folder_without_a_tokenizer() {
    let mut folder = Folder::new("llama");
    folder.texts.clear();
    assert_refused!(folder.refused(), MissingFile, "tokenizer.json", "tokenizer");
}

#[test]
fn a_configuration_that_is_not_json() {
    let folder = Folder::new("llama");
    folder.write();
    for (text, why) in [
        ("{\"model_type\": ", "line 1"),
        ("[]", "object"),
        ("", "line 1"),
    ] {
        std::fs::write(folder.file("config.json"), text).unwrap();
        assert_refused!(
            crate::open(folder.path()).err().unwrap(),
            Json,
            "config.json",
            why
        );
    }
}

#[test]
fn a_configuration_that_is_not_text() {
    let folder = Folder::new("llama");
    folder.write();
    std::fs::write(folder.file("config.json"), b"{\"a\xff\": 1}").unwrap();
    assert_refused!(
        crate::open(folder.path()).err().unwrap(),
        NotUtf8,
        "config.json",
        "byte 3"
    );
}

#[test]
fn a_configuration_of_absurd_size() {
    let folder = Folder::new("llama");
    folder.write();
    let file = std::fs::File::create(folder.file("config.json")).unwrap();
    file.set_len(MAX_CONFIG + 1).unwrap();
    assert_refused!(
        crate::open(folder.path()).err().unwrap(),
        TooLarge,
        "config.json",
        "bytes"
    );
}

#[test]
fn a_required_key_that_is_absent_or_null() {
    let required = [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
    ];
    for key in required {
        assert_refused!(
            refused("llama", |c| remove(c, key)),
            MissingKey,
            "config.json",
            key
        );
        assert_refused!(
            refused("llama", |c| c[key] = Value::Null),
            MissingKey,
            "config.json",
            key
        );
    }
    for (family, key) in [("mistral", "num_key_value_heads"), ("qwen3", "head_dim")] {
        assert_refused!(
            refused(family, |c| remove(c, key)),
            MissingKey,
            "config.json",
            key
        );
    }
    assert_refused!(
        refused("llama", |c| c["hidden_act"] = "fatrelu".into()),
        MissingKey,
        "config.json",
        "hidden_act_param"
    );
}

#[test]
fn a_key_of_the_wrong_type_or_out_of_range() {
    let cases = [
        ("hidden_size", json!("24")),
        ("hidden_size", json!(24.5)),
        ("hidden_size", json!(-24)),
        ("hidden_size", json!(1u64 << 40)),
        ("num_hidden_layers", json!(4_000_000_000u32)),
        ("num_attention_heads", json!(0)),
        ("rms_norm_eps", json!("small")),
        ("rms_norm_eps", json!(1e300)),
        ("rope_theta", json!([1])),
        ("tie_word_embeddings", json!("no")),
        ("model_type", json!(3)),
        ("eos_token_id", json!(["a"])),
        ("rope_scaling", json!("linear")),
        ("rope_parameters", json!([])),
    ];
    for (key, value) in cases {
        let error = if key == "num_attention_heads" {
            refused("llama", |c| {
                remove(c, "head_dim");
                c[key] = value;
            })
        } else {
            refused("llama", |c| c[key] = value)
        };
        assert_refused!(error, BadKey, "config.json", key);
    }
}

#[test]
fn fields_that_do_not_fit_together() {
    let cases = [
        ("hidden_size", json!(0), "d_model"),
        ("num_key_value_heads", json!(3), "divisor"),
        ("num_key_value_heads", json!(0), "kv_heads"),
        ("head_dim", json!(7), "even"),
        ("head_dim", json!(1 << 20), "head_dim"),
        ("vocab_size", json!(u32::MAX), "vocab"),
        ("intermediate_size", json!(u32::MAX), "ffn"),
        ("num_hidden_layers", json!(0), "layers"),
        ("max_position_embeddings", json!(0), "max_context"),
        ("eos_token_id", json!(11), "vocabulary"),
        ("bos_token_id", json!(11), "vocabulary"),
        ("rms_norm_eps", json!(0.0), "rms_eps"),
        ("rope_theta", json!(0.0), "theta"),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 0.0}),
            "factors",
        ),
        (
            "rope_scaling",
            json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 5.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8}),
            "low_freq_factor",
        ),
    ];
    for (key, value, culprit) in cases {
        assert_refused!(
            refused("llama", |c| c[key] = value),
            BadKey,
            "config.json",
            culprit
        );
    }
    let negative = refused("llama", |c| {
        c["hidden_act"] = "fatrelu".into();
        c["hidden_act_param"] = json!(-1.0);
    });
    assert_refused!(negative, BadKey, "config.json", "fatrelu");
    let undivided = refused("llama", |c| {
        remove(c, "head_dim");
        c["num_attention_heads"] = 5.into();
    });
    assert_refused!(undivided, BadKey, "config.json", "num_attention_heads");
}

#[test]
fn windows_that_contradict_each_other() {
    let windows = |types: Value, used: bool| {
        refused("qwen2", |c| {
            c["layer_types"] = types;
            c["use_sliding_window"] = used.into();
            c["sliding_window"] = 8.into();
        })
    };
    assert_refused!(
        windows(json!(["full_attention"]), true),
        BadKey,
        "config.json",
        "layer_types"
    );
    assert_refused!(
        windows(json!(["full_attention", "chunked"]), true),
        BadKey,
        "config.json",
        "layer_types"
    );
    assert_refused!(
        windows(json!(["full_attention", "sliding_attention"]), false),
        BadKey,
        "config.json",
        "layer_types"
    );
    assert_refused!(
        windows(Value::Null, true),
        MissingKey,
        "config.json",
        "max_window_layers"
    );
    assert_refused!(
        refused("mistral", |c| c["sliding_window"] = 0.into()),
        BadKey,
        "config.json",
        "sliding_window"
    );
}

/// Regression: windows were the same in every layer, ignoring `layer_types`.
#[test]
fn layers_that_name_windows_nobody_has() {
    for (family, window, kinds) in [
        ("mistral", json!(8), json!(["sliding_attention"])),
        (
            "mistral",
            json!(8),
            json!(["full_attention", "chunked_attention"]),
        ),
        (
            "mistral",
            Value::Null,
            json!(["full_attention", "sliding_attention"]),
        ),
        (
            "llama",
            json!(8),
            json!(["full_attention", "sliding_attention"]),
        ),
    ] {
        let error = refused(family, |c| {
            c["sliding_window"] = window;
            c["layer_types"] = kinds;
        });
        assert_refused!(error, BadKey, "config.json", "layer_types");
    }
    let unused = refused("mistral", |c| {
        c["sliding_window"] = 8.into();
        c["use_sliding_window"] = false.into();
    });
    assert_refused!(unused, BadKey, "config.json", "use_sliding_window");
    let from = refused("mistral", |c| {
        c["sliding_window"] = 8.into();
        c["max_window_layers"] = 1.into();
    });
    assert_refused!(from, Unsupported, "config.json", "max_window_layers");
}

#[test]
fn an_unknown_family_names_the_known_ones() {
    assert_refused!(
        refused("llama", |c| c["model_type"] = "mamba".into()),
        UnknownFamily,
        "config.json",
        "qwen3"
    );
}

#[test]
fn an_unknown_activation_is_never_guessed() {
    for act in ["gelu_fast", "ReLU", "squared_relu", ""] {
        assert_refused!(
            refused("llama", |c| c["hidden_act"] = act.into()),
            UnknownActivation,
            "config.json",
            "fatrelu"
        );
    }
}

#[test]
fn features_that_would_change_the_output() {
    let cases = [
        (
            "quantization_config",
            json!({"quant_method": "bitsandbytes"}),
        ),
        ("rope_scaling", json!({"type": "su-like", "factor": 2.0})),
        (
            "rope_scaling",
            json!({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}),
        ),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_type": "default"}}),
        ),
        ("partial_rotary_factor", json!(0.5)),
        ("attn_logit_softcapping", json!(50.0)),
        ("is_causal", json!(false)),
        ("no_rope_layers", json!([1, 0])),
        ("residual_multiplier", json!(0.22)),
        ("num_local_experts", json!(8)),
        ("position_embedding_type", json!("alibi")),
        ("use_qk_norm", json!(true)),
    ];
    let biased = refused("qwen2", |c| c["mlp_bias"] = true.into());
    assert_refused!(biased, Unsupported, "config.json", "mlp_bias");
    for (key, value) in cases {
        assert_refused!(
            refused("llama", |c| c[key] = value),
            Unsupported,
            "config.json",
            key
        );
    }
    let mut folder = Folder::new("llama");
    for (key, value) in [
        ("attn_logit_softcapping", Value::Null),
        ("is_causal", json!(true)),
        ("no_rope_layers", json!([])),
        ("residual_multiplier", json!(1)),
        ("num_local_experts", json!(1)),
        ("position_embedding_type", json!("rope")),
        ("use_qk_norm", json!(false)),
        ("mlp_bias", json!(false)),
        ("_name_or_path", json!("anything else")),
    ] {
        folder.config[key] = value;
    }
    folder.open().expect("keys that change nothing");
    for (family, key, value) in [
        ("llama", "hidden_activation", json!("gelu")),
        ("llama", "hidden_act_param", json!(0.01)),
    ] {
        assert_refused!(
            refused(family, |c| c[key] = value),
            BadKey,
            "config.json",
            key
        );
    }
    assert_refused!(
        refused("mistral", |c| c["attention_bias"] = true.into()),
        Unsupported,
        "config.json",
        "attention_bias"
    );
    assert_refused!(
        refused("bamboo", |c| c["hidden_act"] = "silu".into()),
        Unsupported,
        "config.json",
        "hidden_act"
    );
}

#[test]
fn two_forms_of_rotary_scaling_that_differ() {
    let error = refused("llama", |c| {
        c["rope_scaling"] = json!({"type": "linear", "factor": 2.0});
        c["rope_parameters"] = json!({"rope_type": "linear", "factor": 3.0});
    });
    assert_refused!(error, BadKey, "config.json", "rope_scaling");
}

#[test]
fn other_texts_that_lie() {
    let refused = |name, text: Value| {
        let mut folder = Folder::new("llama");
        folder.texts.insert(name, text.to_string());
        folder.refused()
    };
    let generation = "generation_config.json";
    for (text, key) in [
        (json!({"temperature": -1.0}), "temperature"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"min_p": -0.5}), "min_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
    ] {
        assert_refused!(refused(generation, text), BadKey, generation, key);
    }
    assert_refused!(
        refused(generation, json!({"eos_token_id": 99})),
        BadKey,
        "config.json",
        "99"
    );
    let tokenizer = "tokenizer_config.json";
    for (text, key) in [
        (json!({"chat_template": []}), "chat_template"),
        (json!({"bos_token": 5}), "bos_token"),
    ] {
        assert_refused!(refused(tokenizer, text), BadKey, tokenizer, key);
    }
    assert_refused!(
        refused("tokenizer.json", json!({"added_tokens": 5})),
        Json,
        "tokenizer.json",
        "sequence"
    );
}
