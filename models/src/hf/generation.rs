//! `generation_config.json`: recommended generation settings.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::SamplingDefaults;
use crate::error::Error;
use crate::file::read_text;
use crate::json::{self, Keys, MAX_CONFIG};
use crate::rules::TextRules;

/// Content of the file.
#[derive(Debug, Default)]
pub(super) struct Generation {
    pub(super) sampling: SamplingDefaults,
    pub(super) rules: TextRules,
    /// Tokens that end a text.
    pub(super) eos: Vec<u32>,
}

/// Unsupported keys that change texts, and their value without effect in addition to null, `false`
/// and 0.
const FOREIGN: [(&str, f64); 25] = [
    ("typical_p", 1.0),
    ("num_beams", 1.0),
    ("num_beam_groups", 1.0),
    ("penalty_alpha", 0.0),
    ("top_h", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("diversity_penalty", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("forced_eos_token_id", -1.0),
    ("sequence_bias", 0.0),
    ("guidance_scale", 1.0),
    ("exponential_decay_length_penalty", 0.0),
    ("dola_layers", 0.0),
    ("forced_decoder_ids", 0.0),
    ("force_words_ids", 0.0),
    ("constraints", 0.0),
    ("watermarking_config", 0.0),
    ("remove_invalid_values", 0.0),
    ("renormalize_logits", 0.0),
    ("p_less", 0.0),
    ("token_healing", 0.0),
];

/// Reads the file; without one there are no rules.
pub(super) fn read(path: &Path) -> Result<Generation, Error> {
    let Some(text) = read_text(path, MAX_CONFIG)? else {
        return Ok(Generation::default());
    };
    let value = json::parse(path, &text)?;
    let keys = Keys::new(path, &value)?;
    for key in without_effect(&keys) {
        let (path, found) = (path.display(), keys.get(key).unwrap_or_default());
        tracing::warn!("{path}: {key} is {found}, which has no effect here");
    }
    let eos = keys.tokens("eos_token_id")?;
    Ok(Generation {
        sampling: sampling(&keys)?,
        rules: rules(&keys, &eos)?,
        eos,
    })
}

/// Keys of [`FOREIGN`] with a value that would change texts.
fn without_effect(keys: &Keys) -> Vec<&'static str> {
    let set = |key: &str, harmless: f64| match keys.get(key) {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Number(number)) => !number
            .as_f64()
            .is_some_and(|n| n == harmless || n == 0.0 && harmless >= 0.0),
        Some(_) => true,
    };
    let foreign = FOREIGN
        .into_iter()
        .filter(|&(key, harmless)| set(key, harmless));
    foreign.map(|(key, _)| key).collect()
}

/// Sampling parameters count only if `do_sample` is set, as in transformers; the repetition penalty
/// always counts.
fn sampling(keys: &Keys) -> Result<SamplingDefaults, Error> {
    let sampling = SamplingDefaults {
        temperature: keys.f32("temperature")?,
        top_k: keys.u32("top_k")?,
        top_p: keys.f32("top_p")?,
        min_p: keys.f32("min_p")?,
        typical_p: keys.f32("typical_p")?,
        repetition_penalty: keys.f32("repetition_penalty")?,
    };
    if let Some(wrong) = sampling.wrong() {
        return Err(keys.bad(wrong.what, wrong.expected));
    }
    if keys.bool("do_sample")? == Some(true) {
        return Ok(sampling);
    }
    Ok(SamplingDefaults {
        repetition_penalty: sampling.repetition_penalty,
        ..SamplingDefaults::default()
    })
}

fn rules(keys: &Keys, eos: &[u32]) -> Result<TextRules, Error> {
    let words = keys.read("bad_words_ids", "lists of token ids", |value| {
        let word = |word: &Value| -> Option<Vec<u32>> {
            let ids = word.as_array()?.iter();
            ids.map(|id| u32::try_from(id.as_u64()?).ok()).collect()
        };
        value
            .as_array()?
            .iter()
            .map(word)
            .collect::<Option<Vec<_>>>()
    })?;
    // A token that ends a text is not a bad word.
    let is_end = |word: &Vec<u32>| matches!(word[..], [id] if eos.contains(&id));
    let strings = keys.read(
        "stop_strings",
        "a string or a list of them",
        |value| match value {
            Value::String(one) => Some(vec![one.clone()]),
            value => {
                let texts = value.as_array()?.iter();
                texts.map(|text| text.as_str().map(str::to_owned)).collect()
            }
        },
    )?;
    Ok(TextRules {
        suppress_tokens: keys.tokens("suppress_tokens")?,
        begin_suppress_tokens: keys.tokens("begin_suppress_tokens")?,
        forced_bos_token_id: keys.u32("forced_bos_token_id")?,
        no_repeat_ngram_size: keys.u32("no_repeat_ngram_size")?.unwrap_or(0),
        bad_words_ids: words.into_iter().flatten().filter(|w| !is_end(w)).collect(),
        stop_strings: strings.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_without_effect_here_are_named() {
        let value = json!({"num_beams": 4, "num_beam_groups": 1, "min_length": 0, "top_h": null,
            "guidance_scale": 1.0, "sequence_bias": [[[3], 1.0]], "forced_eos_token_id": 0,
            "remove_invalid_values": false, "encoder_repetition_penalty": 1.0});
        let keys = Keys::new(Path::new("generation_config.json"), &value).unwrap();
        assert_eq!(
            without_effect(&keys),
            ["num_beams", "forced_eos_token_id", "sequence_bias"]
        );
    }

    /// transformers 5.23 filters such words in `NoBadWordsLogitsProcessor`.
    #[test]
    fn an_end_token_is_no_bad_word() {
        let value = json!({"bad_words_ids": [[2], [3], [2, 3]], "stop_strings": "END"});
        let keys = Keys::new(Path::new("generation_config.json"), &value).unwrap();
        let rules = rules(&keys, &[2]).unwrap();
        assert_eq!(rules.bad_words_ids, [vec![3], vec![2, 3]]);
        assert_eq!(rules.stop_strings, ["END"]);
    }
}
