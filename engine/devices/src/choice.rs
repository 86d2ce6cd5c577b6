//! Choice of devices: names of the command line, and devices of this machine.

use std::str::FromStr;

use emberflow_opencl::list;

use super::{
    CpuDevice, Device, DeviceError, MOST_DEVICES, NpuDevice, OpenCl, Provider, TryOut, Verdicts,
};

/// Devices by name, each of them once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceChoices(pub Vec<DeviceChoice>);

impl FromStr for DeviceChoices {
    type Err = String;

    /// Names with commas between them.
    fn from_str(names: &str) -> Result<Self, String> {
        let mut all = Vec::new();
        for name in names.split(',') {
            let choice = name.parse()?;
            if all.contains(&choice) {
                return Err(format!("{name} is named twice in {names:?}"));
            }
            all.push(choice);
        }
        let alone = [DeviceChoice::None, DeviceChoice::Auto];
        if all.len() > 1 && all.iter().any(|choice| alone.contains(choice)) {
            return Err(format!("none and auto stand alone, unlike in {names:?}"));
        }
        if all.len() > MOST_DEVICES {
            return Err(format!("{} devices, at most {MOST_DEVICES}", all.len()));
        }
        Ok(Self(all))
    }
}

/// A device by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// None.
    #[default]
    None,
    /// The first graphics processor, where it is worth its transfers; else none.
    Auto,
    /// The CPU, as a device: to try what a device changes, where there is none.
    Cpu,
    /// The OpenCL device of this number.
    OpenCl(usize),
    /// The same, treated as if it had separate memory, so that weights are copied to it.
    OpenClApart(usize),
    /// An NPU, or what computes its graphs.
    Npu(Provider),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = match name {
            "none" => Some(Self::None),
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            "opencl" => Some(Self::OpenCl(0)),
            "npu" => Some(Self::Npu(Provider::HERE)),
            _ if name.starts_with("npu:") => name[4..].parse().map(Self::Npu).ok(),
            _ => name
                .strip_prefix("opencl:")
                .and_then(|n| match n.split_once(':') {
                    Some((n, "copies")) => n.parse().map(Self::OpenClApart).ok(),
                    Some(_) => None,
                    None => n.parse().map(Self::OpenCl).ok(),
                }),
        };
        known.ok_or_else(|| {
            let providers = Provider::ALL.map(|provider| format!("npu:{provider}"));
            format!(
                "no device is called {name:?}: none, auto, cpu, opencl, opencl:N, opencl:N:copies, npu, {} (see doctor)",
                providers.join(", ")
            )
        })
    }
}

impl DeviceChoice {
    /// Opens it. `None` where none is wanted, and with `auto` where none is there.
    ///
    /// # Errors
    /// No such device, or the driver's.
    pub fn open(self) -> Result<Option<Device>, DeviceError> {
        self.open_trying(None)
    }

    /// The same; with `try_out` another process makes an NPU's graphs for a model first.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_trying(self, try_out: Option<TryOut>) -> Result<Option<Device>, DeviceError> {
        let number = match self {
            Self::None => return Ok(None),
            Self::Cpu => return Ok(Some(Device::new(Box::new(CpuDevice::new())))),
            Self::Npu(provider) => {
                let npu = NpuDevice::open_trying(provider, try_out)?;
                return Ok(Some(Device::new(Box::new(npu))));
            }
            Self::OpenCl(number) | Self::OpenClApart(number) => number,
            Self::Auto => match list().iter().position(|found| found.gpu) {
                Some(number) => number,
                None => return Ok(None),
            },
        };
        let apart = matches!(self, Self::OpenClApart(_));
        let device = Device::new(Box::new(OpenCl::open(number, apart)?));
        Ok(Some(match self {
            Self::Auto => device.optional(),
            _ => device,
        }))
    }
}

impl DeviceChoice {
    /// Where verdicts on such a device are saved; `None` of those that compute with the CPU's kernels.
    pub fn verdicts(self) -> Option<Verdicts> {
        match self {
            Self::OpenCl(_) | Self::OpenClApart(_) | Self::Npu(_) | Self::Auto => Verdicts::here(),
            Self::None | Self::Cpu => None,
        }
    }
}
