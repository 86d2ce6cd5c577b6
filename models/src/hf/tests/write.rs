//! Folders that cannot be written leave nothing behind.

use std::path::Path;

use std::collections::BTreeMap;

use crate::checkpoint::SamplingDefaults;
use crate::config::ModelConfig;
use crate::error::Error;
use crate::hf::write::{Folder as Writing, RowSink, write_folder};
use crate::names::required;
use crate::rules::TextRules;
use crate::testing::{FAMILIES_OF_EXPERTS, Folder};

fn config(family: &str) -> ModelConfig {
    Folder::new(family).open().unwrap().config().clone()
}

/// One of each.
fn rules() -> TextRules {
    TextRules {
        suppress_tokens: vec![3, 4],
        begin_suppress_tokens: vec![5],
        forced_bos_token_id: Some(1),
        no_repeat_ngram_size: 3,
        bad_words_ids: vec![vec![6], vec![7, 8]],
        stop_strings: vec!["END".into()],
    }
}

fn write(
    dir: &Path,
    config: &ModelConfig,
    sampling: SamplingDefaults,
    weights: impl FnOnce(&mut RowSink<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let folder = Writing {
        config,
        tokenizer_json: &Folder::new("llama").texts["tokenizer.json"],
        chat_template: None,
        tool_template: None,
        sampling,
        rules: &rules(),
        named_tokens: &BTreeMap::from([("pad_token".into(), "<pad>".into())]),
        tensors: &required(config),
    };
    write_folder(dir, &folder, weights)
}

/// Rows that identify their tensor and position.
fn all_rows(config: &ModelConfig, sink: &mut RowSink<'_>) -> Result<(), Error> {
    for (t, tensor) in required(config).into_iter().enumerate() {
        for r in 0..tensor.rows {
            let row: Vec<f32> = (0..tensor.cols)
                .map(|c| (t * 10_000 + r * 100 + c) as f32)
                .collect();
            sink(tensor.id, &row)?;
        }
    }
    Ok(())
}

#[test]
fn every_family_reads_back() {
    let dense = ["llama", "mistral", "qwen2", "qwen3", "bamboo"];
    let made = dense.into_iter().chain(FAMILIES_OF_EXPERTS).map(config);
    let references = [
        "seed_oss",
        "dots1",
        "dots1_window",
        "glm4_moe",
        "glm4_moe_air",
        "solar_open",
        "minimax_m2",
        "hy_v3",
        "exaone4",
        "exaone4_full",
        "exaone_moe",
    ];
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/models");
    let opened = references.map(|name| ModelConfig {
        bos: Some(1),
        eos: vec![2],
        ..crate::open(&models.join(name)).unwrap().config().clone()
    });
    for config in made.chain(opened) {
        let family = &config.family;
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let sampling = SamplingDefaults {
            top_k: Some(7),
            min_p: Some(0.25),
            repetition_penalty: Some(1.5),
            ..Default::default()
        };
        write(&out, &config, sampling, |sink| all_rows(&config, sink)).unwrap();
        let read = crate::open(&out).unwrap();
        assert_eq!(read.sampling_defaults(), sampling);
        assert_eq!(read.rules(), rules());
        assert_eq!(read.named_tokens()["pad_token"], "<pad>");
        let name = "out".to_owned();
        assert_eq!(
            read.config(),
            &ModelConfig {
                name,
                ..config.clone()
            }
        );
        for (t, tensor) in required(&config).into_iter().enumerate() {
            let mut values = vec![0.0; tensor.rows * tensor.cols];
            read.read_rows(tensor.id, 0, tensor.rows, &mut values)
                .unwrap();
            for (i, v) in values.iter().enumerate() {
                let expected = t * 10_000 + i / tensor.cols * 100 + i % tensor.cols;
                assert_eq!(*v, expected as f32, "{family}: {} at {i}", tensor.id);
            }
        }
    }
}

#[test]
fn a_failed_export_leaves_nothing_and_stops_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let config = config("llama");
    let tensors = required(&config);
    let mut rows = 0;
    let result = write(&out, &config, SamplingDefaults::default(), |sink| {
        sink(tensors[0].id, &vec![0.0; tensors[0].cols])?;
        rows += 1;
        Err(Error::ChatTemplate {
            reason: "the read failed".into(),
        })
    });
    assert!(result.unwrap_err().to_string().contains("the read failed"));
    assert_eq!(rows, 1);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    // too few rows, rows of another width, a row too many
    let short = write(&out, &config, SamplingDefaults::default(), |_| Ok(()));
    assert!(short.unwrap_err().to_string().contains("got 0 of its"));
    let narrow = write(&out, &config, SamplingDefaults::default(), |sink| {
        sink(tensors[0].id, &[1.0])
    });
    assert!(
        narrow
            .unwrap_err()
            .to_string()
            .contains("no place for a row of 1")
    );
    let extra = write(&out, &config, SamplingDefaults::default(), |sink| {
        all_rows(&config, sink)?;
        sink(tensors[0].id, &vec![0.0; tensors[0].cols])
    });
    assert!(extra.unwrap_err().to_string().contains("no place"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn what_the_format_cannot_express_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let refused = |config: &ModelConfig, key: &str| {
        let result = write(&out, config, SamplingDefaults::default(), |sink| {
            all_rows(config, sink)
        });
        let message = result.expect_err(key).to_string();
        assert!(message.contains(key), "{message}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    };
    for family in ["llama", "qwen3"] {
        let mut c = config(family);
        c.qkv_bias = true;
        refused(&c, "qkv_bias");
    }
    let mut c = config("qwen2");
    c.qkv_bias = false;
    refused(&c, "qkv_bias");
    let mut c = config("mistral");
    c.o_bias = true;
    refused(&c, "attention_bias");
    let mut c = config("llama");
    c.ffn_kind.relu_on_up = true;
    refused(&c, "ffn_kind");
    let mut c = config("llama");
    c.qk_norm = true;
    refused(&c, "qk_norm");
    let mut c = config("llama");
    c.rope.dims /= 2;
    refused(&c, "rope");
    let mut c = config("mistral");
    c.window[0] = 5;
    refused(&c, "windows");
}

#[test]
fn neither_an_existing_folder_nor_anothers_work_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let config = config("llama");
    let attempt = |name: &str| {
        write(
            &dir.path().join(name),
            &config,
            SamplingDefaults::default(),
            |sink| all_rows(&config, sink),
        )
    };
    std::fs::create_dir(dir.path().join("a")).unwrap();
    assert!(attempt("a").unwrap_err().to_string().contains("exists"));
    std::fs::create_dir(dir.path().join("b.partial")).unwrap();
    std::fs::write(dir.path().join("b.partial/x"), "x").unwrap();
    assert!(
        attempt("b")
            .unwrap_err()
            .to_string()
            .contains("b.partial: exists")
    );
    assert!(dir.path().join("b.partial/x").exists());
    attempt("c").unwrap();
    assert!(!dir.path().join("c.partial").exists());
}
