//! GGUF files with a block for multi-token prediction give the text of those without it, and the block opens as a head.

use std::collections::BTreeSet;
use std::path::PathBuf;

use emberflow_engine::{Engine, Model, PlannedHead};
use emberflow_kernels::DType;
use emberflow_tests::gguf::{Gguf, Tensor};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy};

/// Architectures for which llama.cpp's converter writes such blocks.
const ARCHS: [&str; 12] = [
    "bailingmoe3",
    "deepseek2",
    "deepseek32",
    "exaone-moe",
    "exaone4",
    "glm-dsa",
    "glm4moe",
    "hy_v3",
    "nemotron_h_moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
];

/// The files of these architectures.
fn files() -> Vec<(PathBuf, Gguf)> {
    let models = std::fs::read_dir(fixtures().join("models")).unwrap();
    let mut cases: Vec<PathBuf> = models.map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    let is_gguf = |case: &PathBuf| {
        let start = std::fs::read(case.join("model.gguf"));
        start.is_ok_and(|bytes| bytes.starts_with(b"GGUF"))
    };
    let read = |case: PathBuf| (Gguf::read(&case.join("model.gguf")), case);
    let files = cases.into_iter().filter(is_gguf).map(read);
    files
        .filter(|(file, _)| ARCHS.contains(&&*file.arch()))
        .map(|(file, case)| (case, file))
        .collect()
}

/// The layer of a tensor, and its name inside.
fn inside(tensor: &Tensor) -> Option<(u32, &str)> {
    let (layer, name) = tensor.name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, name))
}

/// Adds a block after the last layer, as the converter does: attention and an FFN as in other layers, with
/// what makes of a token and a hidden state their input.
fn add_block(file: &mut Gguf) {
    let arch = file.arch();
    let key = |name: &str| format!("{arch}.{name}");
    let further = file.u32(&key("nextn_predict_layers")).unwrap_or(0);
    let layers = file.u32(&key("block_count")).unwrap() - further;
    (file.tensors).retain(|tensor| inside(tensor).is_none_or(|(layer, _)| layer < layers));
    file.set_u32(&key("block_count"), layers + 1);
    file.set_u32(&key("nextn_predict_layers"), 1);
    for (list, largest) in [
        ("attention.head_count_kv", true),
        ("feed_forward_length", true),
        ("attention.recurrent_layers", false),
    ] {
        file.grow(&key(list), layers.into(), largest);
    }

    // the last layer with a tensor of that name: in Nemotron-H a layer has one of both
    let mut block = Vec::new();
    for part in ["attn_k", "ffn_"] {
        let named = file.tensors.iter().filter_map(inside);
        let named = named.filter(|(_, name)| name.starts_with(part));
        let last = named.map(|(layer, _)| layer).max().unwrap();
        for tensor in &file.tensors {
            if let Some((_, name)) = inside(tensor).filter(|(layer, _)| *layer == last) {
                let name = format!("blk.{layers}.{name}");
                if block.iter().all(|other: &Tensor| other.name != name) {
                    block.push(tensor.renamed(name));
                }
            }
        }
    }
    let embed = file.tensors.iter().find(|t| t.name == "token_embd.weight");
    let [width, tokens] = *embed.unwrap().dims else {
        panic!("{arch}: a table of tokens");
    };
    for (name, dims) in [
        ("eh_proj", &[2 * width, width][..]),
        ("enorm", &[width]),
        ("hnorm", &[width]),
        ("embed_tokens", &[width, tokens]),
        ("shared_head_head", &[width, tokens]),
        ("shared_head_norm", &[width]),
    ] {
        let name = format!("blk.{layers}.nextn.{name}.weight");
        block.push(Tensor::ones(name, dims));
    }
    file.tensors.append(&mut block);
}

#[test]
fn blocks_for_multi_token_prediction_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = BTreeSet::new();
    for (case, mut file) in files() {
        let golden = Golden::load(&case, "golden.json");
        let name = case.file_name().unwrap().to_string_lossy().into_owned();
        let dir = dir.path().join(&name);
        std::fs::create_dir(&dir).unwrap();
        let [plain, more] = ["model.gguf", "more.gguf"].map(|name| dir.join(name));
        std::fs::copy(case.join("model.gguf"), &plain).unwrap();
        add_block(&mut file);
        file.write(&more);
        let whole = more.clone();
        let [plain, more] = [plain, more].map(|source| {
            let container = packed(&source, &dir, DType::F32);
            let mut engine = open(&container, roomy(golden.tokens.len()));
            bits(&all_logits(&mut engine, &golden.tokens, 16))
        });
        assert!(plain == more, "{case:?}");
        // In these the block above has the tensors of two mixers, which no file has.
        let real = !["qwen3_5", "qwen3_5_moe", "qwen3_next_plain"].contains(&&*name);
        let model = Model::of_checkpoint(&whole).unwrap();
        let engine = Engine::open(model, roomy(golden.tokens.len())).unwrap();
        let head = PlannedHead::of(&whole, engine.text(), engine.options());
        let opens = |head: PlannedHead| head.open(&engine).is_ok();
        assert_eq!(
            head.is_ok_and(|head| head.is_some_and(opens)),
            real,
            "{name}"
        );
        seen.insert(file.arch());
    }
    assert_eq!(seen.len(), ARCHS.len(), "{seen:?}");
}
