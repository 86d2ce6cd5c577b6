//! `emberflow export`: writes a container's weights as a Hugging Face folder or a GGUF file.

mod gguf;

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use emberflow_models::names::{Required, Role, TensorId, required};
use emberflow_models::{Folder, RowSink, SamplingDefaults, write_folder};
use emberflow_storage::container::Container;
use serde::Serialize;

use crate::cli::ExportArgs;
use crate::interrupt::Unfinished;
use crate::model::open_packed;
use crate::packed::Packed;
use crate::{Failure, atomic, print_json, progress, size};

/// Runs the command.
pub fn command(args: &ExportArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let to_file = args.output.extension().is_some_and(|e| e == "gguf");
    if to_file {
        atomic::may_create(&args.output, args.force, &[args.model.file()])?;
    } else {
        atomic::may_create_folder(&args.output)?;
    }
    let container = open_packed(&args.model)?;
    let bar = progress::bytes("exporting", 0);
    let mut tell = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let unfinished = Unfinished::partial(&args.output);
    let bytes = if to_file {
        gguf::export(&container, &args.output, &mut tell)
    } else {
        export(&container, &args.output, &mut tell)
    };
    bar.finish_and_clear();
    drop(unfinished);
    let done = Exported {
        output: args.output.display().to_string(),
        bytes: bytes?,
        seconds: start.elapsed().as_secs_f64(),
    };
    if args.json {
        return print_json(&done);
    }
    writeln!(
        std::io::stdout().lock(),
        "{}: {} of weights, {:.1} s",
        done.output,
        size::show(done.bytes),
        done.seconds
    )?;
    Ok(())
}

/// Output of `export --json`. Keys are a contract.
#[derive(Debug, Serialize)]
struct Exported {
    /// The folder or file.
    output: String,
    /// Bytes of the weights.
    bytes: u64,
    /// Duration.
    seconds: f64,
}

/// Writes the weights of `container` as f32 into the new folder `dir` and returns their total bytes. An imported
/// predictor is written too, but not its threshold, which the format lacks. `tell` receives bytes done and total
/// bytes.
///
/// # Errors
/// A damaged container, an I/O error, or a model that the format cannot represent. Nothing is left in `dir` then.
pub fn export(
    container: &Container,
    dir: &Path,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<u64, Failure> {
    let packed = Packed::new(container)?;
    let mut tensors = required(packed.config());
    tensors.extend(predictors(container));
    let s = packed.meta.sampling;
    let folder = Folder {
        config: packed.config(),
        tokenizer_json: &packed.meta.tokenizer,
        chat_template: packed.meta.chat_template.as_deref(),
        tool_template: packed.meta.tool_template.as_deref(),
        sampling: SamplingDefaults {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            typical_p: s.typical_p,
            repetition_penalty: s.repetition_penalty,
        },
        rules: &packed.meta.rules,
        named_tokens: &packed.meta.named_tokens,
        tensors: &tensors,
    };
    let total = tensors.iter().map(|t| 4 * (t.rows * t.cols) as u64).sum();
    let mut done = 0;
    write_folder(dir, &folder, |sink| {
        let sink: &mut RowSink<'_> = &mut |id, row| {
            sink(id, row)?;
            done += 4 * row.len() as u64;
            tell(done, total);
            Ok(())
        };
        for &want in &tensors {
            let by_rows = packed.is_by_rows();
            if by_rows && want.id.role == Role::Down {
                let (rows, cols) = (want.cols, want.rows);
                let columns = packed.columns(Required { rows, cols, ..want })?;
                for row in columns.chunks_exact(rows) {
                    sink(want.id, row)?;
                }
            } else if by_rows || !want.id.role.is_bundled() {
                packed.rows(want, &mut |_, _, row| Ok(sink(want.id, row)?))?;
            }
        }
        (0..container.banks().len()).try_for_each(|bank| neurons(&packed, container, bank, sink))
    })?;
    Ok(total)
}

/// Matrices of imported predictors, with their shapes in the container.
fn predictors(container: &Container) -> impl Iterator<Item = Required> {
    container.tensors().iter().filter_map(|entry| {
        let id: TensorId = entry.name.parse().ok()?;
        let &[rows, cols] = entry.dims() else {
            return None;
        };
        matches!(id.role, Role::PredictorFc1 | Role::PredictorFc2).then_some(Required {
            id,
            rows: rows as usize,
            cols: cols as usize,
        })
    })
}

/// Reads a bank once and passes on its three matrices.
fn neurons(
    packed: &Packed<'_>,
    container: &Container,
    bank: usize,
    sink: &mut RowSink<'_>,
) -> Result<(), Failure> {
    let entry = &container.banks()[bank];
    let id = |role| TensorId {
        role,
        layer: entry.layer,
        expert: entry.expert,
    };
    packed.neurons(bank, &mut |_, neuron| {
        let mut vectors = neuron.vectors();
        vectors.try_for_each(|(role, row)| Ok(sink(id(role), row)?))
    })
}
