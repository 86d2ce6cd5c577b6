//! `model.safetensors`: every tensor at the location that the reader expects, in f32.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::config::{ModelConfig, Parallel};
use crate::error::Error;
use crate::families::{self, Quirk};
use crate::file::flush;
use crate::hf::safetensors::Raw;
use crate::hf::{identify, ngrams};
use crate::names::{NameTable, Named, Required, Role, TensorId};
use crate::store::{Layout, stored_shape};
use crate::{fused, stacked};

/// Elements written at once. Few in tests, so that regions have several chunks.
const CHUNK: usize = if cfg!(test) { 7 } else { 1 << 16 };

/// A `model.safetensors` being written.
pub(super) struct Weights {
    path: PathBuf,
    file: File,
    slots: Vec<Slot>,
    by_id: HashMap<TensorId, usize>,
    regions: Vec<Region>,
    bytes: Vec<u8>,
}

/// A tensor being received.
struct Slot {
    want: Required,
    /// Rows received so far.
    rows: usize,
    /// Its region of the file, and its layout there.
    region: usize,
    layout: Layout,
}

/// Elements of the file that hold one or several tensors.
struct Region {
    /// First byte.
    offset: u64,
    elements: usize,
    /// Remaining rows of all its tensors.
    left: usize,
    /// Elements written after all rows have arrived, if rows are not stored as such.
    whole: Option<Vec<f32>>,
    /// Stored as 64-bit integers.
    integers: bool,
}

/// A tensor of the file.
struct FileTensor {
    raw: Raw,
    /// Bytes.
    len: u64,
}

/// The names for writing a model's tensors.
fn names_to_write(config: &ModelConfig) -> &'static NameTable {
    let family = families::of(&config.family);
    let two_norms = config.form.parallel == Parallel::TwoNorms;
    let names = family.names_of_two_norms.filter(|_| two_norms);
    names.or(family.names_to_write).unwrap_or(family.names)
}

/// The tensors of the file, in the order of those that they hold.
fn entries(
    path: &Path,
    config: &ModelConfig,
    tensors: &[Required],
) -> Result<Vec<FileTensor>, Error> {
    let names = names_to_write(config);
    let (mut all, mut known) = (Vec::<FileTensor>::new(), HashSet::new());
    let mut end = 0u64;
    let mut push = |name: String, shape: Vec<usize>, integers: bool| {
        let size = if integers { 8 } else { 4 };
        let product = |len: u64, dim: &usize| len.checked_mul(*dim as u64);
        let len = shape.iter().try_fold(size, product);
        let next = len.and_then(|len| Some((len, end.checked_add(len)?)));
        let Some((len, next)) = next else {
            let reason = format!("tensor {name} of {shape:?} is too large");
            return Err(Error::export(path, reason));
        };
        if !known.insert(name.clone()) {
            return Ok(());
        }
        let dtype = if integers { "I64" } else { "F32" };
        let raw = Raw {
            name,
            dtype: dtype.into(),
            shape,
            offset: end,
            packed: None,
            powers: None,
        };
        all.push(FileTensor { raw, len });
        end = next;
        Ok(())
    };
    for want in tensors {
        let id = want.id;
        let parts = names.parts_of(id, config);
        if !parts.is_empty() {
            // one after the other, so that they are one region
            for (name, rows) in parts {
                push(name, vec![rows, want.cols], false)?;
            }
            continue;
        }
        let (name, named) = match id.role {
            Role::NGramTable => (ngrams::table_name(config), Some(Named::One(id))),
            _ => match names.stored(id, config) {
                Some((name, named)) => (name, Some(named)),
                None => (id.to_string(), None),
            },
        };
        let shape = match named {
            Some(Named::Fused(fused, layer)) => fused::shape(fused, layer, config),
            Some(Named::Stacked(stack, _)) => stacked::shape(stack, config),
            Some(Named::One(_)) | None => shape_of(want, config),
        };
        push(name, shape, id.role == Role::TokenExperts)?;
    }
    Ok(all)
}

/// The file's beginning, up to the first tensor's bytes.
fn header_of(entries: &[FileTensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    for FileTensor { raw, len } in entries {
        let offsets = [raw.offset, raw.offset + len];
        let entry = json!({"dtype": raw.dtype, "shape": raw.shape, "data_offsets": offsets});
        header.insert(raw.name.clone(), entry);
    }
    let mut header = Value::Object(header);
    // The start of the tensors enters the fingerprint of the written file.
    header.sort_all_objects();
    let mut header = header.to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.append(&mut header);
    start
}

/// The shape of a tensor that is stored separately.
fn shape_of(want: &Required, config: &ModelConfig) -> Vec<usize> {
    let &Required { id, rows, cols } = want;
    match id.role {
        // a matrix of one row in every release
        Role::SharedGate => vec![rows, cols],
        Role::ChoiceBias if families::of(&config.family).has(Quirk::ChoiceRow) => {
            vec![rows, cols]
        }
        // one for each head in Kimi Linear's four dimensions
        Role::DeltaRate if !steps_directly(config) => vec![1, 1, cols, 1],
        // channels, one input of each, taps
        role if role.is_conv() => vec![rows, 1, cols],
        // a LayerNorm for each head
        Role::QNorm | Role::KNorm if rows > 1 => vec![rows, cols],
        Role::O | Role::Gate if families::of(&config.family).has(Quirk::Conv1d) => vec![cols, rows],
        Role::Down if !families::of(&config.family).has(Quirk::Conv1d) => vec![cols, rows],
        _ => stored_shape(config, *want, Layout::AsIs),
    }
}

/// Whether no Kimi Delta Attention has low-rank projections (Kimi Linear).
fn steps_directly(config: &ModelConfig) -> bool {
    let kda = config.form.kda.as_ref();
    kda.is_none_or(|of| of.shape.direct)
}

impl Weights {
    /// Writes the header.
    pub(super) fn create(
        path: PathBuf,
        config: &ModelConfig,
        tensors: &[Required],
    ) -> Result<Self, Error> {
        let mut entries = entries(&path, config, tensors)?;
        let header = header_of(&entries);
        entries
            .iter_mut()
            .for_each(|entry| entry.raw.offset += header.len() as u64);
        let file = File::create_new(&path).map_err(Error::io("create", &path))?;
        file.write_all_at(&header, 0)
            .map_err(Error::io("write", &path))?;
        let mut weights = Self {
            path,
            file,
            slots: Vec::with_capacity(tensors.len()),
            by_id: HashMap::new(),
            regions: Vec::new(),
            bytes: Vec::new(),
        };
        weights.place(entries, config, tensors)?;
        Ok(weights)
    }

    /// Finds the location of each tensor as the reader does.
    fn place(
        &mut self,
        entries: Vec<FileTensor>,
        config: &ModelConfig,
        tensors: &[Required],
    ) -> Result<(), Error> {
        let mut found = HashMap::new();
        for entry in entries {
            let all = identify(entry.raw, &self.path, 0, config, None)?;
            found.extend(all.into_iter().map(|tensor| (tensor.id, tensor)));
        }
        let mut regions = HashMap::new();
        for &want in tensors {
            let mut of_all = found.remove(&want.id);
            if let Some(first) = of_all.as_mut().filter(|_| want.id.role == Role::DeltaIn) {
                for number in 1.. {
                    let id = TensorId {
                        expert: number,
                        ..want.id
                    };
                    let Some(next) = found.remove(&id) else { break };
                    first.shape[0] += next.shape[0];
                }
            }
            let fits = of_all.filter(|at| at.shape == stored_shape(config, want, at.layout));
            let Some(at) = fits else {
                let reason = format!("tensor {} has no place in this family", want.id);
                return Err(Error::export(&self.path, reason));
            };
            let region = *regions.entry(at.offset).or_insert_with(|| {
                self.regions.push(Region {
                    offset: at.offset,
                    elements: at.shape.iter().product(),
                    left: 0,
                    whole: None,
                    integers: want.id.role == Role::TokenExperts,
                });
                self.regions.len() - 1
            });
            let rows = &mut self.regions[region];
            rows.left += want.rows;
            if want.rows == 1 || want.cols == 1 || !at.layout.keeps_rows() {
                rows.whole = Some(Vec::new());
            }
            self.by_id.insert(want.id, self.slots.len());
            self.slots.push(Slot {
                want,
                rows: 0,
                region,
                layout: at.layout,
            });
        }
        Ok(())
    }

    /// Accepts the next row of a tensor.
    pub(super) fn row(&mut self, id: TensorId, row: &[f32]) -> Result<(), Error> {
        let index = self.by_id.get(&id).copied().unwrap_or(usize::MAX);
        let fits = |s: &&mut Slot| s.rows < s.want.rows && s.want.cols == row.len();
        let Some(slot) = self.slots.get_mut(index).filter(fits) else {
            let reason = format!("tensor {id} has no place for a row of {}", row.len());
            return Err(Error::export(&self.path, reason));
        };
        let (at, layout) = (slot.rows, slot.layout);
        let sizes = [slot.want.rows, slot.want.cols];
        slot.rows += 1;
        let region = &mut self.regions[slot.region];
        region.left -= 1;
        let (offset, integers) = (region.offset, region.integers);
        let Some(whole) = &mut region.whole else {
            let values = row.iter().map(|value| layout.stored(*value));
            let stored: Vec<f32> = values.collect();
            return self.write(&stored, offset, layout.place([at, 0], sizes), integers);
        };
        whole.resize(region.elements, 0.0);
        for (col, value) in row.iter().enumerate() {
            whole[layout.place([at, col], sizes)] = layout.stored(*value);
        }
        if region.left > 0 {
            return Ok(());
        }
        let whole = std::mem::take(whole);
        for (chunk, values) in whole.chunks(CHUNK).enumerate() {
            self.write(values, offset, chunk * CHUNK, integers)?;
        }
        Ok(())
    }

    /// Writes elements from index `first` on of a region that begins at `offset`.
    fn write(
        &mut self,
        values: &[f32],
        offset: u64,
        first: usize,
        integers: bool,
    ) -> Result<(), Error> {
        let element = if integers { 8 } else { 4 };
        let offset = offset + element * first as u64;
        self.bytes.clear();
        if integers {
            (self.bytes).extend(values.iter().flat_map(|v| (*v as i64).to_le_bytes()))
        } else {
            (self.bytes).extend(values.iter().flat_map(|v| v.to_le_bytes()))
        }
        self.file
            .write_all_at(&self.bytes, offset)
            .map_err(Error::io("write", &self.path))
    }

    /// Checks that every row came.
    pub(super) fn finish(self) -> Result<(), Error> {
        if let Some(slot) = self.slots.iter().find(|s| s.rows != s.want.rows) {
            let Required { id, rows, .. } = slot.want;
            let reason = format!("tensor {id} got {} of its {rows} rows", slot.rows);
            return Err(Error::export(&self.path, reason));
        }
        flush(&self.file, &self.path)
    }
}
