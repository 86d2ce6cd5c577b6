//! One error type for the crate: one variant for each way a checkpoint, a
//! tokenizer or a template can be wrong.
//!
//! Every message names the file, then the tensor, key or offset, then what was
//! found and what was expected.

use std::path::{Path, PathBuf};

use crate::tensor_id::TensorId;

/// Why a checkpoint, tokenizer or chat template was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system failed a file operation.
    #[error("{path}: cannot {op}: {source}", path = path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was tried: `open`, `read`, `list` …
        op: &'static str,
        /// The system's own reason.
        source: std::io::Error,
    },
    /// The path is none of the checkpoint kinds.
    #[error(
        "{path}: not a checkpoint: found {found}; expected a folder with config.json and \
         model.safetensors, a .safetensors file beside a config.json, or a gguf file",
        path = path.display()
    )]
    NotACheckpoint {
        /// What was given to [`crate::open`].
        path: PathBuf,
        /// What lies there.
        found: String,
    },
    /// A file that belongs to the checkpoint is not there.
    #[error("{path}: file is missing: {why}", path = path.display())]
    MissingFile {
        /// The missing file.
        path: PathBuf,
        /// What needs it, and what to do.
        why: String,
    },
    /// A file is larger than anything of its kind can be.
    #[error("{path}: {what} has {found} bytes; at most {limit} are accepted", path = path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: String,
        /// Its size, in bytes (or in entries, where `what` says so).
        found: u64,
        /// The bound.
        limit: u64,
    },
    /// Text that is not UTF-8.
    #[error("{path}: not valid utf-8 at byte {offset}", path = path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Where, in bytes from the start of the file.
        offset: u64,
    },
    /// A JSON file does not parse.
    #[error("{path}: not valid json: {reason}", path = path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason, with line and column.
        reason: String,
    },
    /// A required key is absent.
    #[error("{path}: key {key} is missing; expected {expected}", path = path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What its value should be.
        expected: String,
    },
    /// A key's value has the wrong type or lies outside its range.
    #[error("{path}: key {key} is {found}; expected {expected}", path = path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// The model family is not one this crate knows.
    #[error("{path}: model family {found} is not supported; supported: {supported}", path = path.display())]
    UnknownFamily {
        /// The file that names the family.
        path: PathBuf,
        /// The family.
        found: String,
        /// The families that work.
        supported: String,
    },
    /// The gate's activation is not one this crate knows.
    #[error("{path}: {key} {found} is not supported; supported: {supported}", path = path.display())]
    UnknownActivation {
        /// The file that names the activation.
        path: PathBuf,
        /// The key that holds it.
        key: String,
        /// The activation.
        found: String,
        /// The activations that work.
        supported: String,
    },
    /// The checkpoint uses a feature that would change its output and that is
    /// not implemented.
    #[error("{path}: {key} = {found} is not supported: {why}", path = path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key (or tensor) that asks for the feature.
        key: String,
        /// Its value.
        found: String,
        /// What would work instead.
        why: String,
    },
    /// The file ends before something it announces.
    #[error(
        "{path}: truncated: {what} needs bytes up to {needed}, the file has {len}",
        path = path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        what: String,
        /// The first byte past it.
        needed: u64,
        /// Length of the file, in bytes.
        len: u64,
    },
    /// The binary header of a container contradicts itself.
    #[error("{path}: bad header at byte {offset}: {what} is {found}; expected {expected}", path = path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// Which field.
        what: String,
        /// Its value.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A sharded index names a file outside the checkpoint's folder.
    #[error("{path}: shard {shard:?} of tensor {tensor} is not a plain file name in this folder", path = path.display())]
    ShardOutside {
        /// The index file.
        path: PathBuf,
        /// The tensor that is said to be there.
        tensor: String,
        /// The shard's name as written.
        shard: String,
    },
    /// A sharded index puts a tensor into a file that does not hold it.
    #[error("{path}: the index places tensor {tensor} in this file, which does not hold it", path = path.display())]
    NotInShard {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor lies about where its bytes are.
    #[error("{path}: tensor {tensor}: data is {found}; expected {expected}", path = path.display())]
    TensorRange {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The byte range or size it claims.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// Two entries carry the same name.
    #[error("{path}: {what} {name} appears twice", path = path.display())]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// `tensor` or `key`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A tensor that the configuration demands is not in the file.
    #[error("{path}: tensor {tensor} is missing; the configuration needs it with shape {expected}", path = path.display())]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// Its name there.
        tensor: String,
        /// Its shape, as stored.
        expected: String,
    },
    /// A tensor that no part of the configured model would use.
    #[error("{path}: tensor {tensor} does not belong to a {family} model with this configuration", path = path.display())]
    UnexpectedTensor {
        /// The file that holds it.
        path: PathBuf,
        /// Its name there.
        tensor: String,
        /// The family.
        family: String,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("{path}: tensor {tensor} has shape {found}; the configuration needs {expected}", path = path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// Its shape, outermost dimension first.
        found: String,
        /// The shape it should have.
        expected: String,
    },
    /// A tensor's element type is not one that can be decoded.
    #[error("{path}: tensor {tensor} has type {found}; supported: {supported}", path = path.display())]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The type.
        found: String,
        /// The types that work.
        supported: String,
    },
    /// A weight is NaN or infinite.
    #[error("{path}: tensor {tensor}: row {row}, column {col} is {found}; expected a finite number", path = path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// Row as presented by the reader.
        row: usize,
        /// Column as presented by the reader.
        col: usize,
        /// The value.
        found: f32,
    },
    /// A caller asked for a tensor that this checkpoint does not have.
    #[error("{path}: there is no tensor {id} in this checkpoint", path = path.display())]
    NoSuchTensor {
        /// The checkpoint.
        path: PathBuf,
        /// What was asked for.
        id: TensorId,
    },
    /// A caller asked for rows outside a tensor, or with a buffer of the wrong size.
    #[error("{path}: tensor {id}: cannot read {found}; expected {expected}", path = path.display())]
    RowRange {
        /// The checkpoint.
        path: PathBuf,
        /// What was asked for.
        id: TensorId,
        /// The rows or the buffer length asked for.
        found: String,
        /// What the tensor has.
        expected: String,
    },
    /// The tokenizer's description is unusable, or a text cannot be tokenised.
    #[error("tokenizer: {what}: found {found}; expected {expected}")]
    Tokenizer {
        /// The key, token or step.
        what: String,
        /// What was there.
        found: String,
        /// What should be there.
        expected: String,
    },
    /// A model cannot be written as a Hugging Face folder or as a GGUF file.
    #[error("{path}: {reason}", path = path.display())]
    Export {
        /// What was being written.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The bundled model cannot be found in the running program's file.
    #[error(
        "the bundled model cannot be read from this program's own file: {reason}; give a MODEL file instead"
    )]
    Demo {
        /// What is missing.
        reason: String,
    },
    /// The chat template does not compile or fails on these messages.
    #[error("chat template: {reason}")]
    ChatTemplate {
        /// The template engine's reason, with a line where known.
        reason: String,
    },
}

impl Error {
    /// What the system said when `op` was tried on `path`.
    pub(crate) fn io(op: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, op, source }
    }

    /// Why `path` cannot be written.
    pub(crate) fn export(path: &Path, reason: String) -> Self {
        let path = path.to_owned();
        Self::Export { path, reason }
    }
}
