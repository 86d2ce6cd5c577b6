//! A model whose tensors lie in files of another format: a container without bundles.
//!
//! Nothing in such files has a checksum, so reads are not compared with any. Metadata and geometry are those that a
//! container would have; there are no sections.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::error::{Error, Result};
use super::format::{Section, SectionEntry, Superblock, TensorEntry, xxh3};
use super::geometry::BundleGeometry;
use super::layout::{Extent, Layout, Spec, TensorSpec};
use super::outside_tensors::{OutsideFile, OutsideFiles, OutsideTensors};
use super::reader::Container;
use crate::io::FileSource;

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
    /// The files, of which there must be one.
    pub files: Vec<(PathBuf, Arc<File>)>,
    /// Every tensor, and the file and byte at which it begins; `None` if its rows are not stored one after another.
    pub tensors: Vec<(TensorSpec, Option<(usize, u64)>)>,
    /// Reads rows of tensors.
    pub reader: Arc<dyn OutsideTensors>,
}

impl Container {
    /// A container whose tensors lie in other files.
    ///
    /// # Errors
    /// Metadata that exceed a limit, no file, or one that cannot be inspected.
    pub fn outside(of: Outside) -> Result<Self> {
        let path = of.path;
        let files = of.files.into_iter();
        let files = files.map(|(path, file)| OutsideFile::new(path, file));
        let files = files.collect::<Result<Vec<_>>>()?;
        let Some(first) = files.first() else {
            let source = io::Error::other("it has no files");
            let what = "open it";
            return Err(Error::File { path, what, source });
        };
        let first = first.again();
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
            file_len: files.iter().map(OutsideFile::len).sum(),
            geometry: spec.geometry,
            bundle_dtype: spec.bundle_dtype,
            sections,
        };
        let (tensors, places): (Vec<_>, Vec<_>) = of.tensors.into_iter().unzip();
        let places = places.into_iter();
        let places =
            places.map(|place| place.and_then(|(file, at)| FileSource::offset_of(file, at)));
        let places: Vec<_> = places.collect();
        let entries = tensors.iter().zip(&places).map(|(tensor, place)| {
            let extent = Extent {
                offset: place.unwrap_or(0),
                len: tensor.len,
            };
            TensorEntry::new(tensor, extent, 0)
        });
        let entries = entries.collect();
        let files = OutsideFiles {
            reader: of.reader,
            places,
            files,
        };
        Ok(Self::of_parts(
            first, path, superblock, layout, spec.meta, entries, files,
        ))
    }
}
