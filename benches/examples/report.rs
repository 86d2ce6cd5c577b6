//! Generates `benches/README.md`, the measured part of `README.md` and its chart from CSV files:
//!
//! ```text
//! cargo run --release -p emberflow-benches --example report -- benches/results/MACHINE
//! ```
//!
//! Without an argument, from the folder of the current page.

use std::path::{Path, PathBuf};

use emberflow_benches::report::{Report, folder_of};

fn main() -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| {
        std::fs::read_to_string(root.join(path)).map_err(|error| format!("{path}: {error}"))
    };
    let given = std::env::args().nth(1).map(PathBuf::from);
    let folder = match given {
        Some(folder) => below(&root, &folder)?,
        None => folder_of(&read("benches/README.md")?).ok_or("the page names no folder")?,
    };
    let report = Report::make(&root, &folder)?;
    let write = |path: &Path, text: &str| {
        println!("{}", path.display());
        std::fs::write(root.join(path), text)
            .map_err(|error| format!("{}: {error}", path.display()))
    };
    write(Path::new("benches/README.md"), &report.page)?;
    write(
        Path::new("README.md"),
        &report.in_readme(&read("README.md")?)?,
    )?;
    match &report.picture {
        Some((path, svg)) => write(path, svg),
        None => Ok(()),
    }
}

/// A folder's path relative to the root.
fn below(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    let whole = |path: &Path| {
        path.canonicalize()
            .map_err(|error| format!("{}: {error}", path.display()))
    };
    let (root, folder) = (whole(root)?, whole(folder)?);
    let below = folder.strip_prefix(&root);
    below
        .map(Path::to_path_buf)
        .map_err(|_| format!("{} lies outside the repository", folder.display()))
}
