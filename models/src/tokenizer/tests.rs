use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// A byte-level tokenizer over the whole byte alphabet, with one merge.
pub(super) fn byte_level() -> Value {
    let alphabet = (0x21..=0x7e)
        .chain(0xa1..=0xac)
        .chain(0xae..=0xff)
        .chain(0x100..=0x143);
    let mut vocab: serde_json::Map<String, Value> = alphabet
        .filter_map(char::from_u32)
        .zip(0..)
        .map(|(c, id)| (c.to_string(), json!(id)))
        .collect();
    vocab.insert("ab".into(), json!(256));
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [{"id": 257, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [257], "tokens": ["<|end|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": [["a", "b"]]}
    })
}

/// Pieces with a visible space, byte fallback and a dropped first space.
pub(super) fn pieces() -> Value {
    let mut file = byte_level();
    let mut vocab = serde_json::Map::new();
    for (id, token) in ["<unk>", "▁", "a", "b", "▁a", "é"].into_iter().enumerate() {
        vocab.insert(token.into(), json!(id));
    }
    for byte in 0..=255u8 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(10 + u32::from(byte)));
    }
    file["model"]["vocab"] = vocab.into();
    file["model"]["merges"] = json!(["▁ a"]);
    file["model"]["byte_fallback"] = json!(true);
    file["added_tokens"] = json!([]);
    file["post_processor"] = Value::Null;
    file["pre_tokenizer"] = Value::Null;
    file["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    file["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    file
}

pub(super) fn read(file: &Value) -> Tokenizer {
    Tokenizer::from_json(&file.to_string()).unwrap()
}

fn streamed(mut stream: StreamDecoder<'_>, ids: &[u32]) -> String {
    let mut text: String = ids.iter().filter_map(|id| stream.push(*id)).collect();
    text.extend(stream.finish());
    text
}

#[test]
fn truncation_of_the_file_is_ignored_and_special_tokens_are_optional() {
    let tokenizer = read(&byte_level());
    let ids = tokenizer.encode("ab a<|end|>", false).unwrap();
    assert_eq!(ids.first(), Some(&256));
    assert_eq!(ids.last(), Some(&257));
    assert_eq!(
        tokenizer.encode("ab a<|end|>", true).unwrap().len(),
        ids.len() + 1
    );
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "ab a");
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "ab a<|end|>");
    assert_eq!(tokenizer.vocab_size(), 258);
    assert_eq!(tokenizer.token_to_id("<|end|>"), Some(257));
    assert_eq!(tokenizer.id_to_token(258), None);
    assert!(tokenizer.is_special(257) && !tokenizer.is_special(256));
}

#[test]
fn a_stream_holds_back_half_a_character() {
    let tokenizer = read(&byte_level());
    let ids = tokenizer.encode("é😀", false).unwrap();
    let mut stream = tokenizer.stream();
    let parts: Vec<_> = ids.iter().map(|id| stream.push(*id)).collect();
    assert_eq!(
        parts,
        [None, Some("é".into()), None, None, None, Some("😀".into())]
    );
    assert_eq!(stream.finish(), None);
    assert_eq!(streamed(tokenizer.stream(), &ids[..1]), "\u{fffd}");
}

#[test]
fn only_the_first_space_of_a_whole_text_is_dropped() {
    let tokenizer = read(&pieces());
    let (space, a, space_a, e) = (1, 2, 4, 5);
    for (ids, whole, after_prompt) in [
        (vec![space_a, space_a], "a a", " a a"),
        (vec![space, space_a], " a", "  a"),
        (vec![a, space_a], "a a", "a a"),
        (vec![space, e], "é", " é"),
        (vec![10 + 0x20, space_a], " a", "  a"),
    ] {
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), whole);
        assert_eq!(streamed(tokenizer.stream(), &ids), whole);
        assert_eq!(
            streamed(tokenizer.stream_after_prompt(), &ids),
            after_prompt
        );
    }
}

#[test]
fn fallback_bytes_become_characters_as_soon_as_they_are_complete() {
    let tokenizer = read(&pieces());
    let bytes = "€".bytes().map(|b| 10 + u32::from(b));
    let mut stream = tokenizer.stream();
    let parts: Vec<_> = bytes.map(|id| stream.push(id)).collect();
    assert_eq!(parts, [None, None, Some("€".into())]);
    assert_eq!(stream.push(10 + 0xff), Some("\u{fffd}".into()));
    assert_eq!(stream.push(10 + 0xe2), None);
    assert_eq!(stream.push(2), Some("\u{fffd}a".into()));
}

#[test]
fn ids_without_a_token_give_no_text() {
    let tokenizer = read(&byte_level());
    assert_eq!(
        tokenizer.decode(&[256, 9999, u32::MAX], true).unwrap(),
        "ab"
    );
    assert_eq!(tokenizer.stream().push(9999), None);
}

/// An invalid value, its location, and the text that its refusal must contain.
struct Lie {
    name: &'static str,
    at: &'static str,
    value: Value,
    expected: &'static str,
}

impl Lie {
    fn new(name: &'static str, at: &'static str, value: Value, expected: &'static str) -> Self {
        Self {
            name,
            at,
            value,
            expected,
        }
    }
}

/// The vocabulary, its merges, the version.
fn lies_about_the_model() -> Vec<Lie> {
    vec![
        Lie::new(
            "model another kind",
            "/model/type",
            json!("Unigram"),
            "Unigram",
        ),
        Lie::new("chance", "/model/dropout", json!(0.1), "model.dropout"),
        Lie::new(
            "prefix of continued words",
            "/model/continuing_subword_prefix",
            json!("##"),
            "subword_prefix",
        ),
        Lie::new(
            "suffix of words",
            "/model/end_of_word_suffix",
            json!("</w>"),
            "word_suffix",
        ),
        Lie::new("empty vocabulary", "/model/vocab", json!({}), "model.vocab"),
        Lie::new(
            "huge id",
            "/model/vocab/ab",
            json!(4_000_000_000u32),
            "4000000000",
        ),
        Lie::new(
            "negative id",
            "/model/vocab/ab",
            json!(-1),
            "tokenizer.json",
        ),
        Lie::new("one id twice", "/model/vocab/ab", json!(1), "id 1 for"),
        Lie::new(
            "merge of nothing",
            "/model/merges",
            json!([["a", "nothing"]]),
            "no token \"nothing\"",
        ),
        Lie::new(
            "merge into nothing",
            "/model/merges",
            json!([["a", "a"]]),
            "no token \"aa\"",
        ),
        Lie::new(
            "merge of three",
            "/model/merges",
            json!([["a", "a", "b"]]),
            "two tokens",
        ),
        Lie::new("merge of one", "/model/merges", json!(["ab"]), "two tokens"),
        Lie::new("version", "/version", json!("2.0"), "2.0"),
    ]
}

/// Tokens outside the vocabulary.
fn lies_about_added_tokens() -> Vec<Lie> {
    vec![
        Lie::new(
            "added token elsewhere",
            "/added_tokens/0/id",
            json!(300),
            "<|end|>",
        ),
        Lie::new(
            "empty added token",
            "/added_tokens/0/content",
            json!(""),
            "added token",
        ),
        Lie::new(
            "overlapping added tokens",
            "/added_tokens",
            json!([{"id": 257, "content": "\n", "single_word": false, "lstrip": false, "rstrip": false, "normalized": true, "special": false},
                {"id": 258, "content": "xx", "single_word": false, "lstrip": false, "rstrip": true, "normalized": true, "special": false}]),
            "rstrip",
        ),
        Lie::new(
            "huge added id",
            "/added_tokens/0/id",
            json!(u32::MAX),
            "added token",
        ),
    ]
}

/// Changes to a text before it is split.
fn lies_about_normalizers() -> Vec<Lie> {
    let step = |name, kind, value| Lie::new(name, "/normalizer", value, kind);
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let nothing = json!({"type": "Precompiled", "precompiled_charsmap": ""});
    let (empty, letter) = (json!({"String": ""}), json!({"String": "a"}));
    vec![
        step("unknown normalizer", "normalizer", nothing),
        step("empty pattern", "Replace", replace(empty, "x")),
        step(
            "empty prefix",
            "Prepend",
            json!({"type": "Prepend", "prepend": ""}),
        ),
        step(
            "regex normalizer",
            "Replace",
            replace(json!({"Regex": "a*"}), "x"),
        ),
        step("replace by nothing", "Replace", replace(letter, "")),
    ]
}

/// The splitter and the post-processor.
fn lies_about_the_way_in() -> Vec<Lie> {
    vec![
        Lie::new(
            "bad regex",
            "/pre_tokenizer",
            json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}),
            "tokenizer.json",
        ),
        Lie::new(
            "too many patterns",
            "/pre_tokenizer",
            json!({"type": "Sequence", "pretokenizers": vec![
                json!({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": false}); 9
            ]}),
            "up to 8",
        ),
        Lie::new(
            "unknown splitter",
            "/pre_tokenizer",
            json!({"type": "FixedLength", "length": 0}),
            "FixedLength",
        ),
        Lie::new(
            "sequence without steps",
            "/pre_tokenizer",
            json!({"type": "Sequence"}),
            "pretokenizers",
        ),
        Lie::new(
            "two templates",
            "/post_processor",
            json!({"type": "Sequence", "processors": vec![byte_level()["post_processor"].clone(); 2]}),
            "one at most",
        ),
        Lie::new(
            "undefined token",
            "/post_processor/special_tokens",
            json!({}),
            "TemplateProcessing",
        ),
        Lie::new(
            "unknown id",
            "/post_processor/special_tokens/<|end|>/ids",
            json!([999]),
            "TemplateProcessing",
        ),
        Lie::new(
            "second text",
            "/post_processor/single/1/Sequence/id",
            json!("B"),
            "TemplateProcessing",
        ),
        Lie::new(
            "no text",
            "/post_processor/single",
            json!([]),
            "TemplateProcessing",
        ),
    ]
}

/// The decoder.
fn lies_about_the_way_out() -> Vec<Lie> {
    vec![
        Lie::new("no decoder", "/decoder", Value::Null, "decoder"),
        Lie::new(
            "unknown decoder",
            "/decoder",
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            "WordPiece",
        ),
        Lie::new(
            "strip before fuse",
            "/decoder",
            json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
            "Strip",
        ),
        Lie::new(
            "two decoders",
            "/decoder",
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}),
            "decoder",
        ),
        Lie::new(
            "strip at the end",
            "/decoder",
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]}),
            "Strip",
        ),
    ]
}

/// Each invalid value must be refused with a message about it.
#[test]
fn lies_are_refused() {
    let lies = [
        lies_about_the_model(),
        lies_about_added_tokens(),
        lies_about_normalizers(),
        lies_about_the_way_in(),
        lies_about_the_way_out(),
    ];
    for lie in lies.into_iter().flatten() {
        let (name, at) = (lie.name, lie.at);
        let mut file = byte_level();
        *file
            .pointer_mut(at)
            .unwrap_or_else(|| panic!("{name}: no {at}")) = lie.value;
        match Tokenizer::from_json(&file.to_string()) {
            Ok(_) => panic!("{name}: accepted"),
            Err(error) => assert!(error.to_string().contains(lie.expected), "{name}: {error}"),
        }
    }
    for text in [
        "",
        "[]",
        "null",
        "{\"model\": 1}",
        "{\"model\": {\"type\": \"BPE\"}}",
    ] {
        assert!(Tokenizer::from_json(text).is_err(), "{text}");
    }
}

pub(super) fn normalizers() -> Vec<Value> {
    ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"]
        .map(|kind| json!({ "type": kind }))
        .into_iter()
        .chain([
            json!({"type": "Prepend", "prepend": "▁"}),
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            json!({"type": "Replace", "pattern": {"String": "a"}, "content": "é"}),
        ])
        .collect()
}

pub(super) fn splitters() -> Vec<Value> {
    let split = |regex: &str, behavior: &str, invert: bool| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert});
    vec![
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}),
        json!({"type": "Metaspace", "replacement": "é", "prepend_scheme": "always", "split": false}),
        json!({"type": "Digits", "individual_digits": true}),
        json!({"type": "Punctuation", "behavior": "Contiguous"}),
        json!({"type": "Whitespace"}),
        json!({"type": "WhitespaceSplit"}),
        split(r"\s+(?!\S)|\s+", "Isolated", false),
        split("a*", "Removed", false),
        split("(?=b)|$", "MergedWithPrevious", true),
        split("b|^", "MergedWithNext", false),
        split(".", "Contiguous", true),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Components that are accepted individually also work together, on any text.
    #[test]
    fn combinations_of_known_components_never_panic(
        start in 0..2usize,
        normalizers in proptest::collection::vec(proptest::sample::select(normalizers()), 0..3),
        splitters in proptest::collection::vec(proptest::sample::select(splitters()), 0..3),
        added in proptest::collection::vec(("[ ab▁é\n]{1,3}", any::<[bool; 5]>()), 0..4),
        ids in proptest::collection::vec(0..400u32, 0..20),
        text in "[ ab▁é1\n\u{300}ﬁ😀]{0,24}",
    ) {
        let mut file = if start == 0 { byte_level() } else { pieces() };
        file["normalizer"] = json!({"type": "Sequence", "normalizers": normalizers});
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": splitters});
        let mut contents = std::collections::BTreeMap::new();
        for (content, flags) in added {
            contents.entry(content).or_insert(flags);
        }
        let vocab = file["model"]["vocab"].as_object().unwrap().clone();
        let fresh = if start == 0 { 257.. } else { 262.. };
        let mut fresh = fresh.filter(|id| !vocab.values().any(|taken| taken.as_u64() == Some(*id)));
        let added: Vec<Value> = contents
            .into_iter()
            .map(|(content, [single_word, lstrip, rstrip, normalized, special])| {
                let id = vocab.get(&content).and_then(Value::as_u64).or_else(|| fresh.next());
                json!({"id": id, "content": content, "single_word": single_word, "lstrip": lstrip,
                    "rstrip": rstrip, "normalized": normalized, "special": special})
            })
            .collect();
        file["added_tokens"] = added.into();
        file["post_processor"] = Value::Null;
        // Two added tokens may become one by normalisation: a refusal, not a panic.
        if let Ok(tokenizer) = Tokenizer::from_json(&file.to_string()) {
            if let Ok(ids) = tokenizer.encode(&text, true) {
                tokenizer.decode(&ids, true).unwrap();
            }
            tokenizer.decode(&ids, false).unwrap();
            streamed(tokenizer.stream(), &ids);
        }
    }

    /// A stream gives the same text as decoding at once.
    #[test]
    fn streaming_equals_decoding(text in "[ ab▁é😀\u{0}-\u{7f}]{0,40}") {
        for file in [byte_level(), pieces()] {
            let tokenizer = read(&file);
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(streamed(tokenizer.stream(), &ids), tokenizer.decode(&ids, true).unwrap());
        }
    }
}
