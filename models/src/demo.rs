//! The bundled demo models: packed containers inside the program itself.
//!
//! A container is neither unpacked nor loaded into the heap: [`Demo::locate`] finds its offset in
//! the executable's file, and direct I/O reads it from there like any other container. So the demos
//! offload for real without a download or installation. Their model cards are `models/README.md`
//! and `models/demo-moe/README.md`.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Error;

/// Page-aligned, so that it is also page-aligned in the executable's file (ELF keeps address and
/// file offset equal modulo the page size) and direct I/O can read it.
#[repr(C, align(4096))]
struct PageAligned<T: ?Sized>(T);

static DENSE: &PageAligned<[u8]> = &PageAligned(*include_bytes!("../demo/demo.ember"));
static EXPERTS: &PageAligned<[u8]> = &PageAligned(*include_bytes!("../demo-moe/demo-moe.ember"));

/// A bundled model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demo {
    /// The dense one, used by commands without a model argument.
    Dense,
    /// The mixture of experts.
    Experts,
}

/// Location of the container.
#[derive(Debug)]
pub struct Place {
    /// The file that holds it, open for reading.
    pub file: File,
    /// Its first byte, a multiple of 4096.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
}

impl Demo {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Dense, Self::Experts];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "demo",
            Self::Experts => "demo-moe",
        }
    }

    fn container(self) -> &'static [u8] {
        match self {
            Self::Dense => &DENSE.0,
            Self::Experts => &EXPERTS.0,
        }
    }

    /// Finds the container in the running program's file.
    ///
    /// # Errors
    /// [`Error::Demo`] if the program's memory map cannot be read or does not name a file (for
    /// programs that unpack themselves into memory).
    pub fn locate(self) -> Result<Place, Error> {
        place_of(self.container())
    }
}

/// Location of `container` in the running program's file.
fn place_of(container: &[u8]) -> Result<Place, Error> {
    let fail = |reason: String| Error::Demo { reason };
    let maps = std::fs::read_to_string("/proc/self/maps")
        .map_err(|e| fail(format!("/proc/self/maps: {e}")))?;
    let address = container.as_ptr().addr() as u64;
    let mapping = find_mapping(&maps, address)
        .ok_or_else(|| fail("its memory is not mapped from a file".into()))?;
    let exe = Path::new("/proc/self/exe");
    let same = std::fs::metadata(exe).is_ok_and(|m| m.ino() == mapping.inode);
    let path = if same { exe } else { &mapping.path };
    let file = File::open(path).map_err(|e| fail(format!("{}: {e}", path.display())))?;
    Ok(Place {
        file,
        offset: mapping.offset,
        len: container.len() as u64,
    })
}

#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    /// File offset of the given address.
    offset: u64,
    inode: u64,
    path: PathBuf,
}

/// The file mapping that `address` belongs to, from the text of
/// `/proc/self/maps`: `start-end perms offset dev inode path`.
fn find_mapping(maps: &str, address: u64) -> Option<Mapping> {
    maps.lines().find_map(|line| {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let start = u64::from_str_radix(start, 16).ok()?;
        let end = u64::from_str_radix(end, 16).ok()?;
        if !(start..end).contains(&address) {
            return None;
        }
        let _permissions = fields.next()?;
        let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
        let _device = fields.next()?;
        let inode = fields.next()?.parse().ok().filter(|&i| i != 0)?;
        let path = fields.next()?.trim_start();
        Some(Mapping {
            offset: offset.checked_add(address - start)?,
            inode,
            path: path.into(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn the_file_holds_the_same_bytes() {
        for demo in Demo::ALL {
            let (place, container) = (demo.locate().unwrap(), demo.container());
            assert_eq!(place.offset % 4096, 0);
            let mut head = [0u8; 64];
            place.file.read_exact_at(&mut head, place.offset).unwrap();
            assert_eq!(head, container[..64]);
            let mut tail = [0u8; 64];
            let at = place.offset + place.len - 64;
            place.file.read_exact_at(&mut tail, at).unwrap();
            assert_eq!(tail, container[container.len() - 64..]);
        }
    }

    #[test]
    fn maps_lines_are_read_defensively() {
        let maps = "55d0-55f0 r--p 00002000 08:01 77 /opt/a b/emberflow\n\
                    7f00-7f10 rw-p 00000000 00:00 0 \n\
                    garbage\n";
        let found = find_mapping(maps, 0x55e4).unwrap();
        assert_eq!(found.offset, 0x2014);
        assert_eq!((found.inode, found.path), (77, "/opt/a b/emberflow".into()));
        assert_eq!(find_mapping(maps, 0x7f04), None);
        assert_eq!(find_mapping(maps, 0x1), None);
    }
}
