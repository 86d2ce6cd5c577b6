//! Folders of mixtures of experts.

use std::collections::BTreeMap;

use super::*;
use crate::config::{Mixture, Scoring};

/// Stores the experts of every layer in two tensors, as in transformers 5.
fn stack(folder: &mut Folder) {
    for layer in 0..LAYERS {
        let prefix = format!("model.layers.{layer}.");
        let family = folder.config["model_type"].as_str();
        let mixtral = family.is_some_and(|family| family.ends_with("mixtral"));
        let (block, parts) = if mixtral {
            ("block_sparse_moe", ["w1", "w3", "w2"])
        } else {
            ("mlp", ["gate_proj", "up_proj", "down_proj"])
        };
        let [mut rows, mut downs] = [Vec::new(), Vec::new()];
        for expert in 0..EXPERTS {
            let mut take = |part: &str, to: &mut Vec<u8>| {
                let name = format!("{prefix}{block}.experts.{expert}.{part}.weight");
                to.extend(folder.tensors.remove(&name).unwrap().bytes);
            };
            take(parts[0], &mut rows);
            take(parts[1], &mut rows);
            take(parts[2], &mut downs);
        }
        for (name, shape, bytes) in [
            ("gate_up_proj", [EXPERTS, 2 * FFN, D], rows),
            ("down_proj", [EXPERTS, D, FFN], downs),
        ] {
            let tensor = Tensor {
                dtype: Dtype::BF16,
                shape: shape.to_vec(),
                bytes,
            };
            let name = format!("{prefix}mlp.experts.{name}");
            folder.tensors.insert(name, tensor);
        }
        let router = format!("{prefix}{block}.gate.weight");
        let router = folder.tensors.remove(&router).unwrap();
        let name = format!("{prefix}mlp.gate.weight");
        folder.tensors.insert(name, router);
    }
}

#[test]
fn stacked_experts_read_like_single_ones() {
    for family in FAMILIES_OF_EXPERTS {
        let mut folder = Folder::new(family);
        let single = folder.open().unwrap();
        let expected: Vec<_> = (single.tensors().iter())
            .map(|info| (info.id, read_all(single.as_ref(), info.id)))
            .collect();
        stack(&mut folder);
        let stacked = folder.open().unwrap();
        assert_eq!(stacked.tensors().len(), expected.len());
        for (id, values) in expected {
            assert_eq!(read_all(stacked.as_ref(), id), values, "{family}: {id}");
        }
    }
}

#[test]
fn the_keys_of_each_family() {
    let plain = Mixture {
        chosen: 2,
        ..Mixture::default()
    };
    for (family, expected) in [
        (
            "mixtral",
            Mixture {
                renormalise: true,
                ..plain.clone()
            },
        ),
        (
            "turbosparsemixtral",
            Mixture {
                renormalise: true,
                ..plain.clone()
            },
        ),
        (
            "smallthinker",
            Mixture {
                renormalise: true,
                scoring: Scoring::Sigmoid,
                early_router: true,
                ..plain.clone()
            },
        ),
        (
            "qwen2_moe",
            Mixture {
                shared: SHARED as u32,
                ..plain.clone()
            },
        ),
        ("qwen3_moe", plain.clone()),
        ("olmoe", plain.clone()),
    ] {
        let config = config_of(family, |_| ());
        assert_eq!((config.experts, config.ffn), (EXPERTS as u32, FFN as u32));
        assert_eq!(config.mixture, Some(expected), "{family}");
        assert_eq!(config.qk_norm_whole, family == "olmoe");
    }
    assert!(config_of("turbosparsemixtral", |_| ()).ffn_kind.relu_on_up);
    let renormalised = config_of("qwen3_moe", |c| c["norm_topk_prob"] = true.into());
    assert!(renormalised.mixture.unwrap().renormalise);
    let clipped = config_of("olmoe", |c| c["clip_qkv"] = 0.5.into());
    assert_eq!(clipped.clip_qkv, Some(0.5));
}

#[test]
fn layers_may_be_dense() {
    let config = |step: u32, named: Value| {
        let mut folder = Folder::new("qwen3_moe");
        folder.config["decoder_sparse_step"] = step.into();
        folder.config["mlp_only_layers"] = named;
        folder.config["intermediate_size"] = 5.into();
        folder
            .tensors
            .retain(|name, _| !name.contains("layers.0.mlp"));
        for (part, shape) in [("gate", [5, D]), ("up", [5, D]), ("down", [D, 5])] {
            folder.add(&format!("model.layers.0.mlp.{part}_proj.weight"), &shape);
        }
        folder.open().unwrap().config().clone()
    };
    for config in [config(2, Value::Null), config(1, json!([0]))] {
        let mixture = config.mixture.clone().unwrap();
        assert_eq!((mixture.dense_layers, mixture.dense_ffn), (vec![0], 5));
        let banks: Vec<_> = (config.banks())
            .map(|b| (b.layer, b.expert, b.neurons as usize))
            .collect();
        let mut expected = vec![(0, 0, 5)];
        expected.extend((0..EXPERTS as u32).map(|e| (1, e, FFN)));
        assert_eq!(banks, expected);
    }
}

#[test]
fn what_would_change_the_output_is_refused_by_name() {
    let refused = |family: &str, key: &str, value: Value| {
        let mut folder = Folder::new(family);
        folder.config[key] = value;
        folder.refused()
    };
    for family in FAMILIES_OF_EXPERTS {
        for (key, value) in [
            ("n_routed_experts", json!(8)),
            ("routed_scaling_factor", json!(2.5)),
            ("scoring_func", json!("sigmoid")),
            ("n_group", json!(4)),
        ] {
            let error = refused(family, key, value);
            assert_refused!(error, Unsupported, "config.json", key);
        }
        let error = refused(family, "num_experts_per_tok", 4.into());
        assert_refused!(error, BadKey, "config.json", "chosen experts");
        let error = refused(family, "num_local_experts", 1.into());
        assert_refused!(error, BadKey, "config.json", "experts");
        let error = refused(family, "num_experts", 7.into());
        assert_refused!(error, BadKey, "config.json", "num_local_experts");
    }
    for family in ["qwen2_moe", "qwen3_moe"] {
        let error = refused(family, "use_sliding_window", true.into());
        assert_refused!(error, Unsupported, "config.json", "use_sliding_window");
    }
    let error = refused("qwen3_moe", "clip_qkv", 1.0.into());
    assert_refused!(error, Unsupported, "config.json", "clip_qkv");
    let error = refused("llama", "num_local_experts", 8.into());
    assert_refused!(error, Unsupported, "config.json", "num_local_experts");
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let mut folder = Folder::new("mixtral");
    let name = "model.layers.1.block_sparse_moe.experts.2.w3.weight";
    let tensor = folder.tensors.remove(name).unwrap();
    assert_refused!(folder.refused(), MissingTensor, "", name);
    let beyond = "model.layers.1.block_sparse_moe.experts.3.w3.weight";
    folder.tensors.insert(name.into(), tensor.clone());
    folder.tensors.insert(beyond.into(), tensor);
    assert_refused!(
        folder.refused(),
        UnexpectedTensor,
        "model.safetensors",
        beyond
    );

    let mut folder = Folder::new("qwen3_moe");
    stack(&mut folder);
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    folder.add(name, &[EXPERTS, D, 2 * FFN]);
    assert_refused!(folder.refused(), WrongShape, "model.safetensors", name);
    let mut folder = Folder::new("qwen3_moe");
    folder.add(name, &[EXPERTS, 2 * FFN, D]);
    assert_refused!(folder.refused(), Duplicate, "model.safetensors", "layers.0");
}

#[test]
fn layers_of_smallthinker_differ_by_its_lists() {
    let config = config_of("smallthinker", |c| {
        c["rope_layout"] = json!([0, 1]);
        c["sliding_window_layout"] = json!([0, 1]);
        c["sliding_window_size"] = 9.into();
        c["moe_layer_layout"] = json!([1, 1]);
        c["moe_primary_router_apply_softmax"] = true.into();
    });
    assert_eq!(
        (config.form.nope_layers, config.window),
        (vec![0], vec![0, 9])
    );
    assert_eq!(config.mixture.unwrap().scoring, Scoring::Softmax);
    assert_eq!(config.ffn_kind.activation, Activation::Relu);

    let refused = |key: &str, value: Value| {
        let mut folder = Folder::new("smallthinker");
        folder.config[key] = value;
        folder.refused()
    };
    for (key, value) in [
        ("rope_layout", json!([0])),
        ("rope_layout", json!([0, 2])),
        ("sliding_window_layout", json!("all")),
    ] {
        assert_refused!(refused(key, value), BadKey, "config.json", key);
    }
    for (key, value) in [
        ("moe_layer_layout", json!([1, 0])),
        ("moe_enable_early_router", json!(false)),
        ("moe_enable_secondary_experts", json!(true)),
        ("moe_num_secondary_experts", json!(4)),
        ("use_qk_norm", json!(true)),
        ("hidden_act", json!("silu")),
    ] {
        assert_refused!(refused(key, value), Unsupported, "config.json", key);
    }
    let no_size = refused("sliding_window_layout", json!([1, 0]));
    assert_refused!(no_size, MissingKey, "config.json", "sliding_window_size");
    for key in ["rope_layout", "moe_num_primary_experts"] {
        let mut folder = Folder::new("mixtral");
        folder.config[key] = json!([2, 2]);
        assert_refused!(folder.refused(), Unsupported, "config.json", key);
    }
}

/// The names of the predictors of TurboSparse-Mixtral are not published.
#[test]
fn predictors_of_experts_are_refused_by_name() {
    for name in [
        "model.layers.0.block_sparse_moe.experts.0.predictor.fc1.weight",
        "model.layers.0.mlp.predictor.fc1.weight",
    ] {
        let mut folder = Folder::new("turbosparsemixtral");
        folder.add(name, &[4, D]);
        assert_refused!(
            folder.refused(),
            UnexpectedTensor,
            "model.safetensors",
            name
        );
    }
    let mut folder = Folder::new("turbosparsemixtral");
    folder.config["hidden_act"] = "silu".into();
    assert_refused!(folder.refused(), Unsupported, "config.json", "hidden_act");
}

/// A copy of the reference folder of gpt-oss, whose tensors `change` may change.
fn gpt_oss(change: impl FnOnce(&mut BTreeMap<String, Tensor>)) -> Result<ModelConfig, Error> {
    reference("gpt_oss", change)
}

/// The same of any reference folder.
fn reference(
    name: &str,
    change: impl FnOnce(&mut BTreeMap<String, Tensor>),
) -> Result<ModelConfig, Error> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/models");
    let folder = models.join(name);
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let stored = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| {
        let view = stored.tensor(name).unwrap();
        Tensor {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        }
    };
    let mut copy = Folder::new("llama");
    let names = stored.names().into_iter().map(|name| name.to_owned());
    copy.tensors = names.map(|name| (name.clone(), tensor(&name))).collect();
    change(&mut copy.tensors);
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    copy.config = serde_json::from_str(&text).unwrap();
    copy.config["bos_token_id"] = 1.into();
    copy.config["eos_token_id"] = 2.into();
    Ok(copy.open()?.config().clone())
}

/// GLM-4.5 has a layer past the last one that predicts further tokens; others must not.
#[test]
fn layers_that_guess_tokens_are_left_out() {
    const NAME: &str = "model.layers.3.eh_proj.weight";
    let open = |family| {
        reference(family, |tensors| {
            let tensor = Tensor::new(NAME, &[2, 2], ::safetensors::Dtype::F32);
            tensors.insert(NAME.into(), tensor);
        })
    };
    assert_eq!(open("glm4_moe").unwrap().layers, 3);
    let error = open("dots1").unwrap_err();
    assert_refused!(error, UnexpectedTensor, "model.safetensors", NAME);
}

#[test]
fn blocks_and_their_scales_belong_together() {
    const BLOCKS: &str = "model.layers.1.mlp.experts.gate_up_proj_blocks";
    const SCALES: &str = "model.layers.1.mlp.experts.gate_up_proj_scales";
    let config = gpt_oss(|_| ()).unwrap();
    assert_eq!(config.window, [7, 0, 7]);
    assert!(config.form.sinks && config.mixture.as_ref().is_some_and(|m| m.router_bias));
    assert!(matches!(
        config.rope.scaling,
        RopeScaling::Yarn {
            truncate: false,
            ..
        }
    ));
    let limit = Activation::ClampedSwiglu {
        limit: 7.0,
        alpha: 1.702,
    };
    assert_eq!(config.ffn_kind.activation, limit);

    let error = gpt_oss(|t| _ = t.remove(SCALES)).unwrap_err();
    assert_refused!(error, MissingTensor, "model.safetensors", SCALES);
    let error = gpt_oss(|t| _ = t.remove(BLOCKS)).unwrap_err();
    assert_refused!(error, UnexpectedTensor, "model.safetensors", SCALES);
    let error = gpt_oss(|t| t.get_mut(SCALES).unwrap().shape.rotate_left(1)).unwrap_err();
    assert_refused!(error, WrongShape, "model.safetensors", SCALES);
    let error = gpt_oss(|t| t.get_mut(BLOCKS).unwrap().shape.rotate_left(1)).unwrap_err();
    assert_refused!(error, WrongShape, "model.safetensors", "gate_up_proj");
    let error = gpt_oss(|t| {
        let sinks = "model.layers.0.self_attn.sinks";
        _ = t.remove(sinks);
    })
    .unwrap_err();
    assert_refused!(error, MissingTensor, "", "sinks");
}

/// One scale of a matrix in eight-bit floats may be a scalar or a vector, and ends in `_scale` in some releases. Scales
/// of activations are left out.
#[test]
fn a_matrix_in_eight_bits_has_one_scale() {
    const MATRIX: &str = "language_model.model.layers.1.mlp.up_proj.weight";
    let scale = format!("{MATRIX}_scale_inv");
    let of = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
        let config = reference("ministral3_fp8", change)?;
        // That of a temporary folder.
        let name = String::new();
        Ok::<_, Error>(ModelConfig { name, ..config })
    };
    let plain = of(&|_| ()).unwrap();
    for shape in [vec![1], vec![1, 1]] {
        let changed = of(&|t| t.get_mut(&scale).unwrap().shape = shape.clone()).unwrap();
        assert_eq!(changed, plain);
    }
    let renamed = of(&|t| {
        let of_weight = t.remove(&scale).unwrap();
        t.insert(format!("{MATRIX}_scale"), of_weight);
        let name = MATRIX.replace("weight", "activation_scale");
        let of_input = t.remove(&name).unwrap();
        t.insert(MATRIX.replace("weight", "input_scale"), of_input);
    });
    assert_eq!(renamed.unwrap(), plain);

    let error = of(&|t| _ = t.remove(&scale)).unwrap_err();
    assert_refused!(error, MissingTensor, "model.safetensors", &scale);
    let error = of(&|t| _ = t.remove(MATRIX)).unwrap_err();
    assert_refused!(error, UnexpectedTensor, "model.safetensors", &scale);
    let error = of(&|t| {
        let scale = t.get_mut(&scale).unwrap();
        (scale.shape, scale.bytes) = (vec![2], vec![0; 4]);
    });
    assert_refused!(error.unwrap_err(), WrongShape, "model.safetensors", &scale);
}

#[test]
fn yarn_has_the_defaults_of_transformers() {
    let scaling = |more: Value| {
        let config = config_of("qwen3_moe", |c| {
            let object = json!({"rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 32});
            c["rope_scaling"] = object;
            for (key, value) in more.as_object().unwrap() {
                c["rope_scaling"][key] = value.clone();
            }
        });
        config.rope.scaling
    };
    let expected = |attention_factor: f32, beta_fast: f32, truncate: bool| RopeScaling::Yarn {
        factor: 4.0,
        beta_fast,
        beta_slow: 1.0,
        original_context: 32,
        attention_factor,
        truncate,
    };
    let usual = (0.1 * 4f64.ln() + 1.0) as f32;
    assert_eq!(scaling(json!({})), expected(usual, 32.0, true));
    let given = json!({"attention_factor": 1.5, "beta_fast": 16, "truncate": false});
    assert_eq!(scaling(given), expected(1.5, 16.0, false));
    let equal = json!({"mscale": 1.0, "mscale_all_dim": 1.0});
    assert_eq!(scaling(equal), expected(1.0, 32.0, true));
    for key in ["factor", "original_max_position_embeddings"] {
        let mut folder = Folder::new("llama");
        folder.config["rope_scaling"] = json!({"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32});
        folder.config["rope_scaling"]
            .as_object_mut()
            .unwrap()
            .remove(key);
        assert_refused!(folder.refused(), MissingKey, "config.json", key);
    }
}
