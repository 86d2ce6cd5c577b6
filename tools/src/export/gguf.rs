//! Writes a container's weights as a GGUF file: as f32, except that q4k matrices stored by rows (all but Down) become
//! Q4_K.

use std::path::Path;

use emberflow_kernels::{DType, Row};
use emberflow_models::gguf_vocab::GgufVocab;
use emberflow_models::names::{Required, Role, TensorId};
use emberflow_models::{Encoding, GgufFile, GgufTensor, GgufValue, GgufWriter};
use emberflow_storage::container::Container;

use crate::packed::Packed;
use crate::{Failure, q4_k};

/// Writes the weights of `container` to the GGUF file `path`, atomically, and returns their total bytes. The
/// recommended sampling is left out: GGUF has no key for it. `tell` receives bytes done and total bytes.
///
/// # Errors
/// A damaged container, an I/O error, or a model that GGUF cannot represent; an existing file is then unchanged.
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
    let mut writer = begin(container, &packed, path)?;
    let total = writer.data_bytes();
    let (mut done, mut bytes) = (0, Vec::new());
    for tensor in writer.tensors().to_vec() {
        let mut put = |bytes: &[u8]| {
            done += bytes.len() as u64;
            tell(done, total);
            Ok(writer.append(bytes)?)
        };
        let mut row = |stored: Option<Row<'_>>, values: &[f32]| {
            bytes.clear();
            match stored.filter(|_| tensor.q4_k) {
                Some(stored) => q4_k::write(stored, &mut bytes),
                None => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
            }
            put(&bytes)
        };
        match tensor.id.role {
            Role::Gate | Role::Up | Role::Down if packed.is_by_rows() => {
                packed.rows(required(&tensor), &mut |_, stored, values| {
                    row(Some(stored), values)
                })?;
            }
            Role::Gate | Role::Up => {
                let (bank, dtype) = (bank_of(container, &tensor)?, packed.ffn_dtype()?);
                packed.neurons(bank, &mut |_, neuron| {
                    let (values, stored) = match tensor.id.role {
                        Role::Gate => (&neuron.gate, &neuron.stored[0]),
                        _ => (&neuron.up, &neuron.stored[1]),
                    };
                    let stored = Row::inline(dtype, values.len(), stored);
                    row(Some(stored), values)
                })?;
            }
            // Stored transposed.
            Role::Down => {
                let matrix = down_matrix(&packed, container, &tensor)?;
                let mut rows = matrix.chunks_exact(tensor.cols);
                rows.try_for_each(|values| row(None, values))?;
            }
            // Rows in another order, so that the matrix is read whole.
            Role::Q | Role::K => {
                let matrix = whole(&packed, &tensor)?;
                for stored in 0..tensor.rows {
                    let from = tensor.presented_row(stored) * tensor.row_bytes;
                    put(&matrix[from..from + tensor.row_bytes])?;
                }
            }
            _ => packed.rows(required(&tensor), &mut |_, stored, values| {
                row(Some(stored), values)
            })?,
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

/// Creates the file and writes its header.
fn begin(container: &Container, packed: &Packed<'_>, path: &Path) -> Result<GgufWriter, Failure> {
    let vocab = GgufVocab::from_tokenizer_json(&packed.meta.tokenizer, packed.config())?;
    let templates = [
        ("tokenizer.chat_template", &packed.meta.chat_template),
        (
            "tokenizer.chat_template.tool_use",
            &packed.meta.tool_template,
        ),
    ];
    let text = |text: &String| GgufValue::Text(text.clone());
    let templates = templates
        .into_iter()
        .filter_map(|(key, template)| Some((key.into(), template.as_ref().map(text)?)));
    let file = GgufFile {
        config: packed.config(),
        vocab: &vocab,
        encoding: Encoding::F32,
        q4_k: &|id| is_q4k(container, packed, id),
        extra: templates.collect(),
    };
    Ok(GgufWriter::create(path, file)?)
}

/// Whether a matrix is stored in q4k.
fn is_q4k(container: &Container, packed: &Packed<'_>, id: TensorId) -> bool {
    if id.role.is_bundled() && !packed.is_by_rows() {
        packed.ffn_dtype().is_ok_and(|dtype| dtype == DType::Q4k)
    } else {
        let entry = container.tensor(&id.to_string());
        entry.is_some_and(|entry| entry.dtype == DType::Q4k.code())
    }
}

/// All rows of a non-FFN tensor as the file stores them.
fn whole(packed: &Packed<'_>, tensor: &GgufTensor) -> Result<Vec<u8>, Failure> {
    let mut matrix = Vec::with_capacity(tensor.rows * tensor.row_bytes);
    packed.rows(required(tensor), &mut |_, stored, values| {
        if tensor.q4_k {
            q4_k::write(stored, &mut matrix)
        } else {
            matrix.extend(values.iter().flat_map(|v| v.to_le_bytes()))
        }
        Ok(())
    })?;
    Ok(matrix)
}

/// The Down matrix, transposed from the neurons' vectors.
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

/// The bank of an FFN matrix.
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
