//! Keys of mixtures of experts.

use serde_json::{Value, json};

use crate::config::{Mixture, ModelConfig, Scoring};
use crate::families::{Dense, Experts, Renormalise, ScoringBy, Shared};
use crate::mixers::layers::Periodic;

/// Adds the keys that the reader (`hf/experts.rs`) expects to those of a plain decoder.
pub(super) fn add(c: &ModelConfig, of: &Experts, config: &mut Value) {
    if let Some(key) = of.parallel_dense {
        config[key] = json!(c.mixture.is_some());
    }
    let Some(mixture) = &c.mixture else {
        if of.optional && of.dense != Dense::Sublayers {
            let periodic = matches!(of.dense, Dense::Periodic(_));
            config[of.count] = json!(u32::from(periodic));
        }
        return;
    };
    config[of.count] = json!(c.experts);
    config[of.chosen] = json!(mixture.chosen);
    config[of.ffn] = json!(c.ffn);
    if let Some(key) = of.early_router {
        config[key] = json!(mixture.early_router);
    }
    if let ScoringBy::SoftmaxIf(key) = of.scoring {
        config[key] = json!(mixture.scoring == Scoring::Softmax);
    }
    if let Renormalise::Key(_) = of.renormalise {
        config["norm_topk_prob"] = json!(mixture.renormalise);
    }
    if mixture.scoring == Scoring::SparseMixer {
        config["router_jitter_noise"] = json!(mixture.jitter);
    }
    if let Some((key, _)) = of.scale {
        config[key] = json!(mixture.scale);
    }
    if let Some(key) = of.width {
        let width = Some(mixture.width).filter(|&width| width > 0);
        config[key] = json!(width);
    }
    dense(c, mixture, of, config);
    match of.shared {
        Some(Shared::Gated(key) | Shared::Plain(key)) => config[key] = json!(mixture.shared),
        Some(Shared::Experts(key, _)) => config[key] = json!(mixture.shared / c.ffn),
        Some(Shared::AsOthers) | None => {}
    }
    if let Some((key, ..)) = of.by_token {
        let kind = |layer| {
            if mixture.is_by_token(layer) {
                "hash_moe"
            } else {
                "moe"
            }
        };
        config[key] = (0..c.layers).map(kind).collect();
    }
    groups(mixture, of, config);
}

/// Layers with a dense FFN, and its neurons.
fn dense(c: &ModelConfig, mixture: &Mixture, of: &Experts, config: &mut Value) {
    let first = mixture.dense_layers.len();
    let with: Vec<u32> = (0..c.layers)
        .filter(|&layer| c.mixture_of(layer).is_some())
        .collect();
    match of.dense {
        Dense::Never | Dense::NeverBy(_) => return,
        Dense::Steps => {
            config["mlp_only_layers"] = json!(mixture.dense_layers);
            config["decoder_sparse_step"] = json!(1);
        }
        Dense::First(key, _) => config[key] = json!(first),
        Dense::Kinds(key, ..) => {
            let kind = |layer| match c.mixture_of(layer) {
                Some(_) => "sparse",
                None => "dense",
            };
            config[key] = (0..c.layers).map(kind).collect();
        }
        Dense::Outside(from, to) => {
            config[from] = json!(with.first());
            config[to] = json!(with.last());
        }
        Dense::But(list, _) => config[list] = json!(with),
        Dense::Periodic(keys) => Periodic::write(&with, keys, c.layers, config),
        // in addition to the keys of sublayers
        Dense::Sublayers => {}
    }
    config[of.dense_ffn] = json!(mixture.dense_ffn.max(c.ffn));
}

/// The groups from which experts are chosen.
fn groups(mixture: &Mixture, of: &Experts, config: &mut Value) {
    if of.best_of_groups {
        config["topk_method"] = json!(match mixture.groups {
            Some(_) => "group_limited_greedy",
            None => "greedy",
        });
    }
    if of.grouped {
        let [count, chosen] = mixture.groups.map_or([1; 2], |of| [of.count, of.chosen]);
        config["n_group"] = json!(count);
        config["topk_group"] = json!(chosen);
    }
}
