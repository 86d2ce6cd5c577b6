//! Files that are replaced whole or not at all.

use std::io::Write as _;
use std::path::Path;

use crate::Failure;

/// Refuses a result that exists, unless it may be replaced.
pub fn may_write(path: &Path, force: bool) -> Result<(), Failure> {
    if path.exists() && !force {
        return Err(Failure::usage(format!(
            "{} exists; give --force to replace it",
            path.display()
        )));
    }
    Ok(())
}

/// Writes `bytes` to a sibling, flushes it to disk and gives it the name `path`.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let write = || {
        let mut file = std::fs::File::create(partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(partial, path)
    };
    write().map_err(|e| {
        // what is left of it is of no use; the first error is the one that is told
        let _ = std::fs::remove_file(partial);
        Failure::file(path)(e)
    })
}
