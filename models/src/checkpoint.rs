//! The one interface through which a checkpoint is read, whatever its format.

use std::path::Path;

use crate::config::ModelConfig;
use crate::error::Error;
use crate::names::TensorId;

/// One tensor of a checkpoint, as it is presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Which tensor of the decoder it is.
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

/// What the checkpoint's authors recommend for sampling; `None` where they
/// say nothing.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SamplingDefaults {
    /// Divisor of the logits; 0 is greedy.
    pub temperature: Option<f32>,
    /// Number of candidates kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Probability mass kept, in (0, 1].
    pub top_p: Option<f32>,
    /// Candidates below this share of the likeliest one's probability are
    /// dropped, in [0, 1].
    pub min_p: Option<f32>,
    /// Divides the positive logits of tokens already seen, and multiplies the
    /// negative ones; above 0, and 1 does nothing.
    pub repetition_penalty: Option<f32>,
}

/// A checkpoint whose header has been read and checked in full.
///
/// Opening proves that every tensor the configuration needs is there, with the
/// right shape, a readable type and its bytes inside the file, and that none
/// is left over. Weights are read later, row by row.
pub trait Checkpoint: Send {
    /// The folder or file it was opened from.
    fn path(&self) -> &Path;

    /// The normalised, validated configuration.
    fn config(&self) -> &ModelConfig;

    /// The tokenizer as the text of a `tokenizer.json` (converted, where the
    /// checkpoint carries its vocabulary in another form).
    fn tokenizer_json(&self) -> &str;

    /// The chat template in Jinja, if the checkpoint has one.
    fn chat_template(&self) -> Option<&str>;

    /// Recommended sampling parameters.
    fn sampling_defaults(&self) -> SamplingDefaults;

    /// All tensors: those that [`crate::names::required`] lists, in that order,
    /// then the predictors if there are any.
    fn tensors(&self) -> &[TensorInfo];

    /// Reads rows `[first, first + count)` as f32 into `out`, which holds
    /// `count · cols` numbers.
    ///
    /// Memory beyond `out` is a small bounded buffer; only `Down`, where the
    /// file stores it untransposed, costs one matrix, which stays cached until
    /// another layer's is asked for.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`] and [`Error::RowRange`] for wrong arguments,
    /// [`Error::NotFinite`] for a weight that is NaN or infinite,
    /// [`Error::Io`] where the file cannot be read.
    fn read_rows(
        &self,
        id: TensorId,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) -> Result<(), Error>;

    /// Fingerprint of the source: the tensor table, the configuration, the
    /// tokenizer, and for each file its length and its first and last MiB. Equal
    /// for equal checkpoints wherever they lie.
    fn fingerprint(&self) -> u64;
}
