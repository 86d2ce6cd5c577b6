//! Hugging Face folders: `config.json`, safetensors, and the tokenizer files
//! beside them.

mod config;
mod experts;
mod foreign;
mod form;
mod json;
mod safetensors;
mod spelled;
#[cfg(test)]
mod tests;
mod texts;
pub mod write;

use std::path::{Path, PathBuf};

use self::safetensors::DTYPES;
use self::texts::MAX_CONFIG;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::file::{DataFile, need_text};
use crate::fused;
use crate::names::{ExpertNames, NameTable, Named, Role, Spellings, Stack, TensorId};
use crate::stacked;
use crate::store::{About, Found, Layout, Store};

const OUTSIDE: Spellings = &[
    (Role::Embed, "model.embed_tokens.weight"),
    (Role::Head, "lm_head.weight"),
    (Role::FinalNorm, "model.norm.weight"),
];

const OF_LAYERS: Spellings = &[
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
    (Role::GateBias, "mlp.gate_proj.bias"),
    (Role::UpBias, "mlp.up_proj.bias"),
    (Role::DownBias, "mlp.down_proj.bias"),
    (Role::PredictorFc1, "mlp.predictor.fc1.weight"),
    (Role::PredictorFc2, "mlp.predictor.fc2.weight"),
];

/// Experts in three-dimensional tensors, as `save_pretrained(save_original_format=False)` writes
/// them.
const STACKED: &[(Stack, &str)] = &[
    (Stack::GateUp, "mlp.experts.gate_up_proj"),
    (Stack::One(Role::Down), "mlp.experts.down_proj"),
];

const NAMES: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: OUTSIDE,
    layers: &[
        OF_LAYERS,
        &[
            (Role::Router, "mlp.gate.weight"),
            (Role::SharedGate, "mlp.shared_expert_gate.weight"),
        ],
    ],
    experts: ExpertNames {
        one: (
            "mlp.experts.",
            &[
                (Role::Gate, "gate_proj.weight"),
                (Role::Up, "up_proj.weight"),
                (Role::Down, "down_proj.weight"),
            ],
        ),
        shared: &[
            (Role::Gate, "mlp.shared_expert.gate_proj.weight"),
            (Role::Up, "mlp.shared_expert.up_proj.weight"),
            (Role::Down, "mlp.shared_expert.down_proj.weight"),
        ],
        stacked: STACKED,
    },
    fused: &[],
};

const MIXTRAL_NAMES: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: OUTSIDE,
    layers: &[
        OF_LAYERS,
        &[
            (Role::Router, "block_sparse_moe.gate.weight"),
            (Role::Router, "mlp.gate.weight"),
        ],
    ],
    experts: ExpertNames {
        one: (
            "block_sparse_moe.experts.",
            &[
                (Role::Gate, "w1.weight"),
                (Role::Up, "w3.weight"),
                (Role::Down, "w2.weight"),
            ],
        ),
        shared: &[],
        stacked: STACKED,
    },
    fused: &[],
};

/// The names of a family's tensors.
fn names_of(family: &str) -> &'static NameTable {
    match family {
        "mixtral" => &MIXTRAL_NAMES,
        _ => spelled::table_of(family).unwrap_or(&NAMES),
    }
}

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
    config.validate(&config_path)?;
    let names = names_of(&config.family);
    let spelled = config.clone();

    let mut files = Vec::new();
    let mut found = Vec::new();
    let mut stored_heads = Vec::new();
    for (file, header) in shards()? {
        for raw in header.into_iter().filter(|raw| !is_ignorable(&raw.name)) {
            for tensor in identify(raw, &file, files.len(), &config)? {
                if config.tied_head && tensor.id.role == Role::Head {
                    stored_heads.push(tensor);
                } else {
                    found.push(tensor);
                }
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
    let store = Store::new(about, files, found, &|id| names.spell(id, &spelled))?;
    for head in &stored_heads {
        store.expect_the_embedding(head)?;
    }
    Ok(Box::new(store))
}

/// What a tensor is: one of the decoder's, or those of all experts.
fn identify(
    raw: safetensors::Raw,
    file: &DataFile,
    index: usize,
    config: &ModelConfig,
) -> Result<Vec<Found>, Error> {
    let Some(named) = names_of(&config.family).parse(&raw.name, config.experts) else {
        return Err(Error::UnexpectedTensor {
            path: file.path.clone(),
            tensor: raw.name,
            family: config.family.clone(),
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
    let id = match named {
        Named::One(id) => id,
        Named::Stacked(_, layer) | Named::Fused(_, layer) => TensorId::layer(Role::Gate, layer),
    };
    let shape = match (id.role, &raw.shape[..]) {
        // a vector, stored as a matrix of one row
        (Role::SharedGate, &[1, n]) => vec![n],
        _ => raw.shape,
    };
    let whole = Found {
        id,
        name: raw.name,
        shape,
        dtype,
        layout: match id.role {
            Role::Down => Layout::Transposed,
            role if form::is_less_one(&config.family, role) => Layout::PlusOne,
            _ => Layout::AsIs,
        },
        file: index,
        offset: raw.offset,
    };
    match named {
        Named::One(_) => Ok(vec![whole]),
        Named::Stacked(stack, layer) => stacked::split(&whole, stack, layer, config, file),
        Named::Fused(fused, layer) => fused::split(&whole, fused, layer, config, file),
    }
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
