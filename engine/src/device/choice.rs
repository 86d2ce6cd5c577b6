//! Which device: the names of the command line, and what is there.

use std::str::FromStr;

use emberflow_opencl as cl;
use emberflow_storage::clock;

use super::opencl::{OpenCl, facts};
use super::{CpuDevice, Device, DeviceError, Facts, Kept, SimDevice, Simulated};
use crate::planner::rates::Rates;
use crate::split::snapdragon::MEMORY_OF_CPU;

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
    /// The same, taken to have a memory of its own whatever it says, so that weights are copied to it.
    OpenClApart(usize),
    /// A simulated one.
    Sim(Simulated),
    /// None, on the phone that it is simulated on: to compare with.
    SimNone,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let simulated = |name: &str| {
            let found = Simulated::ALL.into_iter().find(|sim| sim.name() == name);
            found
                .map(Self::Sim)
                .or((name == "8gen3-none").then_some(Self::SimNone))
        };
        let known = match name {
            "none" => Some(Self::None),
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            "opencl" => Some(Self::OpenCl(0)),
            _ => match (name.strip_prefix("sim:"), name.strip_prefix("opencl:")) {
                (Some(name), _) => simulated(name),
                (_, Some(n)) => match n.split_once(':') {
                    Some((n, "copies")) => n.parse().map(Self::OpenClApart).ok(),
                    Some(_) => None,
                    None => n.parse().map(Self::OpenCl).ok(),
                },
                _ => None,
            },
        };
        known.ok_or_else(|| {
            format!(
                "no device is called {name:?}: none, auto, cpu, opencl, opencl:N or opencl:N:copies (see doctor), \
                 sim:8gen3, sim:8gen3-gpu or sim:8gen3-none"
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
        let number = match self {
            Self::None => return Ok(None),
            Self::Cpu => return Ok(Some(Device::new(Box::new(CpuDevice::new())))),
            Self::SimNone => {
                set_clock()?;
                return Ok(None);
            }
            Self::Sim(of) => {
                set_clock()?;
                return Ok(Some(Device::new(Box::new(SimDevice::new(of)))));
            }
            Self::OpenCl(number) | Self::OpenClApart(number) => number,
            Self::Auto => match cl::list().iter().position(|found| found.gpu) {
                Some(number) => number,
                None => return Ok(None),
            },
        };
        let apart = matches!(self, Self::OpenClApart(_));
        Ok(Some(Device::new(Box::new(OpenCl::open(number, apart)?))))
    }
}

impl DeviceChoice {
    /// Where verdicts on such a device are kept. Those of OpenCL alone are: the others compute with the
    /// CPU's kernels.
    pub fn kept(self) -> Option<Kept> {
        match self {
            Self::OpenCl(_) | Self::OpenClApart(_) | Self::Auto => Kept::here(),
            Self::None | Self::Cpu | Self::Sim(_) | Self::SimNone => None,
        }
    }
}

/// Lets the program's clock run so that this machine's compute threads are as fast as the phone's.
fn set_clock() -> Result<(), DeviceError> {
    let here = Rates::saved().and_then(|rates| rates.of_memory());
    let here = here.ok_or_else(|| DeviceError {
        device: "sim".into(),
        what: "needs to know how fast this machine is: `emberflow plan MODEL` measures it once"
            .into(),
    })?;
    let rate = here / MEMORY_OF_CPU;
    tracing::info!(
        rate,
        "seconds of the simulated phone in one of this machine"
    );
    clock::set_rate(rate);
    Ok(())
}

/// An OpenCL device of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// What it is.
    pub facts: Facts,
    /// A graphics processor.
    pub gpu: bool,
    /// Compute units.
    pub units: u32,
    /// Names of its extensions.
    pub extensions: Vec<String>,
}

/// The OpenCL devices of this machine, in the order of their numbers. Empty without a driver.
pub fn list() -> Vec<Listed> {
    let listed = |found: cl::Listed| Listed {
        facts: facts(&found),
        gpu: found.gpu,
        units: found.units,
        extensions: found.extensions,
    };
    cl::list().into_iter().map(listed).collect()
}
