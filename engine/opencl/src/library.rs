//! Run-time loading of the OpenCL library, the same on all targets except for the file names.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use opencl_sys::cl_function_types::*;
use opencl_sys::cl_int;

use crate::Error;

/// Function type inside the `Option` that opencl-sys declares.
pub(super) trait Loaded {
    type Function: Copy;
}

impl<F: Copy> Loaded for Option<F> {
    type Function = F;
}

/// Declares [`Functions`]; fields have the names of OpenCL's documentation.
macro_rules! functions {
    ($($name:ident: $kind:ident,)*) => {
        /// Functions of a library that is never unloaded.
        #[allow(non_snake_case)]
        pub(super) struct Functions {
            $(pub $name: <$kind as Loaded>::Function,)*
        }

        impl Functions {
            /// Resolves all functions.
            #[cfg(not(target_feature = "crt-static"))]
            fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: in an OpenCL library a function of this name has this type.
                        *unsafe {
                            library.get::<<$kind as Loaded>::Function>(name.as_bytes())?
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    clGetPlatformIDs: clGetPlatformIDs_t,
    clGetDeviceIDs: clGetDeviceIDs_t,
    clGetDeviceInfo: clGetDeviceInfo_t,
    clCreateContext: clCreateContext_t,
    clReleaseContext: clReleaseContext_t,
    clCreateCommandQueue: clCreateCommandQueue_t,
    clReleaseCommandQueue: clReleaseCommandQueue_t,
    clCreateBuffer: clCreateBuffer_t,
    clReleaseMemObject: clReleaseMemObject_t,
    clCreateProgramWithSource: clCreateProgramWithSource_t,
    clBuildProgram: clBuildProgram_t,
    clGetProgramBuildInfo: clGetProgramBuildInfo_t,
    clReleaseProgram: clReleaseProgram_t,
    clCreateKernel: clCreateKernel_t,
    clReleaseKernel: clReleaseKernel_t,
    clSetKernelArg: clSetKernelArg_t,
    clGetKernelWorkGroupInfo: clGetKernelWorkGroupInfo_t,
    clEnqueueNDRangeKernel: clEnqueueNDRangeKernel_t,
    clEnqueueReadBuffer: clEnqueueReadBuffer_t,
    clEnqueueWriteBuffer: clEnqueueWriteBuffer_t,
    clEnqueueMapBuffer: clEnqueueMapBuffer_t,
    clEnqueueUnmapMemObject: clEnqueueUnmapMemObject_t,
    clEnqueueBarrierWithWaitList: clEnqueueBarrierWithWaitList_t,
    clGetEventInfo: clGetEventInfo_t,
    clGetEventProfilingInfo: clGetEventProfilingInfo_t,
    clWaitForEvents: clWaitForEvents_t,
    clReleaseEvent: clReleaseEvent_t,
    clFlush: clFlush_t,
    clFinish: clFinish_t,
}

/// File names by target, in order of preference. On Android vendors install the library, or a driver with the
/// same functions, in their own folders.
#[cfg(all(target_os = "android", not(target_feature = "crt-static")))]
const NAMES: [&str; 5] = [
    "libOpenCL.so",
    "/vendor/lib64/libOpenCL.so",
    "/system/vendor/lib64/libOpenCL.so",
    "/vendor/lib64/egl/libGLES_mali.so",
    "/vendor/lib64/libPVROCL.so",
];
#[cfg(all(not(target_os = "android"), not(target_feature = "crt-static")))]
const NAMES: [&str; 2] = ["libOpenCL.so.1", "libOpenCL.so"];

/// The loaded library. The lock also serialises the loading of drivers, not all of which are thread-safe.
static LIBRARY: Mutex<Option<&'static Functions>> = Mutex::new(None);

/// Calls `then` with the library's functions while holding the lock.
pub(super) fn with_library<T>(then: impl FnOnce(&'static Functions) -> T) -> Result<T, Error> {
    let mut library = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    let functions = match *library {
        Some(functions) => functions,
        None => *library.insert(load()?),
    };
    Ok(then(functions))
}

/// A statically linked program has no dynamic loader.
#[cfg(target_feature = "crt-static")]
fn load() -> Result<&'static Functions, Error> {
    Err(Error(
        "a static program cannot load an OpenCL library: use one that is linked dynamically".into(),
    ))
}

#[cfg(not(target_feature = "crt-static"))]
fn load() -> Result<&'static Functions, Error> {
    let mut why = String::new();
    for name in NAMES {
        // SAFETY: the initialisers of an OpenCL library have no preconditions.
        let library = match unsafe { libloading::Library::new(name) } {
            Ok(library) => library,
            Err(e) => {
                tracing::debug!(name, error = %e, "no OpenCL library");
                continue;
            }
        };
        match Functions::of(&library) {
            Ok(functions) => {
                tracing::debug!(name, "OpenCL library");
                // Never unloaded: drivers start threads and install handlers.
                std::mem::forget(library);
                return Ok(Box::leak(Box::new(functions)));
            }
            Err(e) => why = format!(" ({name} is not complete: {e})"),
        }
    }
    Err(Error(format!(
        "no OpenCL library was found{why}: install the driver of your device (for processors: \
         pocl-opencl-icd)"
    )))
}

/// Error code of an OpenCL function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Code(pub cl_int);

impl Code {
    /// Converts a status code to a result.
    pub fn check(code: cl_int) -> Result<(), Self> {
        match code {
            opencl_sys::CL_SUCCESS => Ok(()),
            code => Err(Self(code)),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            opencl_sys::CL_DEVICE_NOT_AVAILABLE => "device not available",
            opencl_sys::CL_COMPILER_NOT_AVAILABLE => "no compiler",
            opencl_sys::CL_MEM_OBJECT_ALLOCATION_FAILURE => "no memory for a buffer",
            opencl_sys::CL_OUT_OF_RESOURCES => "out of resources",
            opencl_sys::CL_OUT_OF_HOST_MEMORY => "out of host memory",
            opencl_sys::CL_BUILD_PROGRAM_FAILURE => "its compiler failed",
            opencl_sys::CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST => "work failed",
            opencl_sys::CL_INVALID_VALUE => "invalid value",
            opencl_sys::CL_INVALID_BUFFER_SIZE => "invalid size of a buffer",
            opencl_sys::CL_INVALID_KERNEL_ARGS => "invalid arguments",
            opencl_sys::CL_INVALID_WORK_GROUP_SIZE => "invalid size of work groups",
            _ => return write!(f, "OpenCL error {}", self.0),
        };
        write!(f, "{name} (OpenCL error {})", self.0)
    }
}
