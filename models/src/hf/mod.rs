//! Hugging Face folders: `config.json`, safetensors, and the tokenizer files.

mod added;
mod config;
mod deepseek4;
mod described;
mod experts;
mod foreign;
mod form;
mod gains;
mod gemma4;
mod generation;
mod latent;
mod lfm2;
mod ngrams;
mod olmo_hybrid;
mod quant;
mod rope;
mod safetensors;
mod scales;
mod streams;
mod sublayers;
#[cfg(test)]
mod tests;
mod text_part;
mod texts;
mod values;
mod windows;
pub mod write;
mod xielu;

use std::path::{Path, PathBuf};

pub use self::described::Description;
pub(crate) use self::described::{describe, describe_text};
use self::gains::RoleGains;
use self::safetensors::DTYPES;
use self::scales::ScaleTensors;
use self::text_part::text_name;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::families::{self, Quirk};
use crate::file::{DataFile, need_text};
use crate::fused;
use crate::json::{self, MAX_CONFIG};
use crate::mtp::{HeadNames, Part, may_be_head};
use crate::names::{Named, Role, TensorId};
use crate::stacked;
use crate::store::{About, Found, Layout, Scales, Store, rotary_order, warn_of_left_out};
use crate::tensor_id::split_index;

type Shards = Vec<(DataFile, Vec<safetensors::Raw>)>;

/// Opens a folder.
pub(crate) fn open_folder(folder: &Path, part: Part) -> Result<Option<Box<dyn Checkpoint>>, Error> {
    // The configuration first: without it the folder is not a checkpoint.
    let config_path = folder.join("config.json");
    if !config_path.is_file() {
        return Err(Error::NotACheckpoint {
            path: folder.to_owned(),
            found: "a folder without config.json".into(),
        });
    }
    open_with(folder, folder, part, || {
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

/// Opens one safetensors file, with the configuration next to it.
pub(crate) fn open_single(path: &Path, part: Part) -> Result<Option<Box<dyn Checkpoint>>, Error> {
    let folder = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    open_with(path, folder, part, || Ok(vec![open_shard(path)?]))
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
    part: Part,
    shards: impl FnOnce() -> Result<Shards, Error>,
) -> Result<Option<Box<dyn Checkpoint>>, Error> {
    let config_path = folder.join("config.json");
    let text = need_text(&config_path, MAX_CONFIG, "it describes the model")?;
    let value = json::parse(&config_path, &text)?;
    let mut config = config::model_config(&config_path, &value, model_name(folder))?;
    let mut shards = shards()?;
    if let Some(method) = quant::method_of(&config_path, &value)? {
        quant::join(&mut shards, method.as_ref(), &config.family)?;
    }
    let mut names = shards.iter().flat_map(|(_, header)| header);
    if part == Part::MtpHead && !names.any(|raw| may_be_head(&raw.name)) {
        return Ok(None);
    }
    let texts = texts::read(folder, &mut config)?;
    config.validate(&config_path)?;
    let names = families::of(&config.family).names;
    let (mut files, mut found) = (Vec::new(), Vec::new());
    let (mut stored_heads, mut left_out) = (Vec::new(), 0u32);
    xielu::take(&mut shards, &mut config)?;
    if part == Part::MtpHead {
        let Some(head) = of_head(&mut shards, &config) else {
            return Ok(None);
        };
        config = head;
    }
    let spelled = config.clone();
    let gains = RoleGains::read(&config_path, &value, &config)?;
    let mut scales = ScaleTensors::take(
        &mut shards,
        &config,
        scales::fp8_block(&config_path, &value)?,
    );
    for (file, header) in shards {
        for mut raw in header.into_iter().filter(|raw| !is_ignorable(&raw.name)) {
            let scales = scales.of(&raw, &file)?;
            // Those of a head have their names already.
            if part == Part::Decoder {
                let Some(name) = text_name(&config.family, &raw.name) else {
                    left_out += 1;
                    continue;
                };
                raw.name = name.into_owned();
            }
            if is_unused(&raw.name, &config) || ngrams::is_repeated(&raw, &file, &config)? {
                continue;
            }
            let of_raw = identify(raw, &file.path, files.len(), &config, scales)?;
            for tensor in gains.apply(of_raw) {
                if config.tied_head && tensor.id.role == Role::Head {
                    stored_heads.push(tensor);
                } else {
                    found.push(tensor);
                }
            }
        }
        files.push(file);
    }
    warn_of_left_out(path, left_out);
    if let Some((file, tensor)) = scales.rest() {
        return Err(Error::UnexpectedTensor {
            path: files[file].path.clone(),
            tensor,
            family: config.family,
        });
    }
    let about = About {
        path: path.to_owned(),
        config_path,
        config,
        tokenizer_json: texts.tokenizer_json,
        chat_template: texts.chat_template,
        tool_template: texts.tool_template,
        sampling: texts.generation.sampling,
        rules: texts.generation.rules,
        named_tokens: texts.named_tokens,
        quantization: None,
    };
    let store = Store::new(about, files, found, &|id| names.spell(id, &spelled))?;
    for head in &stored_heads {
        store.expect_the_embedding(head)?;
    }
    Ok(Some(Box::new(store)))
}

/// Leaves the tensors of the first head for multi-token prediction, under the names of a model of one layer, and what it reads
/// of the model's; returns its configuration.
fn of_head(shards: &mut Shards, config: &ModelConfig) -> Option<ModelConfig> {
    let family = families::of(&config.family);
    let of = HeadNames {
        names: family.names,
        layers: config.layers,
    };
    let names: Vec<String> = (shards.iter().flat_map(|(_, header)| header))
        .map(|raw| {
            text_name(&config.family, &raw.name)
                .unwrap_or_default()
                .into_owned()
        })
        .collect();
    let (routed, renamed) = of.of_all(names.iter().map(String::as_str), config)?;
    let mut renamed = renamed.into_iter();
    for (_, header) in shards {
        header.retain_mut(|raw| match renamed.next().flatten() {
            Some(name) => {
                raw.name = name;
                true
            }
            None => false,
        });
    }
    config.mtp_head(routed)
}

/// Kind of a tensor: one of the decoder's, or one for all experts.
fn identify(
    mut raw: safetensors::Raw,
    path: &Path,
    index: usize,
    config: &ModelConfig,
    scales: Option<Scales>,
) -> Result<Vec<Found>, Error> {
    let family = families::of(&config.family);
    let inside = raw.name.strip_prefix(family.names.layer_prefix);
    let table = inside.and_then(|inside| ngrams::table_part(inside, config));
    let named = (table.map(Named::One)).or_else(|| family.names.parse(&raw.name, config.experts));
    let Some(named) = named else {
        return Err(Error::UnexpectedTensor {
            path: path.to_owned(),
            tensor: raw.name,
            family: config.family.clone(),
        });
    };
    let dtype = match raw.dtype.as_str() {
        _ if raw.packed.is_some() => raw
            .packed
            .as_ref()
            .map_or(DType::F32, |packed| packed.parts.dtype),
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::Bf16,
        "I64" if named.is(Role::TokenExperts) => DType::I64,
        "I32" if named.is(Role::TokenExperts) => DType::I32,
        "I8" if scales.is_some() => {
            // pairs of elements
            if let Some(cols) = raw.shape.last_mut() {
                *cols = cols.saturating_mul(2);
            }
            DType::Mxfp4Pairs
        }
        "U8" if scales.is_some() => DType::Mxfp4Pairs,
        "F8_E4M3" if scales.is_some() => DType::F8E4M3,
        _ => {
            return Err(Error::WrongDtype {
                path: path.to_owned(),
                tensor: raw.name,
                found: raw.dtype,
                supported: DTYPES.into(),
            });
        }
    };
    let named = named.of_model(config);
    let id = match named {
        Named::One(id) => id,
        Named::Stacked(_, layer) | Named::Fused(_, layer) => TensorId::layer(Role::Gate, layer),
    };
    let whole = Found {
        id,
        name: raw.name,
        shape: shape_of(id.role, raw.shape),
        dtype,
        layout: layout_of(id, config),
        file: index,
        offset: raw.offset,
        scales,
        packed: raw.packed,
        gains: Vec::new(),
    };
    match named {
        Named::One(_) => Ok(vec![whole]),
        Named::Stacked(stack, layer) => stacked::split(&whole, stack, layer, config, path),
        Named::Fused(fused, layer) => fused::split(&whole, fused, layer, config, path),
    }
}

/// The shape of a tensor without meaningless dimensions.
fn shape_of(role: Role, shape: Vec<usize>) -> Vec<usize> {
    match (role, &shape[..]) {
        // a vector, stored as a matrix of one row
        (Role::SharedGate | Role::ChoiceBias, &[1, n]) => vec![n],
        (Role::DeltaRate, &[1, 1, heads, 1]) => vec![heads],
        // a row for each head
        (Role::QNorm | Role::KNorm, &[heads, width]) => vec![heads.saturating_mul(width)],
        // one kernel per channel
        (role, &[channels, 1, taps]) if role.is_conv() => vec![channels, taps],
        _ => shape,
    }
}

/// Storage layout of a tensor.
fn layout_of(id: TensorId, config: &ModelConfig) -> Layout {
    let family = families::of(&config.family);
    if let Some(rotary) = rotary_order(id, config).filter(|_| family.interleaved) {
        return rotary;
    }
    let transposed = family.has(Quirk::Conv1d);
    match id.role {
        Role::O | Role::Gate if transposed => Layout::Transposed,
        Role::Down if !transposed => Layout::Transposed,
        role if role.is_rate() => Layout::NegativeLog,
        role if form::is_less_one(&config.family, role) => Layout::PlusOne,
        _ => Layout::AsIs,
    }
}

/// Redundant tensors in some releases: the rotary frequencies, and the masks of GPT-2 and GPT-NeoX.
fn is_ignorable(name: &str) -> bool {
    const ENDS: [&str; 5] = [
        ".rotary_emb.inv_freq",
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
    ];
    ENDS.iter().any(|end| name.ends_with(end))
}

/// Unused keys and values of layers that share those of others, which releases still store, and
/// weights for multi-token prediction.
fn is_unused(name: &str, config: &ModelConfig) -> bool {
    use Role::*;
    let family = families::of(&config.family);
    let inside = name.strip_prefix(family.names.layer_prefix);
    let layer = inside.and_then(split_index).map(|(layer, _)| layer);
    if (family.further_tokens).have(name, layer, config.layers) {
        return true;
    }
    let Some(Named::One(id)) = family.names.parse(name, config.experts) else {
        return false;
    };
    let mixture = config.mixture.as_ref();
    if id.role == ChoiceBias && mixture.is_some_and(|mixture| mixture.is_by_token(id.layer)) {
        return true;
    }
    matches!(id.role, K | V | KBias | VBias | KNorm)
        && id.layer < config.layers
        && config.kv_layer(id.layer) != id.layer
}

/// The folder's own name.
fn model_name(folder: &Path) -> String {
    let full: PathBuf = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    full.file_name().map_or_else(
        || "model".into(),
        |name| name.to_string_lossy().into_owned(),
    )
}
