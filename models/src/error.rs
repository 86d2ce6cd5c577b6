//! The error type of the crate: one variant per kind of invalid checkpoint, tokenizer or
//! template.
//!
//! Every message names the file, then the tensor, key or offset, then what was found and what was
//! expected.

use std::path::{Path, PathBuf};

use crate::tensor_id::TensorId;

/// Why a checkpoint, tokenizer or chat template was rejected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system failed a file operation.
    #[error("{path}: cannot {op}: {source}", path = path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The operation: `open`, `read`, `list` …
        op: &'static str,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The path is not a checkpoint of any kind.
    #[error(
        "{path}: not a checkpoint: found {found}; expected a folder with config.json and \
         model.safetensors, a .safetensors file next to a config.json, or a gguf file",
        path = path.display()
    )]
    NotACheckpoint {
        /// The path.
        path: PathBuf,
        /// What it is instead.
        found: String,
    },
    /// A git-lfs pointer in place of a file.
    #[error(
        "{path}: a git-lfs pointer, not the file itself{of}; run `git lfs pull` in its folder, or \
         download the file",
        path = path.display(),
        of = bytes.map(|bytes| format!(" of {bytes} bytes")).unwrap_or_default()
    )]
    LfsPointer {
        /// The pointer.
        path: PathBuf,
        /// Length of the file it refers to, if given.
        bytes: Option<u64>,
    },
    /// A file of the checkpoint is missing.
    #[error("{path}: file is missing: {why}", path = path.display())]
    MissingFile {
        /// The missing file.
        path: PathBuf,
        /// What needs it, and what to do.
        why: String,
    },
    /// A file is larger than its kind allows.
    #[error("{path}: {what} has {found} bytes; at most {limit} are accepted", path = path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: String,
        /// Size in bytes (or in entries, if `what` says so).
        found: u64,
        /// The limit.
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
        /// Expected value.
        expected: String,
    },
    /// A key's value has the wrong type or is out of range.
    #[error("{path}: key {key} is {found}; expected {expected}", path = path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// Expected value.
        expected: String,
    },
    /// The model family is not supported.
    #[error("{path}: model family {found} is not supported; supported: {supported}", path = path.display())]
    UnknownFamily {
        /// The file that names the family.
        path: PathBuf,
        /// The family.
        found: String,
        /// The families that work.
        supported: String,
    },
    /// The gate's activation is not supported.
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
    /// The checkpoint uses an unimplemented feature that would change its output.
    #[error("{path}: {key} = {found} is not supported: {why}", path = path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key (or tensor) of the feature.
        key: String,
        /// Its value.
        found: String,
        /// What is supported instead.
        why: String,
    },
    /// The file is truncated.
    #[error(
        "{path}: truncated: {what} needs bytes up to {needed}, the file has {len}",
        path = path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// What is missing.
        what: String,
        /// The first byte past it.
        needed: u64,
        /// Length of the file, in bytes.
        len: u64,
    },
    /// The file was written while it was in use.
    #[error("{path}: the file has changed since it was opened: start again when it is complete", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The binary header of a container is inconsistent.
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
        /// Expected value.
        expected: String,
    },
    /// A sharded index names a file outside the checkpoint's folder.
    #[error("{path}: shard {shard:?} of tensor {tensor} is not a plain file name in this folder", path = path.display())]
    ShardOutside {
        /// The index file.
        path: PathBuf,
        /// The tensor in that shard.
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
    /// A tensor's byte range is invalid.
    #[error("{path}: tensor {tensor}: data is {found}; expected {expected}", path = path.display())]
    TensorRange {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The byte range or size given.
        found: String,
        /// Expected range or size.
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
    /// A required tensor is missing.
    #[error("{path}: tensor {tensor} is missing; the configuration needs it with shape {expected}", path = path.display())]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// Its name there.
        tensor: String,
        /// Its shape, as stored.
        expected: String,
    },
    /// A tensor that the configured model does not use.
    #[error("{path}: tensor {tensor} does not belong to a {family} model with this configuration", path = path.display())]
    UnexpectedTensor {
        /// The file that holds it.
        path: PathBuf,
        /// Its name there.
        tensor: String,
        /// The family.
        family: String,
    },
    /// A tensor's shape does not match the configuration.
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
    /// A tensor's element type is not supported.
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
    /// The requested tensor does not exist in this checkpoint.
    #[error("{path}: there is no tensor {id} in this checkpoint", path = path.display())]
    NoSuchTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The requested tensor.
        id: TensorId,
    },
    /// The requested rows are out of range, or the buffer has the wrong size.
    #[error("{path}: tensor {id}: cannot read {found}; expected {expected}", path = path.display())]
    RowRange {
        /// The checkpoint.
        path: PathBuf,
        /// The requested tensor.
        id: TensorId,
        /// The requested rows or buffer length.
        found: String,
        /// The tensor's size.
        expected: String,
    },
    /// The tokenizer's description is invalid, or a text cannot be tokenised.
    #[error("tokenizer: {what}: found {found}; expected {expected}")]
    Tokenizer {
        /// The key, token or step.
        what: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A model cannot be exported to a Hugging Face folder or a GGUF file.
    #[error("{path}: {reason}", path = path.display())]
    Export {
        /// The export target.
        path: PathBuf,
        /// The reason.
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
    /// Maps the system's error of `op` on `path`.
    pub(crate) fn io(op: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, op, source }
    }

    /// An export error for `path`.
    pub(crate) fn export(path: &Path, reason: String) -> Self {
        let path = path.to_owned();
        Self::Export { path, reason }
    }
}
