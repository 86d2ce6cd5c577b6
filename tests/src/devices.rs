//! Devices for tests: those of this machine with times of the test's choosing, and such as fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use emberflow_engine::device::{
    Backend, CpuDevice, Device, DeviceChoice, DeviceError, Dots, Facts, Form, HostBytes, Kept,
    Kernels, Lease, NeuronRows, OpenCl, Order, Part, PartKind, Program, Provider, Taken, Team,
    Ticket, Work, list,
};
use tempfile::TempDir;

thread_local! {
    /// Verdicts on devices without a fault, for as long as a test runs. The whole check of an OpenCL device takes a
    /// third of a second of a core, that of the CPU a tenth; each engine that a test opens would repeat it.
    static VERDICTS: TempDir = tempfile::tempdir().expect("a folder");
}

/// A device that is checked as a whole once in a test for each kind of FFN, and later in a few ways. `verdicts` names
/// devices that share their times.
fn checked_once(device: Device, verdicts: &str) -> Device {
    let file = VERDICTS.with(|dir| dir.path().join(verdicts));
    device.keeping(Some(Kept::at(file)))
}

/// The device without a fault, and so fast that it gets all that it holds.
fn fast(device: &Device, verdicts: &str) -> Device {
    checked_once(Faulty::armed_by(device, Fault::Never, never()), verdicts)
}

/// The CPU as a device, with its own times.
pub fn cpu() -> Device {
    checked_once(Device::new(Box::new(CpuDevice::new())), "cpu")
}

/// The CPU as a device, the OpenCL devices of this machine, and the graphs of NPUs on ONNX Runtime's own kernels where it is
/// installed; so fast that they get all that they hold.
pub fn devices() -> Vec<Device> {
    let all = plain_devices();
    all.iter().map(|device| fast(device, "shared")).collect()
}

/// The same with their own times.
pub fn plain_devices() -> Vec<Device> {
    let cpu = Device::new(Box::new(CpuDevice::new()));
    let open = |n| DeviceChoice::OpenCl(n).open().ok().flatten();
    std::iter::once(cpu)
        .chain((0..list().len()).filter_map(open))
        .chain(npu())
        .collect()
}

/// The NPU that processors stand in for.
fn npu() -> Option<Device> {
    let opened = DeviceChoice::Npu(Provider::Cpu).open();
    let needed = std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some();
    assert!(opened.is_ok() || !needed, "{opened:?}");
    opened.ok().flatten()
}

/// The same devices with memories of their own, which the CPU cannot read: what they compute is copied to them.
pub fn devices_apart() -> Vec<Device> {
    let all = plain_devices_apart();
    all.iter().map(|device| fast(device, "apart")).collect()
}

/// The same with their own times, but for the CPU.
pub fn plain_devices_apart() -> Vec<Device> {
    let open = |n| DeviceChoice::OpenClApart(n).open().ok().flatten();
    std::iter::once(Faulty::discrete(Fault::Never))
        .chain((0..list().len()).filter_map(open))
        .collect()
}

/// The OpenCL devices of this machine with memories of their own, rows in tiles and each form of the kernels that all
/// devices have; so fast that they get all that they hold.
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
    let all = (0..list().len()).flat_map(|n| forms.map(|form| (n, form)));
    all.filter_map(|(n, form)| forced(n, form)).collect()
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
    /// It does not.
    Never,
    /// It is slow for fewer rows, and fast for so many.
    Narrow(usize),
    /// It ends at this piece of work: while it is submitted, or while it is waited for.
    Submit(usize),
    /// See `Submit`.
    Take(usize),
    /// Its sums are a little off, as another order of sums would make them.
    Off,
    /// The same, until it ends at this piece of work.
    OffUntil(usize),
    /// They are wrong.
    Wrong,
    /// Its products are.
    WrongProducts,
    /// It ends at a product, once armed: while it is begun, or while it is waited for.
    Multiply,
    /// See `Multiply`.
    TakeProducts,
    /// It has no memory for passes of more rows than this, once its check is over.
    Room(usize),
}

/// A device with a fault. It says that its work in the check at the start took a nanosecond.
pub struct Faulty {
    inner: Lease,
    facts: Facts,
    fault: Fault,
    /// Pieces of work so far, those of the check at the start included.
    done: Arc<AtomicUsize>,
    /// Rows of the piece of work under way; `None` of products.
    rows: Option<usize>,
    /// Products until a fault.
    left: Arc<AtomicUsize>,
}

impl Faulty {
    /// The CPU with a fault.
    pub fn device(fault: Fault) -> Device {
        let cpu = Device::new(Box::new(CpuDevice::new()));
        Self::armed_by(&cpu, fault, never())
    }

    /// The same with a memory of its own, which the CPU cannot read.
    pub fn discrete(fault: Fault) -> Device {
        let mut faulty = Self::new(&Device::new(Box::new(CpuDevice::new())), fault);
        faulty.facts.unified = false;
        Device::new(Box::new(faulty))
    }

    /// A device with a fault, for which products count down.
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
        let checked = self.done.load(Ordering::Relaxed) >= CHECKS;
        match (self.fault, program) {
            (Fault::Room(most), Program::Room(room)) if checked && room.rows > most => {
                Err(DeviceError {
                    device: "faulty".into(),
                    what: "has no memory".into(),
                })
            }
            _ => self.inner.backend().prepare(program),
        }
    }

    fn memory(&mut self, of: PartKind) -> Result<Part, DeviceError> {
        self.inner.backend().memory(of)
    }

    fn host(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        match self.facts.unified {
            true => self.inner.backend().host(part),
            false => Ok(None),
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
        self.inner.backend().upload(part, first, neurons)
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        let fails = match work {
            Work::Clusters(work) => {
                self.rows = Some(work.rows());
                let number = self.done.fetch_add(1, Ordering::Relaxed);
                matches!(self.fault, Fault::Submit(at) if number >= at)
            }
            Work::Products(..) => {
                self.rows = None;
                let left = self.left.fetch_sub(1, Ordering::Relaxed);
                self.fault == Fault::Multiply && left == 0
            }
        };
        match fails {
            true => Err(self.lost()),
            false => self.inner.backend().submit(work),
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
    /// Sums as the fault has them; how long they took.
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

    /// The same of products: so fast that it gets nearly all rows, if it has a fault.
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
