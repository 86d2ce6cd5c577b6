//! The only [`Checkpoint`] implementation: tensors in files of any format.
//!
//! A reader parses its format's headers into [`Found`] tensors; [`Store::new`] checks them against
//! the configuration; rows are then read by position.

mod bands;
mod found;
mod identity;
mod inverse;
mod joined;
mod packed;
mod read;
mod stored;
mod table;
mod tied;

pub(crate) use self::found::{
    Found, Gains, Layout, RotaryHeads, RowGroups, ScaleKind, Scales, rotary_order,
};
pub(crate) use self::packed::{Common, Groups, Offsets, Packed, Parts};
pub(crate) use self::table::{Elements, Table};

use emberflow_kernels::Block;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use xxhash_rust::xxh3::Xxh3;

use self::inverse::rate;
use crate::checkpoint::{Checkpoint, SamplingDefaults, TensorInfo};
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::file::DataFile;
use crate::names::{Required, Role, TensorId, required};
use crate::rules::TextRules;
use crate::stored_tensors::{Bands, StoredTensors};

/// Bytes read from a file at a time.
const READ_BYTES: usize = 1 << 20;
/// Bytes at each end of a file that enter the fingerprint.
const FINGERPRINT_BYTES: u64 = 1 << 20;

/// Everything in a checkpoint except the tensors.
pub(crate) struct About {
    pub(crate) path: PathBuf,
    /// The file with the configuration, for error messages.
    pub(crate) config_path: PathBuf,
    pub(crate) config: ModelConfig,
    pub(crate) tokenizer_json: String,
    pub(crate) chat_template: Option<String>,
    pub(crate) tool_template: Option<String>,
    pub(crate) sampling: SamplingDefaults,
    pub(crate) rules: TextRules,
    pub(crate) named_tokens: BTreeMap<String, String>,
    pub(crate) quantization: Option<&'static str>,
}

/// An opened, checked checkpoint.
pub(crate) struct Store {
    about: About,
    files: Vec<DataFile>,
    infos: Vec<TensorInfo>,
    places: Vec<Place>,
    index: HashMap<TensorId, usize>,
    fingerprint: u64,
    /// The last transposed matrix, by its index in `infos` and its head.
    transposed: Mutex<Option<([usize; 2], Vec<f32>)>>,
    /// The last scales of a row of blocks, by the tensor's index in `infos` and the row.
    scales: Mutex<Option<([usize; 2], Vec<f32>)>>,
    /// Rows of packed matrices that are stored transposed, the last used at the end.
    bands: Mutex<Vec<packed::Band>>,
    /// Most bytes of these.
    band_bytes: usize,
    raw: Mutex<Vec<u8>>,
}

/// Location of rows that do not follow the tensor's first ones.
#[derive(Debug)]
struct LaterRows {
    /// The first of these rows.
    first: usize,
    file: usize,
    offset: u64,
}

/// Location of a tensor.
#[derive(Debug)]
struct Place {
    file: usize,
    offset: u64,
    dtype: DType,
    layout: Layout,
    /// Columns of the stored matrix.
    cols: usize,
    /// Bytes of a stored row.
    row_bytes: usize,
    scales: Option<Scales>,
    /// The parts of a packed matrix.
    packed: Option<Packed>,
    /// For a tensor stored as several.
    rest: Vec<LaterRows>,
    /// Factors of its presented rows.
    gains: Gains,
}

impl Store {
    /// Checks `found` against the configuration. `spell` returns the format's name of a missing
    /// tensor, for errors.
    pub(crate) fn new(
        about: About,
        files: Vec<DataFile>,
        found: Vec<Found>,
        spell: &dyn Fn(TensorId) -> String,
    ) -> Result<Self, Error> {
        about.config.validate(&about.config_path)?;
        let mut by_id = HashMap::with_capacity(found.len());
        for tensor in found {
            let path = files[tensor.file].path.clone();
            if let Some(other) = by_id.insert(tensor.id, tensor) {
                return Err(Error::Duplicate {
                    path,
                    what: "tensor",
                    name: other.name,
                });
            }
        }
        let mut store = Self {
            infos: Vec::new(),
            places: Vec::new(),
            index: HashMap::new(),
            fingerprint: 0,
            transposed: Mutex::new(None),
            scales: Mutex::new(None),
            bands: Mutex::default(),
            band_bytes: packed::BAND_BYTES,
            raw: Mutex::new(Vec::new()),
            about,
            files,
        };
        for wanted in required(&store.about.config) {
            store.take(&mut by_id, wanted, spell)?;
        }
        store.take_predictors(&mut by_id, spell)?;
        if let Some(tensor) = by_id.into_values().min_by_key(|tensor| tensor.id) {
            return Err(Error::UnexpectedTensor {
                path: store.files[tensor.file].path.clone(),
                tensor: tensor.name,
                family: store.about.config.family,
            });
        }
        store.fingerprint = store.compute_fingerprint()?;
        Ok(store)
    }

    /// Moves one required tensor from `by_id` into the table.
    fn take(
        &mut self,
        by_id: &mut HashMap<TensorId, Found>,
        wanted: Required,
        spell: &dyn Fn(TensorId) -> String,
    ) -> Result<(), Error> {
        let Required { id, rows, cols } = wanted;
        let Some(mut tensor) = by_id.remove(&id) else {
            let expected = plain_shape(&self.about.config, wanted);
            return Err(Error::MissingTensor {
                path: self.about.path.clone(),
                tensor: spell(id),
                expected: shape_text(&expected),
            });
        };
        let own = tensor.shape.first().copied().unwrap_or(0);
        let rest = match id.role {
            Role::NGramTable | Role::QNorm | Role::KNorm | Role::DeltaIn | Role::DeltaConv => {
                self.join(by_id, &mut tensor, wanted)?
            }
            _ => Vec::new(),
        };
        let stored = stored_shape(&self.about.config, wanted, tensor.layout);
        let path = &self.files[tensor.file].path;
        if tensor.shape != stored {
            return Err(Error::WrongShape {
                path: path.clone(),
                tensor: tensor.name,
                found: shape_text(&tensor.shape),
                expected: shape_text(&stored),
            });
        }
        let (stored_rows, stored_cols) = match tensor.layout {
            Layout::EveryElement(_) => (2 * rows, cols),
            Layout::GroupedElements(_) => (1, stored[0]),
            // the others are already checked
            _ if !rest.is_empty() && id.role.is_vector() => (1, cols),
            _ if id.role.is_vector() => (rows, cols),
            _ if !rest.is_empty() => (own, stored[1]),
            _ => (stored[0], stored[1]),
        };
        let row_bytes = check_extent(&self.files[tensor.file], &tensor, stored_rows, stored_cols)?;
        let source_bytes = match &tensor.packed {
            Some(packed) => packed.bytes(stored_rows),
            None => source_bytes(tensor.dtype, rows, cols),
        };
        self.index.insert(id, self.infos.len());
        self.places.push(Place {
            file: tensor.file,
            offset: tensor.offset,
            dtype: tensor.dtype,
            layout: tensor.layout,
            cols: stored_cols,
            row_bytes,
            scales: tensor.scales,
            packed: tensor.packed,
            rest,
            gains: tensor.gains,
        });
        self.infos.push(TensorInfo {
            id,
            source_name: tensor.name,
            rows,
            cols,
            source_dtype: tensor.dtype.name().to_owned(),
            source_bytes,
        });
        Ok(())
    }

    /// Predictors are optional, each with its own rank; an incomplete one is an error.
    fn take_predictors(
        &mut self,
        by_id: &mut HashMap<TensorId, Found>,
        spell: &dyn Fn(TensorId) -> String,
    ) -> Result<(), Error> {
        let (d, ffn) = (
            self.about.config.d_model as usize,
            self.about.config.ffn as usize,
        );
        let predicted = match self.about.config.mixture {
            None => self.about.config.layers,
            Some(_) => 0,
        };
        for layer in 0..predicted {
            let fc1 = TensorId::layer(Role::PredictorFc1, layer);
            let fc2 = TensorId::layer(Role::PredictorFc2, layer);
            let rank = match (by_id.get(&fc1), by_id.get(&fc2)) {
                (None, None) => continue,
                (Some(first), _) => first.shape.first(),
                (None, Some(second)) => second.shape.last(),
            };
            // A rank of 0, or no rank, fails the shape check.
            let rank = rank.copied().unwrap_or(0).max(1);
            self.take(
                by_id,
                Required {
                    id: fc1,
                    rows: rank,
                    cols: d,
                },
                spell,
            )?;
            self.take(
                by_id,
                Required {
                    id: fc2,
                    rows: ffn,
                    cols: rank,
                },
                spell,
            )?;
        }
        Ok(())
    }

    /// Refuses rows of `cols` elements of tensor `at`, from `first` on, with a number that is NaN or infinite.
    fn check_finite(
        &self,
        at: usize,
        first: usize,
        cols: usize,
        rows: &[f32],
    ) -> Result<(), Error> {
        match rows.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(index) => Err(Error::NotFinite {
                path: self.files[self.places[at].file].path.clone(),
                tensor: self.infos[at].source_name.clone(),
                row: first + index / cols,
                col: index % cols,
                found: rows[index],
            }),
        }
    }

    fn compute_fingerprint(&self) -> Result<u64, Error> {
        let mut hash = Xxh3::new();
        let mut part = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        for (info, place) in self.infos.iter().zip(&self.places) {
            part(info.id.to_string().as_bytes());
            part(info.source_name.as_bytes());
            part(info.source_dtype.as_bytes());
            for number in [
                info.rows as u64,
                info.cols as u64,
                place.file as u64,
                place.offset,
            ] {
                part(&number.to_le_bytes());
            }
            for other in &place.rest {
                part(&(other.file as u64).to_le_bytes());
                part(&other.offset.to_le_bytes());
            }
            if let Some(packed) = &place.packed {
                part(format!("{:?}", packed.parts).as_bytes());
            }
            for (row, gain) in &place.gains {
                part(&(*row as u64).to_le_bytes());
                part(&gain.to_le_bytes());
            }
        }
        // The name may come from the folder; the fingerprint must not depend on the path.
        let config = ModelConfig {
            name: String::new(),
            ..self.about.config.clone()
        };
        part(identity::of(&config).as_bytes());
        part(self.about.tokenizer_json.as_bytes());
        part(self.about.chat_template.as_deref().unwrap_or("").as_bytes());
        if let Some(template) = &self.about.tool_template {
            part(template.as_bytes());
        }
        for file in &self.files {
            part(&file.len.to_le_bytes());
            let size = file.len.min(FINGERPRINT_BYTES);
            let mut bytes = vec![0; size as usize];
            for offset in [0, file.len - size] {
                file.read_at(&mut bytes, offset, &|| "the fingerprint".into())?;
                part(&bytes);
            }
        }
        Ok(hash.digest())
    }
}

impl Checkpoint for Store {
    fn path(&self) -> &Path {
        &self.about.path
    }

    fn config(&self) -> &ModelConfig {
        &self.about.config
    }

    fn tokenizer_json(&self) -> &str {
        &self.about.tokenizer_json
    }

    fn chat_template(&self) -> Option<&str> {
        self.about.chat_template.as_deref()
    }

    fn tool_template(&self) -> Option<&str> {
        self.about.tool_template.as_deref()
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.about.sampling
    }

    fn rules(&self) -> TextRules {
        self.about.rules.clone()
    }

    fn named_tokens(&self) -> BTreeMap<String, String> {
        self.about.named_tokens.clone()
    }

    fn quantization(&self) -> Option<&'static str> {
        self.about.quantization
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn read_rows(
        &self,
        id: TensorId,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let Some(&at) = self.index.get(&id) else {
            return Err(Error::NoSuchTensor {
                path: self.about.path.clone(),
                id,
            });
        };
        let (rows, cols) = (self.infos[at].rows, self.infos[at].cols);
        let in_range = first.checked_add(count).is_some_and(|end| end <= rows);
        if !in_range || count.checked_mul(cols) != Some(out.len()) {
            return Err(Error::RowRange {
                path: self.about.path.clone(),
                id,
                found: format!("{count} rows from row {first} into {} numbers", out.len()),
                expected: format!("rows below {rows}, {cols} numbers each"),
            });
        }
        match self.places[at].layout {
            Layout::AsIs => self.read_stored(at, first, out)?,
            Layout::PlusOne => {
                self.read_stored(at, first, out)?;
                out.iter_mut().for_each(|value| *value += 1.0);
            }
            Layout::Negative => {
                self.read_stored(at, first, out)?;
                out.iter_mut().for_each(|value| *value = -*value);
            }
            Layout::Grouped(groups) => self.read_grouped(at, first, out, groups)?,
            Layout::NegativeLog => {
                self.read_stored(at, first, out)?;
                // rounded once, to the value that converters to GGUF write
                out.iter_mut().for_each(|value| *value = rate(*value));
            }
            Layout::Interleaved(heads) => self.read_interleaved(at, first, out, heads)?,
            Layout::InterleavedColumns(heads) => {
                self.read_interleaved_columns(at, first, out, heads)?;
            }
            Layout::TransposedHeads { stored, cols } => {
                self.read_transposed_heads(at, first, out, [stored, cols])?;
            }
            Layout::Transposed | Layout::TransposedEvery(_) | Layout::TransposedPart { .. } => {
                self.read_transposed(at, first, out)?;
            }
            Layout::GroupedElements(groups) => self.read_grouped_elements(at, out, groups)?,
            Layout::EveryRow(place) => self.read_every_row(at, first, out, place)?,
            Layout::EveryElement(place) => self.read_every_element(at, first, out, place)?,
        }
        self.places[at].apply_gains(first, cols, out);
        self.check_finite(at, first, cols, out)
    }

    fn read_q4_k(&self, id: TensorId, row: usize, out: &mut Vec<u8>) -> Result<bool, Error> {
        let Some(&at) = self.index.get(&id) else {
            return Err(Error::NoSuchTensor {
                path: self.about.path.clone(),
                id,
            });
        };
        let place = &self.places[at];
        let stored = match place.layout {
            Layout::AsIs => row,
            Layout::Interleaved(heads) => heads.stored(row),
            _ => return Ok(false),
        };
        if place.dtype != DType::Block(Block::Q4K) || row >= self.infos[at].rows {
            return Ok(false);
        }
        out.resize(place.row_bytes, 0);
        let offset = place.offset + stored as u64 * place.row_bytes as u64;
        self.files[place.file].read_at(out, offset, &|| {
            format!("tensor {}", self.infos[at].source_name)
        })?;
        Ok(true)
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn into_stored(self: Box<Self>, bands: Bands) -> Option<Box<dyn StoredTensors>> {
        Some(self.into_rows(bands))
    }
}

/// The shape of a tensor as stored in such a layout.
pub(crate) fn stored_shape(config: &ModelConfig, wanted: Required, layout: Layout) -> Vec<usize> {
    let Required { rows, cols, .. } = wanted;
    let mut stored = plain_shape(config, wanted);
    match layout {
        Layout::Transposed => stored = vec![cols, rows],
        Layout::TransposedEvery(_) => stored = vec![cols, 2 * rows],
        Layout::TransposedPart { stored: width, .. } => stored = vec![cols, width],
        Layout::GroupedElements(groups) => {
            stored = vec![cols / groups.taken().max(1) * groups.stored];
        }
        Layout::EveryRow(_) => stored = vec![2 * rows, cols],
        Layout::EveryElement(_) => stored.iter_mut().rev().take(1).for_each(|n| *n *= 2),
        Layout::Grouped(groups) => {
            stored = vec![rows / groups.taken().max(1) * groups.stored, cols];
        }
        Layout::TransposedHeads {
            stored: of_head,
            cols,
        } => {
            stored = vec![rows / cols.max(1) * of_head, cols];
        }
        // as presented
        _ => {}
    }
    stored
}

/// The shape of a tensor that is stored as presented: a vector has one dimension, and a layer's
/// experts add one.
fn plain_shape(config: &ModelConfig, Required { id, rows, cols }: Required) -> Vec<usize> {
    let experts = config.experts as usize;
    match id.role {
        Role::GateBias | Role::UpBias | Role::DownBias if config.mixture_of(id.layer).is_some() => {
            vec![experts, rows * cols / experts]
        }
        role if role.is_vector() => vec![rows * cols],
        _ => vec![rows, cols],
    }
}

/// A buffer's contents, whatever has happened to the thread that used it last.
fn lock<T>(buffer: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that a tensor's rows are whole blocks inside its file; returns the bytes of a row.
fn check_extent(file: &DataFile, tensor: &Found, rows: usize, cols: usize) -> Result<usize, Error> {
    if let Some(packed) = &tensor.packed {
        // Its parts are inside their files.
        return match packed.holds(rows, cols) {
            true => Ok(cols),
            false => Err(Error::WrongShape {
                path: file.path.clone(),
                tensor: tensor.name.clone(),
                found: shape_text(&packed.parts.shape),
                expected: shape_text(&[rows, cols]),
            }),
        };
    }
    let (Some(row_bytes), Some(bytes)) =
        (tensor.dtype.row_bytes(cols), tensor.dtype.bytes(rows, cols))
    else {
        return Err(Error::WrongShape {
            path: file.path.clone(),
            tensor: tensor.name.clone(),
            found: shape_text(&tensor.shape),
            expected: format!(
                "rows of a multiple of {} for {}",
                tensor.dtype.block().0,
                tensor.dtype.name()
            ),
        });
    };
    match tensor.offset.checked_add(bytes) {
        Some(end) if end <= file.len => Ok(row_bytes),
        end => Err(Error::Truncated {
            path: file.path.clone(),
            what: format!("tensor {}", tensor.name),
            needed: end.unwrap_or(u64::MAX),
            len: file.len,
        }),
    }
}

/// Bytes of `rows · cols` elements of a type, including separately stored scales.
pub(crate) fn source_bytes(dtype: DType, rows: usize, cols: usize) -> u64 {
    let (elements, bytes) = dtype.block();
    let apart = usize::from(dtype == DType::Mxfp4Pairs);
    let blocks = (rows as u64).saturating_mul(cols as u64) / elements as u64;
    blocks.saturating_mul((bytes + apart) as u64)
}

/// `[2, 3]`.
pub(crate) fn shape_text(shape: &[usize]) -> String {
    format!("{shape:?}")
}

/// The context of a model trained for `trained` positions whose attention sees only `most` positions
/// chosen by an indexer (`key`): longer texts are refused, with this reason.
pub(crate) fn indexed_context(path: &Path, key: &str, trained: u32, most: u32) -> u32 {
    if trained > most {
        let path = path.display();
        tracing::warn!(
            "{path}: the context is {most} ({key}) of {trained} positions: attention to what an \
             indexer chooses from more is not implemented"
        );
    }
    trained.min(most)
}

/// Warns that a checkpoint contains image and sound tensors, which are not read.
pub(crate) fn warn_of_left_out(path: &Path, tensors: u32) {
    if tensors > 0 {
        let path = path.display();
        tracing::warn!(
            "{path}: {tensors} tensors of images and sounds are left out: the model reads text alone"
        );
    }
}
