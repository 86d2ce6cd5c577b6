//! Keys for deviations from the plain decoder.

use serde_json::{Value, json};

use super::scaling::{add_attention_scale, scaling_json};
use super::{deepseek4_keys, hyper_keys};
use crate::config::{MixerKind, ModelConfig, Parallel, Rope, RopeScaling};
use crate::families::{self, By, Check, Family, Key, Quirk};

/// Adds to `config`, or removes, the keys that the family's reader (`hf/form.rs`) expects. Anything
/// that they cannot express appears when the keys are read back.
pub(super) fn add(c: &ModelConfig, family: &Family, config: &mut Value) {
    of_tables(c, family, config);
    let local = c.form.local_rope.as_ref();
    if let Some(local) = local.filter(|_| family.two_ropes) {
        two_ropes(&c.rope, local, config);
    }
    for of in family.mixers {
        of.write(c, config);
    }
    if c.form.latent.is_some() {
        add_attention_scale(c, config);
    }
    of_quirks(c, family, config);
}

/// The keys of properties that have no field in the family.
fn of_quirks(c: &ModelConfig, family: &Family, config: &mut Value) {
    for quirk in family.quirks {
        match (quirk, &c.rope.scaling) {
            (Quirk::NoPadding, _) => config["pad_token_id"] = Value::Null,
            (
                Quirk::OriginalContextBeside,
                RopeScaling::Long {
                    original_context, ..
                },
            ) => {
                // transformers otherwise uses 4096
                config["original_max_position_embeddings"] = json!(original_context);
            }
            (Quirk::ParallelIf(key, _), _) => {
                config[*key] = json!(c.form.parallel != Parallel::No);
            }
            (Quirk::Falcon, _) => falcon(c, config),
            (Quirk::Streams, _) => streams(c, config),
            (Quirk::GlobalHeads, _) => global_heads(c, config),
            (Quirk::Lacks(keys), _) => remove(config, keys),
            // it is its size already
            (Quirk::AdjustedFfn, _) => config["block_auto_adjust_ff_dim"] = json!(false),
            (Quirk::QueryScale, _) => query_scale(c, config),
            (Quirk::Temperature, _) => temperature(c, config),
            (Quirk::RotatedByName, _) => {
                let rotated = c.form.nope_layers.is_empty();
                config["position_embedding_type"] = json!(if rotated { "rope" } else { "nope" });
            }
            (Quirk::LateNorms, _) => unrotated(c, config),
            (Quirk::Sublayers, _) => sublayers(c, config),
            (Quirk::WidthScaleBy(key), _) => config[*key] = json!(c.form.embedding_scale != 1.0),
            (Quirk::DeepSeek4, _) => deepseek4_keys::add(c, config),
            (Quirk::Hyper, _) => hyper_keys::add(c, config),
            // the indexer is left out: in this context it would choose everything
            (Quirk::Indexed(key, _), _) => config[*key] = json!(c.max_context),
            _ => {}
        }
    }
}

/// The keys in the family's tables.
fn of_tables(c: &ModelConfig, family: &Family, config: &mut Value) {
    for key in family.keys.iter().filter(|key| !key.hf.name.is_empty()) {
        config[key.hf.name] = value_of(c, key);
    }
    for check in family.checks {
        match *check {
            Check::Flag(key, value) => config[key] = json!(value),
            Check::Zero(key) => config[key] = json!(0),
            Check::One(key) => config[key] = json!(1),
            Check::Number(key, only) => config[key] = json!(only),
            Check::Word(key, word) => config[key] = json!(word),
            Check::AtMost(..) | Check::Words(..) | Check::NotNull(_) => {}
            Check::Width(key) => config[key] = json!(c.d_model),
        }
    }
    if let Some(unrotated) = family.unrotated {
        let switches = (0..c.layers).map(|layer| u32::from(c.rotates(layer)));
        config[unrotated.list] = switches.collect();
    }
}

/// The key's value for a property of the form.
fn value_of(c: &ModelConfig, key: &Key) -> Value {
    if key.sets.is_flag() {
        return json!(key.sets.flag(&c.form));
    }
    let Some(part) = key.sets.number(&c.form, c.head_dim) else {
        return Value::Null;
    };
    let value = key.hf.by.invert(part, c.d_model, c.layers);
    // transformers accepts only integers
    if key.hf.by == By::RootReciprocal && value.fract() == 0.0 {
        json!(value as u64)
    } else {
        json!(value)
    }
}

/// Queries scaled by position, next to the rotary scaling.
fn query_scale(c: &ModelConfig, config: &mut Value) {
    let mut object = config["rope_scaling"].take();
    if let (Some(scale), false) = (c.form.query_scale, object.is_null()) {
        object["llama_4_scaling_beta"] = json!(scale.beta);
        object["original_max_position_embeddings"] = json!(scale.original_context);
    }
    if c.form.latent.is_some() {
        // of whole queries; other classes with latent attention count only the rotated elements
        config["head_dim"] = json!(c.head_dim);
        let share = f64::from(c.rope.dims) / f64::from(c.head_dim);
        object["partial_rotary_factor"] = json!(share);
    }
    object["rope_theta"] = json!(c.rope.theta);
    remove(config, &["rope_theta", "rope_scaling"]);
    config["rope_parameters"] = object;
}

/// Queries without rotary positions, scaled by position.
fn temperature(c: &ModelConfig, config: &mut Value) {
    config["attn_temperature_tuning"] = json!(c.form.query_scale.is_some());
    if let Some(scale) = c.form.query_scale {
        config["attn_scale"] = json!(scale.beta);
        config["floor_scale"] = json!(scale.original_context);
    }
}

/// Gives keys the names that the family's folders have.
pub(super) fn rename(family: &Family, config: &mut Value) {
    if let Some(map) = config.as_object_mut() {
        for (usual, other) in family.aliases {
            if let Some(value) = map.remove(*usual) {
                map.insert((*other).to_owned(), value);
            }
        }
    }
}

/// Removes keys that the family does not have.
fn remove(config: &mut Value, keys: &[&str]) {
    if let Some(map) = config.as_object_mut() {
        keys.iter().for_each(|key| {
            map.remove(*key);
        });
    }
}

/// The rotary embeddings of layers without a window and of those with one.
fn two_ropes(full: &Rope, local: &Rope, config: &mut Value) {
    remove(config, &["rope_theta", "rope_scaling"]);
    let one = |rope: &Rope| {
        let mut object = match scaling_json(&rope.scaling, false) {
            Value::Null => json!({"rope_type": "default"}),
            scaling => scaling,
        };
        object["rope_theta"] = json!(rope.theta);
        if let RopeScaling::Proportional { pairs } = rope.scaling {
            let share = f64::from(2 * pairs) / f64::from(rope.dims);
            object["partial_rotary_factor"] = json!(share);
        }
        object
    };
    config["rope_parameters"] =
        json!({"full_attention": one(full), "sliding_attention": one(local)});
}

/// Whether attention has rotary positions (OLMo Hybrid).
fn unrotated(c: &ModelConfig, config: &mut Value) {
    if !c.form.nope_layers.is_empty() {
        config["rope_theta"] = Value::Null;
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": null});
    }
}

/// Layers of a single sublayer each.
fn sublayers(c: &ModelConfig, config: &mut Value) {
    let letter = |layer| match c.mixer_of(layer) {
        MixerKind::Mamba(_) => 'M',
        MixerKind::None if c.mixture_of(layer).is_some() => 'E',
        MixerKind::None => '-',
        _ => '*',
    };
    config["hybrid_override_pattern"] = json!((0..c.layers).map(letter).collect::<String>());
}

fn falcon(c: &ModelConfig, config: &mut Value) {
    let form = &c.form;
    let (new, norms) = match form.parallel {
        Parallel::TwoNorms => (true, Some(2)),
        Parallel::OneNorm if c.kv_heads > 1 => (true, Some(1)),
        Parallel::OneNorm | Parallel::No => (false, None),
    };
    config["new_decoder_architecture"] = json!(new);
    config["parallel_attn"] = json!(form.parallel != Parallel::No);
    config["bias"] = json!(c.o_bias);
    config["alibi"] = json!(false);
    if let Some(norms) = norms {
        config["num_ln_in_parallel_attn"] = json!(norms);
        config["num_kv_heads"] = json!(c.kv_heads);
    } else {
        config["multi_query"] = json!(c.kv_heads == 1);
    }
}

/// Properties without a key: other heads or neurons of some layers.
pub(super) fn without_keys(c: &ModelConfig) -> Option<&'static str> {
    let heads = c.form.global_heads;
    let wide = c.form.shared_kv_ffn;
    let dense = c.mixture.as_ref().map_or(c.ffn, |of| of.shared);
    match () {
        _ if heads.is_some_and(|of| !of.key_is_value && of.kv_heads != c.kv_heads) => {
            Some("another number of heads in layers without a window")
        }
        _ if !c.form.activations.is_empty() => Some("an activation with parameters by layer"),
        _ if c.form.qk_layer_norms && !families::of(&c.family).names.by_head.is_empty() => {
            Some("a LayerNorm of each head, in a tensor of its own,")
        }
        _ if wide > 0 && wide != dense.saturating_mul(2) => {
            Some("this number of neurons in layers with shared keys")
        }
        _ => None,
    }
}

/// The keys of Gemma 4 in addition to those of Gemma 3.
fn global_heads(c: &ModelConfig, config: &mut Value) {
    let form = &c.form;
    let heads = form.global_heads;
    config["global_head_dim"] = json!(heads.map_or(c.head_dim, |of| of.head_dim));
    config["attention_k_eq_v"] = json!(heads.is_some_and(|of| of.key_is_value));
    config["num_global_key_value_heads"] = json!(heads.map(|of| of.kv_heads));
    config["num_kv_shared_layers"] = json!(form.shared_kv);
    config["use_double_wide_mlp"] = json!(form.shared_kv_ffn > 0);
    config["hidden_size_per_layer_input"] = json!(form.layer_inputs.map_or(0, |of| of.width));
    config["vocab_size_per_layer_input"] = json!(form.layer_inputs.map_or(c.vocab, |of| of.vocab));
}

/// Keys of several residual streams and related properties.
fn streams(c: &ModelConfig, config: &mut Value) {
    let form = &c.form;
    let Some(streams) = form.streams else { return };
    config["altup_num_inputs"] = json!(streams.count);
    config["altup_correct_scale"] = json!(streams.scaled);
    config["laurel_rank"] = json!(streams.laurel);
    config["hidden_size_per_layer_input"] = json!(streams.per_layer);
    config["vocab_size_per_layer_input"] = json!(streams.per_layer_vocab);
    config["num_kv_shared_layers"] = json!(form.shared_kv);
    let none = vec![0.0; c.layers as usize];
    config["activation_sparsity_pattern"] = if form.gate_top.is_empty() {
        json!(none)
    } else {
        json!(form.gate_top)
    };
}
