//! Tests of the GGUF reader on valid files. Invalid ones are in `refused`.

mod keys;
mod refused;
mod split;
mod text;
mod write;

use emberflow_kernels::Block;
use std::path::PathBuf;

use super::*;
use crate::checkpoint::TensorInfo;
use crate::config::{Activation, RopeScaling};
use crate::dtype::DType;
use crate::families;
use crate::metadata::Value;
use crate::testing::*;

/// The committed reference files.
fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

#[test]
fn every_tensor_of_every_architecture_reads_as_presented() {
    for arch in ["llama", "qwen2", "qwen3", "bamboo"] {
        let file = Gguf::new(arch);
        let checkpoint = file.open().unwrap();
        assert_eq!(checkpoint.tensors().len(), file.tensors.len(), "{arch}");
        for info in checkpoint.tensors() {
            let rows = read_all(checkpoint.as_ref(), info.id);
            for (index, value) in rows.into_iter().enumerate() {
                assert_eq!(
                    value,
                    weight(&info.source_name, index),
                    "{arch} {} {index}",
                    info.source_name
                );
            }
        }
    }
}

#[test]
fn interleaved_biases_are_put_in_order() {
    let mut file = Gguf::new("llama");
    for layer in 0..LAYERS {
        file.add(
            &format!("blk.{layer}.attn_q.bias"),
            &[HEADS * HEAD_DIM],
            Order::Interleaved,
        );
        file.add(
            &format!("blk.{layer}.attn_k.bias"),
            &[KV_HEADS * HEAD_DIM],
            Order::Interleaved,
        );
        file.add(
            &format!("blk.{layer}.attn_v.bias"),
            &[KV_HEADS * HEAD_DIM],
            Order::AsIs,
        );
    }
    let checkpoint = file.open().unwrap();
    assert!(checkpoint.config().qkv_bias && !checkpoint.config().o_bias);
    for role in [Role::QBias, Role::KBias, Role::VBias] {
        let info = checkpoint
            .tensors()
            .iter()
            .find(|info| info.id == TensorId::layer(role, 1))
            .unwrap();
        let values = read_all(checkpoint.as_ref(), info.id);
        assert!(
            values
                .iter()
                .enumerate()
                .all(|(i, &v)| v == weight(&info.source_name, i)),
            "{role:?}"
        );
    }
}

/// Files of ChatGLM's first releases have Q, K and V in one tensor; the first half of each head is rotated.
#[test]
fn fused_projections_are_put_in_order() {
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let mut file = Gguf::new("chatglm");
    file.set("chatglm.rope.dimension_count", Kv::U32(HEAD_DIM as u32 / 2));
    let single = ["attn_q.", "attn_k.", "attn_v.", "ffn_gate.", "ffn_up."];
    file.tensors
        .retain(|tensor| !single.iter().any(|name| tensor.name.contains(name)));
    for layer in 0..LAYERS {
        let mut add = |name: &str, shape: &[usize]| {
            file.add(&format!("blk.{layer}.{name}"), shape, Order::AsIs);
        };
        add("attn_qkv.weight", &[q + 2 * kv, D]);
        add("attn_qkv.bias", &[q + 2 * kv]);
        add("ffn_up.weight", &[2 * FFN, D]);
    }
    let checkpoint = file.open().unwrap();
    assert_eq!(checkpoint.config().rope.dims as usize, HEAD_DIM / 2);
    assert!(checkpoint.config().qkv_bias);
    // pairs (0, 1) and (2, 3) of 8
    let order = [0, 2, 1, 3, 4, 5, 6, 7];
    let stored = |row: usize| row - row % HEAD_DIM + order[row % HEAD_DIM];
    for (role, first, rows, rotated) in [
        (Role::Q, 0, q, true),
        (Role::K, q, kv, true),
        (Role::V, q + kv, kv, false),
        (Role::QBias, 0, q, true),
        (Role::KBias, q, kv, true),
        (Role::VBias, q + kv, kv, false),
    ] {
        let values = read_all(checkpoint.as_ref(), TensorId::layer(role, 1));
        let (name, cols) = match role.is_vector() {
            true => ("blk.1.attn_qkv.bias", 1),
            false => ("blk.1.attn_qkv.weight", D),
        };
        assert_eq!(values.len(), rows * cols, "{role:?}");
        for (index, value) in values.into_iter().enumerate() {
            let row = index / cols;
            let row = first + if rotated { stored(row) } else { row };
            assert_eq!(
                value,
                weight(name, row * cols + index % cols),
                "{role:?} {index}"
            );
        }
    }
}

#[test]
fn fields_follow_the_metadata() {
    let config = Gguf::new("llama").open().unwrap().config().clone();
    assert_eq!(
        (config.d_model, config.ffn, config.layers),
        (D as u32, FFN as u32, LAYERS as u32)
    );
    assert_eq!(
        (config.heads, config.kv_heads, config.head_dim, config.vocab),
        (4, 2, 8, 11)
    );
    assert_eq!(
        (config.rms_eps, config.rope.theta, config.max_context),
        (1e-5, 1000.0, 64)
    );
    assert_eq!(
        (config.bos, config.add_bos, config.eos),
        (Some(1), true, vec![2])
    );
    assert_eq!(
        (config.family.as_str(), config.name.as_str()),
        ("llama", "tiny")
    );
    assert_eq!(
        config.ffn_kind,
        crate::config::FfnKind {
            activation: Activation::Silu,
            relu_on_up: false,
            ungated: false,
        }
    );
    assert!(!config.tied_head && !config.qkv_bias && !config.qk_norm);
}

#[test]
fn powerinfer_files_are_relu_models_with_predictors() {
    let mut file = Gguf::new("bamboo");
    file.set("powerinfer.sparse_threshold", Kv::F32(0.25));
    let checkpoint = file.open().unwrap();
    let config = checkpoint.config();
    assert_eq!(
        (config.ffn_kind.activation, config.ffn_kind.relu_on_up),
        (Activation::Relu, true)
    );
    assert_eq!(config.predictor_threshold, Some(0.25));
    let rank = |layer| {
        checkpoint
            .tensors()
            .iter()
            .find(|i| i.id == TensorId::layer(Role::PredictorFc1, layer))
            .unwrap()
            .rows
    };
    assert_eq!((rank(0), rank(1)), (4, 5));

    let mut llama = Gguf::new("llama");
    llama.magic = *b"PWRI";
    let config = llama.open().unwrap().config().clone();
    assert_eq!(config.predictor_threshold, Some(0.0));
    let kind = config.ffn_kind;
    assert_eq!(
        (kind.activation, kind.relu_on_up),
        (Activation::Relu, false)
    );
}

#[test]
fn an_absent_head_is_tied_and_optional_keys_have_defaults() {
    let mut file = Gguf::new("llama");
    file.tensors.retain(|tensor| tensor.name != "output.weight");
    for key in [
        "rope.freq_base",
        "attention.key_length",
        "attention.value_length",
    ] {
        file.unset(&format!("llama.{key}"));
    }
    // Without a key length, a head is d_model / heads, which differs here.
    let error = file.refused();
    assert!(matches!(error, Error::WrongShape { tensor, .. } if tensor == "blk.0.attn_q.weight"));
    file.set("llama.attention.key_length", Kv::U32(HEAD_DIM as u32));
    let config = file.open().unwrap().config().clone();
    assert!(config.tied_head);
    assert_eq!(config.rope.theta, 10_000.0);
}

#[test]
fn numbers_may_be_stored_in_other_widths_or_once_per_layer() {
    let mut file = Gguf::new("llama");
    file.set("llama.block_count", Kv::U64(LAYERS as u64));
    file.set("llama.context_length", Kv::I32(64));
    file.set(
        "llama.attention.head_count_kv",
        Kv::List(0, vec![Kv::U8(KV_HEADS as u8); LAYERS]),
    );
    file.set(
        "general.nested",
        Kv::List(
            9,
            vec![Kv::List(4, vec![Kv::U32(1)]), Kv::List(4, Vec::new())],
        ),
    );
    assert_eq!(file.open().unwrap().config().kv_heads, KV_HEADS as u32);
}

#[test]
fn version_two_and_other_alignments_read_the_same() {
    let mut file = Gguf::new("llama");
    file.version = 2;
    file.alignment = 64;
    file.set("general.alignment", Kv::U32(64));
    let checkpoint = file.open().unwrap();
    let head = read_all(checkpoint.as_ref(), TensorId::global(Role::Head));
    assert_weights("output.weight", &head);
}

#[test]
fn rotary_scaling_comes_from_keys_or_divisors() {
    let scaling = |file: &Gguf| file.open().unwrap().config().rope.scaling.clone();
    let mut linear = Gguf::new("llama");
    linear.set("llama.rope.scaling.type", text("linear"));
    linear.set("llama.rope.scaling.factor", Kv::F32(4.0));
    assert_eq!(scaling(&linear), RopeScaling::Linear { factor: 4.0 });
    linear.set("llama.rope.scaling.type", text("none"));
    assert_eq!(scaling(&linear), RopeScaling::None);

    // theta 1000, 8 dims: wavelengths 6.3, 35.3, 198.7, 1117.3.
    let mut divisors = Gguf::new("llama");
    let original = 128.0f64;
    let values: Vec<f32> = (0..4)
        .map(|i| {
            let wavelength = std::f64::consts::TAU * 1000f64.powf(f64::from(i) / 4.0);
            if wavelength < original / 4.0 {
                1.0
            } else if wavelength > original {
                8.0
            } else {
                let smooth = (original / wavelength - 1.0) / 3.0;
                (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32
            }
        })
        .collect();
    assert!(
        values[1] > 1.0 && values[1] < 8.0,
        "the middle band is used"
    );
    divisors.add("rope_freqs.weight", &[4], Order::AsIs);
    divisors.tensor("rope_freqs.weight").bytes =
        values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 128,
    };
    assert_eq!(scaling(&divisors), expected);
    divisors.tensor("rope_freqs.weight").bytes =
        [1f32; 4].iter().flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(scaling(&divisors), RopeScaling::None);
}

#[test]
fn published_llama3_divisors_give_the_published_scaling() {
    // Llama 3.1 (head 128, factor 8), 3.2 (head 64, factor 32), 4 (one limit), theta 500000.
    for (dims, factor, high) in [(128u32, 8.0f32, 4.0), (64, 32.0, 4.0), (128, 16.0, 1.0)] {
        let divisors: Vec<f32> = (0..dims / 2)
            .map(|i| {
                let wavelength =
                    std::f32::consts::TAU * 500_000f32.powf(2.0 * i as f32 / dims as f32);
                let smooth = match high {
                    1.0 => f32::from(u8::from(wavelength < 8192.0)),
                    _ => ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0),
                };
                1.0 / ((1.0 - smooth) / factor + smooth)
            })
            .collect();
        let found = rope::llama3_from_factors(500_000.0, dims, &divisors);
        let expected = RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: high,
            original_context: 8192,
        };
        assert_eq!(found, Some(expected));
    }
}

#[test]
fn block_formats_decode_like_the_reference() {
    for dtype in Block::ALL.map(DType::Block) {
        let read = |ending| {
            std::fs::read(
                fixtures()
                    .join("quants")
                    .join(format!("{}.{ending}", dtype.name())),
            )
            .unwrap()
        };
        let (packed, expected) = (read("bin"), read("f32"));
        let expected: Vec<f32> = expected
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        let mut decoded = vec![f32::NAN; expected.len()];
        assert_eq!(
            dtype.row_bytes(decoded.len()),
            Some(packed.len()),
            "{}",
            dtype.name()
        );
        dtype.decode(&packed, &mut decoded);
        for (index, (found, expected)) in decoded.iter().zip(&expected).enumerate() {
            let error = (found - expected).abs();
            assert!(
                error <= 1e-6 * expected.abs().max(1.0),
                "{} {index}: {found} {expected}",
                dtype.name()
            );
        }
    }
}

#[test]
fn reference_models_agree_between_folder_and_gguf() {
    let mut compared = 0;
    for entry in std::fs::read_dir(fixtures().join("models")).unwrap() {
        let folder = entry.unwrap().path();
        let from_folder = crate::open(&folder).unwrap();
        let file = folder.join("model.gguf");
        if !file.exists() {
            continue;
        }
        compared += 1;
        let from_file = crate::open(&file).unwrap();
        let (left, right) = (from_folder.config(), from_file.config());
        // A file has divisors of frequencies; with few of them, several scalings have the same ones.
        let few = folder.ends_with("apertus");
        assert!(few || left.rope == right.rope, "{folder:?}");
        assert_eq!(
            (left.rope.theta, left.ffn_kind, &left.window),
            (right.rope.theta, right.ffn_kind, &right.window),
            "{folder:?}"
        );
        // A token that is never prepended may be missing in the file.
        let bos = |config: &ModelConfig| config.bos.filter(|_| config.add_bos);
        assert_eq!(
            (bos(left), left.tied_head),
            (bos(right), right.tied_head),
            "{folder:?}"
        );
        assert_eq!(
            (left.qkv_bias, left.o_bias, left.rms_eps),
            (right.qkv_bias, right.o_bias, right.rms_eps),
            "{folder:?}"
        );
        // The converter multiplies Falcon-H1's weights by its factors; goldens compare what comes out.
        if folder.ends_with("falcon_h1") {
            continue;
        }
        for info in from_folder.tensors() {
            let [folder_has, file_has] =
                [&from_folder, &from_file].map(|from| read_all(from.as_ref(), info.id));
            let pair = [folder_has, by_key_head(file_has, info, right)];
            if info.id.role.is_rate() {
                // exp differs between two libraries
                let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * a.abs();
                assert!(
                    pair[0].iter().zip(&pair[1]).all(near),
                    "{folder:?} {}",
                    info.id
                );
                continue;
            }
            assert!(pair[0] == pair[1], "{folder:?} {}", info.id);
        }
    }
    assert!(compared >= 8, "{compared}");
}

/// The values of a tensor with those of each key head consecutive, where the file interleaves them.
fn by_key_head(values: Vec<f32>, info: &TensorInfo, config: &ModelConfig) -> Vec<f32> {
    let Some(net) = config.form.delta_net.as_ref().map(|nets| nets.shape) else {
        return values;
    };
    let (dim, both) = (net.value_dim as usize, 2 * net.keys());
    // before the value heads, of each, and how often they come
    let (before, of_head, times) = match info.id.role {
        Role::DeltaIn | Role::DeltaConv => (both * info.cols, dim * info.cols, 1),
        Role::DeltaGate => (0, dim * info.cols, 1),
        Role::DeltaBeta | Role::DeltaDecay => (0, info.cols, 1),
        Role::DeltaStep | Role::DeltaRate => (0, 1, 1),
        Role::DeltaOut => (0, dim, info.rows),
        _ => return values,
    };
    let heads: Vec<u32> = (0..net.key_heads)
        .flat_map(|key| (0..net.value_heads).filter(move |&head| net.key_head(head) == key))
        .collect();
    let mut ordered = Vec::with_capacity(values.len());
    for part in values.chunks(values.len() / times) {
        ordered.extend(&part[..before]);
        for &head in &heads {
            ordered.extend(&part[before + head as usize * of_head..][..of_head]);
        }
    }
    ordered
}

/// Vectors may have outer dimensions of 1, and keys and tensors of images and sounds change nothing
/// for text.
#[test]
fn what_means_nothing_for_text_is_accepted() {
    let mut file = Gguf::new("qwen3");
    let plain = file.open().unwrap().config().clone();
    file.tensor("blk.1.attn_norm.weight").dims.push(1);
    file.set("qwen3.vision.block_count", Kv::U32(27));
    file.set("qwen3.vision.image_size", Kv::U32(896));
    file.set("qwen3.mm.tokens_per_image", Kv::U32(256));
    file.set("qwen3.audio.embedding_length", Kv::U32(4));
    for name in ["v.blk.0.attn_q.weight", "mm.0.weight", "a.conv1d.1.weight"] {
        file.add(name, &[D, D], Order::AsIs);
    }
    let checkpoint = file.open().unwrap();
    assert_eq!(*checkpoint.config(), plain);
    let id = TensorId::layer(Role::AttnNorm, 1);
    let expected: Vec<f32> = (0..D)
        .map(|i| weight("blk.1.attn_norm.weight", i))
        .collect();
    assert_eq!(read_all(checkpoint.as_ref(), id), expected);
    let mut other = Gguf::new("qwen3");
    other.set("qwen3.visionary", Kv::U32(1));
    assert!(matches!(other.refused(), Error::Unsupported { .. }));
}

/// llama.cpp's converter writes the gate of Qwen2-MoE's shared expert as a matrix of one row
/// (`ffn_gate_inp_shexp.weight`, `[n, 1]` in the file's order, by `convert_hf_to_gguf.py` of October 2026);
/// earlier ones wrote a vector.
#[test]
fn the_gate_of_a_shared_expert_is_a_vector_or_a_matrix_of_one_row() {
    let path = fixtures().join("models/qwen2_moe/model.gguf");
    let expected = crate::open(&path).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let header = header::read(&DataFile::open(&path).unwrap()).unwrap();
    let place = |bytes: &[u8], name: &str| {
        let quoted = [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
        let at = bytes.windows(quoted.len()).position(|part| part == quoted);
        at.unwrap() + quoted.len()
    };
    // entries end with the last one: its dimensions, type and offset
    let end = header
        .tensors
        .iter()
        .map(|raw| place(&bytes, &raw.name) + 4 + 8 * raw.shape.len() + 12);
    let end = end.max().unwrap();
    let data = bytes.split_off(header.tensors[0].offset as usize);
    bytes.truncate(end);
    for layer in 0..expected.config().layers {
        let at = place(&bytes, &format!("blk.{layer}.ffn_gate_inp_shexp.weight"));
        assert_eq!(bytes[at..][..4], 2u32.to_le_bytes());
        bytes[at] = 1;
        bytes.splice(at + 12..at + 20, []);
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(data);
    let dir = tempfile::TempDir::new().unwrap();
    let copy = dir.path().join("model.gguf");
    std::fs::write(&copy, bytes).unwrap();
    let found = crate::open(&copy).unwrap();
    for info in expected.tensors() {
        let [a, b] = [&found, &expected].map(|from| read_all(from.as_ref(), info.id));
        assert_eq!(a, b, "{}", info.id);
    }
}

/// llama.cpp's converter writes the cap of Gemma 3n's logits (`Gemma3Model.set_gguf_parameters` in
/// `conversion/gemma.py`), and llama.cpp reads that of Gemma 3, 0 for none (`gemma3.cpp`).
#[test]
fn caps_of_logits_are_read() {
    let cap = |arch: &str, cap: Option<f64>| {
        let mut metadata = Metadata::new(Path::new("m.gguf"));
        let mut set = |key: &str, value| metadata.insert(format!("{arch}.{key}"), value).unwrap();
        for key in [streams::STREAMS, streams::PER_LAYER, streams::SHARED_KV] {
            set(key, Value::Uint(1));
        }
        set(streams::ACTIVE, Value::Uint(0));
        set(streams::TOP, Value::List(vec![Value::Float(0.0); 2]));
        if let Some(cap) = cap {
            set("final_logit_softcapping", Value::Float(cap));
        }
        let (family, arch) = families::find_arch(arch).unwrap();
        let keys = arch.keys(&metadata);
        let form = form::form(keys, family, arch, &Facts::default(), sizes_of(8, 2), true);
        form.unwrap().logit_cap
    };
    for (arch, without) in [
        ("gemma2", Some(30.0)),
        ("gemma3", None),
        ("gemma3n", Some(30.0)),
    ] {
        assert_eq!(cap(arch, None), without, "{arch}");
        assert_eq!(cap(arch, Some(0.0)), without, "{arch}");
        assert_eq!(cap(arch, Some(20.0)), Some(20.0), "{arch}");
    }
}

#[test]
fn smallthinker_comes_with_down_either_way() {
    let path = fixtures().join("models/smallthinker/model.gguf");
    let dir = tempfile::TempDir::new().unwrap();
    let copy = dir.path().join("model.gguf");
    let expected = crate::open(&path).unwrap();
    let config = expected.config();
    assert_eq!(config.form.nope_layers, [0, 4]);
    assert_eq!(config.window, [0, 7, 7, 7, 0]);
    let (d, ffn) = (config.d_model as usize, config.ffn as usize);
    // the same bytes as other matrices: only what they say of themselves changes
    let mut bytes = std::fs::read(&path).unwrap();
    let name = b"blk.2.ffn_down_exps.weight";
    let at = bytes.windows(name.len()).position(|part| part == name);
    let dims = at.unwrap() + name.len() + 4;
    bytes[dims..][..8].copy_from_slice(&(d as u64).to_le_bytes());
    bytes[dims + 8..][..8].copy_from_slice(&(ffn as u64).to_le_bytes());
    std::fs::write(&copy, bytes).unwrap();
    let found = crate::open(&copy).unwrap();
    for layer in [1, 2] {
        let id = TensorId::layer(Role::Down, layer);
        let [mut rows, columns] = [&found, &expected].map(|c| read_all(c.as_ref(), id));
        if layer == 2 {
            // [ffn × d] of the file's bytes, which the other reads as [d × ffn]
            let stored = rows.clone();
            for (i, value) in rows.iter_mut().enumerate() {
                *value = stored[i % d * ffn + i / d];
            }
        }
        assert_eq!(rows, columns, "{layer}");
    }
}
