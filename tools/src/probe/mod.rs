//! Libraries and drivers of devices are first loaded in a child process, this program again: if one crashes or hangs, the
//! child ends, and this process reports an error.

mod answer;
pub mod npu;
pub mod opencl;

use emberflow_devices::{Device, DeviceChoice, DeviceError};

pub use self::answer::{Cause, Unusable};
use crate::progress::Loading;
use crate::tell::tell;

/// Opens a device; its driver is loaded in a child process first.
///
/// # Errors
/// No such device, or an error of the driver.
pub fn open(choice: DeviceChoice) -> Result<Option<Device>, DeviceError> {
    let (found, name) = {
        let _waiting = in_child(choice).map(|what| Loading::waiting(&what));
        match choice {
            DeviceChoice::None | DeviceChoice::Cpu => (Ok(true), String::new()),
            DeviceChoice::Npu(provider) => {
                let opened = npu::open(provider).map(|()| true);
                (opened, format!("npu:{provider}"))
            }
            DeviceChoice::OpenCl(number) | DeviceChoice::OpenClApart(number) => {
                (opencl::probe(Some(number)), format!("opencl:{number}"))
            }
            DeviceChoice::Auto => (opencl::probe(None), String::new()),
        }
    };
    match (choice, found) {
        // The library of one that is not used takes memory.
        (DeviceChoice::Auto, Ok(false)) => return Ok(None),
        (DeviceChoice::Auto, Err(Unusable { what, .. })) => {
            tell(format_args!("emberflow: no OpenCL device: {what}"));
            return Ok(None);
        }
        (_, found) => found.map_err(|e| e.of(name))?,
    };
    choice.open_trying(Some(npu::try_out))
}

/// What the child process does, to be shown to the user, as it may take long.
fn in_child(choice: DeviceChoice) -> Option<String> {
    let compiled = |device: &str| {
        format!(
            "compiling and trying kernels for {device}, which takes seconds to minutes the first time"
        )
    };
    match choice {
        DeviceChoice::None | DeviceChoice::Cpu => None,
        DeviceChoice::Npu(provider) => Some(format!("loading the library of npu:{provider}")),
        DeviceChoice::OpenCl(number) | DeviceChoice::OpenClApart(number) => {
            Some(compiled(&format!("opencl:{number}")))
        }
        DeviceChoice::Auto => Some(compiled("the graphics processor")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_driver_is_explained() {
        let said = |name: &str| in_child(name.parse().unwrap());
        for name in ["opencl", "opencl:0", "opencl:0:copies"] {
            let expected = "compiling and trying kernels for opencl:0, which takes seconds to minutes the first time";
            assert_eq!(said(name).as_deref(), Some(expected));
        }
        assert!(
            said("auto")
                .unwrap()
                .contains("kernels for the graphics processor")
        );
        assert!(said("npu:cpu").unwrap().ends_with("npu:cpu"));
        assert_eq!([said("none"), said("cpu")], [None, None]);
    }
}
