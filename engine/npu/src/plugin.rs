//! QNN's provider, a separate library that ONNX Runtime loads (package onnxruntime-qnn 2 or later).

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ort::device::Device;
use ort::environment::Environment;
use ort::memory::DeviceType;

use crate::error::Error;
use crate::library::Library;

/// Provider name.
const PROVIDER: &str = "QNNExecutionProvider";

/// File name of its library.
const FILE: &str = if cfg!(windows) {
    "onnxruntime_providers_qnn.dll"
} else {
    "libonnxruntime_providers_qnn.so"
};

/// Folder of its package, beside ONNX Runtime's `onnxruntime/capi`.
const PACKAGE: &str = "onnxruntime_qnn";

/// Result of the registration, which a process does once.
static REGISTERED: Mutex<Option<Result<bool, Error>>> = Mutex::new(None);

/// Path of the library: in the folder of ONNX Runtime's library, or in its own package beside.
pub(crate) fn path(library: &Path) -> Option<PathBuf> {
    let folder = library.parent()?;
    let packages = folder.parent().and_then(Path::parent);
    let folders =
        std::iter::once(folder.to_owned()).chain(packages.map(|packages| packages.join(PACKAGE)));
    let mut files = folders.map(|folder| folder.join(FILE));
    files.find(|file| file.is_file())
}

/// Registers the provider at the first call. Returns whether its library exists.
///
/// # Errors
/// The library cannot be loaded.
pub(crate) fn register(library: &Library) -> Result<bool, Error> {
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let register = || match path(&library.path) {
        None => Ok(false),
        Some(path) => {
            let registered = library.environment.register_ep_library(PROVIDER, &path);
            registered.map_err(|e| {
                let (path, e) = (path.display(), Error::of(e));
                Error::broken(format!("{path} cannot be loaded: {e}; install the newest onnxruntime and onnxruntime-qnn"))
            })?;
            Ok(true)
        }
    };
    registered.get_or_insert_with(register).clone()
}

/// The NPU, or with `simulated` the CPU that simulates one. On Arm, where phones do not report the kind of a device, the
/// first device stands in for the NPU.
pub(crate) fn device(environment: &Environment, simulated: bool) -> Option<Device<'_>> {
    let devices = || {
        let devices = environment.devices();
        devices.filter(|device| device.ep().is_ok_and(|name| name == PROVIDER))
    };
    let first = |kind| devices().find(|device| device.hardware_device().ty() == kind);
    match simulated {
        true => first(DeviceType::CPU).filter(|_| !ON_ARM),
        false => first(DeviceType::NPU).or_else(|| devices().next().filter(|_| ON_ARM)),
    }
}

/// Provider options: the back end of the Hexagon NPU.
pub(crate) fn options() -> [(String, String); 1] {
    [(format!("{PROVIDER}.backend_type"), "htp".to_owned())]
}

const ON_ARM: bool = cfg!(target_arch = "aarch64");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_found_where_packages_and_programs_have_it() {
        let dir = tempfile::tempdir().unwrap();
        let make = |folder: &str| {
            let folder = dir.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            folder
        };
        let library = make("onnxruntime/capi").join("libonnxruntime.so.1");
        assert_eq!(path(&library), None);
        let in_package = make(PACKAGE).join(FILE);
        std::fs::write(&in_package, "").unwrap();
        assert_eq!(path(&library), Some(in_package));
        let in_same = library.with_file_name(FILE);
        std::fs::write(&in_same, "").unwrap();
        assert_eq!(path(&library), Some(in_same));
        assert_eq!(path(Path::new("libonnxruntime.so")), None);
    }
}
