use std::collections::BTreeMap;
use std::str::FromStr;

use serde::Deserialize;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::splitting::SPLITTINGS;
use super::*;
use crate::tokenizer::Tokenizer;

/// `<unk>`, `<s>`, `</s>`, all byte tokens, then the given pieces with falling scores.
fn pieces(pieces: &[&str]) -> GgufVocab {
    let mut vocab = GgufVocab {
        model: "llama".into(),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..GgufVocab::default()
    };
    let mut add = |token: String, score: f32, kind: i32| {
        vocab.tokens.push(token);
        vocab.scores.push(score);
        vocab.token_types.push(kind);
    };
    add("<unk>".into(), 0.0, UNKNOWN);
    add("<s>".into(), 0.0, CONTROL);
    add("</s>".into(), 0.0, CONTROL);
    for byte in 0..=255u8 {
        add(format!("<0x{byte:02X}>"), 0.0, BYTE);
    }
    for (rank, piece) in (0u16..).zip(pieces) {
        add((*piece).into(), -f32::from(rank), NORMAL);
    }
    vocab
}

fn byte_level(pre: Option<&str>) -> GgufVocab {
    GgufVocab {
        model: "gpt2".into(),
        pre: pre.map(Into::into),
        tokens: ["a", "b", "Ġ", "ab", "Ġab", "1", "<|end|>", "[PAD7]"]
            .map(Into::into)
            .into(),
        token_types: vec![1, 1, 1, 1, 1, 1, 3, 5],
        merges: ["a b", "Ġ ab"].map(Into::into).into(),
        bos: Some(6),
        ..GgufVocab::default()
    }
}

fn refusal(vocab: &GgufVocab) -> String {
    vocab.to_tokenizer_json().unwrap_err().to_string()
}

fn tokenizer(vocab: &GgufVocab) -> Tokenizer {
    Tokenizer::from_json(&vocab.to_tokenizer_json().unwrap()).unwrap()
}

#[test]
fn the_best_score_is_merged_first() {
    let vocab = pieces(&["bc", "ab", "▁", "a", "b", "c"]);
    let id =
        |piece: &str| u32::try_from(vocab.tokens.iter().position(|t| t == piece).unwrap()).unwrap();
    let found = tokenizer(&vocab).encode("abc", true).unwrap();
    assert_eq!(found, [1, id("▁"), id("a"), id("bc")]);
}

#[test]
fn without_the_space_prefix_none_is_added_or_dropped() {
    let mut vocab = pieces(&["▁", "a"]);
    vocab.add_space_prefix = Some(false);
    let tokenizer = tokenizer(&vocab);
    let ids = tokenizer.encode(" a", false).unwrap();
    assert_eq!(ids.len(), 2);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), " a");
}

#[test]
fn bos_and_eos_follow_the_keys_and_the_kind() {
    let ends = |vocab: &GgufVocab| tokenizer(vocab).encode("ab", true).unwrap();
    let mut vocab = byte_level(Some("qwen2"));
    assert_eq!(ends(&vocab), [3]);
    vocab.add_bos = Some(true);
    vocab.add_eos = Some(true);
    vocab.eos = Some(6);
    assert_eq!(ends(&vocab), [6, 3, 6]);
    let mut vocab = byte_level(Some("llama-bpe"));
    assert!(vocab.adds_bos());
    assert_eq!(ends(&vocab), [6, 3]);
    vocab.add_bos = Some(false);
    assert!(!vocab.adds_bos());
    assert_eq!(ends(&vocab), [3]);
    vocab.bos = None;
    vocab.add_bos = Some(true);
    assert!(!vocab.adds_bos());
}

#[test]
fn padding_is_no_token() {
    let tokenizer = tokenizer(&byte_level(None));
    assert_eq!(tokenizer.id_to_token(7), None);
    assert_eq!(tokenizer.decode(&[3, 7, 4], false).unwrap(), "ab ab");
}

#[test]
fn unknown_names_are_refused_with_the_known_ones() {
    let found = refusal(&byte_level(Some("new-bpe")));
    assert!(
        found.contains("\"new-bpe\"") && found.contains("llama-bpe, llama3"),
        "{found}"
    );
    let found = refusal(&GgufVocab {
        model: "t5".into(),
        ..byte_level(None)
    });
    assert!(
        found.contains("\"t5\"") && found.contains("\"llama\", \"gpt2\" or"),
        "{found}"
    );
}

#[test]
fn lists_that_contradict_each_other_are_refused() {
    let with = |change: fn(&mut GgufVocab)| {
        let mut vocab = pieces(&["a"]);
        change(&mut vocab);
        refusal(&vocab)
    };
    assert!(with(|v| v.tokens.clear()).contains("no tokens"));
    assert!(with(|v| v.scores.truncate(5)).contains("scores: found 5 entries"));
    assert!(with(|v| v.scores.clear()).contains("0 scores"));
    assert!(with(|v| v.token_types.push(1)).contains("token_type: found 261 entries"));
    assert!(with(|v| v.token_types[4] = 9).contains("token_type[4]"));
    assert!(with(|v| v.scores[259] = f32::NAN).contains("scores[259]"));
    assert!(with(|v| v.bos = Some(260)).contains("bos_token_id"));
    assert!(with(|v| v.unk = Some(u32::MAX)).contains("unknown_token_id"));
    assert!(with(|v| v.tokens[5] = "<0x0g>".into()).contains("tokens[5]"));
    assert!(with(|v| v.tokens[5] = "a".into()).contains("\"a\" as token"));
    assert!(with(|v| v.tokens[259] = "a".repeat(MAX_PIECE + 1)).contains("513 bytes"));
    assert!(with(|v| v.tokens[1].clear()).contains("empty token 1"));
}

#[test]
fn merges_of_unknown_or_malformed_tokens_are_refused() {
    let mut vocab = byte_level(None);
    vocab.merges.push("ab".into());
    assert!(refusal(&vocab).contains("merges[2]"));
    vocab.merges[2] = "a b c".into();
    assert!(refusal(&vocab).contains("merges[2]"));
    vocab.merges[2] = "ab ab".into();
    let json = vocab.to_tokenizer_json().unwrap();
    let error = Tokenizer::from_json(&json).unwrap_err().to_string();
    assert!(error.contains("no token \"abab\""), "{error}");
}

#[test]
fn every_splitting_compiles() {
    for split in SPLITTINGS
        .iter()
        .filter(|split| split.bytes == Bytes::Letters)
    {
        for name in split.names {
            let tokenizer = tokenizer(&byte_level(Some(name)));
            assert_eq!(
                tokenizer.encode("ab ab1", false).unwrap(),
                [3, 4, 5],
                "{name}"
            );
        }
    }
}

/// The boundaries of pieces by `tokenizers` 0.23 with the models' own steps.
#[derive(Deserialize)]
struct Splits {
    texts: Vec<String>,
    names: BTreeMap<String, String>,
    ways: BTreeMap<String, Vec<Vec<usize>>>,
}

/// Every name that llama.cpp knows splits texts as the model's own tokenizer does.
#[test]
fn every_name_splits_as_the_reference() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/text/splits.json"
    );
    let golden: Splits = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut known: Vec<&str> = SPLITTINGS.iter().flat_map(|s| s.names).copied().collect();
    known.sort_unstable();
    let pieces = [
        "gemma4",
        "granite-embed-multi-311m",
        "sarvam-moe",
        "whitespace",
    ];
    let mut expected: Vec<&str> = golden.names.keys().map(String::as_str).collect();
    expected.extend(pieces);
    expected.sort_unstable();
    assert_eq!(known, expected);
    for (name, way) in &golden.names {
        let json = byte_level(Some(name)).to_tokenizer_json().unwrap();
        let whole = tokenizers::Tokenizer::from_str(&json).unwrap();
        let splitter = whole.get_pre_tokenizer().unwrap();
        for (text, borders) in golden.texts.iter().zip(&golden.ways[way]) {
            let mut split = PreTokenizedString::from(text.as_str());
            splitter.pre_tokenize(&mut split).unwrap();
            let found = split.get_splits(OffsetReferential::Original, OffsetType::Char);
            let found: Vec<usize> = found.iter().map(|(_, at, _)| at.1).collect();
            assert_eq!(&found, borders, "{name}: {text:?}");
        }
    }
}

/// llama.cpp's `ignore_merges`, and the normalisers of transformers' classes.
#[test]
fn names_also_say_what_else_is_done() {
    let of = |name: &str| splitting(Some(name)).unwrap();
    for name in [
        "llama-bpe",
        "falcon3",
        "lfm2",
        "glm4",
        "tekken",
        "youtu",
        "minicpm5",
    ] {
        assert!(of(name).whole, "{name}");
    }
    for name in [
        "dbrx",
        "smaug-bpe",
        "chatglm-bpe",
        "gpt-4o",
        "qwen2",
        "falcon",
    ] {
        assert!(!of(name).whole, "{name}");
    }
    for name in ["qwen2", "qwen35", "mpt", "olmo", "command-r"] {
        assert!(of(name).nfc, "{name}");
    }
    for name in ["llama-bpe", "pixtral", "tekken", "chameleon", "gemma4"] {
        assert!(of(name).starts, "{name}");
    }
}

#[test]
fn gemma4_merges_pieces_in_their_listed_order() {
    let mut vocab = pieces(&["▁", "a", "b", "ab", "▁ab", "\n"]);
    vocab.model = "gemma4".into();
    vocab.scores.clear();
    vocab.merges = ["a b", "▁ ab"].map(Into::into).into();
    let id = |piece: &str| vocab.tokens.iter().position(|t| t == piece).unwrap() as u32;
    let tokenizer = tokenizer(&vocab);
    let ids = tokenizer.encode("ab ab\né", true).unwrap();
    let expected = [1, id("ab"), id("▁ab"), id("\n"), 3 + 0xc3, 3 + 0xa9];
    assert_eq!(ids, expected);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "ab ab\né");
}

#[test]
fn ends_are_found_by_text_and_are_no_text() {
    let mut vocab = byte_level(None);
    vocab.bos = None;
    assert_eq!(vocab.ends(), [6]);
    // user-defined, then an ordinary token
    for kind in [USER_DEFINED, NORMAL] {
        vocab.tokens[6] = "<end_of_turn>".into();
        vocab.token_types[6] = kind;
        assert_eq!(vocab.ends(), [6]);
        let tokenizer = tokenizer(&vocab);
        assert_eq!(tokenizer.encode("ab<end_of_turn>", false).unwrap(), [3, 6]);
        assert!(tokenizer.is_special(6));
    }
    vocab.tokens[6] = "</s>".into();
    assert!(vocab.ends().is_empty());
}
