//! Keys of gated hyper-connections and of n-gram rows (Qwen3.8-Flash-Next).

use serde_json::{Value, json};

use crate::config::{Mixing, ModelConfig};
use crate::hf::ngrams;

/// Adds them.
pub(super) fn add(c: &ModelConfig, config: &mut Value) {
    if let Some(hyper) = c.form.hyper
        && let Mixing::Gated { rank } = hyper.mixing
    {
        config["hc_count"] = json!(hyper.count);
        config["hc_lowrank"] = json!(rank);
    }
    // the class always has an indexer; for single positions, it chooses as many as the context has
    config["indexer_n_heads"] = json!(1);
    config["indexer_head_dim"] = json!(c.head_dim);
    config["indexer_compress_ratio"] = json!(1);
    let Some(of) = &c.form.ngrams else {
        config["ple_layer_ids"] = json!([]);
        return;
    };
    let longest = of.factors.len();
    // counts from 1
    config["ple_layer_ids"] = json!([of.layer + 1]);
    config["ple_embed_dim"] = json!(of.embedding());
    config["ple_conv_kernel_size"] = json!(of.taps);
    config["ngram_size"] = json!(longest);
    config["heads_per_ngram"] = json!(of.heads.len() / (longest - 1).max(1));
    // the numbers of rows are the first primes from this value on
    config["ngram_vocab_size_base"] = json!(of.heads.first().map(|head| head[1]));
    config["seed"] = json!(ngrams::seed_of(&of.factors, c.vocab).unwrap_or(0));
    config["make_ngram_vocab_size_divisible_by"] = json!(of.rows);
}
