//! The machine and the file system of a file, as reported by the kernel.

use std::fs::{File, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ProfileError;

/// The machine a profile was measured on. Unknown fields are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release.
    pub kernel: String,
    /// Architecture, as the compiler names it.
    pub arch: String,
    /// Name of the processor.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: u32,
    /// Bytes of memory.
    pub memory: u64,
}

impl Machine {
    /// The running machine.
    #[must_use]
    pub fn here() -> Self {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpus = text("/proc/cpuinfo");
        let name = cpus.lines().find_map(|l| {
            let (key, value) = l.split_once(':')?;
            matches!(key.trim(), "model name" | "Hardware").then(|| value.trim().to_owned())
        });
        Self {
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            cpu: name.unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            memory: crate::mem::Mem::system().mem_total().unwrap_or(0),
        }
    }
}

/// A file and its device. Unknown fields are empty or zero.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Path as given.
    pub path: PathBuf,
    /// Length in bytes.
    pub len: u64,
    /// File system, such as `ext4`.
    pub fs: String,
    /// Block device or other source of the mount.
    pub device: String,
    /// The kernel's read-ahead on that device in KiB; it affects mapped files only.
    pub read_ahead_kb: Option<u64>,
    /// Offset alignment for direct I/O in bytes; absent without direct I/O.
    pub sector: Option<u32>,
    /// Memory alignment for direct I/O in bytes; absent without direct I/O.
    pub memory_align: Option<u32>,
}

impl FileFacts {
    /// Facts of an existing file or folder, without the alignments, which need an open file.
    ///
    /// # Errors
    /// [`ProfileError::File`] if there is no such file.
    pub fn of(path: &Path) -> Result<Self, ProfileError> {
        let meta = std::fs::metadata(path).map_err(ProfileError::file(path))?;
        Ok(Self::with(path, &meta))
    }

    /// Facts of an open file, whose `path` may be only a label.
    ///
    /// # Errors
    /// [`ProfileError::File`] if the system does not report its properties.
    pub fn of_open(file: &File, path: &Path) -> Result<Self, ProfileError> {
        let meta = file.metadata().map_err(ProfileError::file(path))?;
        let open = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let place = std::fs::read_link(open).unwrap_or_else(|_| path.to_owned());
        Ok(Self::with(&place, &meta))
    }

    fn with(path: &Path, meta: &Metadata) -> Self {
        let (major, minor) = numbers(meta.dev());
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let (fs, device) = mount_of(&mounts, major, minor, &full).unwrap_or_default();
        Self {
            path: path.to_owned(),
            len: meta.len(),
            fs,
            device,
            read_ahead_kb: read_ahead(Path::new("/"), major, minor),
            sector: None,
            memory_align: None,
        }
    }
}

/// Device numbers from Linux's 64-bit encoding.
pub(super) fn numbers(dev: u64) -> (u64, u64) {
    let major = ((dev >> 8) & 0xfff) | ((dev >> 32) & 0xffff_f000);
    let minor = (dev & 0xff) | ((dev >> 12) & 0xffff_ff00);
    (major, minor)
}

/// Type and source of a path's mount: by device number, or, on file systems that hide theirs, by
/// the longest mount point above the path.
fn mount_of(mounts: &str, major: u64, minor: u64, path: &Path) -> Option<(String, String)> {
    let wanted = format!("{major}:{minor}");
    let mut found: Option<((bool, usize), &str)> = None;
    for line in mounts.lines() {
        let Some((front, back)) = line.split_once(" - ") else {
            continue;
        };
        let mut fields = front.split(' ').skip(2);
        let (Some(number), Some(point)) = (fields.next(), fields.nth(1)) else {
            continue;
        };
        let above = path.starts_with(point);
        let same = number == wanted;
        if !same && !above {
            continue;
        }
        let rank = (same, if above { point.len() } else { 0 });
        // Later mounts hide earlier ones.
        if found.is_none_or(|(best, _)| rank >= best) {
            found = Some((rank, back));
        }
    }
    let mut fields = found?.1.split(' ');
    Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
}

/// Read-ahead of a block device, or of the disk a partition is on, below `root`.
fn read_ahead(root: &Path, major: u64, minor: u64) -> Option<u64> {
    let device = root.join(format!("sys/dev/block/{major}:{minor}"));
    ["queue/read_ahead_kb", "../queue/read_ahead_kb"]
        .iter()
        .find_map(|at| std::fs::read_to_string(device.join(at)).ok())
        .and_then(|text| text.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 253:1 / / rw - ext4 /dev/vda1 rw\n\
23 22 0:30 / /tmp rw,nosuid shared:5 - tmpfs tmpfs rw\n\
24 22 8:17 / /tmp/disk rw - xfs /dev/sdb1 rw\n\
broken line\n";

    #[test]
    fn mounts_are_found_by_number_then_by_path() {
        let at = |major, minor, path: &str| {
            let (fs, device) = mount_of(MOUNTS, major, minor, Path::new(path)).unwrap();
            format!("{fs} {device}")
        };
        assert_eq!(at(253, 1, "/home/x"), "ext4 /dev/vda1");
        assert_eq!(at(8, 17, "/tmp/disk/x"), "xfs /dev/sdb1");
        assert_eq!(at(0, 99, "/tmp/x"), "tmpfs tmpfs");
        assert_eq!(at(0, 99, "/tmp/disk/x"), "xfs /dev/sdb1");
        assert_eq!(mount_of("", 8, 1, Path::new("/")), None);
    }

    #[test]
    fn device_numbers_are_unpacked() {
        assert_eq!(numbers(0xfd01), (253, 1));
        // Minor 0x1245 is in bits 0..8 and 20..32, major 3 in bits 8..20.
        assert_eq!(numbers((0x12 << 20) | (3 << 8) | 0x45), (3, 0x1245));
    }

    #[test]
    fn a_partition_takes_the_read_ahead_of_its_disk() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("sys/devices/sdb");
        std::fs::create_dir_all(disk.join("sdb1")).unwrap();
        std::fs::create_dir_all(disk.join("queue")).unwrap();
        std::fs::write(disk.join("queue/read_ahead_kb"), "128\n").unwrap();
        let by_number = dir.path().join("sys/dev/block");
        std::fs::create_dir_all(&by_number).unwrap();
        std::os::unix::fs::symlink(disk.join("sdb1"), by_number.join("8:17")).unwrap();
        std::os::unix::fs::symlink(&disk, by_number.join("8:16")).unwrap();
        assert_eq!(read_ahead(dir.path(), 8, 17), Some(128));
        assert_eq!(read_ahead(dir.path(), 8, 16), Some(128));
        assert_eq!(read_ahead(dir.path(), 9, 9), None);
    }

    #[test]
    fn this_machine_answers() {
        let machine = Machine::here();
        assert!(machine.cores >= 1 && !machine.kernel.is_empty());
        let facts = FileFacts::of(Path::new(".")).unwrap();
        assert!(!facts.fs.is_empty(), "{facts:?}");
        let open = File::open("Cargo.toml").unwrap();
        let of_open = FileFacts::of_open(&open, Path::new("a mere label")).unwrap();
        assert_eq!((of_open.fs, of_open.device), (facts.fs, facts.device));
        assert!(of_open.path.ends_with("Cargo.toml") && of_open.len > 0);
    }
}
