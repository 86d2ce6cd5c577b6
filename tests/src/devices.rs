//! Devices for tests: those of this machine with times of the test's choosing, and such as fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use emberflow_engine::device::{
    Block, CpuDevice, Dense, DenseShape, Device, DeviceChoice, DeviceError, Dots, Facts, Form,
    HostBytes, Input, Kernels, Lease, NeuronRows, Order, Part, ProductRoom, Room, SharedMatrix,
    Taken, Team, Ticket, Work, list,
};
use emberflow_kernels::DType;

/// The CPU as a device, and the OpenCL devices of this machine, so fast that they get all that they hold.
pub fn devices() -> Vec<Device> {
    let fast = |device: &Device| Faulty::armed_by(device, Fault::Never, never());
    plain_devices().iter().map(fast).collect()
}

/// The same with their own times.
pub fn plain_devices() -> Vec<Device> {
    let cpu = Device::new(Box::new(CpuDevice::new()));
    let open = |n| DeviceChoice::OpenCl(n).open().ok().flatten();
    std::iter::once(cpu)
        .chain((0..list().len()).filter_map(open))
        .collect()
}

/// The same devices with memories of their own, which the CPU cannot read: what they compute is copied to them.
pub fn devices_apart() -> Vec<Device> {
    let fast = |device: &Device| Faulty::armed_by(device, Fault::Never, never());
    plain_devices_apart().iter().map(fast).collect()
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
        let device = DeviceChoice::OpenClApart(n).open().ok().flatten()?;
        let mut faulty = Faulty::new(&device, Fault::Never);
        let [few, many] = [form; 2];
        let order = Order::Tiles;
        faulty.kernels = Kernels { order, few, many };
        Some(Device::new(Box::new(faulty)))
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
    kernels: Kernels,
    /// Pieces of work so far, those of the check at the start included.
    done: Arc<AtomicUsize>,
    /// Rows of the piece of work under way.
    rows: usize,
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
            kernels: Kernels::default(),
            done: Arc::default(),
            rows: 0,
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

impl Dense for Faulty {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, shape: &DenseShape) -> Result<(), DeviceError> {
        self.inner.dense().prepare(shape)
    }

    fn kernels(&self, _dtype: DType) -> Kernels {
        self.kernels
    }

    fn set_kernels(&mut self, kernels: &Kernels) -> Result<(), DeviceError> {
        self.inner.dense().set_kernels(kernels)
    }

    fn prepare_products(
        &mut self,
        dtype: DType,
        cols: usize,
        kernels: &Kernels,
    ) -> Result<(), DeviceError> {
        let mut inner = self.inner.dense();
        inner.prepare_products(dtype, cols, kernels)
    }

    fn make_room(&mut self, room: &Room) -> Result<(), DeviceError> {
        let checked = self.done.load(Ordering::Relaxed) >= CHECKS;
        match self.fault {
            Fault::Room(most) if checked && room.rows > most => Err(DeviceError {
                device: "faulty".into(),
                what: "has no memory".into(),
            }),
            _ => self.inner.dense().make_room(room),
        }
    }

    fn clear(&mut self) {
        self.inner.dense().clear();
    }

    fn reserve(&mut self, neurons: usize) -> Result<Part, DeviceError> {
        self.inner.dense().reserve(neurons)
    }

    fn reserve_for_streams(&mut self, neurons: usize) -> Result<Part, DeviceError> {
        self.inner.dense().reserve_for_streams(neurons)
    }

    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), DeviceError> {
        self.inner.dense().upload(part, first, neurons)
    }

    fn arrived(&mut self, part: Part) -> Result<Duration, DeviceError> {
        let took = self.inner.dense().arrived(part)?;
        Ok(took.min(Duration::from_nanos(1)))
    }

    fn host_bytes(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        match self.facts.unified {
            true => self.inner.dense().host_bytes(part),
            false => Ok(None),
        }
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        let number = self.done.fetch_add(1, Ordering::Relaxed);
        self.rows = work.rows();
        match self.fault {
            Fault::Submit(at) if number >= at => Err(self.lost()),
            _ => self.inner.dense().submit(work),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError> {
        self.inner.dense().poll(ticket)
    }

    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        let Taken { fired, took } = self.inner.dense().take(ticket, out)?;
        let number = self.done.load(Ordering::Relaxed);
        match self.fault {
            Fault::Take(at) | Fault::OffUntil(at) if number >= at => return Err(self.lost()),
            Fault::Off | Fault::OffUntil(_) => out.iter_mut().for_each(|v| *v *= 1.000_001),
            Fault::Wrong => out.iter_mut().for_each(|v| *v *= 1.01),
            _ => {}
        }
        let took = match self.fault {
            _ if number > CHECKS => took,
            Fault::Narrow(rows) if self.rows < rows => Duration::from_secs(1),
            _ => Duration::from_nanos(1),
        };
        Ok(Taken { fired, took })
    }

    fn share(&mut self, matrix: SharedMatrix) -> Result<usize, DeviceError> {
        self.inner.dense().share(matrix)
    }

    fn give_back(&mut self, matrix: usize) {
        self.inner.dense().give_back(matrix);
    }

    fn make_product_room(&mut self, room: &ProductRoom) -> Result<(), DeviceError> {
        self.inner.dense().make_product_room(room)
    }

    fn multiply(&mut self, blocks: &[Block], input: Input<'_>) -> Result<Ticket, DeviceError> {
        let left = self.left.fetch_sub(1, Ordering::Relaxed);
        match self.fault {
            Fault::Multiply if left == 0 => Err(self.lost()),
            _ => self.inner.dense().multiply(blocks, input),
        }
    }

    /// So fast that it gets nearly all rows, if it has a fault.
    fn take_products(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Duration, DeviceError> {
        let took = self.inner.dense().take_products(ticket, out)?;
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
