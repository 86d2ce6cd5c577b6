//! Writes a decoder's weights as a GGUF file that llama.cpp loads: the inverse of the reader.
//!
//! Weights arrive as bytes in the file's own encoding and order, tensor by tensor, so a file of any
//! size needs memory only for its header. The file is renamed to its final name only after it is
//! fully written and verified by reading.

mod forms;
mod keys;
mod types;
mod vocab;

use emberflow_kernels::Block;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use self::forms::{dims, is_float, rope_factors};
use self::keys::{is_plain, keys};
use self::types::write_text;
pub use self::types::{Encoding, GgufFile, GgufValue};
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::families::{self, Arch};
use crate::file::{flush, flush_folder_of};
use crate::mtp::Part;
use crate::names::{Fused, Required, Role, TensorId, required};
use crate::store::{Layout, RotaryHeads, rotary_order};

/// Alignment of tensor data, the format's default.
const ALIGNMENT: u64 = 32;

/// One tensor as stored in the file.
#[derive(Debug, Clone)]
pub struct GgufTensor {
    /// Which tensor.
    pub id: TensorId,
    /// Rows in the file: for Down `d_model`, not the neurons.
    pub rows: usize,
    /// Numbers per row.
    pub cols: usize,
    /// Storage format, unless `q4_k`.
    pub encoding: Encoding,
    /// Whether rows are blocks of Q4_K.
    pub q4_k: bool,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// The heads, if their rotated rows are stored in interleaved order.
    interleaved: Option<RotaryHeads>,
    /// Head size if the rows of [`Role::Q`] and [`Role::QGate`] are stored in one tensor, head by
    /// head.
    gated: Option<usize>,
    /// Its position in a tensor with a matrix for every expert.
    stack: Option<Place>,
}

/// An expert's index among those of its layer, and their number.
#[derive(Debug, Clone, Copy)]
struct Place {
    expert: u32,
    experts: u32,
}

impl GgufTensor {
    /// Whether a tensor of the file begins with it.
    fn begins(&self) -> bool {
        self.stack.is_none_or(|place| place.expert == 0)
    }

    /// Whether a tensor of the file ends with it.
    fn ends(&self) -> bool {
        (self.stack).is_none_or(|place| place.expert + 1 == place.experts)
    }

    /// The tensor and its row, as presented by [`crate::Checkpoint`], stored as row `stored`. For Down,
    /// which is stored transposed, the column.
    pub fn presented(&self, stored: usize) -> (TensorId, usize) {
        let Some(head_dim) = self.gated else {
            return (self.id, self.presented_row(stored));
        };
        let (head, at) = (stored / (2 * head_dim), stored % (2 * head_dim));
        let role = if at < head_dim { Role::Q } else { Role::QGate };
        let id = TensorId::layer(role, self.id.layer);
        (id, head * head_dim + at % head_dim)
    }

    /// Only the row, of a tensor that is stored separately.
    pub fn presented_row(&self, stored: usize) -> usize {
        let Some(heads) = self.interleaved else {
            return stored;
        };
        let first = stored - stored % heads.head_dim;
        let mut rows = first..first + heads.head_dim;
        rows.find(|&row| heads.stored(row) == stored)
            .unwrap_or(stored)
    }
}

/// The format's number for Q4_K.
const Q4_K: u32 = 12;

/// A GGUF file being written, which is removed unless it is finished.
pub struct GgufWriter {
    path: PathBuf,
    /// Whether the file existed at the start, so that it is replaced.
    replaces: bool,
    partial: PathBuf,
    file: File,
    config: ModelConfig,
    tensors: Vec<GgufTensor>,
    /// Remaining bytes of data, by tensor.
    left: Vec<u64>,
    /// The current tensor, as an index into `tensors`.
    at: usize,
    finished: bool,
}

impl GgufWriter {
    /// Begins the file `path` with its header. Writes to `path` with `.partial` appended; an
    /// existing file at `path` stays until [`GgufWriter::finish`] replaces it.
    ///
    /// # Errors
    /// [`Error::Export`] for a model that is not a plain decoder with separately stored tensors,
    /// [`Error::Io`] if the file cannot be written.
    pub fn create(path: &Path, file: GgufFile<'_>) -> Result<Self, Error> {
        let arch = families::of(&file.config.family).written_arch();
        match arch.filter(|arch| is_plain(file.config, arch)) {
            Some(arch) => Self::begin(path, file, arch),
            None => Err(no_form(path, file.config)),
        }
    }

    /// The same for a model of any form that the keys can express, for callers that take the order of its
    /// rows from [`GgufTensor::presented`].
    ///
    /// # Errors
    /// As [`GgufWriter::create`], for a model that the keys do not express.
    pub fn create_of_any_form(path: &Path, file: GgufFile<'_>) -> Result<Self, Error> {
        match families::of(&file.config.family).written_arch() {
            Some(arch) => Self::begin(path, file, arch),
            None => Err(no_form(path, file.config)),
        }
    }

    /// Writes the header.
    fn begin(path: &Path, file: GgufFile<'_>, arch: &'static Arch) -> Result<Self, Error> {
        let tensors = in_file_order(file.config, arch)
            .into_iter()
            .map(|want| stored(want, &file, arch))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| {
                let block = file.encoding.dtype().block().0;
                let reason = format!("a matrix has rows that are no multiple of {block}");
                Error::export(path, reason)
            })?;
        let keys = keys(path, arch, &file)?;
        let mut header = b"GGUF".to_vec();
        header.extend(3u32.to_le_bytes());
        let factors = rope_factors(file.config);
        let entries = tensors.iter().filter(|tensor| tensor.begins()).count();
        let entries = entries + usize::from(!factors.is_empty());
        header.extend((entries as u64).to_le_bytes());
        header.extend((keys.len() as u64).to_le_bytes());
        for (key, value) in &keys {
            write_text(&mut header, key);
            value.write(&mut header);
        }
        let mut offset = (4 * factors.len() as u64).next_multiple_of(ALIGNMENT);
        if !factors.is_empty() {
            write_factors_entry(&mut header, factors.len());
        }
        let mut left = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            let bytes = (tensor.rows as u64).checked_mul(tensor.row_bytes as u64);
            let end = bytes.and_then(|bytes| offset.checked_add(bytes));
            let (Some(bytes), Some(end)) = (bytes, end) else {
                return Err(Error::export(path, format!("{} is too large", tensor.id)));
            };
            if tensor.begins() {
                write_entry(&mut header, tensor, offset, file.config, arch);
            }
            left.push(bytes);
            offset = if tensor.ends() {
                end.next_multiple_of(ALIGNMENT)
            } else {
                end
            };
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        header.extend(factors.iter().flat_map(|factor| factor.to_le_bytes()));
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);

        let partial = partial_name(path)?;
        let out = File::create_new(&partial).map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => {
                let reason = "exists: another run writes it, or one was killed; \
                              delete it if none is running";
                Error::export(&partial, reason.into())
            }
            _ => Error::io("create", &partial)(e),
        })?;
        let mut writer = Self {
            path: path.to_owned(),
            replaces: path.symlink_metadata().is_ok(),
            partial,
            file: out,
            config: file.config.clone(),
            tensors,
            left,
            at: 0,
            finished: false,
        };
        writer.put(&header)?;
        Ok(writer)
    }

    /// Every tensor, in the order [`GgufWriter::append`] expects.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// Bytes of the weights.
    pub fn data_bytes(&self) -> u64 {
        let bytes = |t: &GgufTensor| t.rows as u64 * t.row_bytes as u64;
        self.tensors.iter().map(bytes).sum()
    }

    /// Appends bytes to the current tensor, at most to its end.
    ///
    /// # Errors
    /// [`Error::Export`] for too many bytes, [`Error::Io`].
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let left = self.left.get_mut(self.at);
        let Some(rest) = left.and_then(|l| l.checked_sub(bytes.len() as u64)) else {
            let reason = format!("{} bytes are more than a tensor has left", bytes.len());
            return Err(Error::export(&self.path, reason));
        };
        self.left[self.at] = rest;
        self.put(bytes)?;
        if rest == 0 {
            let tensor = &self.tensors[self.at];
            if tensor.ends() {
                let experts = tensor.stack.map_or(1, |place| u64::from(place.experts));
                let end = tensor.rows as u64 * tensor.row_bytes as u64 * experts;
                let padding = end.next_multiple_of(ALIGNMENT) - end;
                self.put(&[0; ALIGNMENT as usize][..padding as usize])?;
            }
            self.at += 1;
        }
        Ok(())
    }

    /// Flushes the file to disk, reads it back, and renames it to its final name.
    ///
    /// # Errors
    /// [`Error::Export`] for missing bytes, if the format lost a part of the configuration, or if the file has appeared since
    /// [`GgufWriter::create`]; [`Error::Io`].
    pub fn finish(mut self) -> Result<(), Error> {
        if let Some(tensor) = self.tensors.get(self.at) {
            let reason = format!("tensor {} lacks {} bytes", tensor.id, self.left[self.at]);
            return Err(Error::export(&self.path, reason));
        }
        flush(&self.file, &self.partial)?;
        self.check_reads_back()?;
        if !self.replaces && self.path.symlink_metadata().is_ok() {
            // Nothing of the work is lost.
            self.finished = true;
            let path = self.path.display();
            let reason = format!(
                "complete, but {path} appeared while it was written: move that file away, then give this one its name"
            );
            return Err(Error::export(&self.partial, reason));
        }
        std::fs::rename(&self.partial, &self.path).map_err(Error::io("rename", &self.partial))?;
        self.finished = true;
        flush_folder_of(&self.path)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .write_all(bytes)
            .map_err(Error::io("write", &self.partial))
    }

    /// Reads the file back: anything that the keys cannot express appears as a difference.
    fn check_reads_back(&self) -> Result<(), Error> {
        let Some(read) = super::open_file(&self.partial, Part::Decoder)? else {
            return Err(Error::export(&self.path, "it has no decoder".into()));
        };
        let wanted = ModelConfig {
            family: read.config().family.clone(),
            ..self.config.clone()
        };
        let [found, wanted] =
            [read.config(), &wanted].map(|c| serde_json::to_value(c).unwrap_or_default());
        let differs = wanted
            .as_object()
            .and_then(|w| w.iter().find(|(key, value)| found[*key] != **value));
        match differs {
            None => Ok(()),
            Some((key, value)) => Err(Error::export(
                &self.path,
                format!("{key} = {value} reads back as {}", found[key]),
            )),
        }
    }
}

impl Drop for GgufWriter {
    fn drop(&mut self) {
        if !self.finished {
            // report the original error, not this one
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

fn no_form(path: &Path, config: &ModelConfig) -> Error {
    let (family, reason) = (&config.family, "it has no gguf form yet");
    Error::export(path, format!("family {family:?}: {reason}"))
}

fn partial_name(path: &Path) -> Result<PathBuf, Error> {
    let Some(name) = path.file_name() else {
        return Err(Error::export(path, "not the name of a new file".into()));
    };
    let mut name = name.to_owned();
    name.push(".partial");
    Ok(path.with_file_name(name))
}

/// Storage format of a tensor; `None` if its rows are not whole blocks.
fn stored(want: Required, file: &GgufFile<'_>, arch: &Arch) -> Option<GgufTensor> {
    let (config, matrices) = (file.config, file.encoding);
    let Required { id, rows, cols } = want;
    let q4_k = DType::Block(Block::Q4K).row_bytes(cols);
    let q4_k = q4_k.filter(|_| id.role != Role::Down && (file.q4_k)(id));
    let experts = config.banks_of(id.layer).count();
    let (rows, cols) = match id.role {
        Role::Down => (cols, rows),
        // a row per expert
        Role::GateBias | Role::UpBias => (experts, rows / experts.max(1)),
        // with the gates of the output
        Role::Q if arch.names.fused_with(Role::Q) == Some(Fused::GatedQ) => (2 * rows, cols),
        _ => (rows, cols),
    };
    let stacked = is_stacked(id, config);
    let encoding = match id.role {
        role if is_float(role) => Encoding::F32,
        _ if rows == 1 && !stacked => Encoding::F32,
        _ if stacked => matrices,
        _ => matrices.beside_experts(),
    };
    let rotary = rotary_order(id, config).filter(|_| arch.interleaved);
    let gated = arch.names.fused_with(id.role) == Some(Fused::GatedQ);
    Some(GgufTensor {
        id,
        rows,
        cols,
        encoding,
        q4_k: q4_k.is_some(),
        row_bytes: match q4_k {
            Some(bytes) => bytes,
            None => encoding.row_bytes(cols)?,
        },
        interleaved: match rotary {
            Some(Layout::Interleaved(heads)) => Some(heads),
            _ => None,
        },
        gated: gated.then_some(config.head_dim as usize),
        stack: stacked.then_some(Place {
            expert: id.expert,
            experts: config.experts,
        }),
    })
}

/// Whether a tensor is stored together with those of the other experts.
fn is_stacked(id: TensorId, config: &ModelConfig) -> bool {
    matches!(id.role, Role::Gate | Role::Up | Role::Down)
        && config.mixture_of(id.layer).is_some()
        && id.expert < config.experts
}

/// Every tensor; those stored together are consecutive. The output gates of attention may come with Q.
fn in_file_order(config: &ModelConfig, arch: &Arch) -> Vec<Required> {
    let mut list = required(config);
    let with_q = arch.names.fused_with(Role::QGate).is_some();
    list.retain(|want| want.id.role != Role::QGate || !with_q);
    let stacked = |want: &Required| is_stacked(want.id, config);
    let mut first = 0;
    while first < list.len() {
        let count = list[first..]
            .iter()
            .take_while(|want| stacked(want))
            .count();
        list[first..first + count].sort_by_key(|want| (want.id.role, want.id.expert));
        first += count.max(1);
    }
    list
}

/// A tensor's entry in the header; dimensions are listed innermost first.
fn write_entry(
    header: &mut Vec<u8>,
    tensor: &GgufTensor,
    offset: u64,
    config: &ModelConfig,
    arch: &Arch,
) {
    write_text(header, &arch.names.spell(tensor.id, config));
    let dims = match (tensor.rows, tensor.stack) {
        (rows, Some(place)) => vec![tensor.cols as u64, rows as u64, place.experts.into()],
        (rows, None) => dims(tensor.id.role, [rows, tensor.cols], config),
    };
    header.extend((dims.len() as u32).to_le_bytes());
    header.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
    let code = if tensor.q4_k {
        Q4_K
    } else {
        tensor.encoding.code()
    };
    header.extend(code.to_le_bytes());
    header.extend(offset.to_le_bytes());
}

/// The entry of the divisors of rotary frequencies, at the start of the data.
fn write_factors_entry(header: &mut Vec<u8>, count: usize) {
    write_text(header, super::rope::ROPE_FACTORS);
    header.extend(1u32.to_le_bytes());
    header.extend((count as u64).to_le_bytes());
    header.extend(Encoding::F32.code().to_le_bytes());
    header.extend(0u64.to_le_bytes());
}
