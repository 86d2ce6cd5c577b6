//! Writes a decoder's weights as a Hugging Face folder: the inverse of the reader.
//!
//! Weights are written as f32, so no precision of the source is lost. The folder gets its final
//! name only once it is fully written.

mod form_keys;
mod keys;
mod scaling;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use self::keys::config_json;
use super::form::is_less_one;
use super::{config, texts};
use crate::checkpoint::SamplingDefaults;
use crate::config::{ModelConfig, Parallel};
use crate::error::Error;
use crate::families;
use crate::file::{flush, flush_folder_of};
use crate::names::{Fused, NameTable, Required, Role, TensorId};
use crate::rules::TextRules;
use crate::store::{Layout, interleaved, rotary_order};
use crate::tokenizer::Tokenizer;

/// Input of [`write_folder`], besides the weights.
pub struct Folder<'a> {
    /// The configuration.
    pub config: &'a ModelConfig,
    /// Text of `tokenizer.json`.
    pub tokenizer_json: &'a str,
    /// Chat template, if any.
    pub chat_template: Option<&'a str>,
    /// That for conversations with tools, if it is another one.
    pub tool_template: Option<&'a str>,
    /// Recommended sampling.
    pub sampling: SamplingDefaults,
    /// What generated texts are held to.
    pub rules: &'a TextRules,
    /// Texts of special tokens by name.
    pub named_tokens: &'a BTreeMap<String, String>,
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

/// The names under which a model's tensors are written.
fn names_to_write(config: &ModelConfig) -> &'static NameTable {
    let family = families::of(&config.family);
    let two_norms = config.form.parallel == Parallel::TwoNorms;
    let names = family.names_of_two_norms.filter(|_| two_norms);
    names.unwrap_or(family.names)
}

/// Rows per head of a tensor that the family stores in interleaved rotary order, and how many of them are
/// rotated.
fn interleaved_heads(id: TensorId, config: &ModelConfig) -> Option<[usize; 2]> {
    let order = rotary_order(id, config);
    match order.filter(|_| families::of(&config.family).interleaved)? {
        Layout::Interleaved { head_dim, rotated } => Some([head_dim, rotated]),
        _ => None,
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
    /// First byte in the file: of its own rows, or of the tensor that it shares with others.
    offset: u64,
    /// Where its rows are in a tensor that is stored group by group.
    grouped: Option<Groups>,
    /// Rows per head and how many of them are rotated, where they are stored in interleaved order.
    interleaved: Option<[usize; 2]>,
    /// Stored less one.
    less_one: bool,
}

/// Heads of a tensor among those of a group.
#[derive(Clone, Copy)]
struct Groups {
    head_dim: usize,
    /// Heads of a group: of this tensor, before them, and in all.
    own: usize,
    before: usize,
    all: usize,
}

impl Groups {
    fn of(role: Role, config: &ModelConfig) -> Self {
        let per = (config.heads / config.kv_heads) as usize;
        let (own, before) = match role {
            Role::Q => (per, 0),
            Role::K => (1, per),
            _ => (1, per + 1),
        };
        Self {
            head_dim: config.head_dim as usize,
            own,
            before,
            all: per + 2,
        }
    }

    /// The row of the stored tensor where row `row` is.
    fn stored(self, row: usize) -> usize {
        let own = self.own * self.head_dim;
        let (group, inside) = (row / own, row % own);
        (group * self.all + self.before) * self.head_dim + inside
    }
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
            let names = names_to_write(config);
            let fused = names.fused_with(id.role);
            let entry = header.entry(names.spell(id, config)).or_insert_with(|| {
                let mut shape = shape_of(id, rows, cols);
                if fused.is_some() {
                    shape[0] = 0;
                }
                json!({"dtype": "F32", "shape": shape, "data_offsets": [end, end]})
            });
            if fused.is_some() {
                let before = entry["shape"][0].as_u64().unwrap_or(0);
                entry["shape"][0] = json!(before + rows as u64);
            }
            entry["data_offsets"][1] = json!(next);
            let start = entry["data_offsets"][0].as_u64().unwrap_or(end);
            let groups = || Groups::of(id.role, config);
            let grouped = (fused == Some(Fused::QkvByGroup)).then(groups);
            slots.push(Slot {
                want,
                rows: 0,
                offset: if grouped.is_some() { start } else { end },
                grouped,
                interleaved: interleaved_heads(id, config),
                less_one: is_less_one(&config.family, id.role),
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
            if let (1, Some(heads)) = (rows, slot.interleaved) {
                let mut stored = vec![0.0; cols];
                for (at, value) in row.iter().enumerate() {
                    stored[interleaved(at, heads)] = *value;
                }
                let offset = slot.offset;
                return self.write(&stored, offset);
            }
            let stored = match (slot.grouped, slot.interleaved) {
                (Some(groups), _) => groups.stored(at),
                (None, Some(heads)) => interleaved(at, heads),
                (None, None) => at,
            };
            let offset = slot.offset + 4 * (stored * cols) as u64;
            if slot.less_one {
                let less: Vec<f32> = row.iter().map(|value| value - 1.0).collect();
                return self.write(&less, offset);
            }
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
        flush(&self.file, &self.path)
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

fn shape_of(id: TensorId, rows: usize, cols: usize) -> Vec<usize> {
    match id.role {
        // a matrix of one row in every release
        Role::SharedGate => vec![rows, cols],
        // channels, one input of each, taps
        Role::Conv => vec![rows, 1, cols],
        role if role.is_vector() => vec![rows * cols],
        Role::Down => vec![cols, rows],
        _ => vec![rows, cols],
    }
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
    // Other programs take them from here, and not the ids of config.json.
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
