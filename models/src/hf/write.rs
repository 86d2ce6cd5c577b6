//! Writes a decoder's weights as a Hugging Face folder: the inverse of the reader.
//!
//! Weights are written as f32, so no precision of the source is lost. The folder is renamed to its
//! final name only after it is fully written.

mod deepseek4_keys;
mod expert_keys;
mod form_keys;
mod hyper_keys;
mod keys;
mod scaling;
mod weights;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use self::keys::config_json;
use self::weights::Weights;
use super::{config, texts};
use crate::checkpoint::SamplingDefaults;
use crate::config::ModelConfig;
use crate::error::Error;
use crate::file::{flush, flush_folder_of};
use crate::names::{Required, TensorId};
use crate::rules::TextRules;
use crate::tokenizer::Tokenizer;

/// Input of [`write_folder`], besides the weights.
pub struct Folder<'a> {
    /// The configuration.
    pub config: &'a ModelConfig,
    /// Text of `tokenizer.json`.
    pub tokenizer_json: &'a str,
    /// Chat template, if any.
    pub chat_template: Option<&'a str>,
    /// The template for conversations with tools, if separate.
    pub tool_template: Option<&'a str>,
    /// Recommended sampling.
    pub sampling: SamplingDefaults,
    /// Rules for generated texts.
    pub rules: &'a TextRules,
    /// Texts of special tokens by name.
    pub named_tokens: &'a BTreeMap<String, String>,
    /// Tensors with their shapes as [`crate::Checkpoint`] presents them (Down
    /// transposed).
    pub tensors: &'a [Required],
}

/// Receives the next row of a tensor. Rows of one tensor come in ascending order. Tensors may be
/// interleaved; those stored transposed are buffered until they are complete.
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
        flush(&file, &path)?;
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
        flush_folder_of(&self.path.join("config.json"))?;
        std::fs::rename(&self.path, dir).map_err(Error::io("rename", &self.path))?;
        // nothing is left under the old name
        std::mem::forget(self);
        flush_folder_of(dir)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // report the original error, not this one
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Reads the written texts as a checkpoint and compares: anything that a family's keys cannot
/// express appears as a difference.
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

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

fn generation_json(folder: &Folder<'_>) -> Value {
    let mut value = json!({
        "bos_token_id": folder.config.bos,
        "eos_token_id": folder.config.eos,
    });
    let s = folder.sampling;
    let sampled = s.temperature.is_some_and(|t| t > 0.0)
        || (s.temperature.is_none()
            && (s.top_k.is_some()
                || s.top_p.is_some()
                || s.min_p.is_some()
                || s.typical_p.is_some()));
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
    put("typical_p", s.typical_p.map(Into::into));
    put("repetition_penalty", s.repetition_penalty.map(Into::into));
    // Numbers and texts: cannot fail.
    let rules = serde_json::to_value(folder.rules).unwrap_or_default();
    for (key, rule) in rules.as_object().into_iter().flatten() {
        put(key, Some(rule.clone()));
    }
    value
}

fn tokenizer_config_json(folder: &Folder<'_>) -> Value {
    let mut value = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": folder.config.add_bos,
    });
    // Other programs use these, not the ids of config.json.
    if let Ok(tokenizer) = Tokenizer::from_json(folder.tokenizer_json) {
        let ids = [folder.config.bos, folder.config.eos.first().copied()];
        for (key, id) in ["bos_token", "eos_token"].into_iter().zip(ids) {
            if let Some(token) = id.and_then(|id| tokenizer.id_to_token(id)) {
                value[key] = json!(token);
            }
        }
    }
    for (key, text) in folder.named_tokens {
        value[key.as_str()] = json!(text);
    }
    if let Some(template) = folder.chat_template {
        value["chat_template"] = match folder.tool_template {
            None => json!(template),
            Some(tools) => json!([
                {"name": "default", "template": template},
                {"name": "tool_use", "template": tools},
            ]),
        };
    }
    value
}
