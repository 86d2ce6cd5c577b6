//! Keys of `config.json` that change the reference's output change it here in the same way, or are
//! refused: of every fixture, every relevant key, doubled, halved, flipped, replaced and removed.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use emberflow_kernels::DType;
use emberflow_tests::{Golden, all_logits, fixtures, open, packed, roomy};
use serde_json::Value;

/// Largest difference allowed to the reference, as a share of the logit where it is above 1.
const TOLERANCE: f32 = 2e-3;

#[derive(serde::Deserialize)]
struct Edit {
    /// Keys, from the outermost to the changed one.
    path: Vec<String>,
    /// Its value; without one the key is removed.
    #[serde(default, deserialize_with = "given")]
    value: Option<Value>,
    /// The logits of the prompt's last position that change most.
    at: Vec<usize>,
    /// Their new values, by transformers.
    logits: Vec<f32>,
}

/// A value that may be null.
fn given<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
    serde::Deserialize::deserialize(from).map(Some)
}

impl Edit {
    fn apply(&self, config: &mut Value) {
        let (last, outer) = self.path.split_last().unwrap();
        let inner = outer.iter().fold(config, |inner, key| &mut inner[key]);
        let keys = inner.as_object_mut().unwrap();
        match &self.value {
            Some(value) => keys.insert(last.clone(), value.clone()),
            None => keys.remove(last),
        };
    }

    /// Effect of the edit here; `Err` is the refusal.
    fn logits(&self, case: &Path, dir: &Path) -> Result<Vec<f32>, String> {
        let text = std::fs::read_to_string(case.join("config.json")).unwrap();
        // Python values as written by transformers 5
        let text = text.replace(" Infinity", r#" {"__float__": "Infinity"}"#);
        let mut config: Value = serde_json::from_str(&text).unwrap();
        self.apply(&mut config);
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        emberflow_models::open(dir).map_err(|error| error.to_string())?;
        let tokens = Golden::load(case, "golden.json").tokens;
        let container = packed(dir, dir, DType::F32);
        let mut engine = open(&container, roomy(tokens.len()));
        let logits = all_logits(&mut engine, &tokens, 64);
        std::fs::remove_file(container).unwrap();
        let last = logits.len() - engine.config().vocab as usize;
        Ok(self.at.iter().map(|at| logits[last + at]).collect())
    }
}

/// Result: edits with the same effect, refused edits, and wrong ones.
#[derive(Default)]
struct Found {
    same: usize,
    refused: usize,
    wrong: Vec<String>,
}

/// Tries the edits of a case.
fn try_case(case: &Path, found: &Mutex<Found>) {
    let edits = std::fs::read_to_string(case.join("edits.json")).unwrap();
    let edits: Vec<Edit> = serde_json::from_str(&edits).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(case).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("model") && !name.ends_with(".gguf") || name.starts_with("tokenizer") {
            std::fs::copy(entry.path(), dir.path().join(name)).unwrap();
        }
    }
    for edit in edits {
        let value = edit
            .value
            .as_ref()
            .map_or("removed".into(), Value::to_string);
        let name = format!("{:?}: {} = {value}", case.file_name(), edit.path.join("."));
        let outcome = edit.logits(case, dir.path());
        let mut found = found.lock().unwrap();
        match outcome {
            Err(refusal) => {
                println!("{name}: {refusal}");
                found.refused += 1;
            }
            Ok(logits) => {
                let pairs = logits.iter().zip(&edit.logits);
                let off = pairs.map(|(a, b)| (a - b).abs() / b.abs().max(1.0));
                let most = off.fold(0.0, f32::max);
                if most > TOLERANCE {
                    found.wrong.push(format!("{name}: differs by {most}"));
                }
                found.same += 1;
            }
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_key_counts_or_is_refused() {
    let models = std::fs::read_dir(fixtures().join("models")).unwrap();
    let cases: Vec<PathBuf> = models
        .map(|entry| entry.unwrap().path())
        .filter(|case| case.join("edits.json").exists())
        .collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Found::default()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    try_case(case, &found);
                }
            });
        }
    });
    let Found {
        same,
        refused,
        wrong,
    } = found.into_inner().unwrap();
    println!("{same} edits change the same, {refused} are refused");
    assert!(wrong.is_empty(), "{} wrong: {wrong:#?}", wrong.len());
    assert!(
        cases.len() > 50 && same > 400,
        "{same} in {} cases",
        cases.len()
    );
}
