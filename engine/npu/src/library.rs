//! Search for ONNX Runtime, and its environment, of which a process has one.

use std::ffi::OsStr;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ort::environment::Environment;

use crate::error::{Cause, Error};

/// Environment variables that name the library or its folder. The first that is set replaces the search.
const VARIABLES: [&str; 2] = ["EMBERFLOW_ONNXRUNTIME", "ORT_DYLIB_PATH"];

/// File names for the system's loader.
#[cfg(target_vendor = "apple")]
const NAMES: [&str; 1] = ["libonnxruntime.dylib"];
#[cfg(not(target_vendor = "apple"))]
const NAMES: [&str; 2] = ["libonnxruntime.so.1", "libonnxruntime.so"];

/// Folders of Python's packages, and prefixes of names in them.
const PYTHON: &str = "python3";
const PACKAGES: [&str; 2] = ["site-packages", "dist-packages"];
const IN_WHEEL: &str = "onnxruntime/capi";
const PREFIX: &str = "libonnxruntime.";

/// Advice if there is no library.
const ADVICE: &str = "`pip install onnxruntime` (onnxruntime-openvino or onnxruntime-qnn for those NPUs), or set \
                      EMBERFLOW_ONNXRUNTIME to the path of libonnxruntime.so";

/// A loaded library; it is never unloaded.
#[derive(Clone)]
pub(crate) struct Library {
    pub path: PathBuf,
    /// Build, by git commit.
    pub build: String,
    pub environment: Environment,
}

/// The loaded library, or why it cannot be used. A process loads one; after a failure no other can be loaded.
static LIBRARY: Mutex<Option<Result<Library, Error>>> = Mutex::new(None);

/// Finds and loads the library at the first call. Libraries that satisfy `wanted` are preferred.
///
/// # Errors
/// No library, one that is too old or damaged, or a statically linked program.
pub(crate) fn library(wanted: &dyn Fn(&Path) -> bool) -> Result<Library, Error> {
    let mut library = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    match &*library {
        Some(library) => library.clone(),
        None => library.insert(load(wanted)?).clone(),
    }
}

/// Loads the first candidate of a supported version. The inner error is final: a library was loaded but is unusable.
///
/// # Errors
/// No candidate could be loaded.
fn load(wanted: &dyn Fn(&Path) -> bool) -> Result<Result<Library, Error>, Error> {
    if cfg!(target_feature = "crt-static") {
        return Err(Error {
            cause: Cause::Static,
            what: "this program is linked statically and cannot load ONNX Runtime: use one that is linked \
                   dynamically, as `cargo build --release` makes it"
                .into(),
        });
    }
    let (mut why, mut cause, mut old) = (Vec::new(), Cause::Missing, None);
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    for path in first(wanted, candidates(&variable)?) {
        // ort panics if the library lacks the interface of its version; after that it can load no other.
        let Ok(loaded) = catch_unwind(|| loaded(&path)) else {
            return Ok(Err(without_interface(&path)));
        };
        match loaded {
            Ok(library) => {
                tracing::debug!(path = %path.display(), build = library.as_ref().map_or("", |library| &library.build), "ONNX Runtime");
                return Ok(library);
            }
            Err(e) => {
                tracing::debug!(path = %path.display(), error = %e, "no ONNX Runtime");
                if !is_missing(&e) {
                    cause = Cause::Broken;
                }
                old = old.or_else(|| too_old(&e));
                why.push(reason(&e));
            }
        }
    }
    if let Some(what) = old {
        return Err(Error { cause, what });
    }
    let what = format!(
        "no ONNX Runtime 1.{} or later was found ({}): {ADVICE}",
        ort::MINOR_VERSION,
        why.join("; ")
    );
    Err(Error { cause, what })
}

/// Loads a library and creates its environment.
fn loaded(path: &Path) -> Result<Result<Library, Error>, ort::LoadDynamicError> {
    let named = ort::init_from(path)?.with_name("emberflow");
    let environment = named.with_telemetry(false).build().map_err(Error::of);
    Ok(environment.map(|environment| Library {
        path: path.to_owned(),
        build: build(ort::info()),
        environment,
    }))
}

/// The error for a loaded library without ONNX Runtime's interface.
fn without_interface(path: &Path) -> Error {
    Error::broken(format!(
        "{} does not give the interface of ONNX Runtime 1.{}: it is damaged, or another library; {ADVICE}",
        path.display(),
        ort::MINOR_VERSION
    ))
}

/// The message for a library that is too old.
fn too_old(e: &ort::LoadDynamicError) -> Option<String> {
    match e {
        ort::LoadDynamicError::BadVersion { version_str, path } => Some(format!(
            "ONNX Runtime {version_str} in {} is too old, 1.{} or later is needed: `pip install --upgrade onnxruntime`, \
             or set EMBERFLOW_ONNXRUNTIME to the path of a newer libonnxruntime.so",
            path.display(),
            ort::MINOR_VERSION
        )),
        _ => None,
    }
}

/// Whether the file does not exist (rather than being unusable).
fn is_missing(e: &ort::LoadDynamicError) -> bool {
    matches!(e, ort::LoadDynamicError::Dlopen { path, .. } if !path.exists())
}

/// Why a library was not loaded, with the message of the system's loader.
fn reason(e: &ort::LoadDynamicError) -> String {
    let source = match e {
        ort::LoadDynamicError::Dlopen { error, .. } => std::error::Error::source(error),
        _ => None,
    };
    source.map_or_else(|| e.to_string(), ToString::to_string)
}

/// The build, parsed from `ORT Build Info: git-branch=…, git-commit-id=…, …`.
fn build(info: &str) -> String {
    let commit = info.split("git-commit-id=").nth(1);
    let commit = commit.and_then(|rest| rest.split([',', ' ']).next());
    format!("build {}", commit.unwrap_or("unknown"))
}

/// The candidates, those that satisfy `wanted` first.
fn first(wanted: &dyn Fn(&Path) -> bool, mut candidates: Vec<PathBuf>) -> Vec<PathBuf> {
    candidates.sort_by_cached_key(|path| !wanted(path));
    candidates
}

/// Where the library may be, by the variables of the environment: what the first of [`VARIABLES`] names; or else the packages
/// of Python, and what the system's loader knows.
///
/// # Errors
/// The variable names a folder without the library.
fn candidates(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Vec<PathBuf>, Error> {
    for name in VARIABLES {
        if let Some(path) = variable(name).filter(|path| !path.as_os_str().is_empty()) {
            return named(name, path);
        }
    }
    let home = variable("HOME").map(|home| home.join(".local"));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter();
    let prefixes = environments
        .filter_map(|name| variable(name))
        .chain(home)
        .chain(["/usr/local", "/usr"].map(PathBuf::from));
    let mut paths: Vec<PathBuf> = prefixes.flat_map(|prefix| in_python(&prefix)).collect();
    paths.extend(NAMES.map(PathBuf::from));
    Ok(paths)
}

/// The libraries named by a variable.
fn named(variable: &str, path: PathBuf) -> Result<Vec<PathBuf>, Error> {
    let missing = |what: String| Error {
        cause: Cause::Missing,
        what: format!(
            "{variable} names {what}: set it to the path of the library, or unset it and \
             `pip install onnxruntime`"
        ),
    };
    // The system's loader searches for a bare name.
    if !path.exists() && path.components().count() > 1 {
        let path = path.display();
        return Err(missing(format!("{path}, which does not exist")));
    }
    if !path.is_dir() {
        return Ok(vec![path]);
    }
    // The folder of the library, of its package, or of all packages.
    let folders = [path.clone(), path.join("capi"), path.join(IN_WHEEL)];
    let found = folders.iter().map(|folder| libraries(folder));
    found
        .into_iter()
        .find(|libraries| !libraries.is_empty())
        .ok_or_else(|| {
            let path = path.display();
            missing(format!("the folder {path}, which has no {PREFIX}*"))
        })
}

/// The libraries in Python's packages under a prefix.
fn in_python(prefix: &Path) -> Vec<PathBuf> {
    let versions = entries(&prefix.join("lib"), PYTHON);
    let folders = versions.iter().flat_map(|version| {
        let packages = PACKAGES.iter();
        packages.map(|packages| version.join(packages).join(IN_WHEEL))
    });
    folders.flat_map(|folder| libraries(&folder)).collect()
}

/// The libraries in a folder.
fn libraries(folder: &Path) -> Vec<PathBuf> {
    entries(folder, PREFIX)
}

/// Entries of a folder whose names start with `prefix`, sorted.
fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(found) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let begins = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with(prefix))
    };
    let found = found.filter_map(Result::ok).map(|entry| entry.path());
    let mut found: Vec<PathBuf> = found.filter(begins).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_looked_for_where_they_may_be() {
        let dir = tempfile::tempdir().unwrap();
        let wheel = dir
            .path()
            .join("lib/python3.11/site-packages")
            .join(IN_WHEEL);
        std::fs::create_dir_all(&wheel).unwrap();
        let library = wheel.join("libonnxruntime.so.1.32.0");
        std::fs::write(&library, "").unwrap();
        std::fs::write(wheel.join("libonnxruntime_providers_shared.so"), "").unwrap();
        let with = |name: &'static str, value: &Path| {
            let value = value.to_path_buf();
            candidates(&move |asked| (asked == name).then(|| value.clone()))
        };
        // A variable replaces the search.
        let only = vec![library.clone()];
        assert_eq!(with("ORT_DYLIB_PATH", &library).unwrap(), only);
        for folder in wheel.ancestors().take(3) {
            assert_eq!(with("EMBERFLOW_ONNXRUNTIME", folder).unwrap(), only);
        }
        let name = PathBuf::from(NAMES[0]);
        assert_eq!(with("EMBERFLOW_ONNXRUNTIME", &name), Ok(vec![name]));
        for name in VARIABLES {
            let missing = with(name, &dir.path().join("missing.so")).unwrap_err();
            let words = [name, "missing.so", "pip install onnxruntime"];
            assert!(words.iter().all(|words| missing.what.contains(words)));
            let empty = with(name, dir.path()).unwrap_err();
            assert_eq!(empty.cause, Cause::Missing);
            let folder = dir.path().display().to_string();
            assert!(
                empty.what.contains(name) && empty.what.contains(&folder),
                "{empty}"
            );
        }
        // Otherwise packages precede the system's library.
        let found = with("VIRTUAL_ENV", dir.path()).unwrap();
        assert_eq!(found[0], library);
        assert!(found.ends_with(&NAMES.map(PathBuf::from)), "{found:?}");
        let found = candidates(&|_| None).unwrap();
        assert!(found.ends_with(&NAMES.map(PathBuf::from)), "{found:?}");
    }

    /// A virtual environment may lack a provider that the user's packages have.
    #[test]
    fn a_library_with_the_wanted_files_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        let install = |prefix: &str| {
            let lib = dir.path().join(prefix).join("lib/python3.12/site-packages");
            let wheel = lib.join(IN_WHEEL);
            std::fs::create_dir_all(&wheel).unwrap();
            let library = wheel.join("libonnxruntime.so.1.24.1");
            std::fs::write(&library, "").unwrap();
            library
        };
        let [plain, other] = ["env", "home/.local"].map(install);
        std::fs::write(other.with_file_name("libonnx_other.so"), "").unwrap();
        let variable = |name: &str| match name {
            "VIRTUAL_ENV" => Some(dir.path().join("env")),
            "HOME" => Some(dir.path().join("home")),
            _ => None,
        };
        let found = |wanted: &dyn Fn(&Path) -> bool| {
            let paths = first(wanted, candidates(&variable).unwrap());
            assert!(paths.ends_with(&NAMES.map(PathBuf::from)), "{paths:?}");
            paths[..2].to_vec()
        };
        let other_file = |path: &Path| path.with_file_name("libonnx_other.so").is_file();
        assert_eq!(found(&other_file), [other.clone(), plain.clone()]);
        assert_eq!(found(&|_| true), [plain.clone(), other.clone()]);
        assert_eq!(found(&|_| false), [plain, other]);
    }

    /// A library that is too old is not reported as missing.
    #[test]
    fn a_library_that_is_too_old_is_named_with_both_versions() {
        let e = ort::LoadDynamicError::BadVersion {
            version_str: "1.16.3".into(),
            path: "/opt/libonnxruntime.so".into(),
        };
        let what = too_old(&e).unwrap();
        let needed = format!("1.{}", ort::MINOR_VERSION);
        for words in ["1.16.3", "/opt/libonnxruntime.so", &needed, "--upgrade"] {
            assert!(what.contains(words), "{what}");
        }
        assert_eq!(too_old(&ort::LoadDynamicError::InvalidVersionString), None);
    }

    #[test]
    fn builds_are_named() {
        let info = "ORT Build Info: git-branch=HEAD, git-commit-id=fab30a4, build type=Release";
        assert_eq!(build(info), "build fab30a4");
        assert_eq!(build("other"), "build unknown");
    }
}
