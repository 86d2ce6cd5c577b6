//! The tokenizer's keys.

use super::types::{GgufFile, GgufValue};

/// Every key of the vocabulary, in file order.
pub(super) fn keys(file: &GgufFile<'_>) -> Vec<(String, GgufValue)> {
    use GgufValue::{Bool, F32s, I32s, Text, Texts, U32};
    let v = file.vocab;
    let mut keys = Vec::new();
    let mut token = |key: &str, value| keys.push((format!("tokenizer.ggml.{key}"), value));
    token("model", Text(v.model.clone()));
    if let Some(pre) = &v.pre {
        token("pre", Text(pre.clone()));
    }
    token("tokens", Texts(v.tokens.clone()));
    if !v.scores.is_empty() {
        token("scores", F32s(v.scores.clone()));
    }
    if !v.token_types.is_empty() {
        token("token_type", I32s(v.token_types.clone()));
    }
    if !v.merges.is_empty() {
        token("merges", Texts(v.merges.clone()));
    }
    for (key, id) in [
        ("bos_token_id", v.bos),
        ("eos_token_id", v.eos),
        ("unknown_token_id", v.unk),
    ] {
        if let Some(id) = id {
            token(key, U32(id));
        }
    }
    let further = (file.config.eos.iter()).filter(|&&id| Some(id) != v.eos);
    for (key, &id) in ["eot_token_id", "eom_token_id"].into_iter().zip(further) {
        token(key, U32(id));
    }
    if file.config.eos.len() > 3 {
        let all = file.config.eos.iter().map(|&id| id.cast_signed());
        token("eos_token_ids", I32s(all.collect()));
    }
    for (key, flag) in [
        ("add_bos_token", v.add_bos),
        ("add_eos_token", v.add_eos),
        ("add_space_prefix", v.add_space_prefix),
    ] {
        if let Some(flag) = flag {
            token(key, Bool(flag));
        }
    }
    keys
}
