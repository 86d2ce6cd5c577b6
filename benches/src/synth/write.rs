//! Writes a checkpoint: a GGUF file streamed block by block, or a folder in f32.

use std::collections::BTreeMap;
use std::path::Path;

use emberflow_kernels::Workers;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Required, Role, required};
use emberflow_models::{
    Encoding, Error, Folder, GgufFile, GgufTensor, GgufValue, GgufWriter, SamplingDefaults,
    TextRules, write_folder,
};

use super::SynthReport;
use super::blocks::{encode, values};
use super::recipe::Recipe;
use super::vocab::vocabulary;
use emberflow::Failure;

/// Bytes generated together and then written.
const BATCH_BYTES: usize = 4 << 20;
/// Bytes that a thread generates at a time.
const PIECE_BYTES: usize = 64 << 10;

/// Writes the GGUF file `path`; returns the bytes of its weights. Calls `tell` with (bytes done,
/// bytes in all).
pub fn gguf(
    path: &Path,
    config: &ModelConfig,
    recipe: &Recipe,
    encoding: Encoding,
    about: &SynthReport,
    threads: usize,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<u64, Failure> {
    let vocab = vocabulary(config.vocab);
    let share = |key: &str, value: f64| {
        let key = format!("emberflow.synth.{key}");
        (key, GgufValue::F32(value as f32))
    };
    let extra = vec![
        ("emberflow.synth.seed".into(), GgufValue::U64(about.seed)),
        share("active", about.target.active),
        share("hot_share", about.target.hot_share),
        share("persistence", about.target.persistence),
    ];
    let extra = match about.target.routing {
        None => extra,
        Some(routing) => [
            extra,
            vec![
                share("popular", routing.popular),
                share("reuse", routing.reuse),
            ],
        ]
        .concat(),
    };
    let file = GgufFile {
        config,
        vocab: &vocab,
        encoding,
        q4_k: &|_| false,
        extra,
    };
    let mut writer = GgufWriter::create_of_any_form(path, file)?;
    drop(vocab);
    let workers = Workers::new(threads, None);
    let total = writer.data_bytes();
    let mut done = 0;
    let mut batch = Vec::new();
    for tensor in writer.tensors().to_vec() {
        let biases = recipe.biases_of(tensor.id);
        let at_once = (BATCH_BYTES / tensor.row_bytes).max(1);
        for first in (0..tensor.rows).step_by(at_once) {
            let rows = at_once.min(tensor.rows - first);
            batch.resize(rows * tensor.row_bytes, 0);
            fill(recipe, &tensor, first, &biases, &workers, &mut batch);
            writer.append(&batch)?;
            done += batch.len() as u64;
            tell(done, total);
        }
    }
    writer.finish()?;
    Ok(total)
}

/// Fills `batch` with the rows of a tensor from `first` on.
fn fill(
    recipe: &Recipe,
    tensor: &GgufTensor,
    first: usize,
    biases: &[f32],
    workers: &Workers,
    batch: &mut [u8],
) {
    let GgufTensor {
        id,
        cols,
        encoding,
        row_bytes,
        ..
    } = *tensor;
    if tensor.rows == 1 {
        let vector = recipe.vector(id, cols);
        for (bytes, value) in batch.chunks_exact_mut(4).zip(vector) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        return;
    }
    let piece_rows = (PIECE_BYTES / row_bytes).max(1);
    workers.for_each_chunk_mut(batch, piece_rows * row_bytes, &|_, piece, bytes| {
        for (i, out) in bytes.chunks_exact_mut(row_bytes).enumerate() {
            let (id, row) = tensor.presented(first + piece * piece_rows + i);
            let plan = match id.role {
                Role::Conv | Role::DeltaConv | Role::MambaConv => {
                    let taps = recipe.stream.taps(id, row, cols);
                    for (bytes, value) in out.chunks_exact_mut(4).zip(taps) {
                        bytes.copy_from_slice(&value.to_le_bytes());
                    }
                    continue;
                }
                Role::Down => recipe.stored_down_row(id, row),
                _ => recipe.row(id, row, biases),
            };
            encode(encoding, &plan, out);
        }
    });
}

/// Writes the folder `dir`; returns the bytes of its weights.
pub fn folder(
    dir: &Path,
    config: &ModelConfig,
    recipe: &Recipe,
    threads: usize,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<u64, Failure> {
    let tensors = required(config);
    let tokenizer = vocabulary(config.vocab).to_tokenizer_json()?;
    // A folder is read back with its own name and the tokenizer's ids.
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let config = &ModelConfig {
        name: name.into_owned(),
        ..config.clone()
    };
    let folder = Folder {
        config,
        tokenizer_json: &tokenizer,
        chat_template: None,
        tool_template: None,
        sampling: SamplingDefaults::default(),
        rules: &TextRules::default(),
        named_tokens: &BTreeMap::new(),
        tensors: &tensors,
    };
    let total: u64 = tensors.iter().map(|t| 4 * (t.rows * t.cols) as u64).sum();
    let workers = Workers::new(threads, None);
    let mut done = 0;
    write_folder(dir, &folder, |sink| {
        let mut batch = Vec::new();
        for &Required { id, rows, cols } in &tensors {
            let biases = recipe.biases_of(id);
            let at_once = (BATCH_BYTES / (4 * cols)).max(1);
            for first in (0..rows).step_by(at_once) {
                let count = at_once.min(rows - first);
                batch.resize(count * cols, 0.0);
                if rows == 1 {
                    batch.copy_from_slice(&recipe.vector(id, cols));
                } else {
                    workers.for_each_chunk_mut(&mut batch, cols, &|_, i, out| {
                        values(&recipe.row(id, first + i, &biases), out);
                    });
                }
                for row in batch.chunks_exact(cols) {
                    sink(id, row)?;
                }
                done += 4 * batch.len() as u64;
                tell(done, total);
            }
        }
        Ok::<(), Error>(())
    })?;
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::firing::{Firing, Targets};
    use crate::synth::recipe::Statistics;
    use crate::synth::shape::{ActArg, Shape};

    #[test]
    fn the_number_of_threads_changes_no_byte() {
        let config = Shape::Tiny.config(Some(ActArg::Relu), None, false).unwrap();
        let target = Targets {
            active: 0.2,
            hot_share: 0.5,
            persistence: 0.8,
            routing: None,
        };
        let statistics = Statistics {
            firing: Firing::solve(&target, false).unwrap(),
            routing: None,
        };
        let recipe = Recipe::new(&config, statistics, None, 3).unwrap();
        let about = SynthReport::new("", "tiny", "relu", 3, target);
        let dir = tempfile::tempdir().unwrap();
        let [one, three] = [1, 3].map(|threads| {
            let path = dir.path().join(format!("{threads}.gguf"));
            let tell = &mut |_, _| {};
            gguf(
                &path,
                &config,
                &recipe,
                Encoding::Q4_0,
                &about,
                threads,
                tell,
            )
            .unwrap();
            std::fs::read(path).unwrap()
        });
        assert!(one == three);
    }
}
