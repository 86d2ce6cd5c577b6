//! Writes a decoder's weights as a Hugging Face folder: the inverse of the reader.
//!
//! Weights are written as f32, so no precision of the source is lost. The folder gets its final
//! name only once it is fully written.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::spelled::names_of;
use super::{config, texts};
use crate::checkpoint::SamplingDefaults;
use crate::config::{Activation, Mixture, ModelConfig, RopeScaling, Scoring};
use crate::error::Error;
use crate::names::{Required, Role, TensorId};
use crate::tokenizer::Tokenizer;

/// Input of [`write_folder`], besides the weights.
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
}

/// Receives the next row of a tensor. Rows of one tensor come in ascending order. Tensors may be
/// interleaved, but only one Down at a time.
pub type RowSink<'s> = dyn FnMut(TensorId, &[f32]) -> Result<(), Error> + 's;

/// Creates the folder `dir`, which must not exist. `weights` passes every row of every tensor in
/// `folder.tensors` to the sink; its first error ends the export.
///
/// Everything is written to `dir` with `.partial` appended, and renamed once it is complete and on
/// disk; after an error nothing is left.
///
/// # Errors
/// [`Error::Io`] if it cannot be written, [`Error::Export`] for a model that the format cannot
/// express or rows that do not match the tensors, and any error of `weights`.
pub fn write_folder<E: From<Error>>(
    dir: &Path,
    folder: &Folder<'_>,
    weights: impl FnOnce(&mut RowSink<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let config = config_json(dir, folder.config)?;
    let partial = Partial::create(dir)?;
    let texts = [
        ("config.json", pretty(&config)),
        ("generation_config.json", pretty(&generation_json(folder))),
        (
            "tokenizer_config.json",
            pretty(&tokenizer_config_json(folder)),
        ),
        ("tokenizer.json", folder.tokenizer_json.to_owned()),
    ];
    for (name, text) in &texts {
        let path = partial.path.join(name);
        let file = File::create_new(&path).map_err(Error::io("create", &path))?;
        file.write_all_at(text.as_bytes(), 0)
            .map_err(Error::io("write", &path))?;
        file.sync_all().map_err(Error::io("flush", &path))?;
    }
    check_reads_back(dir, &partial.path, &config, folder.config)?;
    let mut file = Weights::create(
        partial.path.join("model.safetensors"),
        folder.config,
        folder.tensors,
    )?;
    weights(&mut |id, row| file.row(id, row))?;
    file.finish()?;
    Ok(partial.publish(dir)?)
}

/// A folder that is removed unless it is published.
struct Partial {
    path: PathBuf,
}

impl Partial {
    fn create(dir: &Path) -> Result<Self, Error> {
        let Some(name) = dir.file_name() else {
            return Err(Error::export(dir, "not the name of a new folder".into()));
        };
        if dir.symlink_metadata().is_ok() {
            let reason = "exists; give the name of a new folder".into();
            return Err(Error::export(dir, reason));
        }
        let mut name = name.to_owned();
        name.push(".partial");
        let path = dir.with_file_name(name);
        match std::fs::create_dir(&path) {
            Ok(()) => Ok(Self { path }),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                let reason = "exists: another export writes it, or one was killed; \
                              delete it if none is running";
                Err(Error::export(&path, reason.into()))
            }
            Err(e) => Err(Error::io("create", &path)(e)),
        }
    }

    /// Renames the folder to its final name.
    fn publish(self, dir: &Path) -> Result<(), Error> {
        sync_folder(&self.path)?;
        std::fs::rename(&self.path, dir).map_err(Error::io("rename", &self.path))?;
        // nothing is left under the old name
        std::mem::forget(self);
        match dir.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
            _ => sync_folder(Path::new(".")),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // report the original error, not this one
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn sync_folder(path: &Path) -> Result<(), Error> {
    let folder = File::open(path).map_err(Error::io("open", path))?;
    folder.sync_all().map_err(Error::io("flush", path))
}

/// Reads the written texts as a checkpoint and compares: anything a family's keys cannot express
/// shows as a difference.
fn check_reads_back(
    dir: &Path,
    partial: &Path,
    written: &Value,
    wanted: &ModelConfig,
) -> Result<(), Error> {
    let path = partial.join("config.json");
    let mut found = config::model_config(&path, written, wanted.name.clone())?;
    texts::read(partial, &mut found)?;
    // belongs to the imported predictor, not to the decoder
    found.predictor_threshold = wanted.predictor_threshold;
    let [found, wanted] =
        [&found, wanted].map(|config| serde_json::to_value(config).unwrap_or_default());
    let Some(wanted) = wanted.as_object() else {
        return Ok(());
    };
    match wanted.iter().find(|(key, value)| found[*key] != **value) {
        None => Ok(()),
        Some((key, value)) => Err(Error::export(
            dir,
            format!(
                "{key} = {value} has no form in a folder of this family, which would give {}",
                found[key]
            ),
        )),
    }
}

/// A `model.safetensors` being written.
struct Weights {
    path: PathBuf,
    file: File,
    tensors: Vec<Slot>,
    by_id: HashMap<TensorId, usize>,
    /// The Down matrix being transposed, and its index.
    down: (usize, Vec<f32>),
    bytes: Vec<u8>,
}

struct Slot {
    want: Required,
    /// Rows received so far.
    rows: usize,
    /// First byte in the file.
    offset: u64,
}

impl Weights {
    /// Writes the header.
    fn create(path: PathBuf, config: &ModelConfig, tensors: &[Required]) -> Result<Self, Error> {
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut slots = Vec::with_capacity(tensors.len());
        let mut end = 0u64;
        for &want in tensors {
            let Required { id, rows, cols } = want;
            let len = (rows as u64)
                .checked_mul(cols as u64)
                .and_then(|n| n.checked_mul(4));
            let next = len.and_then(|len| end.checked_add(len)).ok_or_else(|| {
                Error::export(
                    &path,
                    format!("tensor {id} of {rows} x {cols} is too large"),
                )
            })?;
            let entry = json!({
                "dtype": "F32",
                "shape": shape_of(id, rows, cols),
                "data_offsets": [end, next],
            });
            header.insert(names_of(&config.family).spell(id, config), entry);
            slots.push(Slot {
                want,
                rows: 0,
                offset: end,
            });
            end = next;
        }
        let mut header = Value::Object(header);
        // Where the tensors begin enters the fingerprint of what is written here.
        header.sort_all_objects();
        let mut header = header.to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let data = 8 + header.len() as u64;
        for slot in &mut slots {
            slot.offset += data;
        }
        let file = File::create_new(&path).map_err(Error::io("create", &path))?;
        let mut start = (header.len() as u64).to_le_bytes().to_vec();
        start.append(&mut header);
        file.write_all_at(&start, 0)
            .map_err(Error::io("write", &path))?;
        Ok(Self {
            by_id: slots
                .iter()
                .enumerate()
                .map(|(i, s)| (s.want.id, i))
                .collect(),
            path,
            file,
            tensors: slots,
            down: (usize::MAX, Vec::new()),
            bytes: Vec::new(),
        })
    }

    fn row(&mut self, id: TensorId, row: &[f32]) -> Result<(), Error> {
        let index = self.by_id.get(&id).copied().unwrap_or(usize::MAX);
        let fits = |s: &&mut Slot| s.rows < s.want.rows && s.want.cols == row.len();
        let Some(slot) = self.tensors.get_mut(index).filter(fits) else {
            let reason = format!("tensor {id} has no place for a row of {}", row.len());
            return Err(Error::export(&self.path, reason));
        };
        let Required { rows, cols, .. } = slot.want;
        let at = slot.rows;
        slot.rows += 1;
        if id.role != Role::Down {
            let offset = slot.offset + 4 * (at * cols) as u64;
            return self.write(row, offset);
        }
        // stored transposed, so write it once it is complete
        if at == 0 {
            self.down = (index, vec![0.0; rows * cols]);
        }
        let (held, down) = &mut self.down;
        if *held != index {
            let reason = format!("rows of tensor {id} come among those of another");
            return Err(Error::export(&self.path, reason));
        }
        for (column, value) in down.chunks_exact_mut(rows).zip(row) {
            column[at] = *value;
        }
        if at + 1 < rows {
            return Ok(());
        }
        let mut offset = slot.offset;
        let down = std::mem::take(down);
        for part in down.chunks(1 << 16) {
            self.write(part, offset)?;
            offset += 4 * part.len() as u64;
        }
        Ok(())
    }

    fn write(&mut self, values: &[f32], offset: u64) -> Result<(), Error> {
        self.bytes.clear();
        self.bytes
            .extend(values.iter().flat_map(|v| v.to_le_bytes()));
        self.file
            .write_all_at(&self.bytes, offset)
            .map_err(Error::io("write", &self.path))
    }

    fn finish(self) -> Result<(), Error> {
        if let Some(slot) = self.tensors.iter().find(|s| s.rows != s.want.rows) {
            let Required { id, rows, .. } = slot.want;
            let reason = format!("tensor {id} got {} of its {rows} rows", slot.rows);
            return Err(Error::export(&self.path, reason));
        }
        self.file.sync_all().map_err(Error::io("flush", &self.path))
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

fn shape_of(id: TensorId, rows: usize, cols: usize) -> Vec<usize> {
    match id.role {
        // a matrix of one row in every release
        Role::SharedGate => vec![rows, cols],
        role if role.is_vector() => vec![rows * cols],
        Role::Down => vec![cols, rows],
        _ => vec![rows, cols],
    }
}

/// The class of transformers that runs a family.
fn class_of(family: &str) -> Option<&'static str> {
    Some(match family {
        "llama" => "LlamaForCausalLM",
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "bamboo" => "BambooForCausalLM",
        "mixtral" => "MixtralForCausalLM",
        "qwen2_moe" => "Qwen2MoeForCausalLM",
        "qwen3_moe" => "Qwen3MoeForCausalLM",
        "olmoe" => "OlmoeForCausalLM",
        "turbosparsemixtral" => "TurboSparseMixtralForCausalLM",
        "smallthinker" => "SmallThinkerForCausalLM",
        _ => return None,
    })
}

fn config_json(dir: &Path, c: &ModelConfig) -> Result<Value, Error> {
    let unsupported = |reason| Error::export(dir, reason);
    let act = c.ffn_kind.activation;
    let class = class_of(&c.family)
        .ok_or_else(|| unsupported(format!("family {:?} has no folder form", c.family)))?;
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
            Activation::Silu | Activation::ClampedSwiglu { .. } => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
        },
    });
    if let Activation::FatRelu { threshold } = act {
        config["hidden_act_param"] = json!(threshold);
    }
    if c.rope.scaling != RopeScaling::None {
        config["rope_scaling"] = scaling_json(&c.rope.scaling);
    }
    if c.o_bias || matches!(c.family.as_str(), "llama" | "qwen3" | "qwen3_moe" | "olmoe") {
        config["attention_bias"] = json!(c.o_bias);
    }
    if let Some(clip) = c.clip_qkv {
        config["clip_qkv"] = json!(clip);
    }
    if let Some(mixture) = &c.mixture {
        experts_json(c, mixture, &mut config);
    }
    if c.family == "smallthinker" {
        let rotated = |layer: u32| u32::from(c.rotates(layer));
        config["rope_layout"] = (0..c.layers).map(rotated).collect();
    }
    windows_json(c, &mut config).map_err(unsupported)?;
    Ok(config)
}

/// A rotary scaling; null for none.
fn scaling_json(scaling: &RopeScaling) -> Value {
    match scaling {
        // the one of a family that has no folder form
        RopeScaling::None | RopeScaling::Long { .. } => Value::Null,
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

/// A mixture of experts, in the keys of its family.
fn experts_json(c: &ModelConfig, mixture: &Mixture, config: &mut Value) {
    if c.family == "smallthinker" {
        let softmax = mixture.scoring == Scoring::Softmax;
        config["moe_num_primary_experts"] = json!(c.experts);
        config["moe_num_active_primary_experts"] = json!(mixture.chosen);
        config["moe_ffn_hidden_size"] = json!(c.ffn);
        config["moe_enable_early_router"] = json!(mixture.early_router);
        config["moe_primary_router_apply_softmax"] = json!(softmax);
        return;
    }
    config["num_experts_per_tok"] = json!(mixture.chosen);
    if matches!(c.family.as_str(), "mixtral" | "turbosparsemixtral") {
        config["num_local_experts"] = json!(c.experts);
        return;
    }
    config["num_experts"] = json!(c.experts);
    config["norm_topk_prob"] = json!(mixture.renormalise);
    if c.family == "olmoe" {
        return;
    }
    config["moe_intermediate_size"] = json!(c.ffn);
    config["intermediate_size"] = json!(mixture.dense_ffn.max(c.ffn));
    config["mlp_only_layers"] = json!(mixture.dense_layers);
    config["decoder_sparse_step"] = json!(1);
    if c.family == "qwen2_moe" {
        config["shared_expert_intermediate_size"] = json!(mixture.shared);
        config["qkv_bias"] = json!(c.qkv_bias);
    }
}

/// Whether a family's windows are those of all layers.
fn has_window_everywhere(family: &str) -> bool {
    matches!(
        family,
        "mistral" | "bamboo" | "mixtral" | "turbosparsemixtral"
    )
}

/// Sliding windows, in the keys that the family's reader understands.
fn windows_json(c: &ModelConfig, config: &mut Value) -> Result<(), String> {
    let Some(&window) = c.window.iter().find(|&&w| w != 0) else {
        if has_window_everywhere(&c.family) {
            // if absent, other programs would use the family's 4096
            config["sliding_window"] = Value::Null;
        }
        return Ok(());
    };
    let every = c.window.iter().all(|&w| w == window);
    let one_size = c.window.iter().all(|&w| w == 0 || w == window);
    match c.family.as_str() {
        family if every && has_window_everywhere(family) => {
            config["sliding_window"] = json!(window);
        }
        "smallthinker" if one_size => {
            let switch = |&w: &u32| u32::from(w != 0);
            config["sliding_window_size"] = json!(window);
            config["sliding_window_layout"] = c.window.iter().map(switch).collect();
        }
        "qwen2" | "qwen3" if one_size => {
            config["sliding_window"] = json!(window);
            config["use_sliding_window"] = json!(true);
            config["layer_types"] = c
                .window
                .iter()
                .map(|&w| {
                    if w == 0 {
                        "full_attention"
                    } else {
                        "sliding_attention"
                    }
                })
                .collect();
        }
        family => {
            return Err(format!(
                "sliding windows {:?} of family {family:?} have no folder form",
                c.window
            ));
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
    let sampled = s.temperature.is_some_and(|t| t > 0.0)
        || (s.temperature.is_none()
            && (s.top_k.is_some() || s.top_p.is_some() || s.min_p.is_some()));
    if sampled || s.temperature.is_some() {
        value["do_sample"] = json!(sampled);
    }
    let mut put = |key: &str, number: Option<Value>| {
        if let Some(number) = number {
            value[key] = number;
        }
    };
    put("temperature", s.temperature.map(Into::into));
    put("top_k", s.top_k.map(Into::into));
    put("top_p", s.top_p.map(Into::into));
    put("min_p", s.min_p.map(Into::into));
    put("repetition_penalty", s.repetition_penalty.map(Into::into));
    value
}

fn tokenizer_config_json(folder: &Folder<'_>) -> Value {
    let mut value = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": folder.config.add_bos,
    });
    // Other programs take them from here, and not the ids of config.json.
    if let Ok(tokenizer) = Tokenizer::from_json(folder.tokenizer_json) {
        let ids = [folder.config.bos, folder.config.eos.first().copied()];
        for (key, id) in ["bos_token", "eos_token"].into_iter().zip(ids) {
            if let Some(token) = id.and_then(|id| tokenizer.id_to_token(id)) {
                value[key] = json!(token);
            }
        }
    }
    if let Some(template) = folder.chat_template {
        value["chat_template"] = json!(template);
    }
    value
}
