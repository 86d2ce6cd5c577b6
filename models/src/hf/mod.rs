//! Hugging Face folders: `config.json`, safetensors, and the tokenizer files
//! beside them.

mod config;
mod foreign;
mod json;
mod safetensors;
#[cfg(test)]
mod tests;
mod texts;
pub mod write;

use std::path::{Path, PathBuf};

use self::safetensors::DTYPES;
use self::texts::MAX_CONFIG;
use crate::checkpoint::Checkpoint;
use crate::dtype::DType;
use crate::error::Error;
use crate::file::{DataFile, need_text};
use crate::names::{NameTable, Role};
use crate::store::{About, Found, Layout, Store};

const NAMES: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: &[
        (Role::Embed, "model.embed_tokens.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "model.norm.weight"),
    ],
    layers: &[
        (Role::AttnNorm, "input_layernorm.weight"),
        (Role::Q, "self_attn.q_proj.weight"),
        (Role::K, "self_attn.k_proj.weight"),
        (Role::V, "self_attn.v_proj.weight"),
        (Role::O, "self_attn.o_proj.weight"),
        (Role::QBias, "self_attn.q_proj.bias"),
        (Role::KBias, "self_attn.k_proj.bias"),
        (Role::VBias, "self_attn.v_proj.bias"),
        (Role::OBias, "self_attn.o_proj.bias"),
        (Role::QNorm, "self_attn.q_norm.weight"),
        (Role::KNorm, "self_attn.k_norm.weight"),
        (Role::FfnNorm, "post_attention_layernorm.weight"),
        (Role::Gate, "mlp.gate_proj.weight"),
        (Role::Up, "mlp.up_proj.weight"),
        (Role::Down, "mlp.down_proj.weight"),
        (Role::PredictorFc1, "mlp.predictor.fc1.weight"),
        (Role::PredictorFc2, "mlp.predictor.fc2.weight"),
    ],
};

type Shards = Vec<(DataFile, Vec<safetensors::Raw>)>;

/// Opens a folder.
pub(crate) fn open_folder(folder: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    // The configuration first: without it the folder is not a checkpoint.
    let config_path = folder.join("config.json");
    if !config_path.is_file() {
        return Err(Error::NotACheckpoint {
            path: folder.to_owned(),
            found: "a folder without config.json".into(),
        });
    }
    open_with(folder, folder, || {
        let single = folder.join("model.safetensors");
        let index = folder.join("model.safetensors.index.json");
        if single.is_file() {
            return Ok(vec![open_shard(&single)?]);
        }
        if index.is_file() {
            return safetensors::open_shards(folder, &index);
        }
        let why = "the folder has neither it nor model.safetensors.index.json; \
                   convert pytorch .bin files to safetensors, or give the .safetensors file itself";
        Err(Error::MissingFile {
            path: single,
            why: why.into(),
        })
    })
}

/// Opens one safetensors file, with the configuration beside it.
pub(crate) fn open_single(path: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    let folder = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    open_with(path, folder, || Ok(vec![open_shard(path)?]))
}

fn open_shard(path: &Path) -> Result<(DataFile, Vec<safetensors::Raw>), Error> {
    let file = DataFile::open(path)?;
    let header = safetensors::read_header(&file)?;
    Ok((file, header))
}

/// Reads the text files in `folder`, then the tensors.
fn open_with(
    path: &Path,
    folder: &Path,
    shards: impl FnOnce() -> Result<Shards, Error>,
) -> Result<Box<dyn Checkpoint>, Error> {
    let config_path = folder.join("config.json");
    let text = need_text(&config_path, MAX_CONFIG, "it describes the model")?;
    let value = json::parse(&config_path, &text)?;
    let mut config = config::model_config(&config_path, &value, model_name(folder))?;
    let texts = texts::read(folder, &mut config)?;

    let mut files = Vec::new();
    let mut found = Vec::new();
    let mut stored_heads = Vec::new();
    for (file, header) in shards()? {
        for raw in header.into_iter().filter(|raw| !is_ignorable(&raw.name)) {
            let tensor = identify(raw, &file, files.len(), &config.family)?;
            if config.tied_head && tensor.id.role == Role::Head {
                stored_heads.push(tensor);
            } else {
                found.push(tensor);
            }
        }
        files.push(file);
    }
    let about = About {
        path: path.to_owned(),
        config_path,
        config,
        tokenizer_json: texts.tokenizer_json,
        chat_template: texts.chat_template,
        sampling: texts.sampling,
    };
    let store = Store::new(about, files, found, &|id| NAMES.spell(id))?;
    for head in &stored_heads {
        store.expect_the_embedding(head)?;
    }
    Ok(Box::new(store))
}

fn identify(
    raw: safetensors::Raw,
    file: &DataFile,
    index: usize,
    family: &str,
) -> Result<Found, Error> {
    let Some(id) = NAMES.parse(&raw.name) else {
        return Err(Error::UnexpectedTensor {
            path: file.path.clone(),
            tensor: raw.name,
            family: family.to_owned(),
        });
    };
    let dtype = match raw.dtype.as_str() {
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::Bf16,
        _ => {
            return Err(Error::WrongDtype {
                path: file.path.clone(),
                tensor: raw.name,
                found: raw.dtype,
                supported: DTYPES.into(),
            });
        }
    };
    let layout = if id.role == Role::Down {
        Layout::Transposed
    } else {
        Layout::AsIs
    };
    Ok(Found {
        id,
        name: raw.name,
        shape: raw.shape,
        dtype,
        layout,
        file: index,
        offset: raw.offset,
    })
}

/// Redundant tensors that some releases wrote: the rotary frequencies.
fn is_ignorable(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

/// The folder's own name.
fn model_name(folder: &Path) -> String {
    let full: PathBuf = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    full.file_name().map_or_else(
        || "model".into(),
        |name| name.to_string_lossy().into_owned(),
    )
}
