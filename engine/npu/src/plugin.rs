//! QNN, which comes as a library of its own that ONNX Runtime loads: the package onnxruntime-qnn since its version 2.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ort::device::Device;
use ort::environment::Environment;
use ort::memory::DeviceType;

use crate::error::Error;
use crate::library::Library;

/// Name of the provider.
const PROVIDER: &str = "QNNExecutionProvider";

/// Its library.
const FILE: &str = if cfg!(windows) {
    "onnxruntime_providers_qnn.dll"
} else {
    "libonnxruntime_providers_qnn.so"
};

/// The package's folder beside that of ONNX Runtime's, whose library is in `onnxruntime/capi`.
const PACKAGE: &str = "onnxruntime_qnn";

/// Whether it was registered, once that was tried: a process does so once.
static REGISTERED: Mutex<Option<Result<bool, Error>>> = Mutex::new(None);

/// Where it is: in the folder of ONNX Runtime's library, or in the package beside ONNX Runtime's.
pub(crate) fn path(library: &Path) -> Option<PathBuf> {
    let folder = library.parent()?;
    let packages = folder.parent().and_then(Path::parent);
    let folders = std::iter::once(folder.to_owned()).chain(packages.map(|all| all.join(PACKAGE)));
    let mut files = folders.map(|folder| folder.join(FILE));
    files.find(|file| file.is_file())
}

/// Registers it, unless it is; whether there is one.
///
/// # Errors
/// It cannot be loaded.
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

/// The device that computes: the NPU, or with `simulated` the processor that simulates one. On Arm the first of all where
/// none says that it is an NPU, as systems of phones do not tell.
pub(crate) fn device(environment: &Environment, simulated: bool) -> Option<Device<'_>> {
    let all = || {
        let devices = environment.devices();
        devices.filter(|device| device.ep().is_ok_and(|name| name == PROVIDER))
    };
    let of = |wanted| all().find(|device| device.hardware_device().ty() == wanted);
    match simulated {
        true => of(DeviceType::CPU).filter(|_| !ON_ARM),
        false => of(DeviceType::NPU).or_else(|| all().next().filter(|_| ON_ARM)),
    }
}

/// What it is to compute on.
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
        let of = |folder: &str| {
            let folder = dir.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            folder
        };
        let library = of("onnxruntime/capi").join("libonnxruntime.so.1");
        assert_eq!(path(&library), None);
        let in_package = of(PACKAGE).join(FILE);
        std::fs::write(&in_package, "").unwrap();
        assert_eq!(path(&library), Some(in_package));
        let in_same = library.with_file_name(FILE);
        std::fs::write(&in_same, "").unwrap();
        assert_eq!(path(&library), Some(in_same));
        assert_eq!(path(Path::new("libonnxruntime.so")), None);
    }
}
