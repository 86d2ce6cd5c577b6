//! A trial of direct reads: some file systems (FUSE on Android) open a file for direct I/O and report success of reads
//! that fill nothing.

use std::io;

/// Fills a buffer from the start of a file. Returns the number of bytes read.
pub(super) type TrialRead<'a> = &'a mut dyn FnMut(&mut [u8]) -> io::Result<usize>;

/// Reads the first `unit` bytes of a file, a power of two, by a direct read into memory of this alignment, and
/// compares them with those of buffered reads. An empty file counts as success.
///
/// # Errors
/// What is wrong with the direct read.
pub(super) fn compare(
    unit: usize,
    buffered: TrialRead<'_>,
    direct: TrialRead<'_>,
) -> Result<(), String> {
    let mut expected = vec![0; unit];
    let mut len = 0;
    while len < unit {
        match buffered(&mut expected[len..]) {
            Ok(0) => break,
            Ok(n) => len = unit.min(len + n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(format!("a buffered read of {unit} bytes: {e}")),
        }
    }
    expected.truncate(len);
    let mut memory = vec![0u8; 2 * unit];
    let start = memory.as_ptr().align_offset(unit).min(unit);
    let found = &mut memory[start..start + unit];
    // Wrong in every byte, whatever the file holds.
    for (found, expected) in found.iter_mut().zip(&expected) {
        *found = !expected;
    }
    let n = direct(found).map_err(|e| format!("a direct read of {unit} bytes: {e}"))?;
    if n != len {
        return Err(format!(
            "a direct read of {unit} bytes returns {n}, a buffered one {len}"
        ));
    }
    let wrong = expected.iter().zip(&*found).filter(|(a, b)| a != b).count();
    match wrong {
        0 => Ok(()),
        wrong => Err(format!(
            "a direct read of {unit} bytes reports success, but {wrong} of {len} bytes are not those of the file"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: usize = 512;

    /// Reads of a file with this content, a hundred bytes at a time.
    fn reads(file: &[u8]) -> impl FnMut(&mut [u8]) -> io::Result<usize> {
        let mut at = 0;
        move |to| {
            let n = to.len().min(file.len() - at).min(100);
            to[..n].copy_from_slice(&file[at..at + n]);
            at += n;
            Ok(n)
        }
    }

    fn tried(
        file: &[u8],
        mut direct: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<(), String> {
        compare(UNIT, &mut reads(file), &mut direct)
    }

    /// A whole read, into memory of the right alignment.
    fn whole(file: &[u8]) -> impl FnMut(&mut [u8]) -> io::Result<usize> {
        |to: &mut [u8]| {
            assert_eq!((to.len(), to.as_ptr().align_offset(UNIT)), (UNIT, 0));
            let n = to.len().min(file.len());
            to[..n].copy_from_slice(&file[..n]);
            Ok(n)
        }
    }

    #[test]
    fn a_read_that_fills_the_files_bytes_is_direct() {
        let file: Vec<u8> = (0..2000).map(|i| (i % 251) as u8).collect();
        // longer than a unit, exactly one, shorter, empty
        for len in [2000, UNIT, 300, 0] {
            assert_eq!(tried(&file[..len], whole(&file[..len])), Ok(()), "{len}");
        }
    }

    /// FUSE paths of Android: whatever the file holds, zeros included, is not in memory.
    #[test]
    fn a_read_that_fills_nothing_is_refused() {
        for byte in [0x00, 0xff, 0x5a] {
            let error = tried(&[byte; UNIT], |to| Ok(to.len())).unwrap_err();
            assert!(error.contains("512 of 512 bytes are not those"), "{error}");
        }
    }

    #[test]
    fn a_read_of_other_bytes_is_refused() {
        let file: Vec<u8> = (0..UNIT).map(|i| i as u8).collect();
        let mut read = whole(&file);
        let error = tried(&file, |to| {
            let n = read(to)?;
            to[511] ^= 1;
            Ok(n)
        });
        let error = error.unwrap_err();
        assert!(error.contains("1 of 512 bytes are not those"), "{error}");
    }

    #[test]
    fn a_read_of_another_length_is_refused() {
        let file = [7; 300];
        for (file, returned) in [(&file[..], 512), (&file[..], 299), (&[3; UNIT][..], 100)] {
            let mut read = whole(file);
            let error = tried(file, |to| read(to).map(|_| returned)).unwrap_err();
            assert!(error.contains(&format!("returns {returned},")), "{error}");
        }
    }

    #[test]
    fn a_refused_read_has_the_kernels_reason() {
        let error = tried(&[1; UNIT], |_| Err(io::Error::from_raw_os_error(22)));
        assert!(error.unwrap_err().contains("Invalid argument"));
    }
}
