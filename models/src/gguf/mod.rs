//! GGUF files of llama.cpp, and PowerInfer's sparse variant.
//!
//! PowerInfer's differ in four ways: the magic, `ffn_down_t` in place of `ffn_down` (already
//! transposed), the predictors `fc1` and `fc2`, and the key `powerinfer.sparse_threshold`.

mod config;
pub(crate) mod dequant;
mod form;
mod header;
#[cfg(test)]
mod tests;
mod value;
pub(crate) mod write;

use std::path::Path;

use self::config::{Arch, Facts};
use self::header::{Header, Raw};
use self::value::Metadata;
use crate::checkpoint::{Checkpoint, SamplingDefaults};
use crate::config::{ModelConfig, RopeScaling};
use crate::dtype::DType;
use crate::error::Error;
use crate::file::DataFile;
use crate::fused;
use crate::gguf_vocab::GgufVocab;
use crate::names::{ExpertNames, NameTable, Named, Role, Stack, TensorId};
use crate::special::SpecialTokens;
use crate::stacked;
use crate::store::{About, Found, Layout, Store, shape_text};

/// Magic of a PowerInfer file for sparse inference.
const POWERINFER: &[u8; 4] = b"PWRI";
/// The tensor with a divisor for each rotary frequency.
const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Those of LongRoPE, for short and for long contexts.
const LONG_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
/// PowerInfer's name for the transposed Down.
const DOWN_T: &str = "ffn_down_t.weight";

const NAMES: NameTable = NameTable {
    layer_prefix: "blk.",
    globals: &[
        (Role::Embed, "token_embd.weight"),
        (Role::Head, "output.weight"),
        (Role::FinalNorm, "output_norm.weight"),
    ],
    layers: &[&[
        (Role::AttnNorm, "attn_norm.weight"),
        (Role::Q, "attn_q.weight"),
        (Role::K, "attn_k.weight"),
        (Role::V, "attn_v.weight"),
        (Role::O, "attn_output.weight"),
        (Role::QBias, "attn_q.bias"),
        (Role::KBias, "attn_k.bias"),
        (Role::VBias, "attn_v.bias"),
        (Role::OBias, "attn_output.bias"),
        (Role::QNorm, "attn_q_norm.weight"),
        (Role::KNorm, "attn_k_norm.weight"),
        (Role::FfnNorm, "ffn_norm.weight"),
        (Role::AttnPostNorm, "post_attention_norm.weight"),
        (Role::FfnPostNorm, "post_ffw_norm.weight"),
        (Role::GateBias, "ffn_gate.bias"),
        (Role::UpBias, "ffn_up.bias"),
        (Role::DownBias, "ffn_down.bias"),
        (Role::Gate, "ffn_gate.weight"),
        (Role::Up, "ffn_up.weight"),
        (Role::Down, "ffn_down.weight"),
        (Role::Down, DOWN_T),
        (Role::Router, "ffn_gate_inp.weight"),
        (Role::SharedGate, "ffn_gate_inp_shexp.weight"),
        (Role::PredictorFc1, "fc1.weight"),
        (Role::PredictorFc2, "fc2.weight"),
    ]],
    experts: ExpertNames {
        // only stacked
        one: ("", &[]),
        shared: &[
            (Role::Gate, "ffn_gate_shexp.weight"),
            (Role::Up, "ffn_up_shexp.weight"),
            (Role::Down, "ffn_down_shexp.weight"),
        ],
        stacked: &[
            (Stack::One(Role::Gate), "ffn_gate_exps.weight"),
            (Stack::One(Role::Up), "ffn_up_exps.weight"),
            (Stack::One(Role::Down), "ffn_down_exps.weight"),
            (Stack::GateUp, "ffn_gate_up_exps.weight"),
        ],
    },
    fused: &[],
};

/// Whether the magic is that of a GGUF (or PowerInfer) file.
pub(crate) fn is_magic(first: [u8; 4]) -> bool {
    matches!(&first, b"GGUF" | POWERINFER)
}

/// Opens a GGUF file.
pub(crate) fn open_file(path: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    let file = DataFile::open(path)?;
    let Header {
        magic,
        mut metadata,
        tensors,
    } = header::read(&file)?;
    let powerinfer = magic == *POWERINFER;
    let arch = config::arch(path, &metadata)?;
    let vocab = vocabulary(&mut metadata)?;
    let has = |name: &str| tensors.iter().any(|raw| raw.name == name);
    let facts = Facts {
        powerinfer,
        vocab: u32::try_from(vocab.tokens.len()).unwrap_or(u32::MAX),
        has_qkv_bias: has("blk.0.attn_q.bias"),
        has_o_bias: has("blk.0.attn_output.bias"),
        has_ffn_bias: has("blk.0.ffn_up.bias"),
        two_norms: has("blk.0.attn_norm_2.weight"),
        has_head: has("output.weight"),
    };
    let names = form::names_of(arch.name, facts.two_norms).unwrap_or(&NAMES);
    let name = path.file_stem().map_or_else(
        || "model".into(),
        |stem| stem.to_string_lossy().into_owned(),
    );
    let mut config = config::model_config(&metadata, arch, &facts, name)?;
    config.validate(path)?;

    let tokenizer_json = vocab
        .to_tokenizer_json()
        .map_err(|error| in_file(path, error))?;
    if let Some(leading) = SpecialTokens::parse(path, &tokenizer_json)?.leading {
        (config.bos, config.add_bos) = (Some(leading), true);
    }
    let spelled = config.clone();
    let mut long_factors = [None, None];
    let mut found = Vec::with_capacity(tensors.len());
    for raw in tensors {
        if raw.name == ROPE_FACTORS {
            scale_rope(&mut config, &file, &raw)?;
        } else if let Some(long) = LONG_FACTORS.iter().position(|name| raw.name == *name) {
            long_factors[long] = Some(read_factors(&config, &file, &raw)?);
        } else if !raw.name.ends_with(".attn_rot_embd.weight") {
            // attn_rot_embd repeats the plain frequencies, in old files only.
            found.append(&mut identify(raw, &file, arch, names, &config)?);
        }
    }
    long_rope(&mut config, &metadata, arch, long_factors)?;
    let about = About {
        path: path.to_owned(),
        config_path: path.to_owned(),
        config,
        tokenizer_json,
        chat_template: metadata.text("tokenizer.chat_template")?,
        sampling: SamplingDefaults::default(),
    };
    let spell = |id: TensorId| match id.role {
        Role::Down if powerinfer => format!("blk.{}.{DOWN_T}", id.layer),
        _ => names.spell(id, &spelled),
    };
    Ok(Box::new(Store::new(about, vec![file], found, &spell)?))
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

/// What a tensor is: one of the decoder's, or those of all experts.
fn identify(
    raw: Raw,
    file: &DataFile,
    arch: &Arch,
    names: &NameTable,
    config: &ModelConfig,
) -> Result<Vec<Found>, Error> {
    let Some(named) = names.parse(&raw.name, config.experts) else {
        let (path, tensor) = (file.path.clone(), raw.name);
        return Err(Error::UnexpectedTensor {
            path,
            tensor,
            family: arch.name.to_owned(),
        });
    };
    let id = match named {
        Named::One(id) => id,
        Named::Stacked(_, layer) | Named::Fused(_, layer) => TensorId::layer(Role::Gate, layer),
    };
    let layout = match id.role {
        Role::Down if !raw.name.ends_with(DOWN_T) => Layout::Transposed,
        Role::Q | Role::K | Role::QBias | Role::KBias if arch.interleaved => Layout::Interleaved {
            head_dim: config.head_dim as usize,
        },
        _ => Layout::AsIs,
    };
    let whole = Found {
        id,
        name: raw.name,
        shape: raw.shape,
        dtype: raw.dtype,
        layout,
        file: 0,
        offset: raw.offset,
    };
    match named {
        Named::One(_) => Ok(vec![whole]),
        Named::Stacked(stack, layer) => stacked::split(&whole, stack, layer, config, file),
        Named::Fused(fused, layer) => fused::split(&whole, fused, layer, config, file),
    }
}

/// The divisors of the rotary frequencies in a tensor.
fn read_factors(config: &ModelConfig, file: &DataFile, raw: &Raw) -> Result<Vec<f32>, Error> {
    let (path, tensor) = (file.path.clone(), raw.name.clone());
    let count = config.rope.dims as usize / 2;
    if raw.shape != [count] {
        let (found, expected) = (shape_text(&raw.shape), shape_text(&[count]));
        return Err(Error::WrongShape {
            path,
            tensor,
            found,
            expected,
        });
    }
    if raw.dtype != DType::F32 {
        let (found, supported) = (raw.dtype.name().into(), "F32".into());
        return Err(Error::WrongDtype {
            path,
            tensor,
            found,
            supported,
        });
    }
    let mut bytes = vec![0; count * 4];
    file.read_at(&mut bytes, raw.offset, &|| format!("tensor {}", raw.name))?;
    let mut factors = vec![0.0; count];
    raw.dtype.decode(&bytes, &mut factors);
    Ok(factors)
}

/// The scaling of LongRoPE, if the file has its divisors; those of the short contexts come first.
fn long_rope(
    config: &mut ModelConfig,
    metadata: &Metadata,
    arch: &Arch,
    factors: [Option<Vec<f32>>; 2],
) -> Result<(), Error> {
    let key = |rest: &str| format!("{}.{rest}", arch.name);
    let attention = key(form::ATTENTION_FACTOR);
    let attention_factor = metadata.f32(&attention)?.filter(|factor| *factor != 0.0);
    let [short, long] = factors;
    match (short, long) {
        (None, None) => match attention_factor {
            Some(factor) if factor != 1.0 => {
                Err(metadata.unsupported(&attention, "there are no divisors of the frequencies"))
            }
            _ => Ok(()),
        },
        (Some(short), Some(long)) if config.rope.scaling == RopeScaling::None => {
            let original = key("rope.scaling.original_context_length");
            config.rope.scaling = RopeScaling::Long {
                short,
                long,
                attention_factor: attention_factor.unwrap_or(1.0),
                original_context: metadata
                    .u32(&original)?
                    .ok_or_else(|| metadata.missing(&original, "an integer"))?,
            };
            Ok(())
        }
        _ => {
            let why = "one of the tensors rope_factors_short.weight and rope_factors_long.weight is \
                       missing, or the metadata asks for another rotary scaling";
            Err(metadata.unsupported(&key("rope.scaling.type"), why))
        }
    }
}

/// Converts the frequency divisors to a scaling.
fn scale_rope(config: &mut ModelConfig, file: &DataFile, raw: &Raw) -> Result<(), Error> {
    let path = file.path.clone();
    let unsupported = |found: String, why: &str| {
        Err(Error::Unsupported {
            path: path.clone(),
            key: ROPE_FACTORS.into(),
            found,
            why: why.into(),
        })
    };
    let factors = read_factors(config, file, raw)?;
    let Some(scaling) = config::llama3_from_factors(config.rope.theta, config.rope.dims, &factors)
    else {
        return unsupported(
            format!("{factors:?}"),
            "these divisors are not those of a llama3 scaling",
        );
    };
    if scaling != RopeScaling::None && config.rope.scaling != RopeScaling::None {
        return unsupported(
            "present".into(),
            "the metadata asks for another rotary scaling",
        );
    }
    if scaling != RopeScaling::None {
        config.rope.scaling = scaling;
    }
    Ok(())
}
