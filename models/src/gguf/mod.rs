//! GGUF files of llama.cpp, and PowerInfer's sparse variant.
//!
//! PowerInfer's differ in four points: the magic, `ffn_down_t` instead of `ffn_down` (already
//! transposed), the predictors `fc1` and `fc2`, and the key `powerinfer.sparse_threshold`. They
//! support one more architecture, OPT.

mod config;
mod deepseek4;
mod experts;
mod facts;
mod form;
mod gemma4;
mod header;
mod latent;
mod ngrams;
mod rope;
mod sampling;
mod split;
mod streams;
mod sublayers;
#[cfg(test)]
mod tests;
pub(crate) mod write;
mod xielu;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use self::facts::Facts;
use self::header::{Header, Raw};
use self::rope::{LONG_FACTORS, ROPE_FACTORS, long_rope, read_factors, scale_rope};
use self::split::Set;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::families::{Arch, DOWN_T, DOWN_T_BIAS, Family};
use crate::file::DataFile;
use crate::fused;
use crate::gguf_vocab::GgufVocab;
use crate::metadata::Metadata;
use crate::mtp::{HeadNames, Part, may_be_head};
use crate::names::{NameTable, Named, Role, TensorId};
use crate::special::SpecialTokens;
use crate::stacked;
use crate::store::{About, Found, Layout, Store, rotary_order, warn_of_left_out};
use crate::tensor_id::split_index;

/// Magic of a PowerInfer file for sparse inference.
const POWERINFER: &[u8; 4] = b"PWRI";

/// Whether the magic is that of a GGUF (or PowerInfer) file.
pub(crate) fn is_magic(first: [u8; 4]) -> bool {
    matches!(&first, b"GGUF" | POWERINFER)
}

/// The parts of the split GGUF file with part `path`; none for a whole file.
pub(crate) fn parts_of(path: &Path) -> Vec<PathBuf> {
    split::parts_of(path)
}

/// Bytes of the header of a GGUF file that may be only the beginning of one, as of a download; `None` if it ends within
/// its header.
///
/// # Errors
/// As [`open`](crate::open), of the header: types of tensors that are not supported, for one.
pub fn gguf_header_len(path: &Path) -> Result<Option<u64>, Error> {
    header::len(&DataFile::open(path)?)
}

/// The name of the model of which the file `path` is a part, without its number and ending.
pub(crate) fn whole_name(path: &Path) -> Option<String> {
    split::prefix(path)
}

/// See [`crate::is_mtp_head`].
pub(crate) fn is_mtp_head(path: &Path) -> Result<bool, Error> {
    Ok(has_head_only(&split::open(path)?.header.tensors))
}

/// Whether there is a head for multi-token prediction and no first layer.
fn has_head_only(tensors: &[Raw]) -> bool {
    let first = |raw: &Raw| raw.name.starts_with("blk.0.");
    tensors.iter().any(|raw| may_be_head(&raw.name)) && !tensors.iter().any(first)
}

/// Opens a GGUF file, or all parts of a split file with part `path`.
pub(crate) fn open_file(path: &Path, part: Part) -> Result<Option<Box<dyn Checkpoint>>, Error> {
    let Set {
        name,
        files,
        header,
    } = split::open(path)?;
    let Header {
        magic,
        mut metadata,
        tensors,
    } = header;
    let path: &Path = &files[0].path;
    if part == Part::MtpHead && !tensors.iter().any(|raw| may_be_head(&raw.name)) {
        return Ok(None);
    }
    if part == Part::Decoder && has_head_only(&tensors) {
        return Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found: "a head for multi-token prediction without its model, for which it drafts"
                .into(),
        });
    }
    let powerinfer = magic == *POWERINFER;
    let vocab = vocabulary(&mut metadata)?;
    let facts = Facts::of(powerinfer, &vocab, &tensors);
    let (family, arch) = config::family_of(path, &metadata, &facts)?;
    let two_norms = arch.names_of_two_norms.filter(|_| facts.two_norms);
    let names = two_norms.unwrap_or(arch.names);
    let mut config = config::model_config(&metadata, family, arch, &facts, name)?;
    let further = vocab.ends();
    let known = config.eos.clone();
    (config.eos).extend(further.into_iter().filter(|id| !known.contains(id)));
    config.validate(path)?;

    let named_tokens = named_tokens(&metadata, &vocab)?;
    let tokenizer_json = vocab
        .to_tokenizer_json()
        .map_err(|error| in_file(path, error))?;
    drop(vocab);
    let around = SpecialTokens::parse(path, &tokenizer_json)?.around;
    if let Some(&leading) = around.before.first() {
        (config.bos, config.add_bos) = (Some(leading), true);
    }
    let mut tensors = tensors;
    if part == Part::MtpHead {
        let of = HeadNames {
            names,
            layers: config.layers,
        };
        let Some(head) = of_head(&mut tensors, of, &config) else {
            return Ok(None);
        };
        config = head;
    }
    let spelled = config.clone();
    let mut long_factors = [None, None];
    let mut found = Vec::with_capacity(tensors.len());
    let mut left_out = 0;
    for raw in tensors {
        let file = &files[raw.file];
        if raw.name == ROPE_FACTORS {
            scale_rope(&mut config, file, &raw)?;
        } else if let Some(long) = LONG_FACTORS.iter().position(|name| raw.name == *name) {
            long_factors[long] = Some(read_factors(&config, file, &raw)?);
        } else if is_of_other_inputs(&raw.name) {
            left_out += 1;
        } else if !is_ignorable(&raw.name)
            && !is_for_further_tokens(&raw.name, family, arch, &config)
        {
            found.append(&mut identify(raw, file, arch, names, &config)?);
        }
    }
    warn_of_left_out(path, left_out);
    long_rope(&mut config, arch.keys(&metadata), long_factors)?;
    let about = About {
        path: path.to_owned(),
        config_path: path.to_owned(),
        config,
        tokenizer_json,
        chat_template: metadata.text("tokenizer.chat_template")?,
        tool_template: metadata.text("tokenizer.chat_template.tool_use")?,
        sampling: sampling::sampling(&metadata)?,
        rules: sampling::rules(&metadata)?,
        named_tokens,
        quantization: quantization(&metadata),
    };
    let spell = |id: TensorId| match id.role {
        Role::Down if powerinfer => format!("blk.{}.{DOWN_T}", id.layer),
        Role::DownBias if powerinfer => format!("blk.{}.{DOWN_T_BIAS}", id.layer),
        _ => names.spell(id, &spelled),
    };
    Ok(Some(Box::new(Store::new(about, files, found, &spell)?)))
}

/// Leaves the tensors of the first head for multi-token prediction, under the names of a model of one layer, and what it reads
/// of the model's; returns its configuration.
fn of_head(tensors: &mut Vec<Raw>, of: HeadNames<'_>, config: &ModelConfig) -> Option<ModelConfig> {
    let names = tensors.iter().map(|raw| raw.name.as_str());
    let (routed, renamed) = of.of_all(names, config)?;
    let rotary = |name: &str| name == ROPE_FACTORS || LONG_FACTORS.contains(&name);
    let mut renamed = renamed.into_iter();
    tensors.retain_mut(|raw| {
        let known = renamed.next().flatten();
        let wanted = known.is_some() || rotary(&raw.name);
        raw.name = known.unwrap_or_else(|| std::mem::take(&mut raw.name));
        wanted
    });
    config.mtp_head(routed)
}

/// The name of the file's `general.file_type`, llama.cpp's number for what its quantizer was asked for.
fn quantization(metadata: &Metadata) -> Option<&'static str> {
    /// A bit of files whose type was guessed from their tensors.
    const GUESSED: u32 = 1024;
    // It changes nothing in how the file is read, so a value of another type is none.
    let number = metadata.u32("general.file_type").ok()??;
    Some(match number & !GUESSED {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        21 => "Q2_K_S",
        25 => "IQ4_NL",
        30 => "IQ4_XS",
        32 => "BF16",
        38 => "MXFP4",
        _ => return None,
    })
}

/// Tensors for images and sound, in files that include them: encoders, and the bias by which DeepSeek-V4-Flash-Vision
/// routes images.
fn is_of_other_inputs(name: &str) -> bool {
    let encoder = ["v.", "a.", "mm."]
        .iter()
        .any(|part| name.starts_with(part));
    encoder || name.ends_with(".exp_probs_b_vl.bias")
}

/// Tensors without effect on the result: the plain rotary frequencies in old files, and
/// SmallThinker's predictor of large logits.
fn is_ignorable(name: &str) -> bool {
    name.ends_with(".attn_rot_embd.weight") || name == "lm_head_profiler.weight"
}

/// Whether a tensor is for multi-token prediction.
fn is_for_further_tokens(name: &str, family: &Family, arch: &Arch, config: &ModelConfig) -> bool {
    let layer = name.strip_prefix("blk.").and_then(split_index);
    let layer = layer.map(|(layer, _)| layer);
    let counted = arch.reads.contains(&"nextn_predict_layers");
    let past_last = layer.is_some_and(|layer| layer >= config.layers);
    past_last && counted || (family.further_tokens).have(name, layer, config.layers)
}

/// Adds the file's name to a vocabulary error.
fn in_file(path: &Path, error: Error) -> Error {
    match error {
        Error::Tokenizer {
            what: key,
            found,
            expected,
        } => Error::BadKey {
            path: path.to_owned(),
            key,
            found,
            expected,
        },
        other => other,
    }
}

/// The special tokens that chat templates and fill-in-the-middle prompts refer to by name.
fn named_tokens(metadata: &Metadata, vocab: &GgufVocab) -> Result<BTreeMap<String, String>, Error> {
    let mut named = BTreeMap::new();
    for (key, name) in [
        ("bos_token_id", "bos_token"),
        ("eos_token_id", "eos_token"),
        ("unknown_token_id", "unk_token"),
        ("padding_token_id", "pad_token"),
        // spelled so in every file
        ("seperator_token_id", "sep_token"),
        ("cls_token_id", "cls_token"),
        ("mask_token_id", "mask_token"),
        // fill-in-the-middle tokens, by their older keys and then by the current ones
        ("prefix_token_id", "fim_prefix"),
        ("suffix_token_id", "fim_suffix"),
        ("middle_token_id", "fim_middle"),
        ("fim_pre_token_id", "fim_prefix"),
        ("fim_suf_token_id", "fim_suffix"),
        ("fim_mid_token_id", "fim_middle"),
        ("fim_pad_token_id", "fim_pad"),
        ("fim_rep_token_id", "fim_repository"),
        ("fim_sep_token_id", "fim_file"),
    ] {
        let id = metadata.u32(&format!("tokenizer.ggml.{key}"))?;
        let token = id.and_then(|id| vocab.tokens.get(usize::try_from(id).ok()?));
        named.extend(token.map(|token| (name.to_owned(), token.clone())));
    }
    Ok(named)
}

/// Moves the vocabulary out of the metadata.
fn vocabulary(metadata: &mut Metadata) -> Result<GgufVocab, Error> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    if !metadata.has(TOKENS) {
        return Err(metadata.missing(TOKENS, "a list of strings"));
    }
    let tokens = metadata.take_texts(TOKENS)?;
    let scores = metadata.f32s("tokenizer.ggml.scores")?;
    let token_types = metadata.i32s("tokenizer.ggml.token_type")?;
    for (key, len) in [
        ("tokenizer.ggml.scores", scores.len()),
        ("tokenizer.ggml.token_type", token_types.len()),
    ] {
        if metadata.has(key) && len != tokens.len() {
            return Err(metadata.bad(
                key,
                &format!("one value for each of {} tokens", tokens.len()),
            ));
        }
        metadata.remove(key);
    }
    Ok(GgufVocab {
        model: metadata.need_text("tokenizer.ggml.model")?,
        pre: metadata.text("tokenizer.ggml.pre")?,
        merges: metadata.take_texts("tokenizer.ggml.merges")?,
        bos: metadata.u32("tokenizer.ggml.bos_token_id")?,
        eos: metadata.u32("tokenizer.ggml.eos_token_id")?,
        unk: metadata.u32("tokenizer.ggml.unknown_token_id")?,
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        tokens,
        scores,
        token_types,
    })
}

/// The rows of a vector that llama.cpp stores as a matrix.
fn stored_rows(config: &ModelConfig, role: Role) -> Option<usize> {
    let rows = config.form.mixers().find_map(|of| of.gguf_rows(role));
    rows.map(|rows| rows as usize)
}

/// The shape of a tensor without meaningless dimensions, with heads stacked.
fn shape_of(role: Role, shape: Vec<usize>, config: &ModelConfig) -> Vec<usize> {
    match shape[..] {
        // outer dimensions of 1 mean nothing in ggml
        [1, n] if role.is_vector() => vec![n],
        // a row for each head
        [heads, width] if matches!(role, Role::QNorm | Role::KNorm) => {
            vec![heads.saturating_mul(width)]
        }
        // a matrix for each head
        [heads, rows, cols] if matches!(role, Role::LatentKeys | Role::LatentValues) => {
            vec![heads.saturating_mul(rows), cols]
        }
        // a kernel, or a number, per channel
        [1, channels, 1, taps] if role.is_conv() => vec![channels, taps],
        [1, 1, heads, 1] | [heads, 1] if role == Role::DeltaRate => vec![heads],
        [rows, cols] if stored_rows(config, role) == Some(rows) => vec![rows.saturating_mul(cols)],
        _ => shape,
    }
}

/// Kind of a tensor: one of the decoder's, or one for all experts.
fn identify(
    raw: Raw,
    file: &DataFile,
    arch: &Arch,
    names: &NameTable,
    config: &ModelConfig,
) -> Result<Vec<Found>, Error> {
    let named = (names.parse(&raw.name, config.experts)).map(|named| named.of_model(config));
    let id = match named {
        Some(Named::One(id)) => id,
        Some(Named::Stacked(_, layer) | Named::Fused(_, layer)) => {
            TensorId::layer(Role::Gate, layer)
        }
        None => TensorId::global(Role::StreamIn),
    };
    if raw.dtype == DType::I32 && id.role != Role::TokenExperts {
        return Err(Error::WrongDtype {
            path: file.path.clone(),
            tensor: raw.name,
            found: raw.dtype.name().into(),
            supported: "integers for the experts of tokens alone".into(),
        });
    }
    let layout = match id.role {
        Role::Down if !raw.name.ends_with(DOWN_T) => Layout::Transposed,
        // of full-rank projections
        Role::DeltaRate if (config.form.kda.as_ref()).is_some_and(|of| of.shape.direct) => {
            Layout::Negative
        }
        _ => rotary_order(id, config)
            .filter(|_| arch.interleaved)
            .unwrap_or(Layout::AsIs),
    };
    let whole = Found {
        packed: None,
        id,
        name: raw.name,
        shape: shape_of(id.role, raw.shape, config),
        dtype: raw.dtype,
        layout,
        file: raw.file,
        offset: raw.offset,
        scales: None,
        gains: Vec::new(),
    };
    match named {
        Some(Named::One(id)) if streams::is_unused(id, config) => Ok(Vec::new()),
        Some(Named::One(_)) => Ok(vec![whole]),
        Some(Named::Stacked(stack, layer)) => {
            stacked::split(&whole, stack, layer, config, &file.path)
        }
        Some(Named::Fused(fused, layer)) => {
            let mut parts = fused::split(&whole, fused, layer, config, &file.path)?;
            for part in parts.iter_mut().filter(|_| arch.interleaved) {
                let rotary = rotary_order(part.id, config);
                part.layout = rotary.unwrap_or(part.layout);
            }
            Ok(parts)
        }
        None => {
            let projections = streams::split(&whole, config, file)?;
            projections.ok_or_else(|| Error::UnexpectedTensor {
                path: file.path.clone(),
                tensor: whole.name,
                family: arch.name.to_owned(),
            })
        }
    }
}
