//! A model whose tensors lie in files of another format: a container without bundles.
//!
//! Nothing in such files has a checksum, so reads are not compared with any.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use super::error::{Error, Result};
use super::format::{Section, SectionEntry, Superblock, TensorEntry, xxh3};
use super::layout::{Extent, Layout, Spec};
use super::outside_tensors::OutsideTensors;
use super::reader::Container;

/// What [`Container::outside`] is made of.
pub struct Outside {
    /// Metadata, geometry and tensors; without banks.
    pub spec: Spec,
    /// Name of the model's file in messages.
    pub path: PathBuf,
    /// The file from which rows of tables are read.
    pub file: File,
    /// First byte of each tensor in it; `None` if the tensor is not in it row after row.
    pub offsets: Vec<Option<u64>>,
    /// Reads whole tensors.
    pub tensors: Arc<dyn OutsideTensors>,
}

impl Container {
    /// A container whose tensors lie in other files.
    ///
    /// # Errors
    /// If the specification has banks, or exceeds a limit.
    pub fn outside(of: Outside) -> Result<Self> {
        let (spec, path) = (of.spec, of.path);
        let layout = match Layout::compute(&spec) {
            Ok(layout) => layout,
            Err(source) => return Err(Error::Layout { path, source }),
        };
        if let Some(bank) = spec.banks.first() {
            return Err(Error::Index {
                path,
                what: "bank of a model outside containers",
                index: u64::from(bank.layer),
                count: 0,
            });
        }
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
            file_len: layout.file_len,
            geometry: spec.geometry,
            bundle_dtype: spec.bundle_dtype,
            sections,
        };
        let tensors = spec.tensors.iter().zip(&of.offsets).map(|(tensor, at)| {
            let place = Extent {
                offset: at.unwrap_or(u64::MAX),
                len: tensor.len,
            };
            TensorEntry::new(tensor, place, 0)
        });
        let tensors = tensors.collect();
        Ok(Self::of_parts(
            of.file, path, superblock, layout, spec.meta, tensors, of.tensors,
        ))
    }
}
