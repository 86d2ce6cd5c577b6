//! A decoder's weights as a Hugging Face folder: the reader's way back.
//!
//! Weights are written as f32, so nothing is lost that the source still had.

use std::borrow::Cow;
use std::cell::RefCell;
use std::path::Path;

use safetensors::tensor::{Dtype, View};
use serde_json::{Value, json};

use super::NAMES;
use crate::checkpoint::SamplingDefaults;
use crate::config::{Activation, ModelConfig, RopeScaling};
use crate::error::Error;
use crate::names::{Required, Role, TensorId};

/// What [`write_folder`] writes.
pub struct Folder<'a> {
    /// The configuration.
    pub config: &'a ModelConfig,
    /// Text of `tokenizer.json`.
    pub tokenizer_json: &'a str,
    /// Chat template, if any.
    pub chat_template: Option<&'a str>,
    /// Recommended sampling.
    pub sampling: SamplingDefaults,
    /// Tensors with their shapes as [`crate::Checkpoint`] presents them (Down
    /// transposed).
    pub tensors: &'a [Required],
    /// Where the weights come from: all rows of one tensor.
    pub read: &'a dyn Fn(TensorId) -> Result<Vec<f32>, String>,
}

/// Creates the folder `dir`, which must not exist.
///
/// # Errors
/// [`Error::Io`] where it cannot be written, [`Error::Export`] for a model that
/// the format cannot express or a tensor that cannot be read.
pub fn write_folder(dir: &Path, folder: &Folder<'_>) -> Result<(), Error> {
    let config = config_json(dir, folder.config)?;
    let io = |op: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { path, op, source }
    };
    std::fs::create_dir(dir).map_err(io("create", dir))?;
    let texts = [
        ("config.json", pretty(&config)),
        ("generation_config.json", pretty(&generation_json(folder))),
        ("tokenizer_config.json", pretty(&tokenizer_config_json(folder))),
        ("tokenizer.json", folder.tokenizer_json.to_owned()),
    ];
    for (name, text) in texts {
        let path = dir.join(name);
        std::fs::write(&path, text).map_err(io("write", &path))?;
    }
    let failure = RefCell::new(None);
    let tensors = folder.tensors.iter().map(|&Required { id, rows, cols }| {
        (NAMES.spell(id), Tensor { id, rows, cols, shape: shape_of(id, rows, cols), read: folder.read, failure: &failure })
    });
    let path = dir.join("model.safetensors");
    let format = [("format".to_owned(), "pt".to_owned())].into();
    let written = safetensors::serialize_to_file(tensors, Some(format), &path);
    if let Some(reason) = failure.take() {
        return Err(Error::Export { path, reason });
    }
    written.map_err(|e| Error::Export { path, reason: e.to_string() })
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// One tensor, read when it is written.
struct Tensor<'a> {
    id: TensorId,
    /// `[rows, cols]` as read.
    rows: usize,
    cols: usize,
    /// As written: one number for a vector, Down transposed.
    shape: Vec<usize>,
    read: &'a dyn Fn(TensorId) -> Result<Vec<f32>, String>,
    failure: &'a RefCell<Option<String>>,
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = (self.read)(self.id).unwrap_or_else(|reason| {
            self.failure.borrow_mut().get_or_insert(reason);
            vec![0.0; self.rows * self.cols]
        });
        let bytes = if self.id.role == Role::Down {
            (0..self.cols)
                .flat_map(|c| (0..self.rows).map(move |r| (r, c)))
                .flat_map(|(r, c)| values[r * self.cols + c].to_le_bytes())
                .collect()
        } else {
            values.iter().flat_map(|v| v.to_le_bytes()).collect()
        };
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        4 * self.rows * self.cols
    }
}

fn shape_of(id: TensorId, rows: usize, cols: usize) -> Vec<usize> {
    use Role::{AttnNorm, FfnNorm, FinalNorm, KBias, KNorm, OBias, QBias, QNorm, VBias};
    match id.role {
        AttnNorm | FfnNorm | FinalNorm | QBias | KBias | VBias | OBias | QNorm | KNorm => {
            vec![cols]
        }
        Role::Down => vec![cols, rows],
        _ => vec![rows, cols],
    }
}

fn config_json(dir: &Path, c: &ModelConfig) -> Result<Value, Error> {
    let unsupported = |reason: String| Error::Export { path: dir.to_owned(), reason };
    let (class, act) = match (c.family.as_str(), c.ffn_kind.activation) {
        ("llama", act) => ("LlamaForCausalLM", act),
        ("mistral", act) => ("MistralForCausalLM", act),
        ("qwen2", act) => ("Qwen2ForCausalLM", act),
        ("qwen3", act) => ("Qwen3ForCausalLM", act),
        ("bamboo", act) => ("BambooForCausalLM", act),
        (other, _) => return Err(unsupported(format!("family {other:?} has no folder form"))),
    };
    let mut config = json!({
        "architectures": [class],
        "model_type": c.family,
        "vocab_size": c.vocab,
        "hidden_size": c.d_model,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_context,
        "tie_word_embeddings": c.tied_head,
        "bos_token_id": c.bos,
        "eos_token_id": c.eos,
        "torch_dtype": "float32",
        "hidden_act": match act {
            Activation::Relu => "relu",
            Activation::FatRelu { .. } => "fatrelu",
            Activation::Relu2 => "relu2",
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
        },
    });
    if let Activation::FatRelu { threshold } = act {
        config["hidden_act_param"] = json!(threshold);
    }
    match c.rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            config["rope_scaling"] = json!({"rope_type": "linear", "factor": factor});
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            config["rope_scaling"] = json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_context,
            });
        }
        #[allow(unreachable_patterns, reason = "forms that only GGUF files have")]
        ref other => return Err(unsupported(format!("rope scaling {other:?} has no folder form"))),
    }
    if c.o_bias {
        config["attention_bias"] = json!(true);
    }
    windows_json(c, &mut config).map_err(unsupported)?;
    Ok(config)
}

/// Sliding windows, in the keys that the family's reader understands.
fn windows_json(c: &ModelConfig, config: &mut Value) -> Result<(), String> {
    let Some(&window) = c.window.iter().find(|&&w| w != 0) else {
        return Ok(());
    };
    let every = c.window.iter().all(|&w| w == window);
    match c.family.as_str() {
        "mistral" | "bamboo" if every => config["sliding_window"] = json!(window),
        "qwen2" | "qwen3" if c.window.iter().all(|&w| w == 0 || w == window) => {
            config["sliding_window"] = json!(window);
            config["use_sliding_window"] = json!(true);
            config["layer_types"] = c
                .window
                .iter()
                .map(|&w| if w == 0 { "full_attention" } else { "sliding_attention" })
                .collect();
        }
        family => {
            return Err(format!("sliding windows {:?} of family {family:?} have no folder form", c.window));
        }
    }
    Ok(())
}

fn generation_json(folder: &Folder<'_>) -> Value {
    let mut value = json!({
        "bos_token_id": folder.config.bos,
        "eos_token_id": folder.config.eos,
    });
    let s = folder.sampling;
    if let Some(t) = s.temperature {
        value["do_sample"] = json!(t > 0.0);
        value["temperature"] = json!(t);
    }
    if let Some(k) = s.top_k {
        value["top_k"] = json!(k);
    }
    if let Some(p) = s.top_p {
        value["top_p"] = json!(p);
    }
    value
}

fn tokenizer_config_json(folder: &Folder<'_>) -> Value {
    let mut value = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": folder.config.add_bos,
    });
    if let Some(template) = folder.chat_template {
        value["chat_template"] = json!(template);
    }
    value
}
