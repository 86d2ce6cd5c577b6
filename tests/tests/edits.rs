//! Keys of `config.json` that change what the reference computes change the same here, or are
//! refused.

use std::path::Path;

use emberflow_kernels::DType;
use emberflow_tests::{Golden, all_logits, fixtures, open, packed, roomy};
use serde_json::{Map, Value};

/// Largest difference allowed to the reference.
const TOLERANCE: f32 = 2e-3;

/// An edited key; null removes it.
#[derive(serde::Deserialize)]
struct Edit {
    key: String,
    value: Value,
    /// The first logits of the prompt's last position, by transformers.
    logits: Vec<f32>,
}

/// Logits of the last position with the edit; `Err` is the refusal.
fn logits_with(edit: &Edit, case: &Path, dir: &Path) -> Result<Vec<f32>, String> {
    let text = std::fs::read_to_string(case.join("config.json")).unwrap();
    let mut config: Map<String, Value> = serde_json::from_str(&text).unwrap();
    match edit.value {
        Value::Null => config.remove(&edit.key),
        _ => config.insert(edit.key.clone(), edit.value.clone()),
    };
    let text = Value::Object(config).to_string();
    std::fs::write(dir.join("config.json"), text).unwrap();
    emberflow_models::open(dir).map_err(|error| error.to_string())?;
    let tokens = Golden::load(case, "golden.json").tokens;
    let container = packed(dir, dir, DType::F32);
    let mut engine = open(&container, roomy(tokens.len()));
    let logits = all_logits(&mut engine, &tokens, 16);
    std::fs::remove_file(container).unwrap();
    Ok(logits[logits.len() - engine.config().vocab as usize..].to_vec())
}

#[test]
fn every_key_counts_or_is_refused() {
    let (mut same, mut refused) = (0, 0);
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(fixtures().join("models")).unwrap() {
        let case = entry.unwrap().path();
        let Ok(edits) = std::fs::read_to_string(case.join("edits.json")) else {
            continue;
        };
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            std::fs::copy(case.join(name), dir.path().join(name)).unwrap();
        }
        let edits: Vec<Edit> = serde_json::from_str(&edits).unwrap();
        for edit in edits {
            let name = format!("{:?}: {} = {}", case.file_name(), edit.key, edit.value);
            match logits_with(&edit, &case, dir.path()) {
                Err(refusal) => {
                    println!("{name}: {refusal}");
                    refused += 1;
                }
                Ok(logits) => {
                    let pairs = logits.iter().zip(&edit.logits);
                    let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    if most > TOLERANCE {
                        wrong.push(format!("{name}: differs by {most}"));
                    }
                    same += 1;
                }
            }
        }
    }
    println!("{same} edits change the same, {refused} are refused");
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(same > 80, "only {same} edits were honoured");
}
