//! Checkpoint files of other programs: GGUF, safetensors and their text files.

use std::os::unix::fs::FileExt;
use std::path::Path;

use emberflow_engine::Model;
use emberflow_models::tokenizer::Tokenizer;

use super::formats::next_tokens;
use super::{Form, Target};
use crate::fixtures;

pub(super) fn gguf() -> Target {
    let models = [
        "relu/model.gguf",
        "llama2/model-q4_0.gguf",
        "llama3/model.gguf",
        "smallthinker/model.gguf",
        "gpt_oss/model.gguf",
        "phi3_long/model.gguf",
        "falcon_new/model.gguf",
        "falcon_new_sparse/model.gguf",
        "opt_sparse/model.gguf",
        "granite/model.gguf",
        "gemma3_layers/model.gguf",
        "gemma3n/model.gguf",
        "qwen3_5_moe/model.gguf",
        "qwen4_exp/model.gguf",
        "deepseek_v2/model.gguf",
        "glm_moe_dsa/model.gguf",
        "kimi_linear/model.gguf",
        "bailing_hybrid/model.gguf",
        "lfm2/model.gguf",
        "nemotron_h_moe/model.gguf",
        "gemma4_inputs/model.gguf",
        "llama4/model.gguf",
        "mistral4/model.gguf",
        "deepseek_v4_release/model-converted.gguf",
    ];
    gguf_of(&models, Form::BINARY, use_checkpoint)
}

/// Models that run without packing.
pub(super) fn unpacked() -> Target {
    let models = [
        "relu/model.gguf",
        "llama2/model-q4_0.gguf",
        "smallthinker/model.gguf",
        "gpt_oss/model.gguf",
        "qwen3_5_moe/model.gguf",
        "gemma4_inputs/model.gguf",
        "deepseek_v4_release/model-converted.gguf",
    ];
    // The buffers of a pass.
    let form = Form {
        room: 16 << 20,
        ..Form::BINARY
    };
    gguf_of(&models, form, |path| {
        let opened = Model::of_checkpoint(path);
        opened.is_ok_and(|model| {
            // weights may be any numbers
            let _ = next_tokens(model);
            true
        })
    })
}

fn gguf_of(models: &[&str], form: Form, run: fn(&Path) -> bool) -> Target {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("model.gguf"), b" ").expect("a file");
    Target {
        seeds: models.iter().map(|name| fixture(name)).collect(),
        form,
        run: Box::new(move |bytes| {
            let path = dir.path().join("model.gguf");
            overwrite(&path, bytes);
            run(&path)
        }),
    }
}

pub(super) fn safetensors() -> Target {
    folder("relu", "model.safetensors", SAFETENSORS)
}

/// Experts in four-bit blocks and matrices in eight bits, with separate tensors of scales.
pub(super) fn blocks() -> Target {
    let models = [
        "gpt_oss",
        "deepseek_v3_fp8",
        "deepseek_v4_release",
        "ministral3_fp8",
    ];
    folders(&models, "model.safetensors", SAFETENSORS)
}

/// Matrices in codes of a few bits, with scales and zero points in tensors of their own.
pub(super) fn quantized() -> Target {
    let models = [
        "../quantized/awq",
        "../quantized/compressed_mixed",
        "../quantized/compressed_int8",
        "../quantized/compressed_nvfp4",
        "../quantized/compressed_mxfp4",
        "../quantized/gptq",
        "../quantized/gptq_order",
        "../quantized/mlx",
        "../quantized/modelopt",
    ];
    folders(&models, "model.safetensors", SAFETENSORS)
}

const SAFETENSORS: Form = Form {
    json: |bytes| {
        let len = u64::from_le_bytes(*bytes.first_chunk()?);
        Some(8..usize::try_from(len).ok()?.checked_add(8)?)
    },
    ..Form::BINARY
};

pub(super) fn config() -> Target {
    let models = [
        "relu",
        "phi3_long",
        "opt",
        "falcon_new",
        "gemma2",
        "gemma3",
        "gemma3_layers",
        "gemma3_whole",
        "gemma3n",
        "gemma3n_whole",
        "qwen3_next",
        "qwen3_5_whole",
        "qwen4_exp",
        "deepseek_v3_fp8",
        "deepseek_v4_release",
        "glm_moe_dsa",
        "kimi_linear",
        "bailing_hybrid",
        "lfm2_moe",
        "nemotron_h_moe",
        "granitemoehybrid",
        "gemma4_inputs",
        "llama4",
        "mistral4",
        "hy_v3",
        "../quantized/awq",
        "../quantized/compressed_mixed",
        "../quantized/gptq",
        "../quantized/mlx",
    ];
    folders(&models, "config.json", Form::JSON)
}

/// Several checkpoints' folders with one fuzzed file. An input is tried in the folder whose own file begins most like it,
/// and in the next one, where a file of another model is damage too.
fn folders(models: &[&str], file: &'static str, form: Form) -> Target {
    let targets: Vec<Target> = (models.iter())
        .map(|model| folder(model, file, form))
        .collect();
    let seeds: Vec<Vec<u8>> = (models.iter())
        .map(|model| fixture(&format!("{model}/{file}")))
        .collect();
    let own = seeds.clone();
    Target {
        seeds,
        form,
        run: Box::new(move |bytes| {
            let alike = |at: &usize| {
                own[*at]
                    .iter()
                    .zip(bytes)
                    .take_while(|(a, b)| a == b)
                    .count()
            };
            let first = (0..own.len()).max_by_key(alike).unwrap_or(0);
            let tried = [first, (first + 1) % targets.len()];
            let opened = tried.map(|at| (targets[at].run)(bytes));
            opened.contains(&true)
        }),
    }
}

pub(super) fn tokenizer() -> Target {
    let folder = fixtures().join("text/tokenizers");
    let names = [
        "llama3",
        "spm",
        "gpt2",
        "default",
        "qwen2",
        "smollm",
        "spm_added",
        "spm_first",
    ];
    let read = |name| std::fs::read(folder.join(format!("{name}.json"))).expect(name);
    Target {
        seeds: names.map(read).to_vec(),
        form: Form::PATTERNS,
        run: Box::new(use_json),
    }
}

pub(super) fn tokenizer_config() -> Target {
    folder("relu", "tokenizer_config.json", Form::JSON)
}

pub(super) fn generation_config() -> Target {
    folder("relu", "generation_config.json", Form::JSON)
}

pub(super) fn index() -> Target {
    folder("llama_linear", "model.safetensors.index.json", Form::JSON)
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(fixtures().join("models").join(name)).expect(name)
}

/// Writes `bytes` to an existing file. Never truncates it first: ext4 treats that as a replacement
/// and waits for the disk each time.
fn overwrite(path: &Path, bytes: &[u8]) {
    let file = std::fs::File::options()
        .write(true)
        .open(path)
        .expect("scratch file");
    file.write_all_at(bytes, 0).expect("scratch file");
    file.set_len(bytes.len() as u64).expect("scratch file");
}

/// A checkpoint's folder with one fuzzed file.
fn folder(model: &str, file: &'static str, form: Form) -> Target {
    let dir = tempfile::tempdir().expect("a folder");
    let from = fixtures().join("models").join(model);
    for entry in std::fs::read_dir(from).expect(model) {
        let entry = entry.expect(model);
        let name = entry.file_name().into_string().expect("a name");
        if !name.starts_with("golden") && !name.ends_with(".gguf") {
            std::fs::copy(entry.path(), dir.path().join(name)).expect("a copy");
        }
    }
    let others = [
        "qwen2_window",
        "llama3",
        "smallthinker",
        "gpt_oss",
        "phimoe",
    ]
    .map(|other| std::fs::read(fixtures().join("models").join(other).join(file)).ok());
    let first = fixture(&format!("{model}/{file}"));
    Target {
        seeds: [Some(first)].into_iter().chain(others).flatten().collect(),
        form,
        run: Box::new(move |bytes| {
            overwrite(&dir.path().join(file), bytes);
            use_checkpoint(dir.path())
        }),
    }
}

/// Opens a checkpoint and reads all of it, a few rows at a time.
fn use_checkpoint(path: &Path) -> bool {
    let Ok(checkpoint) = emberflow_models::open(path) else {
        return false;
    };
    for info in checkpoint.tensors() {
        let rows = info.rows.min(8);
        let mut out = vec![0.0; rows * info.cols];
        for first in [0, info.rows - rows] {
            // a damaged weight may be NaN, which is then an error
            let _ = checkpoint.read_rows(info.id, first, rows, &mut out);
        }
    }
    if let Ok(tokenizer) = Tokenizer::from_json(checkpoint.tokenizer_json()) {
        use_tokenizer(&tokenizer);
    }
    true
}

fn use_json(bytes: &[u8]) -> bool {
    let text = std::str::from_utf8(bytes);
    let Some(tokenizer) = text.ok().and_then(|text| Tokenizer::from_json(text).ok()) else {
        return false;
    };
    use_tokenizer(&tokenizer);
    true
}

fn use_tokenizer(tokenizer: &Tokenizer) {
    for text in ["", " Ab  1é\n▁<s>", "a\u{300}ﬁ😀<0x41></s>"] {
        for add_special in [false, true] {
            let Ok(ids) = tokenizer.encode(text, add_special) else {
                continue;
            };
            let whole = tokenizer.decode(&ids, true);
            let mut stream = tokenizer.stream();
            let pieces = ids.iter().filter_map(|&id| stream.push(id));
            let mut streamed: String = pieces.collect();
            streamed.extend(stream.finish());
            assert_eq!(
                whole.ok(),
                Some(streamed),
                "a stream gives what the whole gives"
            );
        }
    }
    let _ = tokenizer.decode(&[0, 1, u32::MAX, tokenizer.vocab_size()], false);
}
