//! Recommended sampling (`general.sampling.*`), and tokens that are never generated.

use crate::checkpoint::SamplingDefaults;
use crate::error::Error;
use crate::metadata::Metadata;
use crate::rules::TextRules;

/// Keys that change texts and are not supported.
const FOREIGN: [&str; 3] = ["mirostat", "xtc_probability", "sequence"];

/// Recommended sampling, with llama.cpp's meaning: no temperature above 0 is greedy, no `top_k` above
/// 0 keeps all tokens.
pub(super) fn sampling(metadata: &Metadata) -> Result<SamplingDefaults, Error> {
    let key = |name: &str| format!("general.sampling.{name}");
    let sampling = SamplingDefaults {
        temperature: metadata.f32(&key("temp"))?.map(|t| t.max(0.0)),
        top_k: metadata
            .i32(&key("top_k"))?
            .map(|k| u32::try_from(k).unwrap_or(0)),
        top_p: metadata.f32(&key("top_p"))?,
        min_p: metadata.f32(&key("min_p"))?,
        typical_p: None,
        repetition_penalty: metadata.f32(&key("penalty_repeat"))?,
    };
    if let Some(wrong) = sampling.wrong() {
        let name = match wrong.what {
            "temperature" => "temp",
            "repetition_penalty" => "penalty_repeat",
            same => same,
        };
        return Err(metadata.bad(&key(name), wrong.expected));
    }
    for name in FOREIGN {
        let key = key(name);
        if metadata.has(&key) && !metadata.is_off(&key) {
            tracing::warn!("{key} has no effect here");
        }
    }
    Ok(sampling)
}

/// Tokens that are never generated; invalid ids are ignored, as in llama.cpp.
pub(super) fn rules(metadata: &Metadata) -> Result<TextRules, Error> {
    let tokens = metadata.i32s("tokenizer.ggml.suppress_tokens")?;
    let tokens = tokens.into_iter().filter_map(|id| u32::try_from(id).ok());
    Ok(TextRules {
        suppress_tokens: tokens.collect(),
        ..TextRules::default()
    })
}
