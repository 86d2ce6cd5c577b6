//! Memory of a large vocabulary. A program of its own: its peak is that of the process.

#![cfg(target_os = "linux")]

use std::fs;

use emberflow_models::gguf_vocab::GgufVocab;
use emberflow_models::tokenizer::Tokenizer;

/// As many as Gemma 3 has.
const TOKENS: u32 = 1 << 18;

/// Bytes that may be resident at once.
const MOST: u64 = 80 << 20;

/// The texts of one letter, of two, of three, and so on.
fn text(mut number: u32) -> String {
    let mut letters = Vec::new();
    while number > 0 {
        number -= 1;
        letters.push(b'a' + (number % 26) as u8);
        number /= 26;
    }
    letters.iter().rev().copied().map(char::from).collect()
}

/// A vocabulary in which each part of a token is one.
fn vocabulary() -> GgufVocab {
    GgufVocab {
        model: "llama".into(),
        tokens: (0..TOKENS)
            .map(|id| if id == 0 { "<unk>".into() } else { text(id) })
            .collect(),
        scores: (0..TOKENS).map(|id| -(id as f32)).collect(),
        token_types: (0..TOKENS).map(|id| if id == 0 { 2 } else { 1 }).collect(),
        unk: Some(0),
        add_space_prefix: Some(false),
        ..GgufVocab::default()
    }
}

#[test]
fn a_tokenizer_of_262144_tokens_is_built_in_80_mib() {
    let vocab = vocabulary();
    let json = vocab.to_tokenizer_json().unwrap();
    drop(vocab);
    let tokenizer = Tokenizer::from_json(&json).unwrap();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.unwrap().trim_end_matches("kB").trim();
    let peak = peak.parse::<u64>().unwrap() << 10;
    assert_eq!(tokenizer.vocab_size(), TOKENS);
    assert_eq!(tokenizer.encode("abca", false).unwrap(), [19_007]);
    assert!(peak <= MOST, "{} MiB", peak >> 20);
}
