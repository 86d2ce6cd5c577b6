//! `emberflow export`: a container's weights as a Hugging Face folder.

use std::path::Path;

use emberflow_models::names::{Role, required};
use emberflow_models::{Folder, SamplingDefaults, write_folder};
use emberflow_storage::container::Container;

use crate::Failure;
use crate::cli::ExportArgs;
use crate::model::open_container;
use crate::packed::Packed;

/// Runs the command.
pub fn command(args: &ExportArgs) -> Result<(), Failure> {
    let container = open_container(&args.model)?;
    export(&container, &args.output)?;
    println!("wrote {}", args.output.display());
    Ok(())
}

/// Writes `container`'s weights, as f32, into the new folder `dir`.
pub fn export(container: &Container, dir: &Path) -> Result<(), Failure> {
    let packed = Packed::new(container)?;
    let tensors = required(packed.config());
    let read = |id| {
        match id {
            emberflow_models::names::TensorId {
                role: Role::Gate | Role::Up | Role::Down,
                ..
            } => packed.ffn_matrix(id),
            _ => packed.tensor(id).map(|(_, values)| values),
        }
        .map_err(|e| e.to_string())
    };
    let s = packed.meta.sampling;
    let folder = Folder {
        config: packed.config(),
        tokenizer_json: &packed.meta.tokenizer,
        chat_template: packed.meta.chat_template.as_deref(),
        sampling: SamplingDefaults {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
        },
        tensors: &tensors,
        read: &read,
    };
    Ok(write_folder(dir, &folder)?)
}
