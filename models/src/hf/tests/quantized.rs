//! Folders in quantized formats: numbers equal those that the formats' own libraries decode, and what does not fit is
//! refused by name. `fixtures/golden/quantized.py` says whose code wrote and decoded each of the cases.

use std::collections::BTreeMap;

use ::safetensors::{Dtype, SafeTensors};

use super::*;

const CASES: [&str; 12] = [
    "awq",
    "compressed_fp8_blocks",
    "compressed_int4",
    "compressed_int8",
    "compressed_mixed",
    "compressed_mxfp4",
    "compressed_nvfp4",
    "gptq",
    "gptq8",
    "gptq_order",
    "mlx",
    "modelopt",
];

fn fixture(case: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/quantized");
    fixtures.join(case)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A copy of a case, to be changed.
fn copy(case: &str) -> Folder {
    let path = fixture(case);
    let bytes = std::fs::read(path.join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let mut folder = Folder::new("llama");
    folder.config = json_of(&path.join("config.json"));
    folder.tensors = (stored.iter())
        .map(|(name, view)| {
            let tensor = Tensor {
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: view.data().to_vec(),
            };
            (name.to_owned(), tensor)
        })
        .collect();
    let tokenizer = std::fs::read_to_string(path.join("tokenizer.json")).unwrap();
    folder.texts.insert("tokenizer.json", tokenizer);
    folder
}

/// All numbers of each tensor, as a folder of plain numbers stores them.
fn decoded(checkpoint: &dyn Checkpoint) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    for info in checkpoint.tensors() {
        let values = read_all(checkpoint, info.id);
        let stored = match info.id.role {
            Role::Down => (0..info.cols)
                .flat_map(|col| (0..info.rows).map(move |row| row * info.cols + col))
                .map(|at| values[at])
                .collect(),
            _ => values,
        };
        all.insert(info.source_name.clone(), stored);
    }
    all
}

/// FNV-1a of numbers in their bytes.
fn hash(values: &[f32]) -> String {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.fold(0xcbf2_9ce4_8422_2325, step))
}

#[test]
fn every_matrix_decodes_as_its_formats_library_decodes_it() {
    for case in CASES {
        let expected = json_of(&fixture(case).join("decoded.json"));
        let expected = expected.as_object().unwrap();
        let checkpoint = crate::open(&fixture(case)).unwrap();
        let found = decoded(checkpoint.as_ref());
        assert_eq!(found.len(), expected.len(), "{case}");
        for (name, of) in expected {
            let values = &found[name];
            let first = of["first"].as_array().unwrap().iter();
            let first: Vec<f32> = first.map(|value| value.as_f64().unwrap() as f32).collect();
            assert_eq!(values[..4], first, "{case} {name}");
            assert_eq!(json!(hash(values)), of["hash"], "{case} {name}");
        }
    }
}

#[test]
fn rows_of_packed_matrices_are_read_in_any_order_and_number() {
    for case in CASES {
        let checkpoint = crate::open(&fixture(case)).unwrap();
        for info in checkpoint.tensors() {
            let all = read_all(checkpoint.as_ref(), info.id);
            for first in [info.rows - 1, info.rows / 3, 0] {
                for count in [1, (info.rows - first) / 2] {
                    let mut out = vec![0.0; count * info.cols];
                    (checkpoint.read_rows(info.id, first, count, &mut out)).unwrap();
                    let name = &info.source_name;
                    assert_eq!(out, all[first * info.cols..][..out.len()], "{case} {name}");
                }
            }
        }
    }
}

/// Types by which `pack` decides, and bytes in the files.
#[test]
fn types_and_bytes_are_those_of_the_files() {
    let of = |case: &str, part: &str| {
        let checkpoint = crate::open(&fixture(case)).unwrap();
        let mut tensors = checkpoint.tensors().iter();
        let info = tensors
            .find(|info| info.source_name.contains(part))
            .unwrap();
        (info.source_dtype.clone(), info.source_bytes)
    };
    let affine = |bits: u32| format!("AFFINE{bits}");
    // 64 × 64 codes of 4 bits, a scale of 16 bits for each 32, a shape of two I64
    let int4 = 2048 + 64 * 2 * 2 + 16;
    assert_eq!(of("compressed_int4", "q_proj"), ("INT4".into(), int4));
    assert_eq!(of("compressed_mixed", "q_proj").0, affine(4));
    assert_eq!(of("compressed_mixed", "k_proj").0, affine(8));
    assert_eq!(of("compressed_mixed", "up_proj").0, "F8_E4M3");
    assert_eq!(of("compressed_int8", "up_proj").0, affine(8));
    assert_eq!(of("compressed_nvfp4", "up_proj").0, "NVFP4");
    assert_eq!(of("compressed_mxfp4", "up_proj").0, "MXFP4");
    assert_eq!(of("mlx", "q_proj"), (affine(4), 2048 + 64 * 2 * 2));
    assert_eq!(of("mlx", "k_proj").0, affine(2));
    assert_eq!(of("mlx", "embed").0, affine(6));
    assert_eq!(of("gptq", "q_proj").0, affine(4));
    assert_eq!(of("gptq8", "q_proj").0, affine(8));
    assert_eq!(of("awq", "q_proj").0, affine(4));
}

/// Phi-3 stores Q, K and V, and Gate and Up, as one matrix.
#[test]
fn parts_of_a_packed_matrix_are_its_rows() {
    for (case, ends, across) in [
        ("gptq", &["qweight", "qzeros", "scales"][..], true),
        ("compressed_int4", &["weight_packed", "weight_scale"], false),
    ] {
        let separate = decoded(crate::open(&fixture(case)).unwrap().as_ref());
        let mut folder = copy(case);
        folder.config["model_type"] = "phi3".into();
        folder.config["pad_token_id"] = 0.into();
        for (whole, names) in [
            ("self_attn.qkv_proj", &["q", "k", "v"][..]),
            ("mlp.gate_up_proj", &["gate", "up"]),
        ] {
            let block = whole.split_once('.').unwrap().0;
            let part = |name: &&str| format!("model.layers.0.{block}.{name}_proj");
            for end in ends {
                let parts: Vec<Tensor> = (names.iter().map(part))
                    .map(|name| folder.tensors.remove(&format!("{name}.{end}")).unwrap())
                    .collect();
                let rows = parts[0].shape[0];
                let row = |tensor: &Tensor, row: usize| {
                    let bytes = tensor.bytes.len() / tensor.shape[0];
                    tensor.bytes[row * bytes..][..bytes].to_vec()
                };
                let bytes = match across {
                    true => (0..rows)
                        .flat_map(|at| parts.iter().flat_map(move |part| row(part, at)))
                        .collect(),
                    false => parts.iter().flat_map(|part| part.bytes.clone()).collect(),
                };
                let sum = |dim: usize| parts.iter().map(|part| part.shape[dim]).sum();
                let shape = match across {
                    true => vec![rows, sum(1)],
                    false => vec![sum(0), parts[0].shape[1]],
                };
                let dtype = parts[0].dtype;
                let joined = Tensor {
                    dtype,
                    shape,
                    bytes,
                };
                folder
                    .tensors
                    .insert(format!("model.layers.0.{whole}.{end}"), joined);
            }
            for name in names.iter().map(part) {
                folder.tensors.retain(|other, _| !other.starts_with(&name));
            }
        }
        let checkpoint = folder.open().unwrap();
        let of = |role| read_all(checkpoint.as_ref(), TensorId::layer(role, 0));
        for (role, name) in [
            (Role::Q, "self_attn.q_proj"),
            (Role::K, "self_attn.k_proj"),
            (Role::V, "self_attn.v_proj"),
            (Role::Gate, "mlp.gate_proj"),
            (Role::Up, "mlp.up_proj"),
        ] {
            let name = format!("model.layers.0.{name}.weight");
            assert_eq!(of(role), separate[&name], "{case} {name}");
        }
    }
}

/// MLX stores the matrices of all experts as one, under a name of its own.
#[test]
fn experts_of_mlx_are_matrices_of_their_own() {
    let mut folder = Folder::new("mixtral");
    folder.config["quantization"] = json!({"group_size": 8, "bits": 4});
    for layer in 0..LAYERS {
        for (name, old, [rows, cols]) in [
            ("gate_proj", "w1", [FFN, D]),
            ("up_proj", "w3", [FFN, D]),
            ("down_proj", "w2", [D, FFN]),
        ] {
            let block = format!("model.layers.{layer}.block_sparse_moe");
            for expert in 0..EXPERTS {
                let name = format!("{block}.experts.{expert}.{old}.weight");
                folder.tensors.remove(&name).unwrap();
            }
            let name = format!("{block}.switch_mlp.{name}");
            let count = EXPERTS * rows * cols / 2;
            let codes = Tensor {
                dtype: Dtype::U32,
                shape: vec![EXPERTS, rows, cols / 8],
                bytes: (0..count).map(|n| (n * 37 % 251) as u8).collect(),
            };
            folder.tensors.insert(format!("{name}.weight"), codes);
            folder.add(&format!("{name}.scales"), &[EXPERTS, rows, cols / 8]);
            folder.add(&format!("{name}.biases"), &[EXPERTS, rows, cols / 8]);
        }
    }
    let checkpoint = folder.open().unwrap();
    let id = TensorId {
        role: Role::Up,
        layer: 1,
        expert: 1,
    };
    let found = read_all(checkpoint.as_ref(), id);
    for (at, value) in found.into_iter().enumerate() {
        let at = FFN * D + at;
        let byte = (at / 2 * 37 % 251) as u8;
        let code = f32::from(if at.is_multiple_of(2) {
            byte & 15
        } else {
            byte >> 4
        });
        let name = "model.layers.1.block_sparse_moe.switch_mlp.up_proj";
        let of = |end: &str| weight(&format!("{name}.{end}"), at / 8);
        assert_eq!(value, code * of("scales") + of("biases"), "{at}");
    }
}

/// The error from a case whose configuration `change` changed.
fn refused_config(case: &str, change: impl FnOnce(&mut Value)) -> Error {
    let mut folder = copy(case);
    change(&mut folder.config);
    folder.refused()
}

#[test]
fn other_variants_of_the_formats_are_refused_by_name() {
    for (case, key, value) in [
        ("gptq", "bits", json!(5)),
        ("gptq", "bits", json!(3)),
        ("gptq", "checkpoint_format", json!("marlin")),
        ("gptq", "is_marlin_format", json!(true)),
        ("gptq", "pack_dtype", json!("int16")),
        ("awq", "bits", json!(8)),
        ("awq", "version", json!("gemv")),
        ("awq", "zero_point", json!(false)),
        ("compressed_int4", "format", json!("marlin-24")),
        (
            "compressed_int4",
            "transform_config",
            json!({"config_groups": {"R3": {}}}),
        ),
        (
            "compressed_int4",
            "sparsity_config",
            json!({"format": "sparse-24-bitmask"}),
        ),
        ("modelopt", "quant_algo", json!("W4A8_AWQ")),
        ("modelopt", "quant_algo", Value::Null),
    ] {
        let error = refused_config(case, |c| c["quantization_config"][key] = value.clone());
        assert_refused!(
            error,
            Unsupported,
            "config.json",
            &format!("quantization_config.{key}")
        );
    }
    for (key, value) in [
        ("num_bits", json!(5)),
        ("type", json!("complex")),
        ("strategy", json!("attn_head")),
    ] {
        let error = refused_config("compressed_int4", |c| {
            c["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value.clone();
        });
        assert_refused!(error, Unsupported, "config.json", key);
    }
    for (key, value) in [("bits", json!(7)), ("mode", json!("mxfp4"))] {
        for inner in [false, true] {
            let error = refused_config("mlx", |c| match inner {
                true => c["quantization"]["lm_head"][key] = value.clone(),
                false => c["quantization"][key] = value.clone(),
            });
            assert_refused!(error, Unsupported, "config.json", key);
        }
    }
    for (case, key) in [("gptq", "group_size"), ("awq", "group_size")] {
        for size in [json!(0), json!(-2), json!(1.5)] {
            let error = refused_config(case, |c| c["quantization_config"][key] = size);
            assert_refused!(error, BadKey, "config.json", key);
        }
        let error = refused_config(case, |c| c["quantization_config"][key] = Value::Null);
        assert_refused!(error, MissingKey, "config.json", key);
    }
    let error = refused_config("mlx", |c| c["quantization"]["group_size"] = 0.into());
    assert_refused!(error, BadKey, "config.json", "quantization.group_size");
    let error = refused_config("compressed_int4", |c| {
        remove(&mut c["quantization_config"], "config_groups")
    });
    assert_refused!(error, MissingKey, "config.json", "config_groups");
    let error = refused_config("gptq", |c| {
        c["quantization_config"]["quant_method"] = "quip".into()
    });
    assert_refused!(
        error,
        Unsupported,
        "config.json",
        "compressed-tensors, gptq, awq"
    );
}

/// Groups and bits that the tensors do not have.
#[test]
fn other_groups_and_bits_than_the_tensors_are_refused_by_the_tensor() {
    let name = "self_attn.q_proj";
    for (case, key, value) in [
        ("gptq", "bits", json!(8)),
        ("gptq", "bits", json!(2)),
        ("gptq", "group_size", json!(48)),
        ("gptq", "group_size", json!(-1)),
        ("awq", "group_size", json!(128)),
    ] {
        let error = refused_config(case, |c| c["quantization_config"][key] = value.clone());
        let message = error.to_string();
        assert!(
            message.contains("model.layers.0."),
            "{case} {key} {value}: {message}"
        );
    }
    for (key, value) in [
        ("bits", json!(3)),
        ("group_size", json!(32)),
        ("group_size", json!(48)),
    ] {
        let error = refused_config("mlx", |c| c["quantization"][key] = value);
        assert_refused!(error, WrongShape, "model.safetensors", name);
    }
    for (key, value) in [("num_bits", 8), ("group_size", 64), ("group_size", 5)] {
        let error = refused_config("compressed_int4", |c| {
            c["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value.into();
        });
        assert_refused!(error, WrongShape, "model.safetensors", "weight_packed");
    }
}

/// Every tensor of a matrix is removed, cut, and given another shape and another type in turn. What is opened all the
/// same is read, or refused when it is read.
#[test]
fn damaged_parts_are_refused_by_name() {
    for case in CASES {
        let whole = copy(case);
        let names = whole.tensors.keys().filter(|name| name.contains("q_proj"));
        for name in names {
            let damages: [fn(&mut Tensor); 6] = [
                |tensor| tensor.shape.push(1),
                |tensor| tensor.shape = vec![tensor.shape.iter().product()],
                |tensor| {
                    let rows = tensor.shape.first().copied().unwrap_or(1);
                    tensor.bytes.truncate(tensor.bytes.len() / rows);
                    tensor.shape = tensor.shape.iter().skip(1).copied().collect();
                },
                |tensor| {
                    (tensor.shape, tensor.bytes) = (vec![0; tensor.shape.len().max(1)], Vec::new());
                },
                |tensor| {
                    tensor.dtype = match tensor.dtype {
                        Dtype::I32 | Dtype::U32 => Dtype::F32,
                        Dtype::F32 => Dtype::I32,
                        Dtype::F16 | Dtype::BF16 => Dtype::I16,
                        Dtype::U8 => Dtype::I8,
                        Dtype::I64 => Dtype::F64,
                        _ => Dtype::BOOL,
                    };
                },
                |tensor| tensor.bytes.fill(0xff),
            ];
            let remove = |folder: &mut Folder| _ = folder.tensors.remove(name);
            let mut folders: Vec<Folder> = (damages.iter())
                .map(|damage| {
                    let mut folder = copy(case);
                    damage(folder.tensors.get_mut(name).unwrap());
                    folder
                })
                .collect();
            let mut removed = copy(case);
            remove(&mut removed);
            folders.push(removed);
            for (number, folder) in folders.iter().enumerate() {
                let message = match folder.open() {
                    Err(error) => error.to_string(),
                    Ok(checkpoint) => {
                        let optional = ["g_idx", "weight_shape", "scale", "biases"];
                        let harmless = optional.iter().any(|end| name.contains(end));
                        assert!(number == 5 || harmless, "{case} {name}: damage {number}");
                        for info in checkpoint.tensors() {
                            let mut out = vec![0.0; info.rows * info.cols];
                            let read = checkpoint.read_rows(info.id, 0, info.rows, &mut out);
                            if let Err(error) = read {
                                assert!(error.to_string().contains("q_proj"), "{error}");
                            }
                        }
                        continue;
                    }
                };
                assert!(
                    message.contains("q_proj"),
                    "{case} {name} {number}: {message}"
                );
            }
        }
    }
}

#[test]
fn missing_parts_are_named() {
    for (case, end) in [
        ("awq", "qzeros"),
        ("awq", "scales"),
        ("gptq", "qzeros"),
        ("gptq", "scales"),
        ("mlx", "scales"),
        ("mlx", "biases"),
        ("compressed_int4", "weight_scale"),
        ("compressed_mixed", "weight_zero_point"),
        ("compressed_int8", "weight_scale"),
        ("compressed_fp8_blocks", "weight_scale"),
        ("compressed_nvfp4", "weight_scale"),
        ("compressed_mxfp4", "weight_scale"),
        ("modelopt", "weight_scale_2"),
    ] {
        let name = format!("model.layers.0.self_attn.q_proj.{end}");
        let mut folder = copy(case);
        folder.tensors.remove(&name).unwrap();
        let message = folder.refused().to_string();
        assert!(
            message.contains(&name[..name.len() - 1]),
            "{case}: {message}"
        );
        // and without their codes they belong to nothing
        let mut folder = copy(case);
        let codes = ["qweight", "weight_packed", "weight"].map(|of| name.replace(end, of));
        for name in codes {
            folder.tensors.remove(&name);
        }
        let error = folder.refused();
        assert!(
            matches!(error, Error::UnexpectedTensor { .. }),
            "{case}: {error}"
        );
    }
}

/// The group of a column that there is not is found when the matrix is read.
#[test]
fn groups_out_of_range_are_refused_by_the_matrix() {
    for group in [2i32, -1, i32::MAX] {
        let mut folder = copy("gptq_order");
        let name = "model.layers.0.self_attn.q_proj.g_idx";
        let list = &mut folder.tensors.get_mut(name).unwrap().bytes;
        list[..4].copy_from_slice(&group.to_le_bytes());
        let checkpoint = folder.open().unwrap();
        let mut row = vec![0.0; 64];
        let id = TensorId::layer(Role::Q, 0);
        let error = checkpoint.read_rows(id, 0, 1, &mut row).unwrap_err();
        assert_refused!(error, TensorRange, "model.safetensors", "self_attn.q_proj");
    }
}
