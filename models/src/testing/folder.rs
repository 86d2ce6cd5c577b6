//! Builds Hugging Face folders for tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::error::Error;

pub(crate) const TOKENIZER: &str = r#"{"added_tokens":[{"id":1,"content":"<s>"},{"id":2,"content":"</s>"}],
    "post_processor":null,"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#;

/// One tensor of a test folder.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// The standard weights of `name`.
    pub(crate) fn new(name: &str, shape: &[usize], dtype: Dtype) -> Self {
        let mut bytes = Vec::new();
        for index in 0..shape.iter().product() {
            let value = weight(name, index);
            match dtype {
                Dtype::F16 => bytes.extend(half::f16::from_f32(value).to_le_bytes()),
                Dtype::BF16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
                _ => bytes.extend(value.to_le_bytes()),
            }
        }
        Self {
            dtype,
            shape: shape.to_vec(),
            bytes,
        }
    }
}

/// A Hugging Face folder being built: change it, then open it.
pub(crate) struct Folder {
    dir: TempDir,
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) texts: BTreeMap<&'static str, String>,
}

/// The configuration of a family.
fn config_of(family: &str) -> Value {
    let mut config = json!({
        "model_type": family,
        "hidden_size": D,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    });
    if matches!(family, "bamboo" | "turbosparsemixtral") {
        config["hidden_act"] = "relu".into();
    }
    if FAMILIES_OF_EXPERTS.contains(&family) {
        config["num_experts_per_tok"] = 2.into();
        config["num_local_experts"] = EXPERTS.into();
        config["moe_intermediate_size"] = FFN.into();
        config["shared_expert_intermediate_size"] = SHARED.into();
    }
    if family == "smallthinker" {
        config.as_object_mut().unwrap().remove("hidden_act");
        config["moe_num_primary_experts"] = EXPERTS.into();
        config["moe_num_active_primary_experts"] = 2.into();
        config["moe_ffn_hidden_size"] = FFN.into();
    }
    config
}

impl Folder {
    /// A complete folder of a family.
    pub(crate) fn new(family: &str) -> Self {
        let mut folder = Self {
            dir: TempDir::new().unwrap(),
            config: config_of(family),
            tensors: BTreeMap::new(),
            texts: BTreeMap::from([("tokenizer.json", TOKENIZER.to_owned())]),
        };
        folder.add("model.embed_tokens.weight", &[VOCAB, D]);
        folder.add("model.norm.weight", &[D]);
        folder.add("lm_head.weight", &[VOCAB, D]);
        for layer in 0..LAYERS {
            let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
            let mut add = |name: &str, shape: &[usize]| {
                folder.add(&format!("model.layers.{layer}.{name}"), shape)
            };
            add("input_layernorm.weight", &[D]);
            add("post_attention_layernorm.weight", &[D]);
            add("self_attn.q_proj.weight", &[q, D]);
            add("self_attn.k_proj.weight", &[kv, D]);
            add("self_attn.v_proj.weight", &[kv, D]);
            add("self_attn.o_proj.weight", &[D, q]);
            if family == "olmoe" {
                add("self_attn.q_norm.weight", &[q]);
                add("self_attn.k_norm.weight", &[kv]);
            }
            let (block, parts) = match family {
                "mixtral" | "turbosparsemixtral" => ("block_sparse_moe", ["w1", "w3", "w2"]),
                "smallthinker" => ("block_sparse_moe", ["gate", "up", "down"]),
                _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
            };
            let mut ffn = |prefix: &str, neurons: usize| {
                for (part, shape) in parts.iter().zip([[neurons, D], [neurons, D], [D, neurons]]) {
                    add(&format!("{block}.{prefix}{part}.weight"), &shape);
                }
            };
            if FAMILIES_OF_EXPERTS.contains(&family) {
                (0..EXPERTS).for_each(|e| ffn(&format!("experts.{e}."), FFN));
                if family == "qwen2_moe" {
                    ffn("shared_expert.", SHARED);
                    add("mlp.shared_expert_gate.weight", &[1, D]);
                }
                add(&format!("{block}.gate.weight"), &[EXPERTS, D]);
            } else if family == "smallthinker" {
                (0..EXPERTS).for_each(|e| ffn(&format!("experts.{e}."), FFN));
                add(&format!("{block}.primary_router.weight"), &[EXPERTS, D]);
            } else {
                ffn("", FFN);
            }
            if family.starts_with("qwen2") {
                add("self_attn.q_proj.bias", &[q]);
                add("self_attn.k_proj.bias", &[kv]);
                add("self_attn.v_proj.bias", &[kv]);
            }
            if family.starts_with("qwen3") {
                add("self_attn.q_norm.weight", &[HEAD_DIM]);
                add("self_attn.k_norm.weight", &[HEAD_DIM]);
            }
        }
        folder
    }

    /// Adds (or replaces) a tensor; matrices are BF16, vectors F32.
    pub(crate) fn add(&mut self, name: &str, shape: &[usize]) {
        let dtype = if shape.len() == 1 {
            Dtype::F32
        } else {
            Dtype::BF16
        };
        self.tensors
            .insert(name.to_owned(), Tensor::new(name, shape, dtype));
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the tensors that `take` accepts into one safetensors file.
    pub(crate) fn write_tensors(&self, name: &str, take: impl Fn(&str) -> bool) {
        let views = self
            .tensors
            .iter()
            .filter(|(name, _)| take(name))
            .map(|(name, tensor)| {
                (
                    name.clone(),
                    TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap(),
                )
            });
        safetensors::serialize_to_file(views, None, &self.file(name)).unwrap();
    }

    pub(crate) fn write_texts(&self) {
        std::fs::write(self.file("config.json"), self.config.to_string()).unwrap();
        for (name, text) in &self.texts {
            std::fs::write(self.file(name), text).unwrap();
        }
    }

    /// Writes everything, one file for all tensors.
    pub(crate) fn write(&self) {
        self.write_texts();
        self.write_tensors("model.safetensors", |_| true);
    }

    pub(crate) fn open(&self) -> Result<Box<dyn Checkpoint>, Error> {
        self.write();
        crate::open(self.path())
    }

    /// The error from opening it.
    pub(crate) fn refused(&self) -> Error {
        match self.open() {
            Err(error) => error,
            Ok(_) => panic!("a bad checkpoint was accepted"),
        }
    }
}
