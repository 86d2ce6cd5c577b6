//! The interface for reading a checkpoint of any format.

use std::collections::BTreeMap;
use std::path::Path;

use crate::config::ModelConfig;
use crate::error::Error;
use crate::names::TensorId;
use crate::rules::TextRules;
use crate::stored_tensors::{Bands, StoredTensors};

/// One tensor of a checkpoint, as presented to callers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its role and position in the decoder.
    pub id: TensorId,
    /// Its name in the checkpoint, for messages.
    pub source_name: String,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Element type in the checkpoint: `F32`, `F16`, `BF16`, `Q4_0` …
    pub source_dtype: String,
    /// Its bytes in the checkpoint.
    pub source_bytes: u64,
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
    /// Keeps tokens that are about as unlikely as their mean, with this probability mass, in (0, 1].
    pub typical_p: Option<f32>,
    /// Divides the positive logits of tokens already seen, and multiplies the negative ones; above
    /// 0, and 1 has no effect.
    pub repetition_penalty: Option<f32>,
}

/// An invalid sampling parameter.
pub(crate) struct WrongSampling {
    /// As in `generation_config.json`.
    pub(crate) what: &'static str,
    pub(crate) expected: &'static str,
}

impl SamplingDefaults {
    /// The first invalid parameter.
    pub(crate) fn wrong(&self) -> Option<WrongSampling> {
        let mass = |p: f32| p > 0.0 && p <= 1.0;
        let share = "above 0, at most 1";
        let checks = [
            (
                "temperature",
                self.temperature.is_none_or(|t| t >= 0.0),
                "0 or more",
            ),
            ("top_p", self.top_p.is_none_or(mass), share),
            (
                "min_p",
                self.min_p.is_none_or(|p| (0.0..=1.0).contains(&p)),
                "0 to 1",
            ),
            ("typical_p", self.typical_p.is_none_or(mass), share),
            (
                "repetition_penalty",
                self.repetition_penalty
                    .is_none_or(|p| p > 0.0 && p.is_finite()),
                "a finite number above 0",
            ),
        ];
        let (what, _, expected) = checks.into_iter().find(|(_, fits, _)| !fits)?;
        Some(WrongSampling { what, expected })
    }
}

/// A checkpoint whose header is read and fully checked.
///
/// Opening checks that every tensor the configuration needs exists, with the right shape, a
/// readable type and its bytes inside the file, and that there are no others. Weights are read
/// later, row by row.
pub trait Checkpoint {
    /// The folder or file it was opened from.
    fn path(&self) -> &Path;

    /// The normalised, validated configuration.
    fn config(&self) -> &ModelConfig;

    /// The tokenizer as the text of a `tokenizer.json`, converted if the checkpoint stores its
    /// vocabulary in another form.
    fn tokenizer_json(&self) -> &str;

    /// The chat template in Jinja, if the checkpoint has one.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// The chat template for conversations with tools, if separate.
    fn tool_template(&self) -> Option<&str> {
        None
    }

    /// Recommended sampling parameters.
    fn sampling_defaults(&self) -> SamplingDefaults {
        SamplingDefaults::default()
    }

    /// Rules for generated texts.
    fn rules(&self) -> TextRules {
        TextRules::default()
    }

    /// Texts of the special tokens that chat templates know by name: `bos_token`, `eos_token`,
    /// `pad_token`, `unk_token` and others that the checkpoint names.
    fn named_tokens(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// The quantizer's name for the formats of the whole file, such as `Q4_K_M`, if the checkpoint states one.
    fn quantization(&self) -> Option<&'static str> {
        None
    }

    /// All tensors: those of [`crate::names::required`] in that order, then any predictors.
    fn tensors(&self) -> &[TensorInfo];

    /// Reads rows `[first, first + count)` as f32 into `out`, which holds `count · cols` numbers.
    ///
    /// Needs only a small bounded buffer beyond `out`, except for a `Down` stored untransposed,
    /// which takes one matrix and stays cached until another layer's is read, and for packed matrices that are stored
    /// transposed (GPTQ, AWQ), of which at most 256 MiB of rows are decoded at once.
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

    /// Reads a row of a matrix as stored in the checkpoint: whole blocks of ggml's `Q4_K`, 144
    /// bytes for 256 weights. False if it does not store such rows, as in most checkpoints; `out`
    /// is then unspecified.
    ///
    /// # Errors
    /// As for [`read_rows`](Self::read_rows), except that numbers may be NaN or infinite.
    fn read_q4_k(&self, id: TensorId, row: usize, out: &mut Vec<u8>) -> Result<bool, Error> {
        let _ = (id, row, out);
        Ok(false)
    }

    /// Fingerprint of the source: the tensor table, the configuration, the tokenizer, and for each
    /// file its length and its first and last MiB. Equal for equal checkpoints at any path.
    fn fingerprint(&self) -> u64;

    /// The tensors alone, in the format in which they are multiplied; `None` if the source is not files.
    fn into_stored(self: Box<Self>, bands: Bands) -> Option<Box<dyn StoredTensors>> {
        let _ = bands;
        None
    }
}
