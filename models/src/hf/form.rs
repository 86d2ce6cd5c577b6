//! The keys of `config.json` by which a family departs from the plain decoder.

use super::experts::switches;
use super::gemma::{gemma2, gemma3, gemma3n};
use super::json::Keys;
use super::values::{Sizes, factor, must_be};
use crate::config::{Form, Parallel};
use crate::error::Error;
use crate::names::Role;

/// What a family departs in, whatever its configuration says.
#[derive(Clone, Copy)]
pub(super) struct Style {
    name: &'static str,
    /// Key of the epsilon of its norms; `None` for that of PyTorch's LayerNorm.
    pub(super) eps: Option<&'static str>,
    /// Key of its activation.
    pub(super) act: &'static str,
    /// Its activation if the key is absent.
    pub(super) act_default: Option<&'static str>,
    /// It has no other activation than this.
    pub(super) one_act: bool,
    /// Key of the number of its FFN's neurons.
    pub(super) ffn: &'static str,
    /// Key of the number of heads of keys and values.
    pub(super) kv_heads: &'static str,
    /// The head is the embedding if `tie_word_embeddings` is absent.
    pub(super) tied: bool,
    /// Its FFN has no gate.
    pub(super) ungated: bool,
    /// Share of a head that is rotated if no key says so; `None` if there is no such key.
    pub(super) rotated: Option<f32>,
    /// Weights of its norms are stored less one.
    plus_one: bool,
    /// Its norms are LayerNorms with biases.
    layer_norm: bool,
    /// LongRoPE's factors of queries and keys have keys of their own.
    pub(super) named_factors: bool,
    /// Layers with a window have a rotary embedding of their own.
    pub(super) two_ropes: bool,
    /// Its rotary positions are scaled, and its keys say how.
    pub(super) always_scaled: bool,
    /// Keys that are read for it and that other families would have to refuse.
    pub(super) reads: &'static [&'static str],
}

const PLAIN: Style = Style {
    name: "",
    eps: Some("rms_norm_eps"),
    act: "hidden_act",
    act_default: None,
    one_act: false,
    ffn: "intermediate_size",
    kv_heads: "num_key_value_heads",
    tied: false,
    ungated: false,
    rotated: None,
    plus_one: false,
    layer_norm: false,
    named_factors: false,
    always_scaled: false,
    two_ropes: false,
    reads: &[],
};

const STYLES: [Style; 17] = [
    // optional, with gate, up and down
    Style {
        name: "llama",
        reads: &["mlp_bias"],
        ..PLAIN
    },
    Style {
        name: "olmoe",
        reads: &["clip_qkv"],
        ..PLAIN
    },
    Style {
        name: "smallthinker",
        act_default: Some("relu"),
        one_act: true,
        reads: &[
            "moe_primary_router_apply_softmax",
            "moe_num_primary_experts",
            "moe_layer_layout",
            "rope_layout",
            "sliding_window_layout",
        ],
        ..PLAIN
    },
    Style {
        name: "gpt_oss",
        act_default: Some("silu"),
        one_act: true,
        always_scaled: true,
        reads: &["swiglu_limit", "swiglu_alpha"],
        ..PLAIN
    },
    Style {
        name: "phimoe",
        layer_norm: true,
        named_factors: true,
        reads: &["lm_head_bias"],
        ..PLAIN
    },
    Style {
        name: "olmo2",
        ..PLAIN
    },
    Style {
        name: "phi3",
        rotated: Some(1.0),
        ..PLAIN
    },
    Style {
        name: "granite",
        reads: &[
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
            "mlp_bias",
        ],
        ..PLAIN
    },
    Style {
        name: "smollm3",
        tied: true,
        reads: &["no_rope_layers", "no_rope_layer_interval", "mlp_bias"],
        ..PLAIN
    },
    Style {
        name: "minicpm",
        tied: true,
        reads: &["scale_emb", "scale_depth"],
        ..PLAIN
    },
    Style {
        name: "starcoder2",
        eps: Some("norm_epsilon"),
        tied: true,
        ungated: true,
        layer_norm: true,
        reads: &["use_bias", "norm_type"],
        ..PLAIN
    },
    Style {
        name: "opt",
        eps: None,
        act: "activation_function",
        ffn: "ffn_dim",
        tied: true,
        ungated: true,
        layer_norm: true,
        ..PLAIN
    },
    Style {
        name: "nemotron",
        eps: Some("norm_eps"),
        ungated: true,
        rotated: Some(0.5),
        plus_one: true,
        layer_norm: true,
        reads: &["mlp_bias"],
        ..PLAIN
    },
    Style {
        name: "falcon",
        eps: Some("layer_norm_epsilon"),
        act: "activation",
        act_default: Some("gelu"),
        ffn: "ffn_hidden_size",
        kv_heads: "num_kv_heads",
        tied: true,
        ungated: true,
        layer_norm: true,
        reads: &["parallel_attn"],
        ..PLAIN
    },
    Style {
        name: "gemma2",
        act: "hidden_activation",
        tied: true,
        plus_one: true,
        reads: &[
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ],
        ..PLAIN
    },
    Style {
        name: "gemma3_text",
        act: "hidden_activation",
        tied: true,
        plus_one: true,
        two_ropes: true,
        reads: &["query_pre_attn_scalar", "sliding_window_pattern"],
        ..PLAIN
    },
    Style {
        name: "gemma3n_text",
        act: "hidden_activation",
        tied: true,
        two_ropes: true,
        reads: &["final_logit_softcapping", "num_kv_shared_layers"],
        ..PLAIN
    },
];

/// What `family` departs in.
pub(super) fn style_of(family: &str) -> &'static Style {
    let mut styles = STYLES.iter();
    styles.find(|style| style.name == family).unwrap_or(&PLAIN)
}

/// Whether checkpoints of the family store such a tensor less one.
pub(super) fn is_less_one(family: &str, role: Role) -> bool {
    use Role::*;
    let norm = matches!(
        role,
        AttnNorm | AttnPostNorm | FfnNorm | FfnPostNorm | FinalNorm | QNorm | KNorm
    );
    norm && style_of(family).plus_one
}

impl Style {
    /// Reads the family's keys.
    pub(super) fn form(&self, keys: &Keys, sizes: Sizes) -> Result<Form, Error> {
        let plain = Form {
            layer_norm: self.layer_norm,
            norm_bias: self.layer_norm,
            ffn_bias: match self.reads.contains(&"mlp_bias") {
                true => keys.bool("mlp_bias")?.unwrap_or(false),
                false => false,
            },
            ..Form::default()
        };
        Ok(match self.name {
            "smallthinker" => Form {
                nope_layers: unrotated(keys, "rope_layout", sizes.layers)?.unwrap_or_default(),
                ..plain
            },
            "gpt_oss" => Form {
                ffn_bias: true,
                sinks: true,
                ..plain
            },
            "phimoe" => Form {
                head_bias: keys.bool("lm_head_bias")?.unwrap_or(false),
                ..plain
            },
            "olmo2" => Form {
                pre_norm: false,
                post_norm: true,
                ..plain
            },
            "granite" => granite(keys, plain)?,
            "smollm3" => Form {
                nope_layers: nope_layers(keys, sizes.layers)?,
                ..plain
            },
            "minicpm" => minicpm(keys, sizes, plain)?,
            "starcoder2" => starcoder2(keys, plain)?,
            "opt" => opt(keys, sizes, plain)?,
            "falcon" => falcon(keys, plain)?,
            "gemma2" => gemma2(keys, sizes, plain)?,
            "gemma3_text" => gemma3(keys, sizes, plain)?,
            "gemma3n_text" => gemma3n(keys, sizes, plain)?,
            _ => plain,
        })
    }

    /// Heads of keys and values where their number is not that of the key.
    pub(super) fn fixed_kv_heads(&self, keys: &Keys, sizes: Sizes) -> Result<Option<u32>, Error> {
        let heads = sizes.heads;
        match self.name {
            "opt" => Ok(Some(heads)),
            "falcon" if new_falcon(keys)? => Ok(None),
            "falcon" if keys.bool("multi_query")?.unwrap_or(true) => Ok(Some(1)),
            "falcon" => match keys.u32(self.kv_heads)? {
                Some(given) if given != heads => Err(keys.bad(
                    self.kv_heads,
                    &format!("{heads}, as multi_query and new_decoder_architecture are false"),
                )),
                _ => Ok(Some(heads)),
            },
            _ => Ok(None),
        }
    }

    /// Whether projections of attention carry biases, where a family has a key of its own: of
    /// queries, keys and values, and of the output.
    pub(super) fn attention_bias(&self, keys: &Keys) -> Result<Option<bool>, Error> {
        match self.name {
            "starcoder2" => Ok(Some(keys.bool("use_bias")?.unwrap_or(true))),
            "opt" => Ok(Some(keys.bool("enable_bias")?.unwrap_or(true))),
            "gpt_oss" => Ok(Some(keys.bool("attention_bias")?.unwrap_or(true))),
            _ => Ok(None),
        }
    }
}

/// `modeling_granite.py`: embeddings, what a layer adds and attention scores are multiplied, logits
/// are divided. All factors are 1 if absent, that of attention too.
fn granite(keys: &Keys, plain: Form) -> Result<Form, Error> {
    let or_one = |key| Ok::<f32, Error>(factor(keys, key)?.unwrap_or(1.0));
    Ok(Form {
        embedding_scale: or_one("embedding_multiplier")?,
        residual_scale: or_one("residual_multiplier")?,
        attention_scale: Some(or_one("attention_multiplier")?),
        logit_scale: 1.0 / or_one("logits_scaling")?,
        ..plain
    })
}

/// `modeling_minicpm.py` of openbmb's releases: embeddings times `scale_emb`, what a layer adds times
/// `scale_depth / sqrt(layers)`, the head's input divided by `hidden_size / dim_model_base`.
fn minicpm(keys: &Keys, sizes: Sizes, plain: Form) -> Result<Form, Error> {
    let need = |key| factor(keys, key)?.ok_or_else(|| keys.missing(key, "a number above 0"));
    Ok(Form {
        embedding_scale: need("scale_emb")?,
        residual_scale: need("scale_depth")? / (sizes.layers as f32).sqrt(),
        logit_scale: need("dim_model_base")? / sizes.d_model as f32,
        ..plain
    })
}

/// The layers of which a list of switches says 0: they are not rotated.
fn unrotated(keys: &Keys, key: &'static str, layers: u32) -> Result<Option<Vec<u32>>, Error> {
    let Some(list) = switches(keys, key, layers)? else {
        return Ok(None);
    };
    let layers = (0..).zip(list).filter(|(_, rotated)| !rotated);
    Ok(Some(layers.map(|(layer, _)| layer).collect()))
}

/// `configuration_smollm3.py`: a list of switches; without it, no positions in every
/// `no_rope_layer_interval`-th layer.
fn nope_layers(keys: &Keys, layers: u32) -> Result<Vec<u32>, Error> {
    if let Some(list) = unrotated(keys, "no_rope_layers", layers)? {
        return Ok(list);
    }
    let interval = keys.u32("no_rope_layer_interval")?.unwrap_or(4);
    if interval == 0 {
        return Err(keys.bad("no_rope_layer_interval", "1 or more"));
    }
    let is_nope = |layer: &u32| (layer + 1).is_multiple_of(interval);
    Ok((0..layers).filter(is_nope).collect())
}

fn starcoder2(keys: &Keys, plain: Form) -> Result<Form, Error> {
    if keys
        .str("norm_type")?
        .is_some_and(|norm| norm != "layer_norm")
    {
        return Err(keys.unsupported("norm_type", "this family has layer_norm"));
    }
    Ok(Form {
        ffn_bias: keys.bool("use_bias")?.unwrap_or(true),
        ..plain
    })
}

/// `modeling_opt.py`: positions are learned, the first two rows of their table unused.
fn opt(keys: &Keys, sizes: Sizes, plain: Form) -> Result<Form, Error> {
    must_be(keys, "do_layer_norm_before", true)?;
    must_be(keys, "_remove_final_layer_norm", false)?;
    must_be(keys, "layer_norm_elementwise_affine", true)?;
    if keys
        .u32("word_embed_proj_dim")?
        .is_some_and(|width| width != sizes.d_model)
    {
        let why = format!("only hidden_size = {} is implemented", sizes.d_model);
        return Err(keys.unsupported("word_embed_proj_dim", &why));
    }
    Ok(Form {
        learned_positions: Some(2),
        ffn_bias: keys.bool("enable_bias")?.unwrap_or(true),
        ..plain
    })
}

/// Whether a Falcon is one of those like the 40B.
fn new_falcon(keys: &Keys) -> Result<bool, Error> {
    Ok(keys.bool("new_decoder_architecture")?.unwrap_or(false))
}

/// `modeling_falcon.py`: attention and FFN read the same input, after one norm or, in the newer
/// models, one each.
fn falcon(keys: &Keys, plain: Form) -> Result<Form, Error> {
    must_be(keys, "bias", false)?;
    let new = new_falcon(keys)?;
    let parallel = keys.bool("parallel_attn")?.unwrap_or(true);
    let norms = keys.u32("num_ln_in_parallel_attn")?;
    if new && !parallel {
        return Err(keys.bad("parallel_attn", "true, as new_decoder_architecture is"));
    }
    let parallel = match (new, norms) {
        (true, None | Some(2)) => Parallel::TwoNorms,
        (true, Some(1)) => Parallel::OneNorm,
        (false, None | Some(0 | 1)) if parallel => Parallel::OneNorm,
        (false, None | Some(0 | 1)) => Parallel::No,
        _ => {
            let expected = "1, or 2 with new_decoder_architecture";
            return Err(keys.bad("num_ln_in_parallel_attn", expected));
        }
    };
    Ok(Form { parallel, ..plain })
}
