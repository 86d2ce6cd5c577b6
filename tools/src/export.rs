//! `emberflow export`: a container's weights as a Hugging Face folder.

use std::io::Write;
use std::path::Path;

use emberflow_models::names::{Required, Role, TensorId, required};
use emberflow_models::{Folder, RowSink, SamplingDefaults, write_folder};
use emberflow_storage::container::Container;

use crate::Failure;
use crate::cli::ExportArgs;
use crate::model::open_container;
use crate::packed::Packed;

/// Runs the command.
pub fn command(args: &ExportArgs) -> Result<(), Failure> {
    let container = open_container(&args.model)?;
    export(&container, &args.output)?;
    writeln!(std::io::stdout().lock(), "wrote {}", args.output.display())?;
    Ok(())
}

/// Writes `container`'s weights, as f32, into the new folder `dir`. An imported
/// predictor goes along, without its threshold, which the format does not have.
///
/// # Errors
/// Where the container is damaged, the folder cannot be written, or the format
/// cannot express the model; nothing is left under `dir` then.
pub fn export(container: &Container, dir: &Path) -> Result<(), Failure> {
    let packed = Packed::new(container)?;
    let mut tensors = required(packed.config());
    tensors.extend(predictors(container));
    let s = packed.meta.sampling;
    let folder = Folder {
        config: packed.config(),
        tokenizer_json: &packed.meta.tokenizer,
        chat_template: packed.meta.chat_template.as_deref(),
        sampling: SamplingDefaults {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
        },
        tensors: &tensors,
    };
    write_folder(dir, &folder, |sink| {
        for &want in &tensors {
            if !matches!(want.id.role, Role::Gate | Role::Up | Role::Down) {
                packed.rows(want, &mut |_, _, row| Ok(sink(want.id, row)?))?;
            }
        }
        (0..container.banks().len()).try_for_each(|bank| neurons(&packed, container, bank, sink))
    })
}

/// Predictor matrices, with the shapes that the container gives them.
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

/// Hands over a bank's three matrices, which are read once.
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
        sink(id(Role::Gate), &neuron.gate)?;
        sink(id(Role::Up), &neuron.up)?;
        Ok(sink(id(Role::Down), &neuron.down)?)
    })
}
