//! Devices for tests: those of this machine with prescribed times, and faulty ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use emberflow_devices::{
    Backend, CpuDevice, Device, DeviceChoice, DeviceError, Dots, Facts, Form, HostBytes, Kernels,
    Lease, NeuronRows, OnDevices, OpenCl, Order, Part, PartKind, Program, Provider, Taken, Team,
    Ticket, Verdicts, Work, list,
};
use emberflow_engine::lane::OpenLane;
use tempfile::TempDir;

thread_local! {
    /// Verdicts on devices without a fault, for as long as a test runs. The whole check of an OpenCL device takes a
    /// third of a second of a core, that of the CPU a tenth; each engine that a test opens would repeat it.
    static VERDICTS: TempDir = tempfile::tempdir().expect("a folder");
}

/// Devices for the options of an engine, with this many bytes for neurons if given.
pub fn lane_of(devices: Vec<Device>, memory: impl Into<Option<u64>>) -> Option<Arc<dyn OpenLane>> {
    OnDevices::new(devices).holding(memory).lane()
}

/// A device that is checked as a whole once in a test for each kind of FFN, and later in a few ways. `verdicts` names
/// devices that share their times.
fn checked_once(device: Device, verdicts: &str) -> Device {
    let file = VERDICTS.with(|dir| dir.path().join(verdicts));
    device.with_verdicts(Some(Verdicts::at(file)))
}

/// The device without a fault, and so fast that it gets all that it holds.
fn fast(device: &Device, verdicts: &str) -> Device {
    checked_once(Faulty::armed_by(device, Fault::Never, never()), verdicts)
}

/// The device so fast that it gets all that it holds, and nearly all rows of products, in each engine that has it.
pub fn fast_products(device: &Device) -> Device {
    let faulty = Faulty::armed_by(device, Fault::Multiply, never());
    checked_once(faulty, "products")
}

/// The CPU as a device, with its own times.
pub fn cpu() -> Device {
    checked_once(Device::new(Box::new(CpuDevice::new())), "cpu")
}

/// The CPU as a device, the OpenCL devices of this machine, and the graphs of NPUs on ONNX Runtime's own kernels if it is
/// installed; with times so short that they get all clusters they can hold.
pub fn devices() -> Vec<Device> {
    let all = plain_devices();
    all.iter().map(|device| fast(device, "shared")).collect()
}

/// The same with their own times.
pub fn plain_devices() -> Vec<Device> {
    let cpu = Device::new(Box::new(CpuDevice::new()));
    let open = |n| DeviceChoice::OpenCl(n).open().ok().flatten();
    std::iter::once(cpu)
        .chain((0..opencl_devices()).filter_map(open))
        .chain(npu())
        .collect()
}

/// The number of OpenCL devices; 0 in tests of one provider of NPUs.
fn opencl_devices() -> usize {
    match std::env::var_os("EMBERFLOW_TEST_PROVIDER") {
        Some(_) => 0,
        None => list().len(),
    }
}

/// The NPU that processors stand in for.
fn npu() -> Option<Device> {
    let provider = Provider::for_tests().expect("a provider");
    let opened = DeviceChoice::Npu(provider).open();
    let needed = std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some();
    assert!(opened.is_ok() || !needed, "{opened:?}");
    opened.ok().flatten()
}

/// The same devices with separate memory, which the CPU cannot read: inputs and results are copied.
pub fn devices_apart() -> Vec<Device> {
    let all = plain_devices_apart();
    all.iter().map(|device| fast(device, "apart")).collect()
}

/// The same with their own times, without the CPU.
pub fn plain_devices_apart() -> Vec<Device> {
    let open = |n| DeviceChoice::OpenClApart(n).open().ok().flatten();
    std::iter::once(Faulty::discrete(Fault::Never))
        .chain((0..opencl_devices()).filter_map(open))
        .collect()
}

/// The OpenCL devices of this machine with separate memory, rows in tiles and each kernel form that all devices
/// support; with times so short that they get all clusters they can hold.
pub fn tiled_devices() -> Vec<Device> {
    let forms = [Team::Alone, Team::Local, Team::Block].map(|team| Form {
        team,
        dots: Dots::Widened,
    });
    let forced = |n: usize, form: Form| {
        let mut device = OpenCl::open(n, true).ok()?;
        let [few, many] = [form; 2];
        let order = Order::Tiles;
        device.force(Kernels { order, few, many });
        Some(fast(&Device::new(Box::new(device)), "apart"))
    };
    let all = (0..opencl_devices()).flat_map(|n| forms.map(|form| (n, form)));
    all.filter_map(|(n, form)| forced(n, form)).collect()
}

/// A provider of graphs on ONNX Runtime's own kernels, if that is installed: with its own times, and with times so short
/// that it gets all clusters it can hold.
pub fn provider(provider: Provider) -> Option<[Device; 2]> {
    let open = || {
        let opened = DeviceChoice::Npu(provider).open();
        let needed = std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some();
        assert!(opened.is_ok() || !needed, "{opened:?}");
        opened.ok().flatten()
    };
    Some([checked_once(open()?, "own"), fast(&open()?, "shared")])
}

/// A count of products that no fault reaches.
pub fn never() -> Arc<AtomicUsize> {
    Arc::new(usize::MAX.into())
}

/// Pieces of work of the check at the start: eleven comparisons, four of them in two pieces, and 26 timed runs.
pub const CHECKS: usize = 41;

/// How a device misbehaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// No fault.
    Never,
    /// Slow for fewer rows, and fast for this many.
    Narrow(usize),
    /// Fails at this piece of work: while it is submitted, or while it is awaited.
    Submit(usize),
    /// See `Submit`.
    Take(usize),
    /// Its sums deviate a little, as from another order of summation.
    Off,
    /// The same, until it fails at this piece of work.
    OffUntil(usize),
    /// Its sums are wrong.
    Wrong,
    /// Its products are wrong.
    WrongProducts,
    /// Fails at a product, once armed: while it is started, or while it is awaited.
    Multiply,
    /// See `Multiply`.
    TakeProducts,
    /// It has no memory for passes of more rows than this, after its check.
    Room(usize),
    /// It makes room for passes so many times after its check, and then no more.
    Rooms(usize),
    /// Fails at this upload after its check.
    Upload(usize),
    /// It has no memory for buffers that neurons pass through, after its check.
    Buffers,
    /// It has no memory for matrices, once armed.
    Matrices,
}

/// A device with a fault. It reports a nanosecond for its work in the check at the start.
pub struct Faulty {
    inner: Lease,
    facts: Facts,
    fault: Fault,
    /// Pieces of work so far, including those of the check at the start.
    done: Arc<AtomicUsize>,
    /// Rows of the current piece of work; `None` for products.
    rows: Option<usize>,
    /// Products until a fault.
    left: Arc<AtomicUsize>,
    /// Rooms that it has made, and uploads, since its check.
    rooms: usize,
    uploads: usize,
}

impl Faulty {
    /// The CPU with a fault.
    pub fn device(fault: Fault) -> Device {
        let cpu = Device::new(Box::new(CpuDevice::new()));
        Self::armed_by(&cpu, fault, never())
    }

    /// The same with separate memory, which the CPU cannot read.
    pub fn discrete(fault: Fault) -> Device {
        let mut faulty = Self::new(&Device::new(Box::new(CpuDevice::new())), fault);
        faulty.facts.unified = false;
        Device::new(Box::new(faulty))
    }

    /// The CPU, as if it did not know rows and tokens with one scale.
    pub fn of_groups() -> Device {
        let mut faulty = Self::new(&Device::new(Box::new(CpuDevice::new())), Fault::Never);
        faulty.facts.per_channel = false;
        Device::new(Box::new(faulty))
    }

    /// A device with its own times, as if it had static graphs for these numbers of tokens.
    pub fn of_graphs(of: &Device, graphs: &'static [usize]) -> Device {
        let mut device = Self::new(of, Fault::Never);
        device.facts.graphs = graphs;
        Device::new(Box::new(device))
    }

    /// A device with a fault, with a countdown of products.
    pub fn armed_by(of: &Device, fault: Fault, left: Arc<AtomicUsize>) -> Device {
        let faulty = Self::new(of, fault);
        Device::new(Box::new(Self { left, ..faulty }))
    }

    /// A device with a fault, and the number of its pieces of work.
    pub fn counted(of: &Device, fault: Fault) -> (Device, Arc<AtomicUsize>) {
        let faulty = Self::new(of, fault);
        let done = Arc::clone(&faulty.done);
        (Device::new(Box::new(faulty)), done)
    }

    fn new(of: &Device, fault: Fault) -> Self {
        Self {
            inner: of.lease().expect("a device that nobody else has"),
            facts: of.facts().clone(),
            fault,
            done: Arc::default(),
            rows: None,
            left: never(),
            rooms: 0,
            uploads: 0,
        }
    }

    /// Whether it has been checked.
    fn is_checked(&self) -> bool {
        self.done.load(Ordering::Relaxed) >= CHECKS
    }

    fn no_memory(&self) -> DeviceError {
        DeviceError {
            device: "faulty".into(),
            what: "has no memory".into(),
        }
    }

    fn lost(&self) -> DeviceError {
        DeviceError {
            device: "faulty".into(),
            what: "was reset".into(),
        }
    }
}

impl Backend for Faulty {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, program: &Program) -> Result<(), DeviceError> {
        if let (Program::Room(room), true) = (program, self.is_checked()) {
            self.rooms += 1;
            match self.fault {
                Fault::Room(most) if room.rows > most => return Err(self.no_memory()),
                Fault::Rooms(most) if self.rooms > most => return Err(self.no_memory()),
                _ => {}
            }
        }
        self.inner.backend().prepare(program)
    }

    fn memory(&mut self, of: PartKind) -> Result<Part, DeviceError> {
        let refused = match &of {
            PartKind::Passing(_) => self.fault == Fault::Buffers && self.is_checked(),
            PartKind::Matrix(_) => {
                self.fault == Fault::Matrices && self.left.load(Ordering::Relaxed) == 0
            }
            _ => false,
        };
        match refused {
            true => Err(self.no_memory()),
            false => self.inner.backend().memory(of),
        }
    }

    fn host(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        if self.facts.unified {
            self.inner.backend().host(part)
        } else {
            Ok(None)
        }
    }

    fn release(&mut self, part: Part) {
        self.inner.backend().release(part);
    }

    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<Ticket, DeviceError> {
        if self.is_checked() {
            self.uploads += 1;
            if matches!(self.fault, Fault::Upload(at) if self.uploads > at) {
                return Err(self.lost());
            }
        }
        self.inner.backend().upload(part, first, neurons)
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        let fails = match work {
            Work::Clusters(work) => {
                self.rows = Some(work.rows());
                let number = self.done.fetch_add(1, Ordering::Relaxed);
                matches!(self.fault, Fault::Submit(at) if number >= at)
            }
            Work::Experts(group, _) => {
                self.rows = Some(group.capacity);
                let number = self.done.fetch_add(1, Ordering::Relaxed);
                matches!(self.fault, Fault::Submit(at) if number >= at)
            }
            Work::Products(..) => {
                self.rows = None;
                let left = self.left.fetch_sub(1, Ordering::Relaxed);
                self.fault == Fault::Multiply && left == 0
            }
        };
        if fails {
            Err(self.lost())
        } else {
            self.inner.backend().submit(work)
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError> {
        self.inner.backend().poll(ticket)
    }

    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        let taken = self.inner.backend().take(ticket, out)?;
        let took = match (ticket, self.rows) {
            (Ticket::Upload(_), _) => taken.took.min(Duration::from_nanos(1)),
            (Ticket::Work, Some(rows)) => self.spoil_sums(rows, taken.took, out)?,
            (Ticket::Work, None) => self.spoil_products(taken.took, out)?,
        };
        Ok(Taken { took, ..taken })
    }

    fn clear(&mut self) {
        self.inner.backend().clear();
    }
}

impl Faulty {
    /// Sums with the fault applied, and their duration.
    fn spoil_sums(
        &self,
        rows: usize,
        took: Duration,
        out: &mut [f32],
    ) -> Result<Duration, DeviceError> {
        let number = self.done.load(Ordering::Relaxed);
        match self.fault {
            Fault::Take(at) | Fault::OffUntil(at) if number >= at => return Err(self.lost()),
            Fault::Off | Fault::OffUntil(_) => out.iter_mut().for_each(|v| *v *= 1.000_001),
            Fault::Wrong => out.iter_mut().for_each(|v| *v *= 1.01),
            _ => {}
        }
        Ok(match self.fault {
            _ if number > CHECKS => took,
            Fault::Narrow(least) if rows < least => Duration::from_secs(1),
            _ => Duration::from_nanos(1),
        })
    }

    /// The same for products: so fast that it gets nearly all rows, if it has a fault.
    fn spoil_products(&self, took: Duration, out: &mut [f32]) -> Result<Duration, DeviceError> {
        match self.fault {
            Fault::TakeProducts if self.left.load(Ordering::Relaxed) == usize::MAX => {
                return Err(self.lost());
            }
            Fault::Never => return Ok(took),
            Fault::WrongProducts => out.iter_mut().for_each(|v| *v *= 1.01),
            _ => {}
        }
        Ok(Duration::from_nanos(1))
    }
}
