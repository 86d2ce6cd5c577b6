//! Bytes written in a day: flash wears out.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::Failure;
use crate::interrupt::with_suffix;

/// Name of the file in a folder that counts the bytes of a day.
const NAME: &str = "written-today";

/// Counts the bytes that are written to a folder, by all processes together. Of two that count at the same moment one may
/// be lost.
#[derive(Debug)]
pub struct DayCount {
    path: PathBuf,
    limit: u64,
}

fn today() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs() / (24 * 3600)
}

impl DayCount {
    /// Of `folder`, for at most `limit` bytes a day.
    pub fn new(folder: &Path, limit: u64) -> Self {
        Self {
            path: folder.join(NAME),
            limit,
        }
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        let mut numbers = text.split_whitespace().map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(day)), Some(Ok(bytes))) if day == today() => bytes,
            _ => 0,
        }
    }

    /// Whether so many bytes may be written today.
    pub fn has(&self, bytes: u64) -> bool {
        self.bytes().saturating_add(bytes) <= self.limit
    }

    /// Counts `bytes` that are to be written. False, and nothing is counted, if they are too many today.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn take(&self, bytes: u64) -> Result<bool, Failure> {
        let all = self.bytes().saturating_add(bytes);
        if all > self.limit {
            return Ok(false);
        }
        let new = with_suffix(&self.path, &format!(".partial{}", std::process::id()));
        std::fs::write(&new, format!("{} {all}\n", today()))
            .and_then(|()| std::fs::rename(&new, &self.path))
            .map_err(Failure::file(&self.path))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_has_so_many_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = [(); 2].map(|()| DayCount::new(dir.path(), 100));
        assert!(first.take(60).unwrap() && second.take(30).unwrap());
        assert!(!first.take(11).unwrap() && first.take(10).unwrap());
        assert!(!second.take(1).unwrap());
        std::fs::write(first.path(), format!("{} 100", today() - 1)).unwrap();
        assert!(first.take(100).unwrap(), "yesterday's");
        std::fs::write(first.path(), "x").unwrap();
        assert!(second.take(1).unwrap());
    }
}
