//! Options of `pack`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use emberflow_kernels::DType;
use emberflow_models::names::{Role, TensorId};
use emberflow_models::{Checkpoint, TensorInfo};
use emberflow_storage::container::Prefer;

use crate::cli::QuantArg;
use crate::windows::Source;

/// Options of `pack`.
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// Format of the neuron bundles.
    pub ffn: DType,
    /// Format of the attention matrices.
    pub attention: DType,
    /// Format of embedding and head.
    pub embedding: DType,
    /// Statistics that order the neurons: file name and content.
    pub stats: Option<(PathBuf, Vec<u8>)>,
    /// Place neurons that are active together next to each other, if the statistics record it.
    pub coactivation: bool,
    /// Sector size; `None` for what direct I/O needs at the output.
    pub sector: Option<u32>,
    /// Where to store scales.
    pub scales: Prefer,
    /// Replace an existing output.
    pub force: bool,
    /// Text to calibrate on.
    pub calibrate: Option<CalibrationText>,
    /// CPU threads; 0 = one per core. The result does not depend on them.
    pub threads: usize,
    /// Target size of the container in bytes, for which formats are chosen.
    pub size: Option<u64>,
    /// Which formats follow the source.
    pub by_source: BySource,
    /// Those are the source's own, also of floats, and no neuron is in a bundle.
    pub keep: bool,
    /// Non-FFN matrices whose format differs from their role's.
    pub mix: BTreeMap<TensorId, DType>,
    /// Flush to disk, and record progress, after this many bytes.
    pub durable_bytes: u64,
}

/// Which formats follow the source; the others are given by the options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BySource {
    /// Neurons.
    pub ffn: bool,
    /// Attention matrices.
    pub attention: bool,
    /// Embedding and head.
    pub embedding: bool,
}

impl BySource {
    /// All formats.
    pub const ALL: Self = Self {
        ffn: true,
        attention: true,
        embedding: true,
    };
}

/// A calibration text.
#[derive(Debug, Clone)]
pub struct CalibrationText {
    /// The text.
    pub source: Arc<Source>,
    /// Tokens to use.
    pub tokens: u32,
}

impl PackOptions {
    /// Defaults for a format: embedding and head are q8 with 4-bit formats, q8c with q4c.
    pub fn new(quant: DType) -> Self {
        Self {
            ffn: quant,
            attention: quant,
            embedding: match quant {
                DType::Q4c => DType::Q8c,
                _ if is_four_bits(quant) => DType::Q8,
                _ => quant,
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
            keep: false,
            mix: BTreeMap::new(),
            durable_bytes: 8 << 20,
        }
    }

    /// At least as many bits as the source; 4.5 for floats.
    pub fn as_source() -> Self {
        Self {
            by_source: BySource::ALL,
            ..Self::new(DType::Q4k)
        }
    }

    /// All formats of the source.
    pub fn keep() -> Self {
        Self {
            keep: true,
            ..Self::as_source()
        }
    }

    /// CPU threads.
    pub(super) fn threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            threads => threads,
        }
    }

    /// These options for `source`: with a 4-bit format, MXFP4 neurons are copied unchanged.
    pub(super) fn keeping_mxfp4(&self, source: &dyn Checkpoint) -> Self {
        let is_neuron = |t: &&TensorInfo| matches!(t.id.role, Role::Gate | Role::Up | Role::Down);
        let mut neurons = source.tensors().iter().filter(is_neuron);
        let (c, whole) = (source.config(), |n: u32| n.is_multiple_of(32));
        let stays = is_four_bits(self.ffn)
            // Routing statistics do not reorder neurons.
            && (self.stats.is_none() || c.mixture.is_some())
            && !c.ffn_kind.activation.is_sparse()
            && whole(c.bundle_width())
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

    /// The format for tensors of a role, unless `mix` overrides it.
    pub(crate) fn dtype(&self, role: Role) -> DType {
        match role {
            Role::Embed | Role::Head | Role::Positions | Role::LayerInputs | Role::NGramTable => {
                self.embedding
            }
            role if role.is_projection() => self.attention,
            Role::Gate | Role::Up | Role::Down => self.ffn,
            Role::PredictorFc1 | Role::PredictorFc2 => DType::F16,
            _ => DType::F32,
        }
    }
}

/// Whether all weights of the source are floats; lists of numbers do not count.
pub(super) fn is_float(source: &dyn Checkpoint) -> bool {
    let tensors = source.tensors().iter();
    let mut weights = tensors.filter(|t| t.id.role != Role::TokenExperts);
    weights.all(|t| is_float_name(&t.source_dtype))
}

/// Whether a type of the source's tensors is of floats.
pub(super) fn is_float_name(name: &str) -> bool {
    matches!(name, "F32" | "F16" | "BF16")
}

/// Whether a format rounds weights to 4 bits.
fn is_four_bits(dtype: DType) -> bool {
    matches!(dtype, DType::Q4 | DType::Q4k | DType::Q4c)
}

impl From<QuantArg> for DType {
    fn from(arg: QuantArg) -> Self {
        match arg {
            QuantArg::Q4 => Self::Q4,
            QuantArg::Q4k => Self::Q4k,
            QuantArg::Q4c => Self::Q4c,
            QuantArg::Q8 => Self::Q8,
            QuantArg::Q8c => Self::Q8c,
            QuantArg::F16 => Self::F16,
            QuantArg::F32 => Self::F32,
        }
    }
}
