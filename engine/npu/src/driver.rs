//! Versions that a provider's results depend on: ONNX Runtime's build, the provider's libraries, the NPU's driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::plugin;

/// Driver libraries of NPUs in the folders of distributions.
const DRIVERS: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu/libze_intel_npu.so.1",
    "/usr/lib/x86_64-linux-gnu/libze_intel_vpu.so.1",
    "/usr/lib64/libze_intel_npu.so.1",
    "/usr/lib64/libze_intel_vpu.so.1",
];

/// Files that identify the kernel's drivers.
const KERNEL: [&str; 3] = [
    "/proc/sys/kernel/osrelease",
    "/sys/module/intel_vpu/srcversion",
    "/sys/module/amdxdna/srcversion",
];

/// Identifies everything that a provider's results and graphs depend on: ONNX Runtime's build, the libraries in its folder
/// and in QNN's (name, length, time), driver libraries, and the kernel's drivers. If the system's loader has found the
/// library by name, its folder is unknown and left out.
pub(crate) fn versions(library: &Path, build: &str) -> String {
    let file = library.file_name().unwrap_or_default().display();
    format!("{file}, {build}, {}", driver(library))
}

/// Hash of all files.
fn driver(library: &Path) -> String {
    let mut hash = Fnv::new();
    let plugin = plugin::path(library);
    let parents = [Some(library), plugin.as_deref()].map(|path| path.and_then(Path::parent));
    let folders = parents.into_iter().flatten().map(fs::read_dir);
    let entries = folders.filter_map(Result::ok).flatten();
    let mut files: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .collect();
    files.extend(DRIVERS.map(PathBuf::from));
    files.sort();
    files.dedup();
    for file in files.iter().filter(|file| is_library(file)) {
        // Follows links.
        let Ok(metadata) = fs::metadata(file) else {
            continue;
        };
        let since = |time: std::time::SystemTime| time.duration_since(UNIX_EPOCH).ok();
        let time = metadata.modified().ok().and_then(since);
        let time = time.unwrap_or_default();
        hash.add(file.as_os_str().as_encoded_bytes());
        hash.add(&metadata.len().to_le_bytes());
        hash.add(&time.as_nanos().to_le_bytes());
    }
    for file in KERNEL {
        hash.add(&fs::read(file).unwrap_or_default());
    }
    format!("driver {}", hash.hex())
}

/// Whether a file name is that of a library.
fn is_library(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    [".so", ".dylib", ".dll"]
        .iter()
        .any(|end| name.contains(end))
}

/// FNV-1a.
pub(crate) struct Fnv(u64);

impl Fnv {
    pub fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub fn hex(&self) -> String {
        format!("{:016x}", self.0)
    }

    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_library_gives_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join("libonnxruntime.so.1");
        let provider = dir.path().join("libonnxruntime_providers_openvino.so");
        fs::write(&library, "a").unwrap();
        fs::write(dir.path().join("notes.txt"), "a").unwrap();
        let alone = driver(&library);
        assert_eq!(alone, driver(&library));
        fs::write(&provider, "1").unwrap();
        let first = driver(&library);
        fs::write(&provider, "22").unwrap();
        let second = driver(&library);
        assert!(alone != first && first != second);
        fs::write(dir.path().join("notes.txt"), "bb").unwrap();
        assert_eq!(second, driver(&library));
        // A library without a folder is no error.
        assert_ne!(driver(Path::new("libonnxruntime.so")), second);
    }

    #[test]
    fn another_build_gives_another_name_without_a_folder() {
        let library = Path::new("libonnxruntime.so.1");
        let [old, new] = ["build 1", "build 2"].map(|build| versions(library, build));
        assert!(old != new && old == versions(library, "build 1"));
        assert!(
            old.starts_with("libonnxruntime.so.1, build 1, driver "),
            "{old}"
        );
    }
}
