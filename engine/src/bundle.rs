//! Layout of a neuron bundle: Gate, Up and Down, or Gate and Down.
//!
//! ```text
//! scales inline     [ gate quants | gate scales ]  pad  [ up quants | up scales | down quants | down scales ]  pad
//! scales resident   [ gate quants ]                pad  [ up quants | down quants ]                            pad
//!                   and, in the SCALES section:         [ gate scales | up scales | down scales ] per neuron
//! ```
//!
//! The Gate row comes first so that two-phase loading (PowerInfer-2 §4.4) can read it alone.
//! Without a gate projection (`FfnKind::ungated`) Up is empty, and Gate is the matrix whose output
//! is activated. Offsets and padding belong to `storage`; this file defines their meaning for
//! packer and engine.

pub mod across;

use emberflow_kernels::{DType, GROUP, Row};
use emberflow_storage::container::{Container, Placement};

use crate::error::Error;
use crate::meta::ContainerMeta;

/// The rows of a neuron.
#[derive(Clone, Copy)]
pub struct NeuronRows<'a> {
    /// Gate.
    pub gate: Row<'a>,
    /// Up; `None` without a gate projection.
    pub up: Option<Row<'a>>,
    /// Down.
    pub down: Row<'a>,
}

impl<'a> NeuronRows<'a> {
    /// Its rows: Gate, Up if there is one, Down.
    pub fn matrices(self) -> impl Iterator<Item = Row<'a>> {
        [Some(self.gate), self.up, Some(self.down)]
            .into_iter()
            .flatten()
    }
}

/// Block format and geometry of a neuron's vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeuronFormat {
    /// Block format.
    pub dtype: DType,
    /// Elements per vector (`d_model`, unless experts have another width).
    pub d: usize,
    /// Scales are in the bundle, not in the resident SCALES section.
    pub inline_scales: bool,
    /// There is no Up vector.
    pub ungated: bool,
}

impl NeuronFormat {
    /// The format of a container without banks.
    pub(crate) fn unused(container: &Container, meta: &ContainerMeta) -> Self {
        Self {
            dtype: DType::from_code(container.bundle_dtype()).unwrap_or(DType::Q8),
            d: meta.config.bundle_width() as usize,
            inline_scales: container.geometry().placement == Placement::Inline,
            ungated: meta.config.ffn_kind.ungated,
        }
    }

    /// The format named by `meta`, verified against the container's geometry.
    pub fn of(container: &Container, meta: &ContainerMeta) -> Result<Self, Error> {
        let g = container.geometry();
        let g_dtype = container.bundle_dtype();
        let format = Self {
            dtype: DType::parse(&meta.quant.ffn)
                .filter(|of| !of.is_blocks())
                .ok_or_else(|| Error::Metadata {
                    path: container.path().to_path_buf(),
                    reason: format!("unknown ffn format {:?}", meta.quant.ffn),
                })?,
            d: meta.config.bundle_width() as usize,
            inline_scales: g.placement == Placement::Inline,
            ungated: meta.config.ffn_kind.ungated,
        };
        let stored = [g.gate_len, g.rest_len, g.scales_per_neuron].map(|n| n as usize);
        let expected = [
            format.gate_len(),
            format.rest_len(),
            format.resident_scales(),
        ];
        if g_dtype != format.dtype.code() {
            return Err(Error::Bundles {
                path: container.path().to_path_buf(),
                reason: format!(
                    "the superblock says block format {g_dtype}, the metadata says {}",
                    meta.quant.ffn
                ),
            });
        }
        if stored != expected {
            return Err(Error::Bundles {
                path: container.path().to_path_buf(),
                reason: format!(
                    "(gate, up+down, resident scale) bytes are {stored:?}, \
                     expected {expected:?} for vectors of {} in {}",
                    format.d, meta.quant.ffn
                ),
            });
        }
        if let Some(reason) = format.without_blocks(container, meta) {
            let path = container.path().to_path_buf();
            return Err(Error::Bundles { path, reason });
        }
        Ok(format)
    }

    /// Whether Down's blocks run [`across`] neurons.
    pub fn is_across(self) -> bool {
        self.dtype == DType::Mxfp4
    }

    /// The reason why the model cannot use blocks across neurons; `None` if it can or has none.
    fn without_blocks(self, container: &Container, meta: &ContainerMeta) -> Option<String> {
        let whole = |n: usize| n.is_multiple_of(GROUP);
        let banks = container.banks();
        match () {
            () if !self.is_across() => None,
            () if !whole(self.d) || self.d > across::MOST => Some(format!(
                "a vector of {} elements is not a whole number of mxfp4 blocks",
                self.d
            )),
            () if !banks.iter().all(|bank| whole(bank.neurons as usize)) => {
                Some("the neurons of a bank are not a whole number of mxfp4 blocks".into())
            }
            () if meta.config.ffn_kind.activation.is_sparse() => {
                Some("mxfp4 is supported only for models that compute all neurons".into())
            }
            () => None,
        }
    }

    /// Bytes of one vector's payload without scales.
    pub fn quants(self) -> usize {
        self.dtype.quants_bytes(self.d)
    }

    /// Bytes of one vector's scales.
    pub fn scales(self) -> usize {
        self.dtype.scales_bytes(self.d)
    }

    fn vector(self) -> usize {
        self.quants() + if self.inline_scales { self.scales() } else { 0 }
    }

    /// Payload bytes of the Gate row.
    pub fn gate_len(self) -> usize {
        self.vector()
    }

    /// Payload bytes of the Up vector.
    pub fn up_len(self) -> usize {
        if self.ungated { 0 } else { self.vector() }
    }

    /// Payload bytes of Up and Down.
    pub fn rest_len(self) -> usize {
        self.up_len() + self.vector()
    }

    /// Bytes per neuron in the resident SCALES section.
    pub fn resident_scales(self) -> usize {
        if self.inline_scales {
            0
        } else {
            (2 + self.ups()) * self.scales()
        }
    }

    /// Splits the rest part into Up and Down.
    #[inline(always)]
    pub fn split_rest(self, rest_part: &[u8]) -> (&[u8], &[u8]) {
        rest_part[..self.rest_len()].split_at(self.up_len())
    }

    /// Number of Up vectors.
    fn ups(self) -> usize {
        usize::from(!self.ungated)
    }

    #[inline(always)]
    fn row<'a>(self, bytes: &'a [u8], scales: &'a [u8], part: usize) -> Row<'a> {
        if self.inline_scales {
            Row::inline(self.dtype, self.d, bytes)
        } else {
            let s = self.scales();
            Row::split(self.dtype, self.d, bytes, &scales[part * s..(part + 1) * s])
        }
    }

    /// Gate row from the Gate part of a bundle. `scales`: the neuron's resident scales (empty if
    /// inline).
    #[inline(always)]
    pub fn gate<'a>(self, gate_part: &'a [u8], scales: &'a [u8]) -> Row<'a> {
        self.row(&gate_part[..self.gate_len()], scales, 0)
    }

    /// Up row from its part of the bundle.
    #[inline(always)]
    pub fn up<'a>(self, up: &'a [u8], scales: &'a [u8]) -> Row<'a> {
        self.row(up, scales, 1)
    }

    /// Down column from its part of the bundle.
    #[inline(always)]
    pub fn down<'a>(self, down: &'a [u8], scales: &'a [u8]) -> Row<'a> {
        self.row(down, scales, 1 + self.ups())
    }
}
