//! Writing a container: streamed, resumable, and under its final name only once it is complete.
//!
//! ```text
//! model.ember.partial           the file in progress; its data are at their final offsets
//! model.ember.partial.journal   units that are complete and on disk; also the lock
//! model.ember                   appears by rename, after tables, superblock and fsync
//! ```
//!
//! The writer holds one buffer and the checksum table, never the model. A killed pack resumes:
//! [`Writer::create`] with the same specification reads the journalled units back and compares
//! their checksums, and [`Writer::is_done`] tells the packer what to skip.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::error::{Error, Result};
use super::format::{
    BANK_RECORD, BankEntry, CHECKSUM_RECORD, Section, SectionEntry, Superblock, TENSOR_RECORD,
    TensorEntry, VERSION, xxh3,
};
use super::journal::{Journal, Sums};
use super::layout::{Extent, Layout, Spec};
use super::source::Source;
use super::stripes::{STRIPE_CHECKSUM, StripeSums};
use super::unit::Unit;
use crate::durable;

/// How to write.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Bytes of complete units between two flushes with a journal entry. A larger value packs many
    /// small units faster, and loses as much work in a crash.
    pub checkpoint_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            checkpoint_bytes: 32 << 20,
        }
    }
}

/// Writes one container. Units may come in any order; the resulting bytes are the same.
pub struct Writer {
    pub(super) target: PathBuf,
    /// Whether the target existed when writing began, so that it is replaced.
    replaces: bool,
    partial: PathBuf,
    file: File,
    journal: Journal,
    pub(super) spec: Spec,
    layout: Layout,
    predictor: Option<Sums>,
    tensors: Vec<Option<Sums>>,
    banks: Vec<Option<Sums>>,
    /// Content of the CHECKSUMS section.
    pub(super) checksums: Vec<u8>,
    /// Complete units not yet journalled, and their bytes.
    pending: Vec<(Unit, Sums)>,
    pending_bytes: u64,
    options: Options,
}

impl Writer {
    /// Starts or resumes the container `path`.
    ///
    /// # Errors
    /// If the specification exceeds a limit, another process writes the same container, or the
    /// system refuses.
    pub fn create(path: impl AsRef<Path>, spec: Spec) -> Result<Self> {
        Self::create_with(path, spec, Options::default())
    }

    /// [`Writer::create`] with options.
    ///
    /// # Errors
    /// As [`Writer::create`].
    pub fn create_with(path: impl AsRef<Path>, spec: Spec, options: Options) -> Result<Self> {
        let target = path.as_ref().to_path_buf();
        let layout = Layout::compute(&spec).map_err(|source| Error::Layout {
            path: target.clone(),
            source,
        })?;
        let partial = sibling(&target, ".partial")?;
        let id = fingerprint(&spec);
        let journal = sibling(&target, ".partial.journal")?;
        if partial.symlink_metadata().is_ok() && journal.symlink_metadata().is_err() {
            let why = "it exists, and no journal says that it is part of a container; move it away";
            let source = io::Error::new(ErrorKind::AlreadyExists, why);
            return Err(write_error(&partial, layout.file_len, "create it", source));
        }
        let (journal, units) = Journal::open(journal, &target, id)?;
        let file = match open_partial(&partial, layout.file_len, units.is_empty()) {
            Ok(file) => file,
            Err(e) => {
                // nothing to resume from
                if units.is_empty() {
                    let _ = std::fs::remove_file(&partial);
                    journal.remove()?;
                }
                return Err(write_error(&partial, layout.file_len, "create it", e));
            }
        };
        let checksums = layout.section(Section::Checksums).len as usize;
        let mut writer = Self {
            predictor: None,
            tensors: vec![None; spec.tensors.len()],
            banks: vec![None; spec.banks.len()],
            checksums: vec![0; checksums],
            pending: Vec::new(),
            pending_bytes: 0,
            replaces: target.symlink_metadata().is_ok(),
            target,
            partial,
            file,
            journal,
            spec,
            layout,
            options,
        };
        if writer.spec.predictor_len == 0 {
            writer.predictor = Some(Sums {
                data: xxh3(&[]),
                scales: 0,
            });
        }
        writer.resume(units)?;
        Ok(writer)
    }

    /// Reads the journalled units back. Those that match their checksums are done.
    fn resume(&mut self, mut units: Vec<(Unit, Sums)>) -> Result<()> {
        // For a unit written twice, the last record counts.
        units.reverse();
        units.sort_by_key(|(unit, _)| *unit);
        units.dedup_by_key(|(unit, _)| *unit);
        for (unit, sums) in units {
            if let Some(found) = self.read_back(unit)?
                && found == sums
                && let Some(done) = self.slot(unit)
            {
                *done = Some(sums);
            }
        }
        Ok(())
    }

    /// Checksums of a unit as it is on disk. Fills in its part of the checksum table.
    fn read_back(&mut self, unit: Unit) -> Result<Option<Sums>> {
        let Ok((data, scales)) = self.places(unit) else {
            return Ok(None);
        };
        let mut row = self.bank_row(unit);
        let source = Source {
            file: &self.file,
            path: &self.partial,
            base: 0,
        };
        let mut stripes = self.stripe_sums(unit);
        let first_stripe = self.first_stripe();
        let (g, checksums) = (&self.spec.geometry, &mut self.checksums);
        let mut hash = Xxh3::new();
        let mut buf = Vec::new();
        source.stream(data, g.stride, &mut buf, |_, piece| {
            hash.update(piece);
            if let Unit::Bank(_) = unit {
                for bundle in piece.chunks_exact(g.stride as usize) {
                    set_checksums(checksums, row, bundle, g.gate_span as usize);
                    row += 1;
                }
            }
            if let Some(stripes) = &mut stripes {
                stripes.update(piece, |index, sum| {
                    set_stripe(checksums, first_stripe, index, sum)
                });
            }
            Ok(())
        })?;
        let mut scales_hash = Xxh3::new();
        source.stream(scales, 1, &mut buf, |_, piece| {
            scales_hash.update(piece);
            Ok(())
        })?;
        let scales = if scales.len == 0 {
            0
        } else {
            scales_hash.digest()
        };
        Ok(Some(Sums {
            data: hash.digest(),
            scales,
        }))
    }

    /// Places of a unit's data and scales.
    pub(super) fn places(&self, unit: Unit) -> Result<(Extent, Extent)> {
        let missing = |what, index: usize, count: usize| Error::Index {
            path: self.target.clone(),
            what,
            index: index as u64,
            count: count as u64,
        };
        match unit {
            Unit::Predictor => Ok((self.layout.section(Section::Predictor), Extent::default())),
            Unit::Tensor(i) => match self.layout.tensors.get(i) {
                Some(place) => Ok((*place, Extent::default())),
                None => Err(missing("tensor", i, self.layout.tensors.len())),
            },
            Unit::Bank(i) => match self.layout.banks.get(i) {
                Some(place) => Ok((place.data, place.scales)),
                None => Err(missing("bank", i, self.layout.banks.len())),
            },
        }
    }

    /// Row of a bank's first neuron in the checksum table.
    pub(super) fn bank_row(&self, unit: Unit) -> usize {
        match unit {
            Unit::Bank(i) => self
                .layout
                .banks
                .get(i)
                .map_or(0, |b| b.first_checksum as usize),
            _ => 0,
        }
    }

    /// For the checksums of a tensor's stripes.
    pub(super) fn stripe_sums(&self, unit: Unit) -> Option<StripeSums> {
        let Unit::Tensor(i) = unit else { return None };
        self.layout.stripes.get(i).copied().map(StripeSums::new)
    }

    /// Byte of the checksum table at which those of stripes begin.
    pub(super) fn first_stripe(&self) -> usize {
        let stripes: u64 = self.layout.stripes.iter().map(|of| of.count()).sum();
        self.checksums.len() - stripes as usize * STRIPE_CHECKSUM
    }

    pub(super) fn slot(&mut self, unit: Unit) -> Option<&mut Option<Sums>> {
        match unit {
            Unit::Predictor => Some(&mut self.predictor),
            Unit::Tensor(i) => self.tensors.get_mut(i),
            Unit::Bank(i) => self.banks.get_mut(i),
        }
    }

    /// Units in file order with their state.
    fn units(&self) -> impl Iterator<Item = (Unit, bool)> {
        let tensors = self
            .tensors
            .iter()
            .enumerate()
            .map(|(i, d)| (Unit::Tensor(i), d.is_some()));
        let banks = self
            .banks
            .iter()
            .enumerate()
            .map(|(i, d)| (Unit::Bank(i), d.is_some()));
        std::iter::once((Unit::Predictor, self.predictor.is_some()))
            .chain(tensors)
            .chain(banks)
    }

    /// Whether a unit is complete, from this run or an earlier one, or absent (the predictor).
    #[must_use]
    pub fn is_done(&self, unit: Unit) -> bool {
        match unit {
            Unit::Predictor => self.predictor.is_some(),
            Unit::Tensor(i) => self.tensors.get(i).is_some_and(Option::is_some),
            Unit::Bank(i) => self.banks.get(i).is_some_and(Option::is_some),
        }
    }

    /// First unit in file order still to be written; `None` if only [`Writer::finish`] remains.
    #[must_use]
    pub fn resume_from(&self) -> Option<Unit> {
        self.units()
            .find_map(|(unit, done)| (!done).then_some(unit))
    }

    /// Completes all units without content. They are holes in the file, which read as zeros that
    /// fail every checksum: for plans of models without weights.
    pub fn leave_empty(&mut self) {
        let units: Vec<Unit> = self.units().map(|(unit, _)| unit).collect();
        for unit in units {
            if let Some(done) = self.slot(unit) {
                *done = Some(Sums { data: 0, scales: 0 });
            }
        }
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn complete(&mut self, unit: Unit, sums: Sums, bytes: u64) -> Result<()> {
        if let Some(done) = self.slot(unit) {
            *done = Some(sums);
        }
        self.pending.push((unit, sums));
        self.pending_bytes += bytes;
        if self.pending_bytes >= self.options.checkpoint_bytes {
            self.checkpoint()?;
        }
        Ok(())
    }

    /// Flushes complete units to disk and journals them, so they survive a crash. Happens
    /// automatically every [`Options::checkpoint_bytes`].
    ///
    /// # Errors
    /// If the system refuses.
    pub fn checkpoint(&mut self) -> Result<()> {
        durable::sync_data(&self.file, &self.partial)
            .map_err(|e| self.failed("flush it to disk", e))?;
        self.journal.record(&self.pending)?;
        self.pending.clear();
        self.pending_bytes = 0;
        Ok(())
    }

    /// Writes tables and superblock, flushes everything and renames the file to its final name.
    ///
    /// # Errors
    /// If a unit was not written, the target has appeared since [`Writer::create`], or the system refuses.
    pub fn finish(mut self) -> Result<()> {
        if let Some(unit) = self.resume_from() {
            return Err(Error::Missing {
                path: self.target,
                unit,
            });
        }
        let tensors = self.tensor_table();
        let banks = self.bank_table();
        let small: [(Section, &[u8]); 5] = [
            (Section::Meta, &self.spec.meta),
            (Section::Tensors, &tensors),
            (Section::Banks, &banks),
            (Section::Checksums, &self.checksums),
            (Section::Stats, &self.spec.stats),
        ];
        let mut sections = self
            .layout
            .sections
            .map(|extent| SectionEntry { extent, xxh3: 0 });
        for (section, bytes) in small {
            self.write(self.layout.section(section).offset, bytes)?;
            sections[section as usize].xxh3 = xxh3(bytes);
        }
        sections[Section::Predictor as usize].xxh3 = self.predictor.map_or(0, |s| s.data);
        // Write the superblock last: without it the file is not a container.
        durable::sync_data(&self.file, &self.partial)
            .map_err(|e| self.failed("flush it to disk", e))?;
        let superblock = Superblock {
            file_len: self.layout.file_len,
            geometry: self.spec.geometry,
            bundle_dtype: self.spec.bundle_dtype,
            sections,
        };
        self.write(0, &superblock.encode())?;
        durable::sync_all(&self.file, &self.partial)
            .map_err(|e| self.failed("flush it to disk", e))?;
        if !self.replaces && self.target.symlink_metadata().is_ok() {
            self.checkpoint()?;
            let why = "it appeared while this command ran; move it away and run the command again, which resumes from the .partial file";
            let source = io::Error::new(ErrorKind::AlreadyExists, why);
            return Err(Error::File {
                path: self.target,
                what: "replace it",
                source,
            });
        }
        std::fs::rename(&self.partial, &self.target)
            .map_err(|e| self.failed("give it its final name", e))?;
        let flushed = durable::sync_folder_of(&self.target);
        // the container is complete, whatever the result
        self.journal.remove()?;
        flushed.map_err(|source| Error::File {
            path: self.target,
            what: "flush its folder to disk",
            source,
        })
    }

    fn tensor_table(&self) -> Vec<u8> {
        let mut table = Vec::with_capacity(self.tensors.len() * TENSOR_RECORD);
        let rows = self
            .spec
            .tensors
            .iter()
            .zip(&self.layout.tensors)
            .zip(&self.tensors);
        for ((spec, place), sums) in rows {
            let hash = sums.map_or(0, |s| s.data);
            table.extend_from_slice(&TensorEntry::new(spec, *place, hash).encode());
        }
        table
    }

    fn bank_table(&self) -> Vec<u8> {
        let mut table = Vec::with_capacity(self.banks.len() * BANK_RECORD);
        let rows = self
            .spec
            .banks
            .iter()
            .zip(&self.layout.banks)
            .zip(&self.banks);
        for ((spec, place), sums) in rows {
            let hash = sums.map_or(0, |s| s.scales);
            table.extend_from_slice(&BankEntry::new(spec, place, hash).encode());
        }
        table
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(|e| self.failed("write to it", e))
    }

    fn failed(&self, what: &'static str, source: io::Error) -> Error {
        write_error(&self.partial, self.layout.file_len, what, source)
    }
}

/// Sets row `row` of the checksum table to the two crc32 of a bundle.
pub(super) fn set_checksums(table: &mut [u8], row: usize, bundle: &[u8], gate_span: usize) {
    let (gate, rest) = bundle.split_at(gate_span);
    let at = row * CHECKSUM_RECORD;
    if let Some(record) = table.get_mut(at..at + CHECKSUM_RECORD) {
        record[..4].copy_from_slice(&super::checksum(gate).to_le_bytes());
        record[4..].copy_from_slice(&super::checksum(rest).to_le_bytes());
    }
}

/// Sets the crc32 of stripe `index`; those of stripes begin at byte `first` of the checksum table.
pub(super) fn set_stripe(table: &mut [u8], first: usize, index: u64, sum: u32) {
    let at = first + index as usize * STRIPE_CHECKSUM;
    if let Some(record) = table.get_mut(at..at + STRIPE_CHECKSUM) {
        record.copy_from_slice(&sum.to_le_bytes());
    }
}

/// Identifies the source of a pack: a pack is resumed only for the same source.
fn fingerprint(spec: &Spec) -> u128 {
    let Spec {
        geometry,
        bundle_dtype,
        meta,
        stats,
        predictor_len,
        tensors,
        banks,
        source,
    } = spec;
    let (meta, stats) = (xxh3_128(meta), xxh3_128(stats));
    let sizes = (VERSION, geometry, bundle_dtype, predictor_len);
    // Debug text names every field. If its format changes with the program, a pack starts over.
    xxh3_128(format!("{:?}", (sizes, meta, stats, tensors, banks, source)).as_bytes())
}

fn sibling(path: &Path, suffix: &str) -> Result<PathBuf> {
    let Some(name) = path.file_name() else {
        return Err(Error::File {
            path: path.to_path_buf(),
            what: "write a container here",
            source: io::Error::new(ErrorKind::InvalidInput, "the path names no file"),
        });
    };
    let mut name = name.to_os_string();
    name.push(suffix);
    Ok(path.with_file_name(name))
}

/// Opens the partial file with its final length; its bytes are preserved unless it is `new`.
fn open_partial(path: &Path, len: u64, new: bool) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(new)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)?;
    // Gaps are never written: a new file reads as zeros.
    file.set_len(len)?;
    Ok(file)
}

fn write_error(path: &Path, needed: u64, what: &'static str, source: io::Error) -> Error {
    let path = path.to_path_buf();
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::NoSpace { path, needed },
        _ => Error::File { path, what, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_says_how_much_is_needed() {
        let full = io::Error::from_raw_os_error(28); // ENOSPC
        let text = write_error(Path::new("m.partial"), 5 << 30, "write to it", full).to_string();
        assert!(
            text.starts_with(
                "m.partial: no space left on the device: the container takes 5368709120 bytes"
            ),
            "{text}"
        );
        let other = io::Error::from_raw_os_error(5); // EIO
        let text = write_error(Path::new("m.partial"), 1, "write to it", other).to_string();
        assert!(
            text.starts_with("m.partial: cannot write to it: "),
            "{text}"
        );
    }
}
