//! Keys of the form that a family departs in.

use serde_json::{Value, json};

use super::scaling::scaling_json;
use crate::config::{ModelConfig, Parallel, Rope, RopeScaling};
use crate::families::{By, Check, Family, Key, Quirk};

/// Adds to `config`, or takes away, what the family's reader (`hf/form.rs`) looks for. Whatever they
/// cannot express shows when the keys are read back.
pub(super) fn add(c: &ModelConfig, family: &Family, config: &mut Value) {
    for key in family.keys.iter().filter(|key| !key.hf.name.is_empty()) {
        config[key.hf.name] = value_of(c, key);
    }
    for check in family.checks {
        match *check {
            Check::Flag(key, value) => config[key] = json!(value),
            Check::Zero(key) => config[key] = json!(0),
            Check::One(key) => config[key] = json!(1),
            Check::Word(key, word) => config[key] = json!(word),
            Check::AtMost(..) | Check::Words(..) | Check::NotNull(_) => {}
            Check::Width(key) => config[key] = json!(c.d_model),
        }
    }
    if let Some(unrotated) = family.unrotated {
        let switches = (0..c.layers).map(|layer| u32::from(c.rotates(layer)));
        config[unrotated.list] = switches.collect();
    }
    if let Some(local) = &c.form.local_rope {
        two_ropes(&c.rope, local, config);
    }
    for quirk in family.quirks {
        match (quirk, &c.rope.scaling) {
            (Quirk::NoPadding, _) => config["pad_token_id"] = Value::Null,
            (
                Quirk::OriginalContextBeside,
                RopeScaling::Long {
                    original_context, ..
                },
            ) => {
                // transformers takes 4096 else
                config["original_max_position_embeddings"] = json!(original_context);
            }
            (Quirk::Falcon, _) => falcon(c, config),
            (Quirk::Streams, _) => streams(c, config),
            (Quirk::Lacks(keys), _) => remove(config, keys),
            (
                Quirk::OneKvHeadEach
                | Quirk::FullUnrotated
                | Quirk::OriginalContextBeside
                | Quirk::ShortConv
                | Quirk::DeltaNet(_)
                | Quirk::Latent
                | Quirk::NtkAlpha
                | Quirk::Indexed(..)
                | Quirk::Mamba
                | Quirk::Sublayers
                | Quirk::RotatedByName
                | Quirk::QueryScale
                | Quirk::AdjustedFfn,
                _,
            ) => {}
        }
    }
}

/// The value of a key that the form's part follows from.
fn value_of(c: &ModelConfig, key: &Key) -> Value {
    if key.sets.is_flag() {
        return json!(key.sets.flag(&c.form));
    }
    let Some(part) = key.sets.number(&c.form, c.head_dim) else {
        return Value::Null;
    };
    let value = key.hf.by.invert(part, c.d_model, c.layers);
    // transformers takes integers alone
    match key.hf.by == By::RootReciprocal && value.fract() == 0.0 {
        true => json!(value as u64),
        false => json!(value),
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
        let mut object = match scaling_json(&rope.scaling) {
            Value::Null => json!({"rope_type": "default"}),
            scaling => scaling,
        };
        object["rope_theta"] = json!(rope.theta);
        object
    };
    config["rope_parameters"] =
        json!({"full_attention": one(full), "sliding_attention": one(local)});
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

/// Several residual streams and what comes with them.
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
    config["activation_sparsity_pattern"] = match form.gate_top.is_empty() {
        true => json!(none),
        false => json!(form.gate_top),
    };
}
