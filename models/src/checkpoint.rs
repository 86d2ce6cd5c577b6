//! The interface for reading a checkpoint of any format.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::config::ModelConfig;
use crate::error::Error;
use crate::names::TensorId;
use crate::{gguf, hf};

/// One tensor of a checkpoint, as presented to callers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its role and place in the decoder.
    pub id: TensorId,
    /// Its name in the checkpoint, for messages.
    pub source_name: String,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Element type in the checkpoint: `F32`, `F16`, `BF16`, `Q4_0` …
    pub source_dtype: String,
}

/// Sampling parameters recommended by the checkpoint's authors; `None` if not given.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SamplingDefaults {
    /// Divisor of the logits; 0 is greedy.
    pub temperature: Option<f32>,
    /// Number of candidates kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Probability mass kept, in (0, 1].
    pub top_p: Option<f32>,
    /// Drops candidates below this fraction of the most likely one's probability, in [0, 1].
    pub min_p: Option<f32>,
    /// Divides the positive logits of tokens already seen, and multiplies the negative ones; above
    /// 0, and 1 has no effect.
    pub repetition_penalty: Option<f32>,
}

/// A checkpoint whose header is read and fully checked.
///
/// Opening checks that every tensor the configuration needs exists, with the right shape, a
/// readable type and its bytes inside the file, and that there are no others. Weights are read
/// later, row by row.
pub trait Checkpoint: Send {
    /// The folder or file it was opened from.
    fn path(&self) -> &Path;

    /// The normalised, validated configuration.
    fn config(&self) -> &ModelConfig;

    /// The tokenizer as the text of a `tokenizer.json`, converted if the checkpoint stores its
    /// vocabulary in another form.
    fn tokenizer_json(&self) -> &str;

    /// The chat template in Jinja, if the checkpoint has one.
    fn chat_template(&self) -> Option<&str>;

    /// Recommended sampling parameters.
    fn sampling_defaults(&self) -> SamplingDefaults;

    /// All tensors: those of [`crate::names::required`] in that order, then any predictors.
    fn tensors(&self) -> &[TensorInfo];

    /// Reads rows `[first, first + count)` as f32 into `out`, which holds `count · cols` numbers.
    ///
    /// Needs only a small bounded buffer beyond `out`, except for a `Down` stored untransposed,
    /// which takes one matrix. It stays cached until another layer's is read.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`] and [`Error::RowRange`] for wrong arguments, [`Error::NotFinite`]
    /// for a weight that is NaN or infinite, [`Error::Io`] if the file cannot be read.
    fn read_rows(
        &self,
        id: TensorId,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) -> Result<(), Error>;

    /// Fingerprint of the source: the tensor table, the configuration, the tokenizer, and for each
    /// file its length and its first and last MiB. Equal for equal checkpoints at any path.
    fn fingerprint(&self) -> u64;
}

/// Opens a checkpoint: a folder with `config.json`, a `.safetensors` file beside a `config.json`,
/// or a GGUF file (detected by its magic, including PowerInfer's `PWRI`).
///
/// # Errors
/// One variant per way in which files can be invalid; see [`Error`].
pub fn open(path: &Path) -> Result<Box<dyn Checkpoint>, Error> {
    let meta = std::fs::metadata(path).map_err(Error::io("open", path))?;
    if meta.is_dir() {
        return hf::open_folder(path);
    }
    if !meta.is_file() {
        return Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found: "neither a file nor a folder".into(),
        });
    }
    let mut magic = [0u8; 4];
    if meta.len() >= 4 {
        File::open(path)
            .map_err(Error::io("open", path))?
            .read_exact_at(&mut magic, 0)
            .map_err(Error::io("read", path))?;
    }
    if gguf::is_magic(magic) {
        gguf::open_file(path)
    } else if path.extension().is_some_and(|e| e == "safetensors") {
        hf::open_single(path)
    } else {
        let found = format!(
            "a file of {} bytes that starts with {:?}",
            meta.len(),
            magic.escape_ascii().to_string()
        );
        Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found,
        })
    }
}
