//! GGUF metadata → [`ModelConfig`].

use std::collections::BTreeSet;
use std::path::Path;

use super::deepseek4;
use super::experts;
use super::form::{self, Shape};
use super::gemma4;
use super::latent;
use super::rope::ropes;
use super::streams;
use super::sublayers;
use crate::config::{Activation, FfnKind, Form, MAX_COUNT, ModelConfig, Rope};
use crate::error::Error;
use crate::families::{self, Arch, Family, QkNorm, Quirk, Windows};
use crate::metadata::Metadata;
use crate::mixers::keys::GgufLayers;
use crate::mixers::{Sizes, pooled};
use crate::store::indexed_context;

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
    let sigmoids = experts::by_sigmoids(metadata, arch, facts.has_choice_bias)?;
    let window = metadata.u32(&format!("{}.{WINDOW}", arch.name))?;
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

/// Configuration facts from the tensors and the vocabulary.
pub(super) struct Facts {
    /// PowerInfer wrote the file for sparse inference.
    pub(super) powerinfer: bool,
    pub(super) vocab: u32,
    pub(super) has_qkv_bias: bool,
    pub(super) has_o_bias: bool,
    pub(super) has_ffn_bias: bool,
    pub(super) has_qk_norm: bool,
    /// There is a second norm before attention.
    pub(super) two_norms: bool,
    /// There is a norm before the FFN.
    pub(super) has_ffn_norm: bool,
    pub(super) has_head: bool,
    /// Experts are chosen by scores plus biases.
    pub(super) has_choice_bias: bool,
    /// Names of tensors in layers, without the layer.
    pub(super) layer_tensors: BTreeSet<String>,
    /// Layers with a router.
    pub(super) routers: BTreeSet<u32>,
    /// Rows of the table of learned positions.
    pub(super) positions: Option<u32>,
    /// Sizes of the residual streams.
    pub(super) streams: streams::Sizes,
    /// Properties of Gemma 4 from the tensors.
    pub(super) gemma4: gemma4::Gemma4Facts,
}

impl Facts {
    /// The context. A file with learned positions declares the rows of their table, or fewer.
    fn max_context(
        &self,
        metadata: &Metadata,
        family: &Family,
        arch: &Arch,
        form: &Form,
    ) -> Result<u32, Error> {
        let need = |rest: &str| {
            let key = format!("{}.{rest}", arch.name);
            let value = metadata.uniform_u32(&key)?;
            value.ok_or_else(|| metadata.missing(&key, "an integer"))
        };
        let declared = need("context_length")?;
        if let Some(of) = &form.pooled {
            let (key, chosen) = pooled::gguf_chosen(arch.keys(metadata))?;
            let most = of.most_positions(chosen);
            let context = most.map(|most| indexed_context(metadata.path(), &key, declared, most));
            return Ok(context.unwrap_or(declared));
        }
        if let Some([_, chosen]) = family.indexed() {
            let most = need(chosen)?;
            return Ok(indexed_context(metadata.path(), chosen, declared, most));
        }
        let rows = self.positions.unwrap_or(u32::MAX);
        Ok(declared.min(rows.saturating_sub(family.learned_positions.unwrap_or(0))))
    }

    /// Whether queries and keys are normed.
    fn qk_norm(&self, family: &Family) -> bool {
        match family.qk_norm {
            QkNorm::HeadBy(_) | QkNorm::LayersBy(_) => self.has_qk_norm,
            QkNorm::PlainUnless(_) => false,
            norm => norm != QkNorm::No,
        }
    }

    /// Properties of the form from the tensors; `sizes` are `d_model`, layers, heads, `head_dim`.
    fn shape(&self, sizes: [u32; 4], windowed: bool) -> Shape {
        let [d_model, layers, heads, head_dim] = sizes;
        Shape {
            d_model,
            layers,
            heads,
            head_dim,
            ffn_bias: self.has_ffn_bias,
            qk_norm: self.has_qk_norm,
            two_norms: self.two_norms,
            ffn_norm: self.has_ffn_norm,
            windowed,
            streams: self.streams,
        }
    }
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
    let key = |rest: &str| format!("{}.{rest}", arch.name);
    let need = |rest: &str| -> Result<u32, Error> {
        metadata
            .uniform_u32(&key(rest))?
            .ok_or_else(|| metadata.missing(&key(rest), "an integer"))
    };
    refuse_unknown(metadata, family, arch)?;
    let layers = layer_count(metadata, arch, need("block_count")?)?;
    let d_model = need("embedding_length")?;
    let heads = need("attention.head_count")?;
    let head_dim = head_dim(metadata, family, arch, d_model, heads)?;
    let experts = experts::read(metadata, family, arch, layers, &facts.routers)?;
    let window = Window::read(metadata, arch, layers)?;
    let ffn_kind = ffn_kind(metadata, family, arch, facts)?;
    let of_expert = metadata.u32(&key("expert_feed_forward_length"))?;
    let of_expert = of_expert.filter(|_| experts.is_some());
    let shape = facts.shape([d_model, layers, heads, head_dim], window.size > 0);
    let (mut rope, local_rope) = ropes(metadata, family, arch, head_dim, window.size > 0)?;
    let mut form = form::form(metadata, family, arch, shape)?;
    form.local_rope = local_rope;
    let window: Vec<u32> = (0..layers).map(|layer| window.of(layer)).collect();
    let of_layers = by_layer(metadata, family, arch, facts, &window, &mut form)?;
    let file = GgufLayers {
        keys: arch.keys(metadata),
        sizes: Sizes {
            d_model,
            layers,
            heads,
            head_dim,
            rotated: rope.dims,
        },
        headless: &of_layers.headless,
        tensors: &facts.layer_tensors,
    };
    of_mixers(&file, family, &mut rope, &mut form)?;
    let mut mixers = family.mixers.iter();
    let kv_heads = (mixers.find_map(|of| of.kv_heads(heads))).or(of_layers.kv_heads);
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
        ffn: match of_expert.or(of_layers.ffn) {
            Some(ffn) => ffn,
            None if family.has(Quirk::Sublayers) => sublayers::ffn(metadata, arch, layers)?,
            None => need("feed_forward_length")?,
        },
        experts: experts.as_ref().map_or(1, |experts| experts.0),
        ffn_kind,
        rms_eps: epsilon(metadata, family, arch)?,
        rope,
        window,
        qkv_bias: family.always_has_qkv_bias() || facts.has_qkv_bias,
        o_bias: facts.has_o_bias,
        qk_norm: facts.qk_norm(family),
        tied_head: !facts.has_head,
        max_context: facts.max_context(metadata, family, arch, &form)?,
        bos: metadata.u32("tokenizer.ggml.bos_token_id")?,
        add_bos: false,
        eos: ends(metadata)?,
        // PowerInfer treats an absent threshold as 0.
        predictor_threshold: (metadata.f32("powerinfer.sparse_threshold")?)
            .or(facts.powerinfer.then_some(0.0)),
        mixture: experts.map(|experts| experts.1),
        qk_norm_whole: family.qk_norm == QkNorm::Whole,
        clip_qkv: (metadata.f32(&key("attention.clamp_kqv"))?).filter(|clip| *clip != 0.0),
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

/// What lists by layer say.
#[derive(Default)]
struct OfLayers {
    /// Heads of keys and values.
    kv_heads: Option<u32>,
    /// The FFN's neurons, if layers differ.
    ffn: Option<u32>,
    /// The layers without heads of keys and values.
    headless: Vec<u32>,
}

fn by_layer(
    metadata: &Metadata,
    family: &Family,
    arch: &Arch,
    facts: &Facts,
    window: &[u32],
    form: &mut Form,
) -> Result<OfLayers, Error> {
    let layers = window.len() as u32;
    if family.has(Quirk::GlobalHeads) {
        let (kv_heads, ffn) = gemma4::form(metadata, arch, facts.gemma4, window, form)?;
        return Ok(OfLayers {
            kv_heads,
            ffn,
            ..OfLayers::default()
        });
    }
    let (kv_heads, headless) = if family.has(Quirk::Sublayers) {
        sublayers::sublayers(metadata, arch, layers, form)?
    } else if family.mixers.iter().any(|of| of.headless()) {
        kv_heads(metadata, arch, layers)?
    } else {
        let key = format!("{}.{KV_HEADS}", arch.name);
        (metadata.uniform_u32(&key)?, Vec::new())
    };
    Ok(OfLayers {
        kv_heads,
        headless,
        ffn: None,
    })
}

/// Heads of keys and values.
const KV_HEADS: &str = "attention.head_count_kv";

/// The heads of keys and values, and the layers without any.
fn kv_heads(
    metadata: &Metadata,
    arch: &Arch,
    layers: u32,
) -> Result<(Option<u32>, Vec<u32>), Error> {
    let key = format!("{}.{KV_HEADS}", arch.name);
    let mut list = metadata.u32s(&key)?;
    if arch.reads.contains(&"nextn_predict_layers") {
        list.truncate(layers as usize);
    }
    let own = list.iter().copied().find(|&heads| heads != 0);
    let alike = list.iter().all(|&heads| heads == 0 || Some(heads) == own);
    if list.len() != layers as usize || !alike {
        let expected = format!("0 or the same number for each of {layers} layers");
        return Err(metadata.bad(&key, &expected));
    }
    let without = (0..).zip(list).filter(|(_, heads)| *heads == 0);
    Ok((own, without.map(|(layer, _)| layer).collect()))
}

/// The epsilon of the norms.
fn epsilon(metadata: &Metadata, family: &Family, arch: &Arch) -> Result<f32, Error> {
    let key = format!("{}.{}", arch.name, arch.eps);
    let other = if family.has(Quirk::Sublayers) {
        metadata.f32(&format!("{}.attention.layer_norm_epsilon", arch.name))?
    } else {
        None
    };
    match (metadata.f32(&key)?, other.or(arch.usual_eps)) {
        (Some(eps), _) | (None, Some(eps)) => Ok(eps),
        (None, None) => metadata.need_f32(&key),
    }
}

/// The number of layers without those for multi-token prediction, if valid.
fn layer_count(metadata: &Metadata, arch: &Arch, blocks: u32) -> Result<u32, Error> {
    let further = metadata.u32(&format!("{}.nextn_predict_layers", arch.name))?;
    let layers = blocks.saturating_sub(further.unwrap_or(0));
    if layers > MAX_COUNT {
        let key = format!("{}.block_count", arch.name);
        return Err(metadata.bad(&key, &format!("at most {MAX_COUNT}")));
    }
    Ok(layers)
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
    let of_mixers: Vec<&str> = (family.mixers.iter())
        .flat_map(|of| of.gguf_keys().iter().copied())
        .collect();
    for rest in metadata.under(&prefix) {
        let key = format!("{prefix}{rest}");
        let passes = match rest {
            _ if arch.reads.contains(&rest) => true,
            _ if family.has(Quirk::DeepSeek4) && deepseek4::KEYS.contains(&rest) => true,
            _ if of_mixers.contains(&rest) => true,
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

fn head_dim(
    metadata: &Metadata,
    family: &Family,
    arch: &Arch,
    d_model: u32,
    heads: u32,
) -> Result<u32, Error> {
    if let Some(of) = family.mixers.iter().find_map(|of| of.head_dim()) {
        return (of.gguf)(&arch.keys(metadata));
    }
    let key = |rest: &str| format!("{}.attention.{rest}", arch.name);
    let head_dim = match metadata.u32(&key("key_length"))? {
        Some(_) if family.has(Quirk::GlobalHeads) => {
            let key = format!("{}.{}", arch.name, gemma4::LOCAL_LENGTH);
            let local = metadata.u32(&key)?;
            return local.ok_or_else(|| metadata.missing(&key, "an integer"));
        }
        Some(length) => length,
        None if heads > 0 && d_model.is_multiple_of(heads) => d_model / heads,
        None => {
            return Err(metadata.bad(
                &key("head_count"),
                &format!("a divisor of embedding_length = {d_model}"),
            ));
        }
    };
    match metadata.u32(&key("value_length"))? {
        Some(length) if length != head_dim => Err(metadata.unsupported(
            &key("value_length"),
            &format!("only {head_dim}, the keys' length, is implemented"),
        )),
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
    let key = format!("{}.{PATTERN}", arch.name);
    if let Some(windowed) = metadata.flags(&key)? {
        if windowed.len() != layers as usize {
            return Err(metadata.bad(&key, &format!("a flag for each of {layers} layers")));
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
            metadata.unsupported(&key, &why)
        });
    }
    match metadata.u32(&key)? {
        Some(0) => Err(metadata.bad(&key, "1 and more")),
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
        let key = format!("{}.{WINDOW}", arch.name);
        match metadata.u32(&key)? {
            Some(size) if matches!(arch.windows, Windows::Chunks(_)) => {
                let why =
                    format!("only chunks are implemented, and {size} asks for others or none");
                Err(metadata.unsupported(&key, &why))
            }
            Some(size) if size > 0 && arch.windows == Windows::Never => {
                Err(metadata
                    .unsupported(&key, "the file does not say which layers have the window"))
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
