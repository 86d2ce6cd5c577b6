//! GGUF metadata → [`ModelConfig`].

use std::path::Path;

use super::deepseek4;
use super::experts;
use super::facts::Facts;
use super::form;
use super::gemma4;
use super::latent;
use super::rope::ropes;
use super::sublayers::{self, KV_HEADS};
use crate::config::{Activation, FfnKind, Form, MAX_COUNT, ModelConfig, Rope};
use crate::error::Error;
use crate::families::{self, Arch, Family, QkNorm, Quirk, Windows};
use crate::metadata::{ArchKeys, Metadata};
use crate::mixers::Sizes;
use crate::mixers::keys::GgufLayers;
use crate::mixers::layers::others;

/// Names the activation as in a Hugging Face configuration: `relu`, `relu2`, `silu`, `gelu`,
/// `gelu_pytorch_tanh`. llama.cpp ignores the key and uses the architecture's activation.
pub(super) const HIDDEN_ACT: &str = "emberflow.hidden_act";
/// Whether the up projection has a ReLU too (dReLU).
pub(super) const RELU_ON_UP: &str = "emberflow.relu_on_up";

/// Positions of the window.
const WINDOW: &str = "attention.sliding_window";
/// Interval of layers without a window.
const PATTERN: &str = "attention.sliding_window_pattern";

/// The family and architecture of a file.
pub(super) fn family_of(
    path: &Path,
    metadata: &Metadata,
    facts: &Facts,
) -> Result<(&'static Family, &'static Arch), Error> {
    let found = metadata.need_text("general.architecture")?;
    let (family, arch) = families::find_arch(&found).ok_or_else(|| {
        let archs = families::all().filter_map(|family| Some(family.gguf.as_ref()?.name));
        Error::UnknownFamily {
            path: path.to_owned(),
            found: format!("{found:?}"),
            supported: archs.collect::<Vec<_>>().join(", "),
        }
    })?;
    let sigmoids = experts::by_sigmoids(arch.keys(metadata), facts.has_choice_bias)?;
    let window = arch.keys(metadata).u32(WINDOW)?;
    let windowed = arch
        .windowed
        .filter(|_| window.is_some_and(|size| size > 0));
    let other = windowed.or(arch.without_sigmoids.filter(|_| !sigmoids));
    Ok((other.unwrap_or(family), arch))
}

/// The family's name: that of the family with experts under its architecture, if the file has
/// experts.
fn name_of(family: &Family, has_experts: bool, kind: FfnKind) -> &'static str {
    let stored = has_experts && family.experts.is_none();
    let like = |other: &&Family| other.relu_on_up == kind.relu_on_up;
    let with_experts = stored.then(|| family.with_experts().find(like)).flatten();
    with_experts.map_or(family.name, |other| other.name)
}

/// Translates the metadata. `name` applies if the file does not name the model. The caller handles
/// special tokens other than the declared ids.
pub(super) fn model_config(
    metadata: &Metadata,
    family: &'static Family,
    arch: &Arch,
    facts: &Facts,
    name: String,
) -> Result<ModelConfig, Error> {
    let keys = arch.keys(metadata);
    let need = |rest: &str| keys.need_uniform(rest);
    refuse_unknown(metadata, family, arch)?;
    let layers = layer_count(keys, need("block_count")?)?;
    let d_model = need("embedding_length")?;
    let heads = need("attention.head_count")?;
    let head_dim = head_dim(keys, family, d_model, heads)?;
    let experts = experts::read(keys, family, layers, &facts.routers)?;
    let window = Window::read(metadata, arch, layers)?;
    let ffn_kind = ffn_kind(metadata, family, arch, facts)?;
    let of_expert = keys.u32("expert_feed_forward_length")?;
    let of_expert = of_expert.filter(|_| experts.is_some());
    let (mut rope, local_rope) = ropes(metadata, family, arch, head_dim, window.size > 0)?;
    let sizes = Sizes {
        d_model,
        layers,
        heads,
        head_dim,
        rotated: rope.dims,
    };
    let mut form = form::form(keys, family, arch, facts, sizes, window.size > 0)?;
    form.local_rope = local_rope;
    let window: Vec<u32> = (0..layers).map(|layer| window.of(layer)).collect();
    let ByLayer {
        kv_heads,
        ffn,
        headless,
    } = by_layer(keys, family, arch, facts, &window, &mut form)?;
    let file = GgufLayers {
        keys,
        sizes,
        headless: &headless,
        tensors: &facts.layer_tensors,
    };
    of_mixers(&file, family, &mut rope, &mut form)?;
    let kv_heads = family.fixed_kv_heads(heads).or(kv_heads);
    let named = (metadata.text("general.name")?).filter(|name| !name.is_empty());
    Ok(ModelConfig {
        family: name_of(family, experts.is_some(), ffn_kind).to_owned(),
        name: named.unwrap_or(name),
        vocab: facts.vocab,
        d_model,
        layers,
        heads,
        kv_heads: kv_heads.unwrap_or(heads),
        head_dim,
        ffn: match of_expert.or(ffn) {
            Some(ffn) => ffn,
            None if family.has(Quirk::Sublayers) => sublayers::ffn(keys, layers)?,
            None => need("feed_forward_length")?,
        },
        experts: experts.as_ref().map_or(1, |experts| experts.0),
        ffn_kind,
        rms_eps: epsilon(keys, family, arch)?,
        rope,
        window,
        qkv_bias: family.always_has_qkv_bias() || facts.has_qkv_bias,
        o_bias: facts.has_o_bias,
        qk_norm: facts.qk_norm(family),
        tied_head: !facts.has_head,
        max_context: facts.max_context(keys, family, &form)?,
        bos: metadata.u32("tokenizer.ggml.bos_token_id")?,
        add_bos: false,
        eos: ends(metadata)?,
        // PowerInfer treats an absent threshold as 0.
        predictor_threshold: (metadata.f32("powerinfer.sparse_threshold")?)
            .or(facts.powerinfer.then_some(0.0)),
        mixture: experts.map(|experts| experts.1),
        qk_norm_whole: family.qk_norm == QkNorm::Whole,
        clip_qkv: (keys.f32("attention.clamp_kqv")?).filter(|clip| *clip != 0.0),
        form,
    })
}

/// Mixers other than attention.
fn of_mixers(
    file: &GgufLayers,
    family: &Family,
    rope: &mut Rope,
    form: &mut Form,
) -> Result<(), Error> {
    for of in family.mixers {
        of.read_gguf(file, form)?;
    }
    if form.latent.is_some() {
        latent::scale_scores(file.keys, rope, file.sizes.head_dim, form)?;
    }
    if family.has(Quirk::DeepSeek4) {
        deepseek4::form(file.keys, file.sizes, form)?;
        let [with_pools, without] = deepseek4::ropes(file.keys, rope.clone())?;
        *rope = with_pools;
        form.local_rope = Some(without);
    }
    Ok(())
}

/// What may differ from layer to layer.
struct ByLayer {
    /// Heads of keys and values, where all layers have as many.
    kv_heads: Option<u32>,
    /// The FFN's neurons, if layers differ.
    ffn: Option<u32>,
    /// Layers without heads of keys and values.
    headless: Vec<u32>,
}

/// Reads what may differ from layer to layer.
fn by_layer(
    keys: ArchKeys<'_>,
    family: &Family,
    arch: &Arch,
    facts: &Facts,
    window: &[u32],
    form: &mut Form,
) -> Result<ByLayer, Error> {
    let layers = window.len() as u32;
    if family.has(Quirk::GlobalHeads) {
        let (kv_heads, ffn) = gemma4::form(keys, facts.gemma4, window, form)?;
        return Ok(ByLayer {
            kv_heads,
            ffn,
            headless: Vec::new(),
        });
    }
    let (kv_heads, headless) = if family.has(Quirk::Sublayers) {
        sublayers::sublayers(keys, layers, form)?
    } else if family.mixers.iter().any(|of| of.facts().headless) {
        let further = arch.reads.contains(&"nextn_predict_layers");
        let (heads, with) = sublayers::listed(keys, KV_HEADS, layers, further)?;
        (heads, others(Some(&with), layers))
    } else {
        (keys.uniform(KV_HEADS)?, Vec::new())
    };
    Ok(ByLayer {
        kv_heads,
        ffn: None,
        headless,
    })
}

/// The epsilon of the norms.
fn epsilon(keys: ArchKeys<'_>, family: &Family, arch: &Arch) -> Result<f32, Error> {
    let other = if family.has(Quirk::Sublayers) {
        keys.f32("attention.layer_norm_epsilon")?
    } else {
        None
    };
    match keys.f32(arch.eps)?.or(other).or(arch.usual_eps) {
        Some(eps) => Ok(eps),
        None => keys.need_f32(arch.eps),
    }
}

/// The number of layers without those for multi-token prediction, if valid.
fn layer_count(keys: ArchKeys<'_>, blocks: u32) -> Result<u32, Error> {
    let further = keys.u32("nextn_predict_layers")?;
    match blocks.saturating_sub(further.unwrap_or(0)) {
        layers if layers <= MAX_COUNT => Ok(layers),
        _ => Err(keys.bad("block_count", &format!("at most {MAX_COUNT}"))),
    }
}

/// Keys of an architecture that are read here, or do not affect the result.
const KNOWN: [&str; 31] = [
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    // without experts, the others have no effect
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_weights_scale",
    "expert_weights_norm",
    "expert_gating_func",
    "attention.clamp_kqv",
    // origin of the weights, and pooling of embeddings in servers
    "tensor_data_layout",
    "pooling_type",
];

/// Prefixes of keys of the image and sound encoders, which text does not use.
const OF_OTHER_INPUTS: [&str; 3] = ["vision.", "audio.", "mm."];

/// Rejects an unknown hyperparameter, because its effect would be missing. A value of 0 or `false`
/// has no effect.
fn refuse_unknown(metadata: &Metadata, family: &Family, arch: &Arch) -> Result<(), Error> {
    let prefix = format!("{}.", arch.name);
    let is_mixers = |rest| (family.mixers.iter()).any(|of| of.facts().gguf_keys.contains(&rest));
    for rest in metadata.under(&prefix) {
        let key = format!("{prefix}{rest}");
        let passes = match rest {
            _ if arch.reads.contains(&rest) => true,
            _ if family.has(Quirk::DeepSeek4) && deepseek4::KEYS.contains(&rest) => true,
            _ if is_mixers(rest) => true,
            _ if family.keys.iter().any(|key| key.gguf.name == rest) => true,
            _ if OF_OTHER_INPUTS.iter().any(|part| rest.starts_with(part)) => true,
            "attention.causal" => metadata.bool(&key)? == Some(true),
            experts::EXPERT_STEP => metadata.u32(&key)? == Some(1),
            "rope.scaling.attn_factor" | "logit_scale" | "embedding_scale" | "residual_scale" => {
                metadata.is_off(&key) || metadata.f32(&key)? == Some(1.0)
            }
            _ => KNOWN.contains(&rest) || metadata.is_off(&key),
        };
        if !passes {
            let why = "this key is not known for this architecture, so its effect would be missing";
            return Err(metadata.unsupported(&key, why));
        }
    }
    Ok(())
}

/// The activation, if the file names it ([`HIDDEN_ACT`], [`RELU_ON_UP`]). Files from other programs
/// do not: the architecture implies it, and PowerInfer's sparse files are ReLU models of the same
/// architectures.
fn ffn_kind(
    metadata: &Metadata,
    family: &Family,
    arch: &Arch,
    facts: &Facts,
) -> Result<FfnKind, Error> {
    let relu = facts.powerinfer || arch.relu;
    let activation = match metadata.text(HIDDEN_ACT)?.as_deref() {
        None if relu => Activation::Relu,
        None if family.has(Quirk::DeepSeek4) => deepseek4::activation(arch.keys(metadata))?,
        None => arch.act,
        Some("relu") => Activation::Relu,
        Some(_) if relu => {
            return Err(metadata.bad(HIDDEN_ACT, "relu, as in every such file"));
        }
        Some("relu2") => Activation::Relu2,
        Some("silu") => Activation::Silu,
        Some("gelu") => Activation::Gelu,
        Some("gelu_pytorch_tanh") => Activation::GeluTanh,
        Some(_) => {
            return Err(metadata.bad(HIDDEN_ACT, "relu, relu2, silu, gelu or gelu_pytorch_tanh"));
        }
    };
    let relu_on_up = metadata.bool(RELU_ON_UP)?.unwrap_or(family.relu_on_up);
    if relu_on_up && activation != Activation::Relu {
        return Err(metadata.bad(RELU_ON_UP, "false, or relu on the gate too"));
    }
    Ok(FfnKind {
        activation,
        relu_on_up,
        ungated: family.ungated,
    })
}

fn head_dim(keys: ArchKeys<'_>, family: &Family, d_model: u32, heads: u32) -> Result<u32, Error> {
    const VALUES: &str = "attention.value_length";
    if let Some(of) = family.head_dim() {
        return (of.gguf)(&keys);
    }
    let head_dim = match keys.u32("attention.key_length")? {
        Some(_) if family.has(Quirk::GlobalHeads) => return keys.need(gemma4::LOCAL_LENGTH),
        Some(length) => length,
        None if heads > 0 && d_model.is_multiple_of(heads) => d_model / heads,
        None => {
            let expected = format!("a divisor of embedding_length = {d_model}");
            return Err(keys.bad("attention.head_count", &expected));
        }
    };
    match keys.u32(VALUES)? {
        Some(length) if length != head_dim => {
            let why = format!("only {head_dim}, the keys' length, is implemented");
            Err(keys.unsupported(VALUES, &why))
        }
        _ => Ok(head_dim),
    }
}

/// Tokens that end a text, a turn or a message, from the keys that name them. Ollama writes lists.
fn ends(metadata: &Metadata) -> Result<Vec<u32>, Error> {
    let mut list = Vec::new();
    for key in [
        "eos_token_id",
        "eot_token_id",
        "eom_token_id",
        "eos_token_ids",
    ] {
        for token in metadata.tokens(&format!("tokenizer.ggml.{key}"))? {
            if !list.contains(&token) {
                list.push(token);
            }
        }
    }
    Ok(list)
}

/// Interval of layers without a window: a number, or a list of flags by layer, as written by llama.cpp's
/// converter for Gemma 3n and Exaone 4.
fn pattern(metadata: &Metadata, arch: &Arch, usual: u32, layers: u32) -> Result<u32, Error> {
    let keys = arch.keys(metadata);
    if let Some(windowed) = metadata.flags(&keys.key(PATTERN))? {
        if windowed.len() != layers as usize {
            return Err(keys.bad(PATTERN, &format!("a flag for each of {layers} layers")));
        }
        let fits = |&nth: &u32| {
            (1..)
                .zip(&windowed)
                .all(|(at, has)| *has == (at % nth != 0))
        };
        // past the last layer, all have a window; other layers without rotary positions are not
        // supported
        let mut all = [usual].into_iter().chain(1..=layers + 1);
        let found = all
            .find(fits)
            .filter(|&nth| nth == usual || arch.unrotated.is_none());
        return found.ok_or_else(|| {
            let why = format!(
                "only layers without a window at equal distances ({usual}) are implemented"
            );
            keys.unsupported(PATTERN, &why)
        });
    }
    match keys.u32(PATTERN)? {
        Some(0) => Err(keys.bad(PATTERN, "1 and more")),
        pattern => Ok(pattern.unwrap_or(usual)),
    }
}

/// The sliding window of a file and its layers.
#[derive(Clone, Copy)]
struct Window {
    /// Positions; 0 without one.
    size: u32,
    layers: Windows,
}

impl Window {
    fn read(metadata: &Metadata, arch: &Arch, layers: u32) -> Result<Self, Error> {
        let keys = arch.keys(metadata);
        match keys.u32(WINDOW)? {
            Some(size) if matches!(arch.windows, Windows::Chunks(_)) => {
                let why =
                    format!("only chunks are implemented, and {size} asks for others or none");
                Err(keys.unsupported(WINDOW, &why))
            }
            Some(size) if size > 0 && arch.windows == Windows::Never => {
                let why = "the file does not say which layers have the window";
                Err(keys.unsupported(WINDOW, why))
            }
            size => Ok(Self {
                size: match arch.windows {
                    Windows::Chunks(usual) => usual,
                    _ => size.unwrap_or(0),
                },
                layers: match arch.windows {
                    Windows::Pattern(usual) => {
                        Windows::Pattern(pattern(metadata, arch, usual, layers)?)
                    }
                    layers => layers,
                },
            }),
        }
    }

    /// The window of a layer.
    fn of(self, layer: u32) -> u32 {
        match self.layers {
            Windows::AllButFourth if layer.is_multiple_of(4) => 0,
            Windows::Alternate if !layer.is_multiple_of(2) => 0,
            Windows::Pattern(pattern) if (layer + 1).is_multiple_of(pattern) => 0,
            Windows::Chunks(_) if (layer + 1).is_multiple_of(4) => 0,
            _ => self.size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Value;

    /// `attention.sliding_window_pattern` as written by converters: a number, or a flag for each
    /// layer.
    #[test]
    fn windows_are_told_by_a_number_or_by_flags() {
        let found = |name: &str, value: Value, layers| {
            let (_, arch) = families::find_arch(name).unwrap();
            let mut metadata = Metadata::new(Path::new("model.gguf"));
            metadata.insert(format!("{name}.{PATTERN}"), value).unwrap();
            pattern(&metadata, arch, 5, layers)
        };
        let flags = |nth: usize, layers: usize| {
            let flags = (1..=layers).map(|at| Value::Bool(at % nth != 0));
            Value::List(flags.collect())
        };
        assert_eq!(found("gemma3n", Value::Uint(6), 35).unwrap(), 6);
        assert_eq!(found("gemma3n", flags(5, 35), 35).unwrap(), 5);
        assert_eq!(found("gemma3n", flags(3, 8), 8).unwrap(), 3);
        // fewer layers than the pattern is long
        assert_eq!(found("gemma3n", flags(5, 4), 4).unwrap(), 5);
        assert_eq!(found("gemma3n", flags(9, 8), 8).unwrap(), 9);
        assert!(found("gemma3n", flags(5, 34), 35).is_err());
        let uneven = Value::List([true, false, false].map(Value::Bool).to_vec());
        assert!(found("gemma3n", uneven, 3).is_err());
        // every fourth layer has no rotary positions
        assert!(found("exaone4", flags(3, 8), 8).is_err());
    }
}
