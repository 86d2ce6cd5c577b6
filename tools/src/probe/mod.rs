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
    match choice {
        DeviceChoice::None | DeviceChoice::Cpu => {}
        DeviceChoice::Npu(provider) => {
            let _waiting = Loading::waiting(&format!("loading the library of npu:{provider}"));
            npu::open(provider).map_err(|e| e.of(format!("npu:{provider}")))?;
        }
        DeviceChoice::OpenCl(number) | DeviceChoice::OpenClApart(number) => {
            opencl::probe(Some(number)).map_err(|e| e.of(format!("opencl:{number}")))?;
        }
        DeviceChoice::Auto => match opencl::probe(None) {
            Ok(true) => {}
            // The library of one that is not used takes memory.
            Ok(false) => return Ok(None),
            Err(Unusable { what, .. }) => {
                tell(format_args!("emberflow: no OpenCL device: {what}"));
                return Ok(None);
            }
        },
    }
    choice.open_trying(Some(npu::try_out))
}
