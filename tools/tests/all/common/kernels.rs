//! Compiled kernels of OpenCL devices that are processors.

use std::env::var_os;
use std::path::PathBuf;

/// Where pocl saves compiled kernels, which takes about a second for each program: in the folder that it uses for
/// tests of the library, so that every test and every later run finds them. They are found by their source,
/// options and driver, and depend on nothing else in a cache.
pub fn compiled_kernels() -> PathBuf {
    let named = |name: &str| var_os(name).map(PathBuf::from);
    let of_user = || named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    named("POCL_CACHE_DIR")
        .or_else(|| Some(of_user()?.join("pocl/kcache")))
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("pocl"))
}
