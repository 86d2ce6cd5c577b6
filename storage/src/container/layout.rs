//! Location of everything in the file: one function for writer and reader.
//!
//! The writer places everything by [`Layout::compute`]. The reader recomputes the layout from the
//! counts and rejects a file whose stored offsets differ. So a valid file is contiguous and in
//! bounds, with gaps only for alignment. All arithmetic on sizes is here.

pub use super::layout_error::LayoutError;
pub use super::parts::{BankPlace, BankSpec, Extent, TensorSpec};

use super::format::{BANK_RECORD, CHECKSUM_RECORD, SUPERBLOCK_LEN, Section, TENSOR_RECORD};
use super::geometry::BundleGeometry;
use super::limits::{
    MAX_BANKS, MAX_DIMS, MAX_EXPERTS, MAX_FILE, MAX_LAYERS, MAX_META, MAX_NAME, MAX_NEURONS,
    MAX_PREDICTOR, MAX_STATS, MAX_TENSORS, MAX_TOTAL_NEURONS, SECTION_ALIGN, TENSOR_ALIGN,
};
use super::stripes::{STRIPE_CHECKSUM, Stripes};

/// Everything known before the first weight is written.
///
/// Packing the same specification and data twice gives the same bytes, so `meta` should not contain
/// a time stamp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Bundle geometry.
    pub geometry: BundleGeometry,
    /// Block format of the bundles; opaque here.
    pub bundle_dtype: u32,
    /// JSON metadata; opaque here.
    pub meta: Vec<u8>,
    /// Activation statistics; opaque here, may be empty.
    pub stats: Vec<u8>,
    /// Bytes of predictor weights; 0 for none.
    pub predictor_len: u64,
    /// Dense tensors in file order.
    pub tensors: Vec<TensorSpec>,
    /// Banks in file order, strictly ascending by (layer, expert).
    pub banks: Vec<BankSpec>,
    /// Identifies the source's content, for instance by a hash of the checkpoint. Not stored; a
    /// pack resumes only for the same source.
    pub source: String,
}

/// The sizes that determine a layout.
#[derive(Debug, Clone, Copy)]
pub struct Counts<'a> {
    /// Bundle geometry.
    pub geometry: &'a BundleGeometry,
    /// Bytes of JSON metadata.
    pub meta_len: u64,
    /// Bytes of activation statistics.
    pub stats_len: u64,
    /// Bytes of predictor weights.
    pub predictor_len: u64,
    /// Dense tensors in file order.
    pub tensors: &'a [TensorSpec],
    /// Banks in file order.
    pub banks: &'a [BankSpec],
}

impl<'a> From<&'a Spec> for Counts<'a> {
    fn from(spec: &'a Spec) -> Self {
        Self {
            geometry: &spec.geometry,
            meta_len: spec.meta.len() as u64,
            stats_len: spec.stats.len() as u64,
            predictor_len: spec.predictor_len,
            tensors: &spec.tensors,
            banks: &spec.banks,
        }
    }
}

/// Offsets of every section, tensor and bank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Sections in file order, indexed by [`Section`].
    pub sections: [Extent; Section::COUNT],
    /// Dense tensors in file order.
    pub tensors: Vec<Extent>,
    /// Their stripes.
    pub stripes: Vec<Stripes>,
    /// Banks in file order.
    pub banks: Vec<BankPlace>,
    /// Bytes of the container, a multiple of 4096.
    pub file_len: u64,
}

impl Layout {
    /// Computes the layout.
    ///
    /// # Errors
    /// If a size exceeds a limit of the format, overflows, or an entry is malformed.
    pub fn compute<'a>(counts: impl Into<Counts<'a>>) -> Result<Self, LayoutError> {
        let counts = counts.into();
        counts.geometry.check()?;
        limit("metadata length", counts.meta_len, MAX_META)?;
        limit("statistics length", counts.stats_len, MAX_STATS)?;
        limit("predictor length", counts.predictor_len, MAX_PREDICTOR)?;
        check_tensors(counts.tensors)?;
        let neurons = check_banks(counts.banks)?;
        let (tensor_count, bank_count) = (counts.tensors.len() as u64, counts.banks.len() as u64);

        // Tensor and bank places are first relative to their section.
        let mut dense = Cursor::new("dense tensors");
        let mut tensors = place_tensors(counts.tensors, &mut dense)?;
        let (stripes, stripe_count) = stripes_of(counts.tensors);
        let mut bundles = Cursor::new("bundles");
        let mut scales = Cursor::new("scales");
        let mut banks = place_banks(&counts, &mut bundles, &mut scales)?;

        let mut file = Cursor {
            at: SUPERBLOCK_LEN as u64,
            ..Cursor::new("file")
        };
        let mut sections = [Extent::default(); Section::COUNT];
        for (section, place) in Section::ALL.into_iter().zip(&mut sections) {
            file.align(SECTION_ALIGN)?;
            *place = file.take(match section {
                Section::Meta => counts.meta_len,
                Section::Tensors => tensor_count * TENSOR_RECORD as u64,
                Section::Banks => bank_count * BANK_RECORD as u64,
                Section::Checksums => {
                    neurons * CHECKSUM_RECORD as u64 + stripe_count * STRIPE_CHECKSUM as u64
                }
                Section::Scales => scales.at,
                Section::Stats => counts.stats_len,
                Section::Predictor => counts.predictor_len,
                Section::Dense => dense.at,
                Section::Bundles => bundles.at,
            })?;
        }
        file.align(SECTION_ALIGN)?;

        let start = |s: Section| sections[s as usize].offset;
        for tensor in &mut tensors {
            tensor.offset += start(Section::Dense);
        }
        for bank in &mut banks {
            bank.data.offset += start(Section::Bundles);
            bank.scales.offset += start(Section::Scales);
        }
        Ok(Self {
            sections,
            tensors,
            stripes,
            banks,
            file_len: file.at,
        })
    }

    /// Location of a section.
    #[must_use]
    pub fn section(&self, section: Section) -> Extent {
        self.sections[section as usize]
    }
}

/// Places dense tensors one behind the other.
fn place_tensors(tensors: &[TensorSpec], dense: &mut Cursor) -> Result<Vec<Extent>, LayoutError> {
    let mut places = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        dense.align(TENSOR_ALIGN)?;
        places.push(dense.take(tensor.len)?);
    }
    Ok(places)
}

/// The stripes of all tensors, and their number. Each tensor has at most one for 8 KiB, so that no sum overflows.
fn stripes_of(tensors: &[TensorSpec]) -> (Vec<Stripes>, u64) {
    let mut count = 0;
    let stripes = tensors.iter().map(|tensor| {
        let stripes = Stripes::new(&tensor.dims, tensor.len, count);
        count += stripes.count();
        stripes
    });
    (stripes.collect(), count)
}

/// Places the bundles and the scales of banks, each kind one after the other, and counts their
/// checksums.
fn place_banks(
    counts: &Counts<'_>,
    bundles: &mut Cursor,
    scales: &mut Cursor,
) -> Result<Vec<BankPlace>, LayoutError> {
    let (mut places, mut first_checksum) = (Vec::with_capacity(counts.banks.len()), 0u64);
    for bank in counts.banks {
        bundles.align(SECTION_ALIGN)?;
        // Both factors are bounded by check_banks and geometry.check.
        let n = u64::from(bank.neurons);
        places.push(BankPlace {
            data: bundles.take(n * u64::from(counts.geometry.stride))?,
            scales: scales.take(n * u64::from(counts.geometry.scales_per_neuron))?,
            first_checksum,
        });
        first_checksum += n;
    }
    Ok(places)
}

struct Cursor {
    at: u64,
    what: &'static str,
}

impl Cursor {
    fn new(what: &'static str) -> Self {
        Self { at: 0, what }
    }

    fn align(&mut self, to: u64) -> Result<(), LayoutError> {
        self.at = self
            .at
            .checked_next_multiple_of(to)
            .ok_or(LayoutError::Overflow { what: self.what })?;
        Ok(())
    }

    fn take(&mut self, len: u64) -> Result<Extent, LayoutError> {
        let offset = self.at;
        self.at = offset
            .checked_add(len)
            .ok_or(LayoutError::Overflow { what: self.what })?;
        limit(self.what, self.at, MAX_FILE)?;
        Ok(Extent { offset, len })
    }
}

fn limit(what: &'static str, found: u64, limit: u64) -> Result<(), LayoutError> {
    if found > limit {
        return Err(LayoutError::Limit { what, found, limit });
    }
    Ok(())
}

fn check_tensors(tensors: &[TensorSpec]) -> Result<(), LayoutError> {
    limit("number of tensors", tensors.len() as u64, MAX_TENSORS)?;
    let mut seen = std::collections::HashMap::with_capacity(tensors.len());
    for (index, tensor) in tensors.iter().enumerate() {
        let name = &tensor.name;
        let visible = name.bytes().all(|b| b.is_ascii_graphic());
        if name.is_empty() || name.len() > MAX_NAME || !visible {
            return Err(LayoutError::TensorName {
                index,
                name: name.clone(),
            });
        }
        if let Some(first) = seen.insert(name.as_str(), index) {
            return Err(LayoutError::DuplicateTensor {
                first,
                second: index,
                name: name.clone(),
            });
        }
        let dims = &tensor.dims;
        let elements = dims
            .iter()
            .try_fold(1u64, |n, &d| n.checked_mul(d))
            .unwrap_or(0);
        if dims.is_empty() || dims.len() > MAX_DIMS || elements == 0 {
            return Err(LayoutError::TensorShape {
                name: name.clone(),
                dims: dims.clone(),
            });
        }
        if tensor.len == 0 {
            return Err(LayoutError::TensorEmpty { name: name.clone() });
        }
    }
    Ok(())
}

/// Returns the number of neurons of all banks.
fn check_banks(banks: &[BankSpec]) -> Result<u64, LayoutError> {
    limit("number of banks", banks.len() as u64, MAX_BANKS)?;
    let (mut total, mut last) = (0u64, None);
    for (index, bank) in banks.iter().enumerate() {
        let BankSpec {
            layer,
            expert,
            neurons,
            ..
        } = *bank;
        limit("layer number", layer.into(), u64::from(MAX_LAYERS - 1))?;
        limit("expert number", expert.into(), u64::from(MAX_EXPERTS - 1))?;
        limit("neurons of a bank", neurons.into(), MAX_NEURONS.into())?;
        if last >= Some((layer, expert)) {
            return Err(LayoutError::BankOrder {
                index,
                layer,
                expert,
            });
        }
        if neurons == 0 {
            return Err(LayoutError::BankEmpty {
                index,
                layer,
                expert,
            });
        }
        last = Some((layer, expert));
        total += u64::from(neurons);
        limit("number of neurons", total, MAX_TOTAL_NEURONS)?;
    }
    Ok(total)
}
