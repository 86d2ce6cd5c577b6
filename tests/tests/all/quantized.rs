//! Folders in quantized formats, run as they are and packed.

use std::path::Path;

use emberflow_engine::{Engine, Model};
use emberflow_kernels::{Cpu, DType, Row, quantize_row};
use emberflow_models::Checkpoint;
use emberflow_models::names::Role;
use emberflow_tests::{all_logits, bits, fixtures, roomy};
use serde_json::{Value, json};

/// Tokens of the tiny models' vocabulary.
const TOKENS: [u32; 9] = [1, 5, 9, 3, 17, 22, 4, 4, 11];

/// All numbers of a tensor.
fn numbers(source: &dyn Checkpoint, at: usize) -> Vec<f32> {
    let info = &source.tensors()[at];
    let mut values = vec![0.0; info.rows * info.cols];
    (source.read_rows(info.id, 0, info.rows, &mut values)).unwrap();
    values
}

/// Writes the model of a quantized folder in f32.
fn write_plain(from: &Path, to: &Path) {
    let source = emberflow_models::open(from).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
    for (at, info) in source.tensors().iter().enumerate() {
        let values = numbers(source.as_ref(), at);
        let (rows, cols) = (info.rows, info.cols);
        let begin = data.len();
        let shape = match info.id.role {
            Role::Down => {
                let places = (0..cols).flat_map(|col| (0..rows).map(move |row| row * cols + col));
                places.for_each(|at| data.extend(values[at].to_le_bytes()));
                json!([cols, rows])
            }
            _ => {
                values
                    .iter()
                    .for_each(|value| data.extend(value.to_le_bytes()));
                if rows == 1 {
                    json!([cols])
                } else {
                    json!([rows, cols])
                }
            }
        };
        let of = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(info.source_name.clone(), of);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    std::fs::write(to.join("model.safetensors"), file).unwrap();
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for key in ["quantization", "quantization_config"] {
        config.as_object_mut().unwrap().remove(key);
    }
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(from.join("tokenizer.json"), to.join("tokenizer.json")).unwrap();
}

fn logits(folder: &Path) -> Vec<f32> {
    let model = Model::of_checkpoint(folder).unwrap();
    let mut engine = Engine::open(model, roomy(TOKENS.len())).unwrap();
    all_logits(&mut engine, &TOKENS, 4)
}

/// What is re-laid in memory has the numbers that were read, so logits are those of the same model in f32.
#[test]
fn quantized_folders_run_as_the_same_models_in_f32() {
    let mut seen = 0;
    for case in std::fs::read_dir(fixtures().join("quantized")).unwrap() {
        let case = case.unwrap().path();
        let plain = tempfile::tempdir().unwrap();
        write_plain(&case, plain.path());
        let (found, expected) = (logits(&case), logits(plain.path()));
        assert!(found.iter().all(|x| x.is_finite()), "{case:?}");
        assert!(found.iter().any(|x| x.abs() > 0.01), "{case:?}");
        // Formats other than f32 that are multiplied as they are: the plain tensors.
        let difference = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        assert!(
            bits(&found) == bits(&expected),
            "{case:?}: {:?}",
            difference.fold(0.0, f32::max)
        );
        seen += 1;
    }
    assert_eq!(seen, 12);
}

/// `pack` gives q4 to symmetric integers of four bits in groups: it holds them exactly.
#[test]
fn symmetric_integers_of_four_bits_are_exact_in_q4() {
    let source = emberflow_models::open(&fixtures().join("quantized/compressed_int4")).unwrap();
    let mut seen = 0;
    for (at, info) in source.tensors().iter().enumerate() {
        // Groups run along the columns of Down as it is stored.
        if info.source_dtype != "INT4" || info.id.role == Role::Down {
            continue;
        }
        for row in numbers(source.as_ref(), at).chunks_exact(info.cols) {
            let mut bytes = vec![0; DType::Q4.row_bytes(info.cols)];
            let (quants, scales) = bytes.split_at_mut(DType::Q4.quants_bytes(info.cols));
            quantize_row(DType::Q4, row, quants, scales).unwrap();
            let mut read = vec![0.0; info.cols];
            Cpu::detect().dequantize(Row::inline(DType::Q4, info.cols, &bytes), &mut read);
            assert_eq!(read, row, "{}", info.source_name);
        }
        seen += 1;
    }
    assert_eq!(seen, 6);
}
