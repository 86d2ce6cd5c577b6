//! One test for each kind of invalid tensors in a folder, and for requests that do not match them.

use super::*;

/// A llama whose safetensors file was rewritten byte for byte.
fn refused_bytes(change: impl FnOnce(&mut Vec<u8>)) -> Error {
    let folder = Folder::new("llama");
    folder.write();
    let path = folder.file("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    change(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    crate::open(folder.path())
        .err()
        .expect("a bad file was accepted")
}

/// A llama whose safetensors header was rewritten as text of the same length or
/// another.
fn refused_header(change: impl FnOnce(String) -> String) -> Error {
    refused_bytes(|bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = change(String::from_utf8(bytes[8..8 + length].to_vec()).unwrap());
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        out.extend(&bytes[8 + length..]);
        *bytes = out;
    })
}

#[test]
fn a_safetensors_file_too_short_for_its_header() {
    assert_refused!(
        refused_bytes(|bytes| bytes.truncate(5)),
        Truncated,
        "model.safetensors",
        "length"
    );
    assert_refused!(
        refused_bytes(|bytes| bytes.truncate(100)),
        Truncated,
        "model.safetensors",
        "header"
    );
    assert_refused!(
        refused_bytes(Vec::clear),
        Truncated,
        "model.safetensors",
        "length"
    );
}

#[test]
fn a_header_of_absurd_length() {
    assert_refused!(
        refused_bytes(|bytes| bytes[..8].fill(0xff)),
        TooLarge,
        "model.safetensors",
        "header"
    );
}

#[test]
fn tensor_data_that_is_cut_off() {
    let cut = refused_bytes(|bytes| {
        bytes.pop();
    });
    assert_refused!(cut, Truncated, "model.safetensors", "tensor");
}

#[test]
fn bytes_after_the_last_tensor() {
    assert_refused!(
        refused_bytes(|bytes| bytes.push(0)),
        Header,
        "model.safetensors",
        "last tensor"
    );
}

#[test]
fn a_header_that_is_not_json() {
    assert_refused!(
        refused_header(|_| "{".into()),
        Json,
        "model.safetensors",
        "json"
    );
    assert_refused!(
        refused_header(|h| h.replacen("\"shape\"", "\"shaqe\"", 1)),
        Json,
        "model.safetensors",
        "shape"
    );
    assert_refused!(
        refused_header(|h| h.replacen("[0,", "[-1,", 1)),
        Json,
        "model.safetensors",
        "-1"
    );
}

#[test]
fn a_tensor_named_twice() {
    let twice =
        refused_header(|h| h.replacen("layers.1.input_layernorm", "layers.0.input_layernorm", 1));
    assert_refused!(
        twice,
        Duplicate,
        "model.safetensors",
        "layers.0.input_layernorm"
    );
}

#[test]
fn tensors_that_overlap_or_leave_a_gap() {
    let first = |h: &str| {
        let at = h.find("\"data_offsets\":[0,").unwrap() + 18;
        h[at..at + h[at..].find(']').unwrap()].to_owned()
    };
    for delta in [-4i64, 4] {
        let moved = refused_header(|h| {
            let end = first(&h);
            let other = end.parse::<i64>().unwrap() + delta;
            h.replacen(&format!("[{end},"), &format!("[{other},"), 1)
        });
        assert_refused!(moved, TensorRange, "model.safetensors", "start at");
    }
}

#[test]
fn a_tensor_longer_or_shorter_than_its_shape() {
    let cases = [
        ("[11,24]", "[11,25]"),
        ("[11,24]", "[11,18446744073709551615]"),
        ("[11,24]", "[]"),
    ];
    for (from, to) in cases {
        assert_refused!(
            refused_header(|h| h.replacen(from, to, 1)),
            TensorRange,
            "model.safetensors",
            "bytes"
        );
    }
}

#[test]
fn element_types_that_are_not_read() {
    let unknown = refused_header(|h| h.replacen("\"BF16\"", "\"Q9\"", 1));
    assert_refused!(unknown, WrongDtype, "model.safetensors", "Q9");
    let integer = refused_header(|h| h.replacen("\"BF16\"", "\"I16\"", 1));
    assert_refused!(integer, WrongDtype, "model.safetensors", "BF16");
}

#[test]
fn a_required_tensor_that_is_absent() {
    let names: Vec<String> = Folder::new("qwen3").tensors.into_keys().collect();
    for name in names {
        let mut folder = Folder::new("qwen3");
        folder.tensors.remove(&name);
        assert_refused!(
            folder.refused(),
            MissingTensor,
            folder.path().to_str().unwrap(),
            name.as_str()
        );
    }
}

#[test]
fn tensors_that_nothing_would_use() {
    for name in [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.bias",
        "score.weight",
        "model.layers.00.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ] {
        let mut folder = Folder::new("llama");
        folder.add(name, &[FFN, D]);
        assert_refused!(
            folder.refused(),
            UnexpectedTensor,
            "model.safetensors",
            name
        );
    }
}

#[test]
fn shapes_that_contradict_the_configuration() {
    let cases: [(&str, &[usize]); 5] = [
        ("model.layers.0.mlp.down_proj.weight", &[FFN, D]),
        ("model.layers.0.mlp.up_proj.weight", &[D, FFN]),
        ("model.norm.weight", &[1, D]),
        ("model.embed_tokens.weight", &[VOCAB * D]),
        ("model.layers.1.self_attn.k_proj.weight", &[32, D]),
    ];
    for (name, shape) in cases {
        let mut folder = Folder::new("llama");
        folder.add(name, shape);
        assert_refused!(folder.refused(), WrongShape, "model.safetensors", name);
    }
    let mut folder = Folder::new("bamboo");
    folder.add("model.layers.0.mlp.predictor.fc1.weight", &[6, D]);
    folder.add("model.layers.0.mlp.predictor.fc2.weight", &[FFN, 5]);
    assert_refused!(folder.refused(), WrongShape, "model.safetensors", "fc2");
}

/// Why a folder is refused whose index has the output head in this file.
fn head_in(shard: &str) -> Error {
    let folder = Folder::new("llama");
    let opened = open_sharded(&folder, |mut index| {
        index["weight_map"]["lm_head.weight"] = shard.into();
        index
    });
    opened.err().unwrap()
}

#[test]
fn a_shard_outside_the_folder() {
    for shard in [
        "../a.safetensors",
        "/tmp/a.safetensors",
        "sub/a.safetensors",
        "..",
        "",
        "./a.safetensors",
        "a.safetensors/",
    ] {
        assert_refused!(head_in(shard), ShardOutside, "index.json", shard);
    }
}

#[test]
fn a_shard_that_is_missing() {
    assert_refused!(
        head_in("c.safetensors"),
        MissingFile,
        "c.safetensors",
        "shards"
    );
}

#[test]
fn a_tensor_that_is_not_where_the_index_says() {
    assert_refused!(
        head_in("b.safetensors"),
        NotInShard,
        "b.safetensors",
        "lm_head.weight"
    );
}

#[test]
fn a_tensor_in_two_shards() {
    let folder = Folder::new("llama");
    open_sharded(&folder, |index| index).unwrap();
    folder.write_tensors("b.safetensors", |name| {
        name.contains("layers.1.") || name == "lm_head.weight"
    });
    assert_refused!(
        crate::open(folder.path()).err().unwrap(),
        Duplicate,
        "b.safetensors",
        "lm_head.weight"
    );
}

#[test]
fn more_shards_than_may_be_open() {
    let folder = Folder::new("llama");
    let error = open_sharded(&folder, |_| {
        let map: serde_json::Map<_, _> = (0..1000)
            .map(|i| (format!("t{i}"), format!("s{i}").into()))
            .collect();
        json!({"weight_map": map})
    });
    assert_refused!(error.err().unwrap(), TooLarge, "index.json", "shards");
}

/// Regression: it was silently dropped, and `verify --source` found the container equal.
#[test]
fn a_head_that_is_tied_and_differs() {
    let mut folder = Folder::new("llama");
    folder.config["tie_word_embeddings"] = true.into();
    let other = folder.refused();
    assert_refused!(other, Unsupported, "tie_word_embeddings", "lm_head.weight");
    let mut copy = folder.tensors["model.embed_tokens.weight"].clone();
    *copy.bytes.last_mut().unwrap() ^= 1;
    folder.tensors.insert("lm_head.weight".into(), copy);
    let last = format!("row {}", VOCAB - 1);
    assert_refused!(folder.refused(), Unsupported, "lm_head.weight", &last);
    folder.add("lm_head.weight", &[VOCAB - 1, D]);
    assert_refused!(folder.refused(), WrongShape, "model.safetensors", "lm_head");
}

#[test]
fn weights_that_are_not_finite() {
    let mut folder = Folder::new("llama");
    let norm = folder.tensors.get_mut("model.norm.weight").unwrap();
    norm.bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    let checkpoint = folder.open().unwrap();
    let mut out = [0.0; D];
    let error = checkpoint
        .read_rows(TensorId::global(Role::FinalNorm), 0, 1, &mut out)
        .unwrap_err();
    assert_refused!(error, NotFinite, "model.safetensors", "column 2");
}

#[test]
fn requests_that_do_not_fit_the_tensor() {
    let folder = Folder::new("llama");
    let checkpoint = folder.open().unwrap();
    let id = TensorId::layer(Role::Gate, 1);
    let read = |id, first, count, len| {
        checkpoint
            .read_rows(id, first, count, &mut vec![0.0; len])
            .unwrap_err()
    };
    assert_refused!(read(id, FFN, 1, D), RowRange, "gate", "row 40");
    assert_refused!(read(id, usize::MAX, 2, 2 * D), RowRange, "gate", "rows");
    assert_refused!(read(id, 0, 2, D), RowRange, "gate", "24 numbers");
    assert_refused!(
        read(TensorId::layer(Role::Gate, 2), 0, 1, D),
        NoSuchTensor,
        "layers.2.ffn.0.gate",
        "no tensor"
    );
}

#[test]
fn a_file_that_shrinks_after_it_was_opened() {
    let folder = Folder::new("llama");
    let checkpoint = folder.open().unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(folder.file("model.safetensors"))
        .unwrap();
    file.set_len(4000).unwrap();
    let error = checkpoint.tensors().iter().find_map(|info| {
        checkpoint
            .read_rows(info.id, 0, info.rows, &mut vec![0.0; info.rows * info.cols])
            .err()
    });
    assert_refused!(error.unwrap(), Truncated, "model.safetensors", "4000");
}
