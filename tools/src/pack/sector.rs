//! Chooses a container's sector size: the direct I/O block size of the device that will hold it.

use std::fs::File;
use std::path::Path;

use emberflow_storage::container::{BundleGeometry, LayoutError};
use emberflow_storage::io::FileSource;
use emberflow_storage::profile::FileFacts;

/// Largest sector size; works on every device.
const LARGEST: u32 = 4096;

/// Smallest sector size; needs the least padding.
const SMALLEST: u32 = 512;

/// A sector size and the reason for it.
#[derive(Debug, Clone)]
pub(super) struct Sector {
    /// Bytes.
    pub bytes: u32,
    /// The reason, phrased to follow the size in a sentence.
    pub why: String,
}

/// The sector size for `output`: `asked` if given, else what the file system reports for direct I/O. If it reports
/// nothing (tmpfs, FUSE, overlayfs, btrfs, kernels before 6.1), the largest size if that adds little padding.
/// `geometry` lays out bundles for a sector size.
///
/// # Errors
/// Errors of `geometry`.
pub(super) fn choose(
    output: &Path,
    asked: Option<u32>,
    geometry: impl Fn(u32) -> Result<BundleGeometry, LayoutError>,
) -> Result<(Sector, BundleGeometry), LayoutError> {
    let reported = match asked {
        Some(_) => None,
        None => reported(output),
    };
    let sector = match (asked, reported) {
        (Some(bytes), _) => Sector {
            bytes,
            why: "given by --sector".into(),
        },
        (None, Some(bytes)) => Sector {
            bytes,
            why: format!("the direct I/O block size on {}", place(output)),
        },
        (None, None) => unreported(&geometry, &place(output))?,
    };
    let geometry = geometry(sector.bytes)?;
    Ok((sector, geometry))
}

/// The sector size if the file system at `place` reports no direct I/O block size.
fn unreported(
    geometry: &impl Fn(u32) -> Result<BundleGeometry, LayoutError>,
    place: &str,
) -> Result<Sector, LayoutError> {
    let large = geometry(LARGEST)?;
    let padding = 1.0 - f64::from(large.payload()) / f64::from(large.stride);
    // As for splitting bundles: an eighth of padding is acceptable for direct I/O on every device.
    if padding <= 1.0 / 8.0 {
        return Ok(Sector {
            bytes: LARGEST,
            why: format!("which works on every device; {place} reports no direct I/O block size"),
        });
    }
    Ok(Sector {
        bytes: SMALLEST,
        why: format!(
            "as {place} reports no direct I/O block size and {LARGEST} would make {:.0} % of the \
             bundles padding; use --sector {LARGEST} if the target device needs it",
            100.0 * padding
        ),
    })
}

/// The direct I/O block size reported for a temporary file next to `output`.
fn reported(output: &Path) -> Option<u32> {
    let mut probe = output.as_os_str().to_owned();
    probe.push(format!(".{}.probe", std::process::id()));
    let file = File::create_new(&probe).ok()?;
    // A leftover would be an empty file.
    let _ = std::fs::remove_file(&probe);
    let align = FileSource::reported_align(&file)?;
    Some(align.offset.clamp(SMALLEST, LARGEST))
}

/// File system and device of `output`, for messages.
fn place(output: &Path) -> String {
    let folder = match output.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match FileFacts::of(folder) {
        Ok(facts) if !facts.fs.is_empty() => format!("{} ({})", facts.fs, facts.device),
        _ => "the file system".into(),
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::container::Prefer;

    use super::*;

    /// Geometry of bundles of 4-bit rows of `d` weights.
    fn bundles(d: u32) -> impl Fn(u32) -> Result<BundleGeometry, LayoutError> {
        move |sector| {
            let (q, s) = (d / 2, d / 16);
            BundleGeometry::choose(q, s, 2 * q, 2 * s, sector, Prefer::Auto)
        }
    }

    #[test]
    fn small_bundles_are_not_padded_for_a_device_that_nobody_knows() {
        // 576 weights, as in SmolLM2-135M: 972 bytes per neuron, padded to 1024 or 4096.
        let small = unreported(&bundles(576), "overlay").unwrap();
        assert_eq!(small.bytes, 512, "{small:?}");
        assert!(
            small.why.contains("76 %") && small.why.contains("--sector 4096"),
            "{small:?}"
        );
        // 7168 weights: 12096 bytes in three pages.
        let large = unreported(&bundles(7168), "overlay").unwrap();
        assert_eq!(large.bytes, 4096, "{large:?}");
    }

    #[test]
    fn what_is_asked_for_decides() {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("m.ember");
        for asked in [512, 1024, 2048, 4096] {
            let (sector, geometry) = choose(&output, Some(asked), bundles(576)).unwrap();
            assert_eq!((sector.bytes, geometry.sector), (asked, asked));
        }
        let (sector, _) = choose(&output, None, bundles(576)).unwrap();
        assert!((512..=4096).contains(&sector.bytes) && !sector.why.is_empty());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    /// tmpfs reports no block size; sectors of 4096 would make containers five times as large.
    #[test]
    fn a_file_system_in_memory_pads_nothing() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
            crate::tell::tell("SKIPPED: there is no /dev/shm");
            return;
        };
        let (sector, _) = choose(&dir.path().join("m.ember"), None, bundles(576)).unwrap();
        assert_eq!(sector.bytes, 512, "{sector:?}");
    }
}
