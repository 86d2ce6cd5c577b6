//! One test for each kind of invalid GGUF file.

use super::*;

/// Asserts the variant, and that the message names the file and the culprit.
macro_rules! assert_refused {
    ($error:expr, $variant:ident, $culprit:expr) => {{
        let error = $error;
        assert!(matches!(error, Error::$variant { .. }), "{error:?}");
        let message = error.to_string();
        assert!(
            message.contains("tiny.gguf") && message.contains($culprit),
            "{message}"
        );
    }};
}

/// The error for a changed llama.
fn refused(change: impl FnOnce(&mut Gguf)) -> Error {
    let mut file = Gguf::new("llama");
    change(&mut file);
    file.refused()
}

/// The error for a llama whose bytes were changed.
fn refused_bytes(change: impl FnOnce(&mut Vec<u8>)) -> Error {
    let file = Gguf::new("llama");
    let mut bytes = file.bytes();
    change(&mut bytes);
    file.open_bytes(&bytes)
        .err()
        .expect("a bad file was accepted")
}

/// The error for one more metadata entry.
fn refused_key(value: Kv) -> Error {
    refused(|file| file.set("general.extra", value))
}

#[test]
fn another_version_or_byte_order() {
    assert_refused!(refused(|f| f.version = 1), Header, "version is 1");
    assert_refused!(refused(|f| f.version = 4), Header, "version is 4");
    assert_refused!(
        refused(|f| f.version = 3u32.swap_bytes()),
        Header,
        "big-endian"
    );
}

#[test]
fn a_file_cut_anywhere_in_its_header() {
    let file = Gguf::new("llama");
    let bytes = file.bytes();
    let data: usize = file
        .tensors
        .iter()
        .map(|t| t.bytes.len().next_multiple_of(32))
        .sum();
    let header = bytes.len() - data;
    for len in (4..header).step_by(7) {
        assert_refused!(
            file.open_bytes(&bytes[..len]).err().unwrap(),
            Truncated,
            "needs bytes up to"
        );
    }
    assert_refused!(refused_bytes(|b| b.truncate(3)), NotACheckpoint, "3 bytes");
}

#[test]
fn tensor_data_that_is_cut_off() {
    let cut = refused_bytes(|bytes| bytes.truncate(bytes.len() - 200));
    assert_refused!(cut, Truncated, "tensor blk.1.ffn_down.weight");
}

#[test]
fn counts_larger_than_the_file() {
    for at in [8, 16] {
        for count in [u64::MAX, 1 << 40, 10_000] {
            let error =
                refused_bytes(|bytes| bytes[at..at + 8].copy_from_slice(&count.to_le_bytes()));
            assert!(
                matches!(
                    error,
                    Error::Truncated { .. } | Error::Header { .. } | Error::Duplicate { .. }
                ),
                "{error}"
            );
        }
    }
}

#[test]
fn strings_longer_than_the_file() {
    for length in [u64::MAX, 1 << 33, 1 << 20] {
        assert_refused!(
            refused_key(Kv::Raw(8, length.to_le_bytes().to_vec())),
            Truncated,
            "general.extra"
        );
    }
    let long = "k".repeat(1 << 16);
    assert_refused!(
        refused(|f| f.set(&long, Kv::U8(0))),
        Header,
        "65536 bytes long"
    );
}

#[test]
fn arrays_longer_than_the_file() {
    let array = |kind: u32, count: u64| {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(count.to_le_bytes());
        Kv::Raw(9, bytes)
    };
    assert_refused!(refused_key(array(4, u64::MAX)), TooLarge, "general.extra");
    assert_refused!(refused_key(array(4, 1 << 22)), Truncated, "general.extra");
    // The limit applies to the elements of all arrays together.
    let half = || array(0, (1 << 22) + 1);
    let error = refused(|f| {
        f.set("general.extra", Kv::List(9, vec![half(), half()]));
    });
    assert!(
        matches!(error, Error::Truncated { .. } | Error::TooLarge { .. }),
        "{error}"
    );
}

#[test]
fn arrays_nested_without_end() {
    let mut nested = Kv::List(4, Vec::new());
    for _ in 0..6 {
        nested = Kv::List(9, vec![nested]);
    }
    assert_refused!(refused_key(nested), Header, "nested");
}

#[test]
fn a_value_of_an_unknown_type() {
    assert_refused!(refused_key(Kv::Raw(13, Vec::new())), Header, "type 13");
    assert_refused!(
        refused_key(Kv::List(99, vec![Kv::U8(0)])),
        Header,
        "type 99"
    );
}

#[test]
fn a_bool_that_is_neither() {
    assert_refused!(refused_key(Kv::Bool(2)), Header, "0 or 1");
}

#[test]
fn text_that_is_not_utf8() {
    let mut bytes = 2u64.to_le_bytes().to_vec();
    bytes.extend([b'a', 0xff]);
    assert_refused!(refused_key(Kv::Raw(8, bytes)), NotUtf8, "byte");
}

#[test]
fn names_that_appear_twice() {
    assert_refused!(
        refused(|f| f.keys.push(f.keys[0].clone())),
        Duplicate,
        "key general.architecture"
    );
    assert_refused!(
        refused(|f| f.tensors.push(f.tensors[0].clone())),
        Duplicate,
        "tensor token_embd.weight"
    );
    // Down under both of its names is one tensor twice.
    assert_refused!(
        refused(|f| f.add("blk.0.ffn_down_t.weight", &[FFN, D], Order::AsIs)),
        Duplicate,
        "ffn_down"
    );
}

#[test]
fn a_required_key_that_is_absent() {
    for key in [
        "general.architecture",
        "llama.context_length",
        "llama.embedding_length",
        "llama.block_count",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
    ] {
        assert_refused!(refused(|f| f.unset(key)), MissingKey, key);
    }
}

#[test]
fn a_key_of_the_wrong_type_or_out_of_range() {
    let cases = [
        ("general.architecture", Kv::U32(1)),
        ("general.name", Kv::U32(1)),
        ("general.alignment", Kv::U32(0)),
        ("general.alignment", Kv::U32(24)),
        ("general.alignment", Kv::U32(1 << 30)),
        ("llama.block_count", Kv::U32(u32::MAX)),
        ("llama.block_count", text("2")),
        ("llama.embedding_length", Kv::I32(-24)),
        ("llama.embedding_length", Kv::U64(1 << 40)),
        (
            "llama.attention.head_count_kv",
            Kv::List(5, vec![Kv::I32(-2), Kv::I32(-2)]),
        ),
        ("llama.attention.layer_norm_rms_epsilon", Kv::F32(f32::NAN)),
        ("llama.rope.freq_base", text("high")),
        ("tokenizer.ggml.tokens", text("all")),
        ("tokenizer.ggml.tokens", Kv::List(4, vec![Kv::U32(1)])),
        ("tokenizer.ggml.scores", Kv::List(6, vec![Kv::F32(0.0)])),
        (
            "tokenizer.ggml.token_type",
            Kv::List(5, vec![Kv::I32(1); 12]),
        ),
        ("tokenizer.ggml.bos_token_id", Kv::U32(11)),
        ("tokenizer.ggml.add_bos_token", Kv::U32(1)),
        ("tokenizer.ggml.model", text("bert")),
        ("tokenizer.chat_template", Kv::U32(1)),
    ];
    for (key, value) in cases {
        let culprit = if key.ends_with("bos_token_id") {
            "bos"
        } else {
            key
        };
        assert_refused!(refused(|f| f.set(key, value)), BadKey, culprit);
    }
}

#[test]
fn fields_that_do_not_fit_together() {
    assert_refused!(
        refused(|f| f.set("llama.attention.head_count_kv", Kv::U32(3))),
        BadKey,
        "divisor"
    );
    assert_refused!(
        refused(|f| f.set("llama.feed_forward_length", Kv::U32(0))),
        BadKey,
        "ffn"
    );
    assert_refused!(
        refused(|f| f.set("tokenizer.ggml.tokens", Kv::List(8, Vec::new()))),
        BadKey,
        "tokenizer.ggml.scores"
    );
    let undivided = refused(|f| {
        f.unset("llama.attention.key_length");
        f.set("llama.attention.head_count", Kv::U32(5));
    });
    assert_refused!(undivided, BadKey, "head_count");
}

#[test]
fn an_unknown_architecture_names_the_known_ones() {
    assert_refused!(
        refused(|f| f.set("general.architecture", text("mamba"))),
        UnknownFamily,
        "qwen3"
    );
}

#[test]
fn features_that_would_change_the_output() {
    let cases = [
        ("llama.expert_gating_func", Kv::U32(2)),
        ("llama.expert_weights_scale", Kv::F32(2.5)),
        ("split.count", Kv::U32(2)),
        ("llama.attention.value_length", Kv::U32(16)),
        ("llama.rope.dimension_count", Kv::U32(4)),
        ("llama.rope.scaling.type", text("su")),
        (
            "llama.attention.head_count_kv",
            Kv::List(4, vec![Kv::U32(2), Kv::U32(4)]),
        ),
        ("llama.attention.scale", Kv::F32(0.5)),
        ("llama.logit_scale", Kv::F32(0.5)),
        ("llama.attention.causal", Kv::Bool(0)),
        ("llama.attention.sliding_window_pattern", Kv::U32(2)),
        ("llama.what_comes_next", text("something")),
    ];
    for (key, value) in cases {
        let with = |f: &mut Gguf| {
            if key.contains("expert") {
                f.set("llama.expert_count", Kv::U32(8));
            }
            f.set(key, value);
        };
        assert_refused!(refused(with), Unsupported, key);
    }
    assert_refused!(
        refused(|f| f.set("llama.expert_count", Kv::U32(8))),
        MissingKey,
        "llama.expert_used_count"
    );
    let mut file = Gguf::new("llama");
    for (key, value) in [
        ("llama.attention.scale", Kv::F32(0.0)),
        ("llama.logit_scale", Kv::F32(1.0)),
        ("llama.attention.causal", Kv::Bool(1)),
        ("llama.expert_count", Kv::U32(0)),
        ("llama.vocab_size", Kv::U32(11)),
        ("qwen2.of_another_architecture", Kv::U32(1)),
    ] {
        file.set(key, value);
    }
    file.open().expect("keys that change nothing");
    let mut qwen = Gguf::new("qwen2");
    qwen.set("qwen2.attention.sliding_window", Kv::U32(8));
    assert_refused!(qwen.refused(), Unsupported, "sliding_window");
}

#[test]
fn rotary_divisors_that_are_no_llama3_scaling() {
    let with = |values: &[f32]| {
        refused(|f| {
            f.add("rope_freqs.weight", &[values.len()], Order::AsIs);
            f.tensor("rope_freqs.weight").bytes =
                values.iter().flat_map(|v| v.to_le_bytes()).collect();
        })
    };
    assert_refused!(
        with(&[8.0, 1.0, 1.0, 1.0]),
        Unsupported,
        "rope_freqs.weight"
    );
    assert_refused!(
        with(&[1.0, f32::NAN, 1.0, 1.0]),
        Unsupported,
        "rope_freqs.weight"
    );
    assert_refused!(
        with(&[1.0, 1.0, f32::INFINITY, f32::INFINITY]),
        Unsupported,
        "rope_freqs.weight"
    );
    assert_refused!(with(&[1.0; 8]), WrongShape, "rope_freqs.weight");
    let half = refused(|f| {
        f.add("rope_freqs.weight", &[4], Order::AsIs);
        f.tensor("rope_freqs.weight").kind = 1;
    });
    assert_refused!(half, WrongDtype, "rope_freqs.weight");
}

#[test]
fn dimensions_that_no_tensor_has() {
    let dims = |dims: &[u64]| refused(|f| f.tensor("output.weight").dims = dims.to_vec());
    assert_refused!(dims(&[]), Header, "0 dimensions");
    assert_refused!(dims(&[1; 5]), Header, "5 dimensions");
    assert_refused!(dims(&[24, 0]), Header, "a dimension of 0");
    assert_refused!(dims(&[1 << 40, 1 << 40]), WrongShape, "output.weight");
    assert_refused!(dims(&[24, u64::MAX]), WrongShape, "output.weight");
    assert_refused!(dims(&[1 << 40]), Truncated, "output.weight");
}

#[test]
fn element_types_that_are_not_read() {
    for (kind, name) in [
        (26, "I32"),
        (4, "Q4_2 (removed"),
        (40, "NVFP4"),
        (u32::MAX, "number 4294967295"),
    ] {
        assert_refused!(
            refused(|f| f.tensor("output.weight").kind = kind),
            WrongDtype,
            name
        );
    }
}

/// Every number of `enum ggml_type` (ggml.h of llama.cpp, October 2026) has a name or is supported.
#[test]
fn all_types_of_ggml_have_names() {
    for kind in 0..43 {
        let mut file = Gguf::new("llama");
        file.tensor("output.weight").kind = kind;
        if let Err(error) = file.open() {
            assert!(!error.to_string().contains("number"), "{error}");
        }
    }
}

#[test]
fn rows_that_are_no_whole_blocks() {
    assert_refused!(
        refused(|f| f.tensor("output.weight").kind = 2),
        WrongShape,
        "multiple of 32"
    );
}

#[test]
fn tensors_out_of_place() {
    let at = |offset| refused(move |f| f.tensor("output.weight").offset = Some(offset));
    assert_refused!(at(4), TensorRange, "multiple of 32");
    assert_refused!(at(0), TensorRange, "output.weight");
    assert_refused!(at(1 << 40), Truncated, "output.weight");
    assert_refused!(at(u64::MAX - 31), Truncated, "output.weight");
}

#[test]
fn a_required_tensor_that_is_absent() {
    for file in ["llama", "bamboo"] {
        let names: Vec<String> = Gguf::new(file)
            .tensors
            .into_iter()
            .map(|tensor| tensor.name)
            .collect();
        for name in names.iter().filter(|name| *name != "output.weight") {
            let mut file = Gguf::new(file);
            file.tensors.retain(|tensor| tensor.name != *name);
            assert_refused!(file.refused(), MissingTensor, name.as_str());
        }
    }
}

#[test]
fn tensors_that_nothing_would_use() {
    for name in [
        "blk.2.attn_q.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.attn_q_norm.weight",
        "position_embd.weight",
    ] {
        assert_refused!(
            refused(|f| f.add(name, &[D, D], Order::AsIs)),
            UnexpectedTensor,
            name
        );
    }
}

#[test]
fn shapes_that_contradict_the_metadata() {
    for (name, shape) in [
        ("output.weight", [D, VOCAB]),
        ("blk.0.ffn_down.weight", [FFN, D]),
        ("token_embd.weight", [VOCAB + 1, D]),
    ] {
        assert_refused!(
            refused(|f| f.add(name, &shape, Order::AsIs)),
            WrongShape,
            name
        );
    }
}

#[test]
fn scales_that_are_not_finite() {
    let mut file = Gguf::new("llama");
    file.tensor("output_norm.weight").bytes[4..8].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let checkpoint = file.open().unwrap();
    let error = checkpoint
        .read_rows(TensorId::global(Role::FinalNorm), 0, 1, &mut [0.0; D])
        .unwrap_err();
    assert_refused!(error, NotFinite, "output_norm.weight");
}
