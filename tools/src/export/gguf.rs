//! A container's weights as a GGUF file in f32.

use std::path::Path;

use emberflow_models::gguf_vocab::GgufVocab;
use emberflow_models::names::{Required, Role};
use emberflow_models::{Encoding, GgufFile, GgufTensor, GgufValue, GgufWriter};
use emberflow_storage::container::Container;

use crate::Failure;
use crate::packed::Packed;

/// Writes `container`'s weights, as f32, into the file `path`. What GGUF has no key for, the
/// recommended sampling, is left out. `tell` hears of bytes done and in all; the latter come back.
///
/// # Errors
/// Where the container is damaged, the file cannot be written, or the format cannot express the
/// model; what lay under `path` is there still.
pub fn export(
    container: &Container,
    path: &Path,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<u64, Failure> {
    let packed = Packed::new(container)?;
    if packed.config().form.ffn_bias {
        let family = &packed.config().family;
        return Err(Failure::usage(format!(
            "family {family:?}: biases of the FFN are not written as gguf yet"
        )));
    }
    let vocab = GgufVocab::from_tokenizer_json(&packed.meta.tokenizer, packed.config())?;
    let template = packed.meta.chat_template.clone();
    let template = template.map(|t| ("tokenizer.chat_template".into(), GgufValue::Text(t)));
    let file = GgufFile {
        config: packed.config(),
        vocab: &vocab,
        encoding: Encoding::F32,
        extra: template.into_iter().collect(),
    };
    let mut writer = GgufWriter::create(path, file)?;
    let total = writer.data_bytes();
    let (mut done, mut bytes) = (0, Vec::new());
    for tensor in writer.tensors().to_vec() {
        let mut row = |values: &[f32]| {
            bytes.clear();
            bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            done += bytes.len() as u64;
            tell(done, total);
            Ok(writer.append(&bytes)?)
        };
        match tensor.id.role {
            Role::Gate | Role::Up => {
                let bank = bank_of(container, &tensor)?;
                packed.neurons(bank, &mut |_, neuron| match tensor.id.role {
                    Role::Gate => row(&neuron.gate),
                    _ => row(&neuron.up),
                })?;
            }
            // stored transposed
            Role::Down => {
                let matrix = down_matrix(&packed, container, &tensor)?;
                matrix.chunks_exact(tensor.cols).try_for_each(&mut row)?;
            }
            // in another order of rows, which is known when all are read
            Role::Q | Role::K => {
                let matrix = whole(&packed, &tensor)?;
                for stored in 0..tensor.rows {
                    let from = tensor.presented_row(stored) * tensor.cols;
                    row(&matrix[from..from + tensor.cols])?;
                }
            }
            _ => packed.rows(required(&tensor), &mut |_, _, values| row(values))?,
        }
    }
    writer.finish()?;
    Ok(total)
}

fn required(tensor: &GgufTensor) -> Required {
    Required {
        id: tensor.id,
        rows: tensor.rows,
        cols: tensor.cols,
    }
}

/// All rows of a tensor that is not FFN.
fn whole(packed: &Packed<'_>, tensor: &GgufTensor) -> Result<Vec<f32>, Failure> {
    let mut matrix = vec![0.0; tensor.rows * tensor.cols];
    packed.rows(required(tensor), &mut |r, _, values| {
        matrix[r * tensor.cols..][..tensor.cols].copy_from_slice(values);
        Ok(())
    })?;
    Ok(matrix)
}

/// The Down matrix, whose columns are the neurons' vectors.
fn down_matrix(
    packed: &Packed<'_>,
    container: &Container,
    tensor: &GgufTensor,
) -> Result<Vec<f32>, Failure> {
    let (rows, cols) = (tensor.rows, tensor.cols);
    let mut matrix = vec![0.0; rows * cols];
    packed.neurons(bank_of(container, tensor)?, &mut |n, neuron| {
        for (r, value) in neuron.down.iter().enumerate() {
            matrix[r * cols + n] = *value;
        }
        Ok(())
    })?;
    Ok(matrix)
}

/// Where the neurons of an FFN matrix lie.
fn bank_of(container: &Container, tensor: &GgufTensor) -> Result<usize, Failure> {
    let id = tensor.id;
    let place =
        (container.banks().iter()).position(|b| (b.layer, b.expert) == (id.layer, id.expert));
    place.ok_or_else(|| {
        Failure::Fault(format!(
            "{} has no neurons for {id}",
            container.path().display()
        ))
    })
}
