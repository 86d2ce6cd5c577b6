//! Keys of the fixtures' files, most of which llama.cpp's converter wrote: each one counts, or is refused by name, or is
//! known to mean nothing for text.

use super::super::header;
use super::*;
use crate::file::DataFile;

/// Keys whose change may mean nothing: what they say follows from other keys or tensors, is the default, or is of parts
/// that the file does not have.
const REPEATED: [&str; 31] = [
    // the norms before FFNs say it
    "use_parallel_residual",
    "vocab_size",
    "tensor_data_layout",
    "context_length",
    "feed_forward_length",
    "attention.value_length",
    "attention.layer_norm_epsilon",
    // how the first positions are chosen, of which all are
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "attention.indexer.types",
    "attention.compress_ratios",
    "expert_group_count",
    "expert_group_used_count",
    "expert_gating_func",
    "expert_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "swiglu_clamp_exp",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "full_attention_interval",
    "ple.image_token_id",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
];
/// Where a key's value begins in a header, after its type.
fn value_at(bytes: &[u8], key: &str) -> usize {
    let mut entry = (key.len() as u64).to_le_bytes().to_vec();
    entry.extend(key.as_bytes());
    let at = bytes.windows(entry.len()).position(|part| part == entry);
    at.unwrap() + entry.len() + 4
}

/// The bytes with another value of the key: the first of a list, floats doubled, and the
/// last bit of others flipped.
fn changed(bytes: &[u8], key: &str) -> Vec<u8> {
    let (mut bytes, at) = (bytes.to_vec(), value_at(bytes, key));
    let kind = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (kind, at) = match kind(at - 4) {
        9 => (kind(at), at + 12),
        kind => (kind, at),
    };
    match kind {
        6 => {
            let doubled = 2.0 * f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            bytes[at..at + 4].copy_from_slice(&doubled.to_le_bytes());
        }
        // a letter of a text
        8 => bytes[at + 8] ^= 1,
        _ => bytes[at] ^= 1,
    }
    bytes
}

/// The bytes with another last letter in the key's name, and this name.
fn renamed(bytes: &[u8], key: &str) -> (Vec<u8>, String) {
    let mut bytes = bytes.to_vec();
    let last = value_at(&bytes, key) - 5;
    bytes[last] = b'_';
    (bytes, format!("{}_", &key[..key.len() - 1]))
}

/// The configuration of a file of these bytes.
fn read(dir: &Path, bytes: &[u8]) -> Result<ModelConfig, Error> {
    let path = dir.join("edited.gguf");
    std::fs::write(&path, bytes).unwrap();
    crate::open(&path).map(|found| found.config().clone())
}

/// One file for each architecture, by llama.cpp's converter where there are others.
fn files() -> Vec<PathBuf> {
    let mut seen = std::collections::BTreeSet::new();
    let models = std::fs::read_dir(fixtures().join("models")).unwrap();
    let folders = models.map(|folder| folder.unwrap().path());
    let all = folders
        .flat_map(|folder| ["model-converted.gguf", "model.gguf"].map(|name| folder.join(name)));
    let arch = |path: &PathBuf| {
        let header = header::read(&DataFile::open(path).unwrap()).unwrap();
        header.metadata.need_text("general.architecture").unwrap()
    };
    let mut all: Vec<_> = all.filter(|path| path.exists()).collect();
    all.sort();
    all.retain(|path| seen.insert(arch(path)));
    all
}

#[test]
fn every_key_of_a_file_counts_or_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (mut counts, mut named, mut without) = (0, 0, Vec::new());
    for path in files() {
        let bytes = std::fs::read(&path).unwrap();
        let metadata = header::read(&DataFile::open(&path).unwrap())
            .unwrap()
            .metadata;
        let arch = metadata.need_text("general.architecture").unwrap();
        let expected = read(dir.path(), &bytes).unwrap();
        for rest in metadata.under(&format!("{arch}.")) {
            let key = format!("{arch}.{rest}");
            match read(dir.path(), &changed(&bytes, &key)) {
                Ok(found) if found == expected => without.push(rest.to_owned()),
                _ => counts += 1,
            }
            let (unknown, name) = renamed(&bytes, &key);
            if !metadata.is_off(&key) {
                let refusal = read(dir.path(), &unknown).unwrap_err().to_string();
                assert!(
                    refusal.contains(&name) || refusal.contains(&key),
                    "{name}: {refusal}"
                );
                named += 1;
            }
        }
    }
    without.retain(|rest| !REPEATED.contains(&rest.as_str()));
    assert!(without.is_empty(), "{without:?}");
    assert!(counts > 400 && named > 600, "{counts} {named}");
}
