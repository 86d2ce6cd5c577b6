//! Keys and values beyond the range of f16: an error that names the way out, and the right numbers there.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use emberflow_engine::{Error, Logits, Options, Request};
use emberflow_kernels::DType;
use emberflow_tests::{Golden, all_logits, fixtures, open, packed, roomy};
use serde_json::Value;

/// A copy of a checkpoint in f32 with matrices times a factor.
fn scaled(dir: &Path, factors: &[(&str, f32)]) -> PathBuf {
    let (source, copy) = (fixtures().join("models/llama2"), dir.join("scaled"));
    std::fs::create_dir_all(&copy).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(name), copy.join(name)).unwrap();
    }
    let mut bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let (len, rest) = bytes.split_first_chunk_mut().unwrap();
    let (header, data) = rest.split_at_mut(u64::from_le_bytes(*len) as usize);
    let header: Value = serde_json::from_slice(header).unwrap();
    for (name, tensor) in header.as_object().unwrap() {
        let Some((_, factor)) = factors.iter().find(|(part, _)| name.contains(part)) else {
            continue;
        };
        assert_eq!(tensor["dtype"], "F32", "{name}");
        let [from, to] = [0, 1].map(|end| tensor["data_offsets"][end].as_u64().unwrap() as usize);
        for value in data[from..to].as_chunks_mut().0 {
            *value = (f32::from_le_bytes(*value) * factor).to_le_bytes();
        }
    }
    std::fs::write(copy.join("model.safetensors"), bytes).unwrap();
    copy
}

/// Factors of 2^17 that leave a model's numbers as they are: of keys, and of values.
const CASES: [[(&str, f32); 2]; 2] = [
    [("k_proj", 131_072.0), ("q_proj", 1.0 / 131_072.0)],
    [("v_proj", 131_072.0), ("o_proj", 1.0 / 131_072.0)],
];

fn expect_range(error: &Error) {
    let words = ["position 0", "65504", "--kv f16", "--kv f32"];
    let text = error.to_string();
    assert!(matches!(error, Error::KvRange { position: 0 }), "{text}");
    assert!(words.iter().all(|words| text.contains(words)), "{text}");
}

#[test]
fn numbers_beyond_f16_name_the_format_that_holds_them() {
    let case = fixtures().join("models/llama2");
    let golden = Golden::load(&case, "golden.json");
    let (tokens, expected) = (&golden.tokens, golden.logits(&case));
    for factors in CASES {
        let dir = tempfile::tempdir().unwrap();
        let container = packed(&scaled(dir.path(), &factors), dir.path(), DType::F32);
        let mut engine = open(&container, roomy(tokens.len()));
        let found = all_logits(&mut engine, tokens, 7);
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-3, "{factors:?}");
        }
        let mut engine = open(
            &container,
            Options {
                kv: DType::F16,
                ..roomy(tokens.len())
            },
        );
        let mut sequence = engine.new_sequence().unwrap();
        let passed = engine.forward(&mut sequence, &tokens[..5], Logits::Last);
        expect_range(&passed.unwrap_err());
        drop(sequence);
        // An error of this text, not of the engine.
        for _ in 0..2 {
            let mut sequence = engine.new_sequence().unwrap();
            let request = Request {
                max_tokens: 2,
                ..Request::default()
            };
            let go_on = &mut |_| ControlFlow::Continue(());
            let generated = engine.generate(&mut sequence, &tokens[..5], &request, go_on);
            expect_range(&generated.unwrap_err());
        }
    }
}
