//! Tests of the folder reader on valid folders. Invalid ones are in the submodules.

/// Asserts the variant, and that the message names the file and the culprit.
macro_rules! assert_refused {
    ($error:expr, $variant:ident, $file:expr, $culprit:expr) => {{
        let error = $error;
        assert!(matches!(error, Error::$variant { .. }), "{error:?}");
        let message = error.to_string();
        assert!(
            message.contains($file) && message.contains($culprit),
            "{message}"
        );
    }};
}

mod config_refused;
mod dense;
mod experts;
mod llama4;
mod quantized;
mod tensors_refused;
mod write;

use ::safetensors::Dtype;
use serde_json::{Value, json};

use super::*;
use crate::config::{Activation, ModelConfig, RopeScaling};
use crate::names::TensorId;
use crate::testing::*;

fn config_of(family: &str, change: impl FnOnce(&mut Value)) -> ModelConfig {
    let mut folder = Folder::new(family);
    change(&mut folder.config);
    folder.open().unwrap().config().clone()
}

fn remove(config: &mut Value, key: &str) {
    config.as_object_mut().unwrap().remove(key).unwrap();
}

#[test]
fn every_tensor_of_every_family_reads_as_written() {
    let others = [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "bamboo",
        "smallthinker",
    ];
    for family in others.into_iter().chain(FAMILIES_OF_EXPERTS) {
        let folder = Folder::new(family);
        let checkpoint = folder.open().unwrap();
        assert_eq!(checkpoint.tensors().len(), folder.tensors.len(), "{family}");
        for info in checkpoint.tensors() {
            let stored = &folder.tensors[&info.source_name];
            let name = &info.source_name;
            for (index, value) in read_all(checkpoint.as_ref(), info.id)
                .into_iter()
                .enumerate()
            {
                let (row, col) = (index / info.cols, index % info.cols);
                let at = if info.id.role == Role::Down {
                    col * info.rows + row
                } else {
                    index
                };
                assert_eq!(value, weight(name, at), "{family} {name} {row} {col}");
            }
            assert_eq!(info.source_dtype, format!("{:?}", stored.dtype));
        }
    }
}

#[test]
fn rows_are_read_in_any_order_and_number() {
    let mut folder = Folder::new("llama");
    let name = "model.layers.1.mlp.down_proj.weight";
    folder
        .tensors
        .insert(name.into(), Tensor::new(name, &[D, FFN], Dtype::F16));
    let checkpoint = folder.open().unwrap();
    for layer in [1, 0, 1] {
        let id = TensorId::layer(Role::Down, layer);
        let all = read_all(checkpoint.as_ref(), id);
        for first in [FFN - 1, 3, 0] {
            for count in [0, 1, FFN - first] {
                let mut out = vec![0.0; count * D];
                checkpoint.read_rows(id, first, count, &mut out).unwrap();
                assert_eq!(out, all[first * D..][..count * D]);
            }
        }
    }
}

#[test]
fn rows_longer_than_the_read_buffer_come_in_pieces() {
    let mut folder = Folder::new("llama");
    let vocab = 30_000;
    folder.config["vocab_size"] = vocab.into();
    folder.add("model.embed_tokens.weight", &[vocab, D]);
    folder.add("lm_head.weight", &[vocab, D]);
    let checkpoint = folder.open().unwrap();
    let head = read_all(checkpoint.as_ref(), TensorId::global(Role::Head));
    assert_weights("lm_head.weight", &head);
}

#[test]
fn a_sharded_index_reads_like_one_file() {
    let folder = Folder::new("llama");
    let whole: Vec<_> = {
        let checkpoint = folder.open().unwrap();
        checkpoint
            .tensors()
            .iter()
            .map(|info| read_all(checkpoint.as_ref(), info.id))
            .collect()
    };
    std::fs::remove_file(folder.file("model.safetensors")).unwrap();
    let checkpoint = open_sharded(&folder, |shards| shards).unwrap();
    let parts: Vec<_> = checkpoint
        .tensors()
        .iter()
        .map(|info| read_all(checkpoint.as_ref(), info.id))
        .collect();
    assert_eq!(whole, parts);
}

/// Splits the folder into two shards; `edit` may change the index.
fn open_sharded(
    folder: &Folder,
    edit: impl FnOnce(Value) -> Value,
) -> Result<Box<dyn Checkpoint>, Error> {
    folder.write_texts();
    let second = |name: &str| name.contains("layers.1.");
    folder.write_tensors("a.safetensors", |name| !second(name));
    folder.write_tensors("b.safetensors", second);
    let shard = |name: &String| {
        if second(name) {
            "b.safetensors"
        } else {
            "a.safetensors"
        }
    };
    let map: serde_json::Map<_, _> = folder
        .tensors
        .keys()
        .map(|name| (name.clone(), shard(name).into()))
        .collect();
    let index = edit(json!({"metadata": {"total_size": 1}, "weight_map": map}));
    std::fs::write(
        folder.file("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    crate::open(folder.path())
}

#[test]
fn a_single_file_opens_beside_its_configuration() {
    let folder = Folder::new("llama");
    folder.write();
    let whole = crate::open(folder.path()).unwrap();
    let single = crate::open(&folder.file("model.safetensors")).unwrap();
    assert_eq!(whole.tensors(), single.tensors());
    assert_eq!(whole.fingerprint(), single.fingerprint());
}

#[test]
fn fields_follow_the_configuration() {
    let config = config_of("llama", |_| ());
    assert_eq!(
        (config.d_model, config.ffn, config.layers),
        (D as u32, FFN as u32, 2)
    );
    assert_eq!(
        (config.heads, config.kv_heads, config.head_dim, config.vocab),
        (4, 2, 8, 11)
    );
    assert_eq!(
        (config.rms_eps, config.rope.theta, config.rope.dims),
        (1e-5, 1000.0, 8)
    );
    assert_eq!(
        (config.rope.scaling, config.max_context),
        (RopeScaling::None, 64)
    );
    assert_eq!((config.bos, config.eos), (Some(1), vec![2]));
    assert!(
        !config.add_bos
            && !config.qkv_bias
            && !config.o_bias
            && !config.qk_norm
            && !config.tied_head
    );
    assert!(config_of("qwen2", |_| ()).qkv_bias);
    assert!(config_of("qwen3", |_| ()).qk_norm);
    assert!(config_of("bamboo", |_| ()).ffn_kind.relu_on_up);
}

#[test]
fn activations_are_named_exactly() {
    let act = |name: &str| {
        config_of("llama", |c| {
            c["hidden_act"] = name.into();
            if name == "fatrelu" {
                c["hidden_act_param"] = 0.25.into();
            }
        })
        .ffn_kind
        .activation
    };
    assert_eq!(act("relu"), Activation::Relu);
    assert_eq!(act("fatrelu"), Activation::FatRelu { threshold: 0.25 });
    assert_eq!(act("relu2"), Activation::Relu2);
    assert_eq!(act("silu"), Activation::Silu);
    assert_eq!(act("gelu"), Activation::Gelu);
    assert_eq!(act("gelu_pytorch_tanh"), Activation::GeluTanh);
}

#[test]
fn rotary_scaling_reads_from_either_form() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16});
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 16,
    };
    assert_eq!(
        config_of("llama", |c| c["rope_scaling"] = llama3.clone())
            .rope
            .scaling,
        expected
    );
    let modern = config_of("llama", |c| {
        remove(c, "rope_theta");
        c["rope_parameters"] = llama3.clone();
        c["rope_parameters"]["rope_theta"] = 5e5.into();
    });
    assert_eq!((modern.rope.scaling, modern.rope.theta), (expected, 5e5));
    let linear = config_of("llama", |c| {
        c["rope_scaling"] = json!({"type": "linear", "factor": 2.0})
    });
    assert_eq!(linear.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    let default = config_of("llama", |c| {
        c["rope_parameters"] = json!({"rope_type": "default"})
    });
    assert_eq!(default.rope.scaling, RopeScaling::None);
    assert_eq!(
        config_of("llama", |c| remove(c, "rope_theta")).rope.theta,
        10_000.0
    );
}

#[test]
fn windows_follow_each_familys_rule() {
    assert_eq!(
        config_of("mistral", |c| c["sliding_window"] = 8.into()).window,
        [8, 8]
    );
    assert_eq!(
        config_of("mistral", |c| c["sliding_window"] = Value::Null).window,
        [0, 0]
    );
    assert_eq!(
        config_of("llama", |c| c["sliding_window"] = 8.into()).window,
        [0, 0]
    );
    let types = json!(["full_attention", "sliding_attention"]);
    for family in ["mistral", "bamboo"] {
        let config = config_of(family, |c| {
            c["sliding_window"] = 8.into();
            c["layer_types"] = types.clone();
        });
        assert_eq!(config.window, [0, 8], "{family}");
    }
    let qwen = |used: bool, types: Value| {
        config_of("qwen2", |c| {
            c["use_sliding_window"] = used.into();
            c["sliding_window"] = 8.into();
            c["max_window_layers"] = 1.into();
            c["layer_types"] = types;
        })
        .window
    };
    assert_eq!(qwen(false, Value::Null), [0, 0]);
    assert_eq!(qwen(true, Value::Null), [0, 8]);
    assert_eq!(
        qwen(true, json!(["sliding_attention", "full_attention"])),
        [8, 0]
    );
}

#[test]
fn an_attention_bias_brings_four_vectors() {
    let mut folder = Folder::new("llama");
    folder.config["attention_bias"] = true.into();
    for layer in 0..LAYERS {
        for (name, len) in [("q", 32), ("k", 16), ("v", 16), ("o", D)] {
            folder.add(
                &format!("model.layers.{layer}.self_attn.{name}_proj.bias"),
                &[len],
            );
        }
    }
    let checkpoint = folder.open().unwrap();
    assert!(checkpoint.config().qkv_bias && checkpoint.config().o_bias);
    assert_eq!(
        read_all(checkpoint.as_ref(), TensorId::layer(Role::OBias, 1)).len(),
        D
    );
}

#[test]
fn a_tied_head_is_not_read_even_where_it_is_stored() {
    let mut folder = Folder::new("llama");
    folder.config["tie_word_embeddings"] = true.into();
    folder.tensors.remove("lm_head.weight").unwrap();
    folder.open().unwrap();
    let embedding = folder.tensors["model.embed_tokens.weight"].clone();
    folder.tensors.insert("lm_head.weight".into(), embedding);
    let with = folder.open().unwrap();
    assert!(
        with.config().tied_head && with.tensors().iter().all(|info| info.id.role != Role::Head)
    );
}

#[test]
fn predictors_are_kept_with_their_own_rank() {
    let mut folder = Folder::new("bamboo");
    folder.add("model.layers.1.mlp.predictor.fc1.weight", &[6, D]);
    folder.add("model.layers.1.mlp.predictor.fc2.weight", &[FFN, 6]);
    let checkpoint = folder.open().unwrap();
    let last = &checkpoint.tensors()[checkpoint.tensors().len() - 2..];
    assert_eq!(
        (last[0].id, last[0].rows, last[0].cols),
        (TensorId::layer(Role::PredictorFc1, 1), 6, D)
    );
    assert_eq!(
        (last[1].id, last[1].rows, last[1].cols),
        (TensorId::layer(Role::PredictorFc2, 1), FFN, 6)
    );
    folder
        .tensors
        .remove("model.layers.1.mlp.predictor.fc2.weight")
        .unwrap();
    assert!(
        matches!(folder.refused(), Error::MissingTensor { tensor, .. } if tensor.ends_with("fc2.weight"))
    );
}

#[test]
fn rotary_frequencies_are_skipped() {
    let mut folder = Folder::new("llama");
    folder.add("model.layers.0.self_attn.rotary_emb.inv_freq", &[4]);
    folder.open().unwrap();
}

#[test]
fn special_tokens_come_from_all_files() {
    let mut folder = Folder::new("llama");
    folder.config["eos_token_id"] = json!([3, 4]);
    folder.texts.insert(
        "generation_config.json",
        json!({"eos_token_id": [5, 4], "do_sample": true,
        "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125,
        "repetition_penalty": 1.5})
        .to_string(),
    );
    folder.texts.insert(
        "tokenizer_config.json",
        json!({"eos_token": {"content": "</s>"}, "bos_token": "<s>",
        "add_bos_token": true, "chat_template": "plain"})
        .to_string(),
    );
    let checkpoint = folder.open().unwrap();
    assert_eq!(checkpoint.config().eos, [2, 5, 4, 3]);
    assert_eq!(
        (checkpoint.config().bos, checkpoint.config().add_bos),
        (Some(1), false)
    );
    assert_eq!(checkpoint.chat_template(), Some("plain"));
    let expected = crate::SamplingDefaults {
        temperature: Some(0.5),
        top_k: Some(7),
        top_p: Some(0.75),
        min_p: Some(0.125),
        typical_p: None,
        repetition_penalty: Some(1.5),
    };
    assert_eq!(checkpoint.sampling_defaults(), expected);
}

#[test]
fn chat_templates_come_as_text_list_or_file() {
    let mut folder = Folder::new("llama");
    let list = json!({"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]});
    folder
        .texts
        .insert("tokenizer_config.json", list.to_string());
    let opened = folder.open().unwrap();
    assert_eq!(opened.chat_template(), Some("yes"));
    assert_eq!(opened.tool_template(), Some("no"));
    // The files take precedence, as in transformers.
    folder.texts.insert("chat_template.jinja", "file".into());
    let opened = folder.open().unwrap();
    assert_eq!(opened.chat_template(), Some("file"));
    assert_eq!(opened.tool_template(), None);
}

#[test]
fn sampling_parameters_count_only_when_sampling() {
    let mut folder = Folder::new("llama");
    folder.texts.insert(
        "generation_config.json",
        json!({"temperature": 0.5, "min_p": 0.5, "repetition_penalty": 1.25}).to_string(),
    );
    // the penalty also applies to greedy decoding
    let expected = crate::SamplingDefaults {
        repetition_penalty: Some(1.25),
        ..Default::default()
    };
    assert_eq!(folder.open().unwrap().sampling_defaults(), expected);
}

#[test]
fn the_fingerprint_follows_content_not_place() {
    let (one, mut two) = (Folder::new("llama"), Folder::new("llama"));
    let first = one.open().unwrap().fingerprint();
    assert_eq!(first, two.open().unwrap().fingerprint());
    two.tensors.get_mut("model.norm.weight").unwrap().bytes[0] ^= 1;
    assert_ne!(first, two.open().unwrap().fingerprint());
}
