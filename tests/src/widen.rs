//! Checkpoints with more neurons than their fixture has.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

/// Changes to a fixture in bf16 that make it wider.
pub struct Wider<'a> {
    /// Number of copies of each neuron.
    pub copies: usize,
    /// A text of `config.json`, and its replacement.
    pub config: (&'a str, &'a str),
    /// Parts of the names of tensors whose rows are neurons.
    pub rows: &'a [&'a str],
    /// Suffixes of the names of those whose columns are neurons.
    pub columns: &'a str,
    /// Changes a tensor's values, two bytes each.
    pub change: fn(&str, &mut [u8]),
}

/// Writes the wider checkpoint into the new folder `to`.
pub fn widen(from: &Path, to: &Path, wider: &Wider<'_>) -> PathBuf {
    std::fs::create_dir(to).expect("a folder");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(name), to.join(name)).expect("a copy");
    }
    let config = std::fs::read_to_string(from.join("config.json")).expect("config.json");
    let config = config.replace(wider.config.0, wider.config.1);
    std::fs::write(to.join("config.json"), config).expect("config.json");

    let bytes = std::fs::read(from.join("model.safetensors")).expect("weights");
    let len = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + len]).expect("a header");
    let (mut tensors, mut data) = (Map::new(), Vec::new());
    for (name, tensor) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let number = |value: &Value| value.as_u64().expect("a number") as usize;
        let [start, end] = [0, 1].map(|i| number(&tensor["data_offsets"][i]));
        let shape = tensor["shape"].as_array().expect("a shape");
        let mut shape: Vec<usize> = shape.iter().map(number).collect();
        let mut values = bytes[8 + len..][start..end].to_vec();
        if wider.rows.iter().any(|part| name.contains(part)) {
            shape[0] *= wider.copies;
            values = values.repeat(wider.copies);
        } else if name.ends_with(wider.columns) {
            let rows = values.chunks_exact(2 * shape[1]);
            values = rows.flat_map(|row| row.repeat(wider.copies)).collect();
            shape[1] *= wider.copies;
        }
        (wider.change)(name, &mut values);
        let offsets = [data.len(), data.len() + values.len()];
        let entry = json!({"dtype": tensor["dtype"], "shape": shape, "data_offsets": offsets});
        tensors.insert(name.clone(), entry);
        data.extend(values);
    }
    let header = Value::Object(tensors).to_string();
    let start = (header.len() as u64).to_le_bytes();
    let file = [&start[..], header.as_bytes(), &data].concat();
    std::fs::write(to.join("model.safetensors"), file).expect("weights");
    to.to_owned()
}
