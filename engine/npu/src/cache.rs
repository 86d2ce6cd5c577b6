//! Files with compiled graphs: an NPU's compiler may take most of a second for one.
//!
//! ```text
//! PROVIDER-DRIVER-GRAPH.onnx     compiled graph ‖ CRC-32        DRIVER: hash of all versions, GRAPH: of the graph
//! PROVIDER-DRIVER-NOTE.onnx      empty ‖ CRC-32                 NOTE: hash of graphs that a process has tried
//! ```
//!
//! A file only saves time: if it cannot be read or written, the graph is compiled.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::driver::Fnv;

/// Maximum size of a file in bytes; graphs contain no weights.
const LARGEST: u64 = 64 << 20;

/// A folder of compiled graphs of one provider.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    folder: PathBuf,
    provider: String,
    driver: String,
}

impl Cache {
    /// The cache of a provider. `driver` names all versions that its graphs depend on.
    pub fn new(folder: &Path, provider: &str, driver: &str) -> Self {
        let mut hash = Fnv::new();
        hash.add(driver.as_bytes());
        Self {
            folder: folder.to_owned(),
            provider: provider.to_owned(),
            driver: hash.hex(),
        }
    }

    fn path(&self, graph: &[u8]) -> PathBuf {
        let mut hash = Fnv::new();
        hash.add(graph);
        let (provider, driver) = (&self.provider, &self.driver);
        let name = format!("{provider}-{driver}-{}.onnx", hash.hex());
        self.folder.join(name)
    }

    /// Reads a compiled graph.
    pub fn get(&self, graph: &[u8]) -> Option<Vec<u8>> {
        let path = self.path(graph);
        let metadata = fs::metadata(&path).ok()?;
        let mut bytes = (metadata.is_file() && metadata.len() <= LARGEST)
            .then(|| fs::read(&path).ok())
            .flatten()?;
        let checksum = bytes.split_off(bytes.len().checked_sub(4)?);
        (crc32fast::hash(&bytes).to_le_bytes() == *checksum).then_some(bytes)
    }

    /// Writes a compiled graph, and removes the provider's graphs of other driver versions.
    pub fn put(&self, graph: &[u8], compiled: &[u8]) {
        let path = self.path(graph);
        let partial = path.with_extension(format!("{}.partial", std::process::id()));
        let write = || -> std::io::Result<()> {
            fs::create_dir_all(&self.folder)?;
            self.remove_others()?;
            let mut file = File::create(&partial)?;
            file.write_all(compiled)?;
            file.write_all(&crc32fast::hash(compiled).to_le_bytes())?;
            file.sync_all()?;
            fs::rename(&partial, &path)
        };
        if let Err(e) = write() {
            tracing::debug!(path = %path.display(), error = %e, "not written");
            let _ = fs::remove_file(&partial);
        }
    }

    fn remove_others(&self) -> std::io::Result<()> {
        let (provider, driver) = (
            format!("{}-", self.provider),
            format!("{}-{}-", self.provider, self.driver),
        );
        // Compared, because the name of one provider may be the beginning of another's.
        let len = self.path(&[]).file_name().map_or(0, |name| name.len());
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            // Old partial files are left behind by processes that ended while writing.
            let age = entry
                .metadata()?
                .modified()
                .ok()
                .and_then(|time| time.elapsed().ok());
            let is_old = age.is_some_and(|age| age > Duration::from_secs(24 * 3600));
            let is_outdated = |name: &str| {
                let other_driver = !name.starts_with(&driver) && name.len() == len;
                name.starts_with(&provider)
                    && (other_driver || is_old && name.ends_with(".partial"))
            };
            if entry.file_name().to_str().is_some_and(is_outdated) {
                // An error may mean that another process has removed it.
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_are_found_by_content_and_driver() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("graphs");
        let [old, new, other] = [("qnn", "1"), ("qnn", "2"), ("qnn-cpu", "1")]
            .map(|(provider, driver)| Cache::new(&folder, provider, driver));
        assert_eq!(old.get(b"a"), None);
        old.put(b"a", b"of a");
        other.put(b"a", b"of another");
        assert_eq!(old.get(b"a").unwrap(), b"of a");
        assert_eq!((old.get(b"b"), new.get(b"a")), (None, None));
        new.put(b"b", b"of b");
        assert_eq!(
            (old.get(b"a"), new.get(b"b").unwrap()),
            (None, b"of b".to_vec())
        );
        assert_eq!(other.get(b"a").unwrap(), b"of another");
        // A damaged file is ignored.
        let path = new.path(b"b");
        fs::write(&path, b"of c\0\0\0\0").unwrap();
        assert_eq!(new.get(b"b"), None);
        fs::write(&path, b"of").unwrap();
        assert_eq!(new.get(b"b"), None);
        // So are folders and files that are too large.
        for odd in [b"d", b"e"] {
            let path = new.path(odd);
            match odd {
                b"d" => fs::create_dir(path).unwrap(),
                _ => File::create(path).unwrap().set_len(LARGEST + 1).unwrap(),
            }
            assert_eq!(new.get(odd), None);
        }
        // A folder that cannot be written is no error.
        Cache::new(&path, "qnn", "1").put(b"a", b"of a");
    }
}
