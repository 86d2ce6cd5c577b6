//! Ends of texts, recommended sampling and tokens that are never generated.

use crate::SamplingDefaults;
use crate::testing::*;

fn tokens(ids: &[i32]) -> Kv {
    Kv::List(5, ids.iter().copied().map(Kv::I32).collect())
}

/// Keys first, then control tokens named like an end token (as llama.cpp's `special_eog_ids`).
#[test]
fn ends_come_from_keys_lists_and_texts() {
    let mut file = Gguf::new("llama");
    file.set("tokenizer.ggml.eos_token_id", Kv::U32(5));
    file.set("tokenizer.ggml.eot_token_id", Kv::U32(7));
    file.set("tokenizer.ggml.eos_token_ids", tokens(&[6, 5]));
    let mut names = [
        "<unk>",
        "<s>",
        "</s>",
        "a",
        "<end_of_turn>",
        "c",
        "d",
        "e",
        "f",
        "g",
        "h",
    ];
    file.set(
        "tokenizer.ggml.tokens",
        Kv::List(8, names.map(text).to_vec()),
    );
    assert_eq!(file.open().unwrap().config().eos, [5, 7, 6, 2, 4]);
    // gpt-oss ends parts of an answer with `<|end|>`
    names[4] = "<|end|>";
    (names[5], names[6]) = ("<|call|>", "<|return|>");
    file.set(
        "tokenizer.ggml.tokens",
        Kv::List(8, names.map(text).to_vec()),
    );
    file.set("tokenizer.ggml.eos_token_ids", tokens(&[]));
    assert_eq!(file.open().unwrap().config().eos, [5, 7, 2, 6]);
}

#[test]
fn sampling_is_read_as_llama_cpp_means_it() {
    let mut file = Gguf::new("llama");
    assert_eq!(
        file.open().unwrap().sampling_defaults(),
        SamplingDefaults::default()
    );
    file.set("general.sampling.temp", Kv::F32(0.5));
    file.set("general.sampling.top_k", Kv::I32(-1));
    file.set("general.sampling.top_p", Kv::F32(0.75));
    file.set("general.sampling.min_p", Kv::F32(0.25));
    file.set("general.sampling.penalty_repeat", Kv::F32(1.25));
    file.set("general.sampling.mirostat", Kv::I32(0));
    let expected = SamplingDefaults {
        temperature: Some(0.5),
        top_k: Some(0),
        top_p: Some(0.75),
        min_p: Some(0.25),
        typical_p: None,
        repetition_penalty: Some(1.25),
    };
    assert_eq!(file.open().unwrap().sampling_defaults(), expected);
    file.set("general.sampling.top_p", Kv::F32(1.5));
    let refused = file.open().err().unwrap().to_string();
    assert!(refused.contains("general.sampling.top_p"), "{refused}");
}

#[test]
fn suppressed_and_named_tokens_are_read() {
    let mut file = Gguf::new("llama");
    file.set("tokenizer.ggml.suppress_tokens", tokens(&[3, -1, 4]));
    file.set("tokenizer.ggml.padding_token_id", Kv::U32(9));
    file.set("tokenizer.ggml.prefix_token_id", Kv::U32(6));
    file.set("tokenizer.ggml.fim_pre_token_id", Kv::U32(5));
    file.set("tokenizer.ggml.middle_token_id", Kv::U32(7));
    let checkpoint = file.open().unwrap();
    assert_eq!(checkpoint.rules().suppress_tokens, [3, 4]);
    let named = checkpoint.named_tokens();
    assert_eq!(
        (named["pad_token"].as_str(), named["eos_token"].as_str()),
        ("g", "</s>")
    );
    // Current keys take precedence over the older ones, as in llama.cpp.
    assert_eq!([&named["fim_prefix"], &named["fim_middle"]], ["c", "e"]);
}
