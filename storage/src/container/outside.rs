//! A model whose tensors lie in files of another format: a container without bundles.
//!
//! Nothing in such files has a checksum, so reads are not compared with any. Metadata and geometry are those that a
//! container would have; there are no sections.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use super::error::{Error, Result};
use super::format::{Section, SectionEntry, Superblock, TensorEntry, xxh3};
use super::geometry::BundleGeometry;
use super::layout::{Extent, Layout, Spec, TensorSpec};
use super::outside_tensors::{OutsideFiles, OutsideTensors};
use super::reader::Container;

/// What [`Container::outside`] is made of.
pub struct Outside {
    /// Name of the model's file in messages.
    pub path: PathBuf,
    /// JSON metadata, as in [`Spec::meta`].
    pub meta: Vec<u8>,
    /// Geometry and format of the bundles that it does not have.
    pub geometry: BundleGeometry,
    /// See `geometry`.
    pub bundle_dtype: u32,
    /// The file from which rows of tables are read.
    pub file: File,
    /// Bytes of all files.
    pub len: u64,
    /// Every tensor, and its first byte in `file`; `None` if its rows are not stored there one after another.
    pub tensors: Vec<(TensorSpec, Option<u64>)>,
    /// Reads whole tensors.
    pub reader: Arc<dyn OutsideTensors>,
}

impl Container {
    /// A container whose tensors lie in other files.
    ///
    /// # Errors
    /// Metadata that exceed a limit, or a file that cannot be inspected.
    pub fn outside(of: Outside) -> Result<Self> {
        let path = of.path;
        let spec = Spec {
            geometry: of.geometry,
            bundle_dtype: of.bundle_dtype,
            meta: of.meta,
            stats: Vec::new(),
            predictor_len: 0,
            tensors: Vec::new(),
            banks: Vec::new(),
            source: String::new(),
        };
        let layout = match Layout::compute(&spec) {
            Ok(layout) => layout,
            Err(source) => return Err(Error::Layout { path, source }),
        };
        let empty = SectionEntry {
            extent: Extent::default(),
            xxh3: xxh3(&[]),
        };
        let mut sections = [empty; Section::COUNT];
        sections[Section::Meta as usize] = SectionEntry {
            extent: layout.section(Section::Meta),
            xxh3: xxh3(&spec.meta),
        };
        let superblock = Superblock {
            file_len: of.len,
            geometry: spec.geometry,
            bundle_dtype: spec.bundle_dtype,
            sections,
        };
        let (tensors, places): (Vec<_>, Vec<_>) = of.tensors.into_iter().unzip();
        let entries = tensors.iter().zip(&places).map(|(tensor, place)| {
            let extent = Extent {
                offset: place.unwrap_or(0),
                len: tensor.len,
            };
            TensorEntry::new(tensor, extent, 0)
        });
        let entries = entries.collect();
        let files = match OutsideFiles::new(of.reader, places, of.len, &of.file) {
            Ok(files) => files,
            Err(source) => {
                let what = "inspect it";
                return Err(Error::File { path, what, source });
            }
        };
        Ok(Self::of_parts(
            of.file, path, superblock, layout, spec.meta, entries, files,
        ))
    }
}
