//! Keys of attention over pools of positions (DeepSeek-V4).

use serde_json::{Value, json};

use super::scaling::scaling_json;
use crate::config::{Mixing, ModelConfig, Rope, RopeScaling};

/// Kinds of layers: without pools, with overlapping ones, with other ones.
const KINDS: [&str; 3] = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
];

/// Adds the keys of pools, of hyper-connections and of both rotary embeddings.
pub(super) fn add(c: &ModelConfig, config: &mut Value) {
    let Some(pooled) = &c.form.pooled else { return };
    config["q_lora_rank"] = json!(pooled.query_rank);
    config["o_groups"] = json!(pooled.groups);
    config["o_lora_rank"] = json!(pooled.group_rank);
    let kind = |pool: u32| match pool {
        0 => 0,
        pool if pool == pooled.overlapping => 1,
        _ => 2,
    };
    let mut rates = serde_json::Map::new();
    for &pool in pooled.pools.iter().filter(|&&pool| pool > 0) {
        rates.insert(KINDS[kind(pool)].into(), json!(pool));
    }
    config["layer_types"] = pooled.pools.iter().map(|&pool| KINDS[kind(pool)]).collect();
    config["compress_rates"] = Value::Object(rates);
    // the indexer is left out: in this context it would choose everything
    config["index_topk"] = json!(c.max_context);
    if let Some(hyper) = c.form.hyper
        && let Mixing::Sinkhorn { iterations, eps } = hyper.mixing
    {
        config["hc_mult"] = json!(hyper.count);
        config["hc_sinkhorn_iters"] = json!(iterations);
        config["hc_eps"] = json!(eps);
    }
    let Some(local) = &c.form.local_rope else {
        return;
    };
    // all of it is in the parameters
    config["rope_scaling"] = Value::Null;
    let one = |rope: &Rope| {
        let mut object = match rope.scaling {
            RopeScaling::None => json!({"rope_type": "default"}),
            ref scaling => scaling_json(scaling, false),
        };
        object["rope_theta"] = json!(rope.theta);
        object["partial_rotary_factor"] = json!(f64::from(rope.dims) / f64::from(c.head_dim));
        object
    };
    config["rope_parameters"] = json!({"main": one(local), "compress": one(&c.rope)});
    config["rope_theta"] = json!(local.theta);
    config["compress_rope_theta"] = json!(c.rope.theta);
}
