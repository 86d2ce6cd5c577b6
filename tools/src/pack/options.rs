//! How to pack.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use emberflow_kernels::DType;
use emberflow_models::names::{Role, TensorId};
use emberflow_models::{Checkpoint, TensorInfo};
use emberflow_storage::container::Prefer;

use crate::cli::QuantArg;
use crate::windows::Source;

/// How to pack.
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// Format of the neuron bundles.
    pub ffn: DType,
    /// Format of the attention matrices.
    pub attention: DType,
    /// Format of embedding and head.
    pub embedding: DType,
    /// Sorts neurons by temperature, if given: a file of statistics and what is in it.
    pub stats: Option<(PathBuf, Vec<u8>)>,
    /// Places neurons that fire together next to each other, where the statistics know
    /// which do.
    pub coactivation: bool,
    /// Bundle alignment; `None` = what direct I/O needs where the output lies.
    pub sector: Option<u32>,
    /// Where scales go.
    pub scales: Prefer,
    /// Replace an existing output.
    pub force: bool,
    /// Rounds weights against a text: a file, what is in it, and how many tokens of it.
    pub calibrate: Option<CalibrationText>,
    /// Compute threads; 0 = one per core. They change no byte.
    pub threads: usize,
    /// Bytes of the container: formats are chosen so that it has about as many.
    pub size: Option<u64>,
    /// Formats that follow those of the source.
    pub by_source: BySource,
    /// Matrices beside the neurons in another format than their role's.
    pub mix: BTreeMap<TensorId, DType>,
    /// Bytes after which finished parts are flushed to disk and count as done.
    pub durable_bytes: u64,
}

/// Which formats follow those of the source; the others are as the options say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BySource {
    /// Of the neurons.
    pub ffn: bool,
    /// Of the attention matrices.
    pub attention: bool,
    /// Of embedding and head.
    pub embedding: bool,
}

impl BySource {
    /// Every format.
    pub const ALL: Self = Self {
        ffn: true,
        attention: true,
        embedding: true,
    };
}

/// A text to round weights against.
#[derive(Debug, Clone)]
pub struct CalibrationText {
    /// The text.
    pub source: Arc<Source>,
    /// Tokens to take of it.
    pub tokens: u32,
}

impl PackOptions {
    /// Defaults for a quantisation: embedding and head in q8 where it has four bits.
    pub fn new(quant: DType) -> Self {
        Self {
            ffn: quant,
            attention: quant,
            embedding: if is_four_bits(quant) {
                DType::Q8
            } else {
                quant
            },
            stats: None,
            coactivation: true,
            sector: None,
            scales: Prefer::Auto,
            force: false,
            calibrate: None,
            threads: 0,
            size: None,
            by_source: BySource::default(),
            mix: BTreeMap::new(),
            durable_bytes: 8 << 20,
        }
    }

    /// Formats with as many bits as the source has, and four to five where it has floats.
    pub fn as_source() -> Self {
        Self {
            by_source: BySource::ALL,
            ..Self::new(DType::Q4k)
        }
    }

    /// Compute threads.
    pub(super) fn threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            threads => threads,
        }
    }

    /// These options for `source`: neurons that are in mxfp4 already stay so, bit for bit, where four
    /// bits are asked for.
    pub(super) fn keeping_mxfp4(&self, source: &dyn Checkpoint) -> Self {
        let is_neuron = |t: &&TensorInfo| matches!(t.id.role, Role::Gate | Role::Up | Role::Down);
        let mut neurons = source.tensors().iter().filter(is_neuron);
        let (c, whole) = (source.config(), |n: u32| n.is_multiple_of(32));
        let stays = is_four_bits(self.ffn)
            // statistics of routing leave neurons in their order
            && (self.stats.is_none() || c.mixture.is_some())
            && !c.ffn_kind.activation.is_sparse()
            && whole(c.d_model)
            && c.banks().all(|bank| whole(bank.neurons))
            && neurons.all(|t| t.source_dtype == "MXFP4");
        Self {
            ffn: if stays { DType::Mxfp4 } else { self.ffn },
            ..self.clone()
        }
    }

    /// The format of a tensor.
    pub(crate) fn dtype_of(&self, id: TensorId) -> DType {
        self.mix.get(&id).copied().unwrap_or(self.dtype(id.role))
    }

    /// The format of the tensors of a role, where `mix` has no other.
    pub(crate) fn dtype(&self, role: Role) -> DType {
        match role {
            Role::Embed | Role::Head | Role::Positions | Role::LayerInputs => self.embedding,
            Role::Q | Role::K | Role::V | Role::O => self.attention,
            Role::ConvIn
            | Role::ConvOut
            | Role::StreamIn
            | Role::StreamOut
            | Role::LayerInputsProj
            | Role::LaurelLeft
            | Role::LaurelRight
            | Role::InputGate
            | Role::InputProj => self.attention,
            Role::Gate | Role::Up | Role::Down => self.ffn,
            Role::PredictorFc1 | Role::PredictorFc2 => DType::F16,
            _ => DType::F32,
        }
    }
}

/// Whether all tensors of the source are floats.
pub(super) fn is_float(source: &dyn Checkpoint) -> bool {
    let mut types = source.tensors().iter().map(|t| t.source_dtype.as_str());
    types.all(|name| matches!(name, "F32" | "F16" | "BF16"))
}

/// Whether weights are rounded to four bits in a format.
fn is_four_bits(dtype: DType) -> bool {
    matches!(dtype, DType::Q4 | DType::Q4k)
}

impl From<QuantArg> for DType {
    fn from(arg: QuantArg) -> Self {
        match arg {
            QuantArg::Q4 => Self::Q4,
            QuantArg::Q4k => Self::Q4k,
            QuantArg::Q8 => Self::Q8,
            QuantArg::F16 => Self::F16,
            QuantArg::F32 => Self::F32,
        }
    }
}
