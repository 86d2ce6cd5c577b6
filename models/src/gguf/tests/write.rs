//! The reader reads back what the writer writes.

use tempfile::TempDir;

use super::*;
use crate::config::FfnKind;
use crate::gguf::write::{Encoding, GgufFile, GgufValue, GgufWriter};

fn vocab() -> GgufVocab {
    let tokens = [
        "<unk>", "<s>", "</s>", "a", "b", "c", "d", "e", "f", "g", "h",
    ];
    GgufVocab {
        model: "llama".into(),
        tokens: tokens.map(String::from).to_vec(),
        scores: vec![0.0; tokens.len()],
        token_types: [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1].to_vec(),
        bos: Some(1),
        eos: Some(2),
        ..GgufVocab::default()
    }
}

/// The rows of `source` in the order and orientation of the file.
fn copy(source: &dyn Checkpoint, mut writer: GgufWriter) -> Result<(), Error> {
    for tensor in writer.tensors().to_vec() {
        let all = read_all(source, tensor.id);
        for row in 0..tensor.rows {
            let row = tensor.presented_row(row);
            let at = |col| match tensor.id.role {
                Role::Down => all[col * tensor.rows + row],
                _ => all[row * tensor.cols + col],
            };
            let bytes: Vec<u8> = (0..tensor.cols).flat_map(|c| at(c).to_le_bytes()).collect();
            writer.append(&bytes)?;
        }
    }
    writer.finish()
}

fn file<'a>(config: &'a ModelConfig, vocab: &'a GgufVocab) -> GgufFile<'a> {
    GgufFile {
        config,
        vocab,
        encoding: Encoding::F32,
        q4_k: &|_| false,
        extra: vec![("emberflow.note".into(), GgufValue::U64(7))],
    }
}

fn activations() -> Vec<FfnKind> {
    use Activation::{Gelu, GeluTanh, Relu, Relu2, Silu};
    let plain = [Relu, Relu2, Silu, Gelu, GeluTanh].map(|activation| FfnKind {
        activation,
        relu_on_up: false,
        ungated: false,
    });
    let mut kinds = plain.to_vec();
    kinds.push(FfnKind {
        activation: Relu,
        relu_on_up: true,
        ungated: false,
    });
    kinds
}

#[test]
fn experts_come_back() {
    for family in FAMILIES_OF_EXPERTS.into_iter().chain(["smallthinker"]) {
        let source = Folder::new(family).open().unwrap();
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("out.gguf");
        let vocab = vocab();
        let config = ModelConfig {
            add_bos: true,
            ..source.config().clone()
        };
        let writer = GgufWriter::create(&path, file(&config, &vocab)).unwrap();
        copy(source.as_ref(), writer).unwrap();
        let back = crate::open(&path).unwrap();
        assert_eq!(back.config(), &config, "{family}");
        for info in source.tensors() {
            let [found, expected] = [&back, &source].map(|c| read_all(c.as_ref(), info.id));
            assert_eq!(found, expected, "{family}: {}", info.id);
        }
    }
}

#[test]
fn every_tensor_and_activation_comes_back() {
    for arch in ["llama", "qwen2", "qwen3"] {
        let original = Gguf::new(arch);
        let source = original.open().unwrap();
        for ffn_kind in activations() {
            let dir = TempDir::new().unwrap();
            let path = dir.path().join("out.gguf");
            let config = ModelConfig {
                ffn_kind,
                ..source.config().clone()
            };
            let vocab = vocab();
            let writer = GgufWriter::create(&path, file(&config, &vocab)).unwrap();
            copy(source.as_ref(), writer).unwrap();
            let back = crate::open(&path).unwrap();
            assert_eq!(back.config(), &config, "{arch}");
            for info in source.tensors() {
                let (a, b) = (
                    read_all(source.as_ref(), info.id),
                    read_all(back.as_ref(), info.id),
                );
                assert_eq!(a, b, "{arch} {}", info.id);
            }
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }
}

/// A file that appears meanwhile is not replaced; what was written stays and is whole.
#[test]
fn what_appeared_meanwhile_stays() {
    let original = Gguf::new("llama");
    let source = original.open().unwrap();
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("out.gguf");
    let vocab = vocab();
    let writer = GgufWriter::create(&path, file(source.config(), &vocab)).unwrap();
    std::fs::write(&path, "precious").unwrap();
    let message = copy(source.as_ref(), writer).unwrap_err().to_string();
    assert!(
        message.contains("appeared while it was written"),
        "{message}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::rename(dir.path().join("out.gguf.partial"), &path).unwrap();
    let back = crate::open(&path).unwrap();
    assert_eq!(back.config(), source.config());
}

#[test]
fn an_unfinished_file_is_gone() {
    let original = Gguf::new("llama");
    let source = original.open().unwrap();
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("out.gguf");
    let vocab = vocab();
    let create = || GgufWriter::create(&path, file(source.config(), &vocab));

    let mut writer = create().unwrap();
    assert!(create().is_err(), "two writers of one file");
    writer.append(&[0; 16]).unwrap();
    let message = writer.finish().unwrap_err().to_string();
    assert!(message.contains("embed lacks"), "{message}");
    let mut writer = create().unwrap();
    let message = writer.append(&[0; 1 << 16]).unwrap_err().to_string();
    assert!(message.contains("more than"), "{message}");
    drop(writer);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    std::fs::write(&path, "before").unwrap();
    drop(create().unwrap());
    assert_eq!(std::fs::read(&path).unwrap(), b"before");
}

#[test]
fn what_the_format_cannot_say_is_refused() {
    let original = Gguf::new("llama");
    let source = original.open().unwrap();
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("out.gguf");
    let vocab = vocab();
    let plain = source.config();
    for (config, word) in [
        (
            ModelConfig {
                window: vec![8; LAYERS],
                ..plain.clone()
            },
            "sliding window",
        ),
        (
            ModelConfig {
                qkv_bias: true,
                ..plain.clone()
            },
            "bias",
        ),
        (
            ModelConfig {
                family: "other".into(),
                ..plain.clone()
            },
            "family",
        ),
    ] {
        match GgufWriter::create(&path, file(&config, &vocab)) {
            Err(error) => assert!(error.to_string().contains(word), "{error}"),
            Ok(_) => panic!("{word} was accepted"),
        }
    }
    // 24 columns are no whole Q4_0 blocks
    let quantised = GgufFile {
        encoding: Encoding::Q4_0,
        ..file(plain, &vocab)
    };
    assert!(GgufWriter::create(&path, quantised).is_err());
}

#[test]
fn a_named_activation_wins_and_an_unknown_one_is_refused() {
    let mut file = Gguf::new("llama");
    file.set("emberflow.hidden_act", text("relu"));
    file.set("emberflow.relu_on_up", Kv::Bool(1));
    let kind = file.open().unwrap().config().ffn_kind;
    assert_eq!((kind.activation, kind.relu_on_up), (Activation::Relu, true));

    file.set("emberflow.hidden_act", text("silu"));
    assert!(file.refused().to_string().contains("relu_on_up"));
    file.unset("emberflow.relu_on_up");
    assert_eq!(
        file.open().unwrap().config().ffn_kind.activation,
        Activation::Silu
    );
    file.set("emberflow.hidden_act", text("sine"));
    assert!(file.refused().to_string().contains("\"sine\""));

    let mut sparse = Gguf::new("bamboo");
    sparse.set("emberflow.hidden_act", text("silu"));
    assert!(sparse.refused().to_string().contains("hidden_act"));
}
