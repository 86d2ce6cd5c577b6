//! `--device`: who computes beside the CPU.

use std::str::FromStr;

#[cfg(feature = "devices")]
use emberflow_devices::DeviceChoices;

use super::values::with_unit;
use crate::size;

/// Devices and their memory limit.
#[derive(Debug, Clone)]
pub struct DeviceArg {
    /// The devices.
    #[cfg(feature = "devices")]
    pub choices: DeviceChoices,
    /// Maximum bytes of neurons on them; `None` to choose by their speed.
    pub memory: Option<u64>,
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, memory) = match text.split_once('=') {
            Some((name, size)) => (name, Some(with_unit(size, size::parse(size)?)?)),
            None => (text, None),
        };
        #[cfg(not(feature = "devices"))]
        if name != "none" {
            return Err(format!(
                "this program was built without devices, so there is no {name:?}: use none, or build it with the cargo \
                 feature `devices`"
            ));
        }
        Ok(Self {
            #[cfg(feature = "devices")]
            choices: name.parse()?,
            memory,
        })
    }
}
