//! Keys of DeepSeek-V4 besides those of pools.

use serde_json::{Value, json};

use super::scaling::scaling_json;
use crate::config::{Mixing, ModelConfig, Rope, RopeScaling};

/// Adds the keys of hyper-connections and of both rotary embeddings.
pub(super) fn add(c: &ModelConfig, config: &mut Value) {
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
