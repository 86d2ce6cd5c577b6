use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::gguf_vocab::GgufVocab;
use crate::tokenizer::check::byte_level_char;
use crate::tokenizer::tests::{byte_level, normalizers, pieces, read, splitters};

/// The tokens of `text`, which arrives in pieces of about `piece` bytes, and the number of cuts.
fn in_pieces(tokenizer: &Tokenizer, text: &str, piece: usize) -> (Vec<u32>, usize) {
    let mut encoder = Encoder::new(tokenizer, piece);
    let (mut ids, mut cuts) = (Vec::new(), 0);
    for some in text.split_inclusive(|_| true) {
        let before = encoder.held() + some.len();
        encoder.push(some, &mut ids).unwrap();
        cuts += usize::from(encoder.held() < before);
    }
    let least = tokenizer.least().tokens(&encoder.held);
    let known = ids.len();
    encoder.finish(&mut ids).unwrap();
    assert!(ids.len() - known >= least, "{text:?}: {least} at least");
    (ids, cuts)
}

/// The tokenizers of the fixtures.
fn fixtures() -> Vec<(String, Tokenizer)> {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models");
    let mut seen = std::collections::HashSet::new();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(models).unwrap() {
        let path = entry.unwrap().path().join("tokenizer.json");
        if let Ok(json) = std::fs::read_to_string(&path)
            && seen.insert(json.clone())
        {
            let tokenizer = Tokenizer::from_json(&json).unwrap();
            found.push((path.display().to_string(), tokenizer));
        }
    }
    assert!(found.len() > 3);
    found
}

/// A byte-level vocabulary with merges within words, across them and across line ends, as GGUF files
/// name its splitter.
fn named(pre: &str) -> Tokenizer {
    let mut tokens: Vec<String> = (0..=255).map(|b| byte_level_char(b).to_string()).collect();
    let mut merges = Vec::new();
    for (left, right) in [
        ("a", "b"),
        ("Ġ", "a"),
        ("Ġ", "Ġ"),
        ("b", "Ġ"),
        ("Ċ", "Ċ"),
        (".", "Ċ"),
        ("1", "2"),
        ("12", "3"),
        ("'", "s"),
        ("ab", "Ġ"),
        ("Ġ", "ab"),
        ("Ċ", "a"),
        (",", "Ġ"),
    ] {
        merges.push(format!("{left} {right}"));
        tokens.push(format!("{left}{right}"));
    }
    let vocab = GgufVocab {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens,
        merges,
        ..GgufVocab::default()
    };
    read(&serde_json::from_str(&vocab.to_tokenizer_json().unwrap()).unwrap())
}

/// Splitters that GGUF files name, one of each kind.
const NAMES: [&str; 31] = [
    "default",
    "mpt",
    "command-r",
    "dbrx",
    "glm4",
    "qwen2",
    "stablelm2",
    "qwen35",
    "ufakzeka",
    "laguna",
    "minicpm5",
    "seed-coder",
    "bailingmoe",
    "exaone-moe",
    "jais-2",
    "tekken",
    "gpt-4o",
    "tiny_aya",
    "youtu",
    "kimi-k2",
    "deepseek-v3",
    "spark2_5",
    "deepseek-llm",
    "deepseek-coder",
    "falcon",
    "bloom",
    "viking",
    "chameleon",
    "superbpe",
    "afmoe",
    "llama-bpe",
];

const TEXT: &str = "The first line, of 12345 words: it's \"here\".\n\n  And then the second,\twith tabs; \
                    它是字，不是词。还有\n<|end|> é ﬁ e\u{301} naïve  spaces   \r\n3.14 x_y __init__(self)\n";

#[test]
fn every_fixture_is_cut_and_gives_the_tokens_of_the_whole() {
    let text = TEXT.repeat(4);
    for (path, tokenizer) in fixtures() {
        let whole = tokenizer.encode_whole(&text, false).unwrap();
        for piece in [1, 7, 64] {
            let (ids, cuts) = in_pieces(&tokenizer, &text, piece);
            assert_eq!(ids, whole, "{path} in pieces of {piece}");
            assert!(piece > 1 || cuts >= 20, "{path}: {cuts} cuts");
        }
    }
}

#[test]
fn every_named_splitter_is_cut_that_does_not_match_nothing() {
    let text = TEXT.repeat(4);
    let mut whole = Vec::new();
    for name in NAMES {
        let tokenizer = named(name);
        let expected = tokenizer.encode_whole(&text, false).unwrap();
        let (ids, cuts) = in_pieces(&tokenizer, &text, 1);
        assert_eq!(ids, expected, "{name}");
        if cuts < 4 {
            whole.push(name);
        }
    }
    // `(?=(\d{3})+(?!\d))` matches the empty text
    assert_eq!(whole, ["superbpe"]);
}

#[test]
fn a_long_text_is_held_back_by_a_piece_at_most() {
    let tokenizer = named("llama-bpe");
    let text = TEXT.repeat(1000);
    let (mut encoder, mut ids) = (tokenizer.encoder(), Vec::new());
    encoder.push(&text, &mut ids).unwrap();
    assert!(
        encoder.held() <= PIECE && encoder.least() == 0,
        "{}",
        encoder.held()
    );
    assert!(ids.len() > text.len() / 3);
    encoder.finish(&mut ids).unwrap();
    assert_eq!(ids, tokenizer.encode_whole(&text, false).unwrap());
    assert_eq!(ids, tokenizer.encode(&text, false).unwrap());
}

#[test]
fn what_cannot_be_cut_is_counted_without_being_tokenised() {
    let tokenizer = named("gpt-2");
    let (mut encoder, mut ids) = (tokenizer.encoder(), Vec::new());
    // the longest token with an `a` has three bytes
    encoder.push(&"a".repeat(40 << 10), &mut ids).unwrap();
    assert!(ids.is_empty());
    assert_eq!(encoder.least(), (40 << 10) / 3 - 1);
    let refused = encoder.push(&"a".repeat(40 << 10), &mut ids).unwrap_err();
    assert!(
        refused.to_string().contains("within 65536 bytes"),
        "{refused}"
    );
    // dropped white space, and letters without a token, count 0
    let mut file = pieces();
    file["model"]["byte_fallback"] = json!(false);
    file["model"]["unk_token"] = json!("<unk>");
    file["model"]["fuse_unk"] = json!(true);
    let fused = read(&file);
    for (text, least) in [
        ("z".repeat(900), 0),
        ("字".repeat(900), 0),
        ("b".repeat(900), 899),
    ] {
        assert_eq!(fused.least().tokens(&text), least, "{}", &text[..3]);
    }
}

/// A tokenizer from known components.
fn composed(start: bool, normalizers: Vec<Value>, splitters: Vec<Value>) -> Value {
    let mut file = if start { byte_level() } else { pieces() };
    file["normalizer"] = json!({"type": "Sequence", "normalizers": normalizers});
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": splitters});
    file["post_processor"] = Value::Null;
    file
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// For any components, pieces give the tokens of the whole, or nothing is cut.
    #[test]
    fn pieces_give_the_tokens_of_the_whole(
        start in any::<bool>(),
        normalizers in proptest::collection::vec(proptest::sample::select(normalizers()), 0..3),
        splitters in proptest::collection::vec(proptest::sample::select(splitters()), 0..3),
        added in proptest::collection::btree_map("[ ab▁é,\n]{1,3}", any::<[bool; 5]>(), 0..3),
        ignore_merges in any::<bool>(),
        text in "([ab]{1,4}[ ▁,.\n1é\u{300}ﬁ字，]{1,2}){0,12}",
        piece in 1..12usize,
    ) {
        let mut file = composed(start, normalizers, splitters);
        file["model"]["ignore_merges"] = json!(ignore_merges);
        let vocab = file["model"]["vocab"].as_object().unwrap().clone();
        let free = (0..).filter(|id| !vocab.values().any(|taken| taken.as_u64() == Some(*id)));
        let mut free = free.skip_while(|&id| id < 257);
        let added: Vec<Value> = added.into_iter().map(|(content, [single_word, lstrip, rstrip, normalized, special])| {
            let id = vocab.get(&content).and_then(Value::as_u64).or_else(|| free.next());
            json!({"id": id, "content": content, "single_word": single_word, "lstrip": lstrip,
                "rstrip": rstrip, "normalized": normalized, "special": special})
        }).collect();
        file["added_tokens"] = added.into();
        if let Ok(tokenizer) = Tokenizer::from_json(&file.to_string())
            && let Ok(whole) = tokenizer.encode_whole(&text, false)
        {
            let (ids, _) = in_pieces(&tokenizer, &text, piece);
            prop_assert_eq!(ids, whole);
        }
    }

    /// The splitters of real files, on any text.
    #[test]
    fn pieces_of_real_splitters_give_the_tokens_of_the_whole(
        name in proptest::sample::select(NAMES.to_vec()),
        text in "([a-cA-C'é字]{0,4}[ \t\r\n1-3.,'，。\u{301}_<|\u{a0}]{0,3}){0,16}",
        piece in 1..24usize,
    ) {
        thread_local! {
            static MADE: Vec<(&'static str, Tokenizer)> =
                NAMES.iter().map(|&name| (name, named(name))).collect();
        }
        MADE.with(|made| {
            let (_, tokenizer) = made.iter().find(|made| made.0 == name).unwrap();
            let (ids, _) = in_pieces(tokenizer, &text, piece);
            prop_assert_eq!(ids, tokenizer.encode_whole(&text, false).unwrap());
            Ok(())
        })?;
    }
}
