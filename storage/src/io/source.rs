//! The files to read: a direct and a buffered descriptor of each.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use super::error::IoError;
use super::sys::{self, DioAlign, DioAnswer, Piece};
use super::trial;

/// Alignments to try if the kernel does not report one (before 6.1, which includes most phones, and for
/// file systems on top of others): the logical block sizes in use. Trial reads decide.
const FALLBACK_ALIGNS: [u32; 2] = [512, 4096];

/// Bytes of the offsets of one file: file n of several begins at n times as many.
const OF_FILE: u64 = 1 << 44;

/// A file, the part of one from a base offset on, or several files under one numbering of bytes.
///
/// Aligned reads bypass the page cache. Others, and the unaligned rest of a short read, use the
/// buffered descriptor. So alignment affects speed, never correctness.
#[derive(Debug)]
pub struct FileSource {
    files: Vec<OneFile>,
    label: Arc<str>,
    base: u64,
    /// Set when the kernel refused a properly aligned direct read. The descriptors stay open,
    /// because commands in flight may still use their numbers.
    direct_refused: bool,
}

/// The descriptors of a file.
#[derive(Debug)]
struct OneFile {
    label: Arc<str>,
    buffered: Arc<File>,
    direct: Option<(File, DioAlign)>,
}

/// The descriptor for a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Picked {
    pub fd: RawFd,
    /// Its number among [`FileSource::descriptors`].
    pub number: u32,
    pub direct: bool,
    /// Offset in its file.
    pub offset: u64,
}

impl FileSource {
    /// Opens `path`; reads are relative to `base` bytes into it.
    ///
    /// # Errors
    /// [`IoError::Open`] with the path and the reason.
    pub fn open(path: &Path, base: u64) -> Result<Self, IoError> {
        let label: Arc<str> = path.display().to_string().into();
        match File::open(path) {
            Ok(file) => Ok(Self::from_file(file, label, base)),
            Err(e) => Err(IoError::Open {
                file: label,
                reason: e.to_string(),
            }),
        }
    }

    /// Uses an open file. Opens it a second time for direct I/O through `/proc/self/fd`, so both
    /// descriptors refer to the same file even if its path was replaced.
    pub fn from_file(file: File, label: impl Into<Arc<str>>, base: u64) -> Self {
        let label = label.into();
        let mut file = OneFile::open(Arc::new(file), Arc::clone(&label));
        if let Some((_, align)) = &file.direct
            && !base.is_multiple_of(u64::from(align.offset))
        {
            tracing::warn!(
                file = %label, base, align = align.offset,
                "base offset is not aligned for direct i/o; reading through the page cache"
            );
            file.direct = None;
        }
        Self::of(vec![file], label, base)
    }

    /// Several open files, at least one. Byte b of file n has offset [`FileSource::offset_of`]`(n, b)`.
    ///
    /// # Panics
    /// If there is no file.
    pub fn of_files(
        files: impl IntoIterator<Item = (Arc<File>, Arc<str>)>,
        label: impl Into<Arc<str>>,
    ) -> Self {
        let files = files.into_iter();
        // Slots are aligned to pages.
        let small = |align: &DioAlign| align.mem.max(align.offset) <= 4096;
        let files = files.map(|(file, label)| {
            let mut file = OneFile::open(file, label);
            if file.direct.as_ref().is_some_and(|(_, align)| !small(align)) {
                tracing::warn!(
                    file = %file.label,
                    "units of direct i/o above 4096 bytes; reading through the page cache, which counts against \
                     memory limits"
                );
                file.direct = None;
            }
            file
        });
        Self::of(files.collect(), label.into(), 0)
    }

    /// The same file without direct I/O, for comparison and for file systems where it misbehaves.
    pub fn buffered_only(file: File, label: impl Into<Arc<str>>, base: u64) -> Self {
        sys::advise_random(&file);
        let label = label.into();
        let file = OneFile {
            label: Arc::clone(&label),
            buffered: Arc::new(file),
            direct: None,
        };
        Self::of(vec![file], label, base)
    }

    fn of(files: Vec<OneFile>, label: Arc<str>, base: u64) -> Self {
        assert!(!files.is_empty(), "a source has at least one file");
        Self {
            files,
            label,
            base,
            direct_refused: false,
        }
    }

    /// Offset of byte `byte` of file `file`; `None` if there are no such offsets.
    #[must_use]
    pub fn offset_of(file: usize, byte: u64) -> Option<u64> {
        let first = u64::try_from(file).ok()?.checked_mul(OF_FILE)?;
        (byte < OF_FILE).then(|| first.checked_add(byte)).flatten()
    }

    /// File and byte of an offset: the inverse of [`FileSource::offset_of`].
    #[must_use]
    pub fn place_of(offset: u64) -> (usize, u64) {
        ((offset / OF_FILE) as usize, offset % OF_FILE)
    }

    /// Name of the file in messages.
    #[must_use]
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// File offset that reads are relative to.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Requirements of direct reads of `file` as reported by the file system; `None` if it reports
    /// none.
    #[must_use]
    pub fn reported_align(file: &File) -> Option<DioAlign> {
        match sys::dio_align(file) {
            DioAnswer::Yes(align) => Some(align),
            _ => None,
        }
    }

    /// Alignments for direct I/O of all files, or `None` if every read is buffered.
    #[must_use]
    pub fn dio_align(&self) -> Option<DioAlign> {
        let files = self.files.iter().filter(|_| !self.direct_refused);
        let aligns = files.filter_map(|file| file.direct.as_ref().map(|(_, align)| *align));
        aligns.reduce(|a, b| DioAlign {
            mem: a.mem.max(b.mem),
            offset: a.offset.max(b.offset),
        })
    }

    /// Stops using direct I/O. Returns whether it was in use.
    pub(crate) fn refuse_direct(&mut self) -> bool {
        let direct = self.files.iter().any(|file| file.direct.is_some());
        direct && !std::mem::replace(&mut self.direct_refused, true)
    }

    /// All descriptors: of each file the direct one, or the buffered one in its place, then the buffered one.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let of = |file: &OneFile| {
            let buffered = file.buffered.as_raw_fd();
            let direct = file.direct.as_ref();
            [
                direct.map_or(buffered, |(file, _)| file.as_raw_fd()),
                buffered,
            ]
        };
        self.files.iter().flat_map(of).collect()
    }

    /// The file of an offset, its number, and the byte in it.
    fn find(&self, offset: u64) -> (&OneFile, usize, u64) {
        let (number, byte) = match self.files.len() {
            1 => (0, offset),
            _ => Self::place_of(offset),
        };
        // Reads come from offsets of known files.
        let number = number.min(self.files.len() - 1);
        (&self.files[number], number, byte)
    }

    /// Name of the file of an offset, and the byte in it, for messages.
    pub(crate) fn name_of(&self, offset: u64) -> (Arc<str>, u64) {
        let (file, _, byte) = self.find(offset);
        (Arc::clone(&file.label), byte)
    }

    /// Descriptor for a command at `offset` into `pieces`.
    pub(crate) fn pick(&self, offset: u64, pieces: &[Piece]) -> Picked {
        let (file, number, offset) = self.find(offset);
        let direct = file.direct.as_ref().filter(|(_, align)| {
            let (mem, unit) = (align.mem as usize, align.offset as usize);
            !self.direct_refused
                && offset.is_multiple_of(u64::from(align.offset))
                && pieces
                    .iter()
                    .all(|p| p.addr().is_multiple_of(mem) && p.len().is_multiple_of(unit))
        });
        Picked {
            fd: direct.map_or(&*file.buffered, |(file, _)| file).as_raw_fd(),
            number: 2 * number as u32 + u32::from(direct.is_none()),
            direct: direct.is_some(),
            offset,
        }
    }
}

impl OneFile {
    fn open(file: Arc<File>, label: Arc<str>) -> Self {
        sys::advise_random(&file);
        let direct = match open_direct(&file) {
            Ok(found) => Some(found),
            Err(reason) => {
                tracing::warn!(
                    file = %label, %reason,
                    "no direct i/o for this file; reading through the page cache, which \
                     counts against memory limits"
                );
                None
            }
        };
        Self {
            label,
            buffered: file,
            direct,
        }
    }
}

/// Opens the same file for direct I/O and determines its alignments.
fn open_direct(file: &File) -> Result<(File, DioAlign), String> {
    let answer = sys::dio_align(file);
    if answer == DioAnswer::No {
        return Err("the file system says so".into());
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .map_err(|e| format!("opening with O_DIRECT: {e}"))?;
    let trial = |align: DioAlign| {
        let mut at = 0;
        let mut buffered = |to: &mut [u8]| {
            let n = file.read_at(to, at)?;
            at += n as u64;
            Ok(n)
        };
        let unit = align.mem.max(align.offset) as usize;
        trial::compare(unit, &mut buffered, &mut |to| direct.read_at(to, 0))
    };
    let align = match answer {
        DioAnswer::Yes(align) => trial(align).map(|()| align)?,
        _ => {
            let both = |unit| DioAlign {
                mem: unit,
                offset: unit,
            };
            let [small, large] = FALLBACK_ALIGNS.map(both);
            match trial(small) {
                Ok(()) => small,
                Err(_) => trial(large).map(|()| large)?,
            }
        }
    };
    Ok((direct, align))
}

/// The smallest aligned range that covers `offset..offset + len`: its start, its length, and the
/// position of `offset` in it. `None` if `align` is zero or a sum overflows.
#[must_use]
pub fn aligned_cover(offset: u64, len: u64, align: u64) -> Option<(u64, u64, u64)> {
    let shift = offset.checked_rem(align)?;
    let start = offset - shift;
    let end = offset.checked_add(len)?.checked_next_multiple_of(align)?;
    Some((start, end - start, shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covers() {
        assert_eq!(aligned_cover(0, 4096, 4096), Some((0, 4096, 0)));
        assert_eq!(aligned_cover(1, 1, 512), Some((0, 512, 1)));
        assert_eq!(aligned_cover(511, 2, 512), Some((0, 1024, 511)));
        assert_eq!(aligned_cover(5120, 100, 4096), Some((4096, 4096, 1024)));
        assert_eq!(aligned_cover(4096, 0, 4096), Some((4096, 0, 0)));
        assert_eq!(aligned_cover(7, 9, 0), None);
        assert_eq!(aligned_cover(u64::MAX, 2, 512), None);
        assert_eq!(aligned_cover(u64::MAX - 1, 1, 512), None);
    }

    #[test]
    fn offsets_name_file_and_byte() {
        for (file, byte) in [(0, 0), (0, 17), (3, 0), (31, (1 << 44) - 1)] {
            let offset = FileSource::offset_of(file, byte).unwrap();
            assert_eq!(FileSource::place_of(offset), (file, byte));
        }
        assert_eq!(FileSource::offset_of(0, 1 << 44), None);
        assert_eq!(FileSource::offset_of(1 << 20, 0), None);
    }

    #[test]
    fn a_missing_file_is_named() {
        let err = FileSource::open(Path::new("/no/such/file"), 0).unwrap_err();
        assert!(err.to_string().contains("/no/such/file"), "{err}");
    }
}
