//! Enumeration of the OpenCL devices of this machine.

use opencl_sys::{
    CL_DEVICE_EXTENSIONS, CL_DEVICE_GLOBAL_MEM_SIZE, CL_DEVICE_HOST_UNIFIED_MEMORY,
    CL_DEVICE_MAX_COMPUTE_UNITS, CL_DEVICE_MAX_MEM_ALLOC_SIZE, CL_DEVICE_NAME,
    CL_DEVICE_SINGLE_FP_CONFIG, CL_DEVICE_TYPE, CL_DEVICE_TYPE_GPU, CL_DRIVER_VERSION,
    CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT,
};

use crate::Listed;
use crate::forms::{Extensions, Kernels};
use crate::handles::{Found, devices};

/// CL_DEVICE_COMPUTE_CAPABILITY_MAJOR_NV and MINOR_NV, of cl_nv_device_attribute_query.
const MAJOR_NV: u32 = 0x4000;
const MINOR_NV: u32 = 0x4001;

/// Properties of a device. Those that the driver does not report stay empty.
pub(super) fn listed(device: &Found) -> Listed {
    let divides = CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT;
    let mut facts = Listed {
        name: device.text(CL_DEVICE_NAME),
        driver: device.text(CL_DRIVER_VERSION),
        unified: device.number(CL_DEVICE_HOST_UNIFIED_MEMORY) != 0,
        memory: device.number(CL_DEVICE_GLOBAL_MEM_SIZE),
        longest: device.number(CL_DEVICE_MAX_MEM_ALLOC_SIZE),
        gpu: device.number(CL_DEVICE_TYPE) & CL_DEVICE_TYPE_GPU != 0,
        units: device.number(CL_DEVICE_MAX_COMPUTE_UNITS) as u32,
        divides: device.number(CL_DEVICE_SINGLE_FP_CONFIG) & divides != 0,
        extensions: (device.text(CL_DEVICE_EXTENSIONS).split_whitespace())
            .map(str::to_owned)
            .collect(),
        ..Listed::default()
    };
    facts.kernels = Kernels::of(&facts, &extensions(device, &facts));
    facts
}

/// Extensions that kernels may use.
pub(super) fn extensions(device: &Found, facts: &Listed) -> Extensions {
    Extensions::of(&facts.extensions, has_dp4a(device, facts))
}

/// Whether the device has NVIDIA's instruction `dp4a` (compute capability 6.1 or later).
fn has_dp4a(device: &Found, facts: &Listed) -> bool {
    let queries = |name: &String| name == "cl_nv_device_attribute_query";
    let reports = facts.extensions.iter().any(queries);
    reports && [MAJOR_NV, MINOR_NV].map(|name| device.number(name)) >= [6, 1]
}

/// Lists the OpenCL devices of this machine in the order of their numbers; empty without a driver.
pub fn list() -> Vec<Listed> {
    let found = devices().unwrap_or_default();
    found.iter().map(listed).collect()
}
