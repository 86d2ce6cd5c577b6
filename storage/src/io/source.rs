//! The file to read: a direct and a buffered descriptor of the same file.

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

/// A file, or the part of one from a base offset on.
///
/// Aligned reads bypass the page cache. Others, and the unaligned rest of a short read, use the
/// buffered descriptor. So alignment affects speed, never correctness.
#[derive(Debug)]
pub struct FileSource {
    buffered: File,
    direct: Option<(File, DioAlign)>,
    /// Set when the kernel refused a properly aligned direct read. The descriptor stays open,
    /// because commands in flight may still use its number.
    direct_refused: bool,
    label: Arc<str>,
    base: u64,
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
        sys::advise_random(&file);
        let direct = match open_direct(&file) {
            Ok((_, align)) if !base.is_multiple_of(u64::from(align.offset)) => {
                tracing::warn!(
                    file = %label, base, align = align.offset,
                    "base offset is not aligned for direct i/o; reading through the page cache"
                );
                None
            }
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
            buffered: file,
            direct,
            direct_refused: false,
            label,
            base,
        }
    }

    /// The same file without direct I/O, for comparison and for file systems where it misbehaves.
    pub fn buffered_only(file: File, label: impl Into<Arc<str>>, base: u64) -> Self {
        sys::advise_random(&file);
        Self {
            buffered: file,
            direct: None,
            direct_refused: false,
            label: label.into(),
            base,
        }
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

    /// Alignments for direct I/O, or `None` if every read is buffered.
    #[must_use]
    pub fn dio_align(&self) -> Option<DioAlign> {
        match &self.direct {
            Some((_, align)) if !self.direct_refused => Some(*align),
            _ => None,
        }
    }

    /// Stops using direct I/O. Returns whether it was in use.
    pub(crate) fn refuse_direct(&mut self) -> bool {
        self.direct.is_some() && !std::mem::replace(&mut self.direct_refused, true)
    }

    pub(crate) fn buffered_fd(&self) -> RawFd {
        self.buffered.as_raw_fd()
    }

    pub(crate) fn direct_fd(&self) -> Option<RawFd> {
        self.direct.as_ref().map(|(file, _)| file.as_raw_fd())
    }

    /// Descriptor for a command at `offset` into `pieces`, and whether it is the direct one.
    pub(crate) fn pick(&self, offset: u64, pieces: &[Piece]) -> (RawFd, bool) {
        if let (Some((file, align)), false) = (&self.direct, self.direct_refused) {
            let (mem, unit) = (align.mem as usize, align.offset as usize);
            let fits = offset.is_multiple_of(u64::from(align.offset))
                && pieces
                    .iter()
                    .all(|p| p.addr().is_multiple_of(mem) && p.len().is_multiple_of(unit));
            if fits {
                return (file.as_raw_fd(), true);
            }
        }
        (self.buffered.as_raw_fd(), false)
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
    fn a_missing_file_is_named() {
        let err = FileSource::open(Path::new("/no/such/file"), 0).unwrap_err();
        assert!(err.to_string().contains("/no/such/file"), "{err}");
    }
}
