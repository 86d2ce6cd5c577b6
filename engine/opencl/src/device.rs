//! A device, its queue and its kernels.

use std::sync::{Mutex, PoisonError};

use opencl3::command_queue::{CL_QUEUE_PROFILING_ENABLE, CommandQueue};
use opencl3::context::Context;
use opencl3::device::{
    CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_GPU, CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT, Device as Found,
};
use opencl3::error_codes::{CL_INVALID_VALUE, ClError};
use opencl3::kernel::{ExecuteKernel, Kernel};
use opencl3::platform::get_platforms;
use opencl3::program::Program;

use crate::buffers::{Bytes, Scratch, write};
use crate::products::{Place, Products};
use crate::work::{ITEMS, SOURCE, Underway, driver, no_work};
use crate::{Block, Error, HostBytes, Listed, MatrixSpec, Room, Spec, Taken, Work};

/// Flags of the kernel `hidden_values`.
const MASKED: i32 = 1;
const GATE_BIAS: i32 = 2;
const UP_BIAS: i32 = 4;

/// Held while the library and its drivers are loaded: not all of them may be by two threads at once.
static LOADING: Mutex<()> = Mutex::new(());

/// Devices of all platforms, in order.
fn devices() -> Vec<Found> {
    let _alone = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    let platforms = get_platforms().unwrap_or_default();
    let ids = platforms
        .iter()
        .flat_map(|platform| platform.get_devices(CL_DEVICE_TYPE_ALL).unwrap_or_default());
    ids.map(Found::new).collect()
}

/// What is told of a device; what it does not tell stays empty.
fn listed(device: &Found) -> Listed {
    let text = |text: Result<String, ClError>| text.unwrap_or_default().trim().to_owned();
    let divides = |has| has & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT != 0;
    Listed {
        name: text(device.name()),
        driver: text(device.driver_version()),
        unified: device.host_unified_memory().unwrap_or(false),
        memory: device.global_mem_size().unwrap_or(0),
        longest: device.max_mem_alloc_size().unwrap_or(0),
        gpu: (device.dev_type()).is_ok_and(|kind| kind & CL_DEVICE_TYPE_GPU != 0),
        units: device.max_compute_units().unwrap_or(0),
        divides: device.single_fp_config().is_ok_and(divides),
        extensions: text(device.extensions())
            .split_whitespace()
            .map(str::to_owned)
            .collect(),
    }
}

/// The OpenCL devices of this machine, in the order of their numbers. Empty without a driver.
pub fn list() -> Vec<Listed> {
    devices().iter().map(listed).collect()
}

/// The kernels for an FFN, and buffers for pieces of work.
struct Prepared {
    spec: Spec,
    hidden: Kernel,
    sums: Kernel,
    scratch: Option<Scratch>,
}

/// An OpenCL device.
pub struct Device {
    underway: Option<Underway>,
    queue: CommandQueue,
    prepared: Option<Prepared>,
    parts: Vec<Bytes>,
    products: Products,
    context: Context,
    facts: Listed,
}

impl Device {
    /// Opens the device of this number.
    ///
    /// # Errors
    /// No such device, or the driver's.
    pub fn open(number: usize) -> Result<Self, Error> {
        let found = devices();
        let count = found.len();
        let device = found.into_iter().nth(number).ok_or_else(|| {
            Error(match count {
                0 => "no OpenCL driver was found: install the one for your device \
                      (for processors: pocl-opencl-icd), or use --device none"
                    .into(),
                _ => format!("there are {count} OpenCL devices, numbered from 0 (see doctor)"),
            })
        })?;
        let context = driver("open it", Context::from_device(&device))?;
        let queue =
            CommandQueue::create_default_with_properties(&context, CL_QUEUE_PROFILING_ENABLE, 0);
        Ok(Self {
            underway: None,
            queue: driver("make a queue", queue)?,
            prepared: None,
            parts: Vec::new(),
            products: Products::default(),
            context,
            facts: listed(&device),
        })
    }

    /// What it is.
    pub fn facts(&self) -> &Listed {
        &self.facts
    }

    /// Makes kernels. Buffers that were made before are given back.
    ///
    /// # Errors
    /// The driver's: its compiler's log.
    pub fn prepare(&mut self, spec: &Spec) -> Result<(), Error> {
        driver("finish", self.queue.finish())?;
        (self.underway, self.prepared) = (None, None);
        self.parts.clear();
        let program = Program::create_and_build_from_source(&self.context, SOURCE, &spec.options)
            .map_err(|log| Error(format!("cannot build its kernels: {}", log.trim())))?;
        let make = || -> Result<Prepared, ClError> {
            Ok(Prepared {
                spec: spec.clone(),
                hidden: Kernel::create(&program, "hidden_values")?,
                sums: Kernel::create(&program, "cluster_sums")?,
                scratch: None,
            })
        };
        self.prepared = Some(driver("make kernels", make())?);
        Ok(())
    }

    /// Makes buffers for pieces of work up to `room`.
    ///
    /// # Errors
    /// The driver's, or no memory.
    pub fn make_room(&mut self, room: &Room) -> Result<(), Error> {
        driver("finish", self.queue.finish())?;
        self.underway = None;
        let prepared = self.prepared.as_mut().ok_or_else(unprepared)?;
        prepared.scratch = None;
        let scratch = Scratch::new(&self.context, &prepared.spec, room);
        prepared.scratch = Some(driver("make buffers", scratch)?);
        Ok(())
    }

    /// Gives back the buffers that were reserved.
    pub fn clear(&mut self) {
        // Nothing uses them any longer; a lost device has nothing to wait for.
        let _ = self.queue.finish();
        self.underway = None;
        self.parts.clear();
        self.products.clear();
    }

    /// A buffer of `len` bytes; its number.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn reserve(&mut self, len: usize) -> Result<usize, Error> {
        if len as u64 > self.facts.longest {
            return Err(Error(format!(
                "has no buffers of {len} bytes, {} at most: give --device-memory less",
                self.facts.longest
            )));
        }
        let made = Bytes::new(&self.context, len, self.facts.unified);
        self.parts.push(driver(&format!("give {len} bytes"), made)?);
        Ok(self.parts.len() - 1)
    }

    /// Copies bytes to a buffer, from byte `at` on.
    ///
    /// # Errors
    /// No such place, or the driver's.
    pub fn write(&mut self, part: usize, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.parts.get_mut(part).ok_or_else(no_part)?;
        driver("copy weights", write(&self.queue, to, at, bytes))
    }

    /// Begins a piece of work. One is under way at a time.
    ///
    /// # Errors
    /// Work that does not fit the buffers, or the driver's.
    pub fn submit(&mut self, work: &Work<'_>) -> Result<(), Error> {
        if self.underway.is_some() {
            return Err(Error("is busy".into()));
        }
        let Self {
            queue,
            prepared,
            parts,
            ..
        } = self;
        let part = parts.get(work.part).ok_or_else(no_part)?;
        let prepared = prepared.as_mut().ok_or_else(unprepared)?;
        self.underway = Some(driver("compute", start(queue, prepared, part, work))?);
        Ok(())
    }

    /// Whether the work under way is done; does not wait.
    ///
    /// # Errors
    /// The driver's, or no such work.
    pub fn is_done(&self) -> Result<bool, Error> {
        let underway = self.underway.as_ref().ok_or_else(no_work)?;
        let status = driver(
            "tell how far it is",
            underway.done.command_execution_status(),
        )?;
        // Complete, or an error that `take` reports.
        Ok(status.0 <= 0)
    }

    /// Waits for the work under way, and copies its sums to `out`.
    ///
    /// # Errors
    /// The driver's, or no such work.
    pub fn take(&mut self, out: &mut [f32]) -> Result<Taken, Error> {
        let underway = self.underway.take().ok_or_else(no_work)?;
        driver("compute", underway.done.wait())?;
        let scratch = self.prepared.as_ref().and_then(|p| p.scratch.as_ref());
        let scratch = scratch.ok_or_else(unprepared)?;
        let sums = &scratch.answer[..underway.sums];
        if out.len() != sums.len() {
            return Err(Error("was asked for other sums".into()));
        }
        out.copy_from_slice(sums);
        Ok(Taken {
            fired: scratch.count[0] as u64,
            nanoseconds: underway.nanoseconds(),
        })
    }

    /// Makes the kernel for matrices of a format and width.
    ///
    /// # Errors
    /// The driver's: its compiler's log.
    pub fn prepare_products(&mut self, spec: &MatrixSpec) -> Result<(), Error> {
        self.products.kernel(&self.context, spec).map(|_| ())
    }

    /// Makes a matrix known; its number. On a device with the machine's memory it is not copied.
    ///
    /// # Errors
    /// The driver's, or no memory.
    pub fn share(&mut self, spec: &MatrixSpec, bytes: HostBytes) -> Result<usize, Error> {
        let place = Place {
            context: &self.context,
            queue: &self.queue,
            unified: self.facts.unified,
            longest: self.facts.longest,
        };
        self.products.share(&place, spec, bytes)
    }

    /// Forgets a matrix. One that a failed device may still read is kept.
    pub fn give_back(&mut self, matrix: usize) {
        if self.queue.finish().is_ok() {
            self.products.give_back(matrix);
        }
    }

    /// Makes buffers for inputs of `x` bytes and `y` results.
    ///
    /// # Errors
    /// The driver's, or no memory.
    pub fn make_product_room(&mut self, x: usize, y: usize) -> Result<(), Error> {
        driver("finish", self.queue.finish())?;
        self.underway = None;
        self.products.make_room(&self.context, x, y)
    }

    /// Begins products of blocks with `tokens` tokens, whose input is `x`.
    ///
    /// # Errors
    /// Blocks that are not there, more than the buffers hold, or the driver's.
    pub fn multiply(&mut self, blocks: &[Block], tokens: usize, x: &[u8]) -> Result<(), Error> {
        if self.underway.is_some() {
            return Err(Error("is busy".into()));
        }
        let begun = self.products.begin(&self.queue, blocks, tokens, x);
        self.underway = Some(driver("multiply", begun)?);
        Ok(())
    }

    /// Waits for the products under way and copies them to `out`, block by block `[tokens × rows]`.
    /// Returns the nanoseconds that they took.
    ///
    /// # Errors
    /// The driver's, or no such work.
    pub fn take_products(&mut self, out: &mut [f32]) -> Result<u64, Error> {
        let underway = self.underway.take().ok_or_else(no_work)?;
        driver("multiply", underway.done.wait())?;
        match self.products.answer(underway.sums) {
            Some(answer) if answer.len() == out.len() => out.copy_from_slice(answer),
            _ => return Err(Error("was asked for other products".into())),
        }
        Ok(underway.nanoseconds())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The queue may still use buffers and staging memory. A lost device has nothing to wait for.
        let _ = self.queue.finish();
    }
}

fn no_part() -> Error {
    Error("has no such buffer".into())
}

fn unprepared() -> Error {
    Error("is not prepared".into())
}

/// Copies inputs to the device and starts both kernels.
fn start(
    queue: &CommandQueue,
    prepared: &mut Prepared,
    part: &Bytes,
    work: &Work<'_>,
) -> Result<Underway, ClError> {
    let spec = &prepared.spec;
    let sums = work.clusters * work.rows * spec.d;
    let Some(scratch) = &mut prepared.scratch else {
        return Err(ClError(CL_INVALID_VALUE));
    };
    let flags = [
        (work.mask.is_some(), MASKED),
        (!work.gate_bias.is_empty(), GATE_BIAS),
        (!work.up_bias.is_empty(), UP_BIAS),
    ];
    let flags: i32 = flags.iter().filter(|f| f.0).map(|f| f.1).sum();
    let [first, neurons, rows] = [work.first, work.neurons, work.rows].map(|n| n as i32);
    scratch.fill(queue, work)?;
    let mut hidden = ExecuteKernel::new(&prepared.hidden);
    let mut of_sums = ExecuteKernel::new(&prepared.sums);
    // SAFETY: arguments in number, order and type as in kernels.cl. The buffers hold what its
    // indices reach: `fill` refuses inputs and clusters beyond what they were made for, and the
    // kernels compare neurons with the part's number.
    let begun = unsafe {
        let begun = hidden
            .set_arg(part.buffer())
            .set_arg(scratch.x.buffer())
            .set_arg(scratch.mask.buffer())
            .set_arg(scratch.gate_bias.buffer())
            .set_arg(scratch.up_bias.buffer())
            .set_arg(scratch.hidden.buffer())
            .set_arg(scratch.fired.buffer())
            .set_arg(&first)
            .set_arg(&neurons)
            .set_arg(&rows)
            .set_arg(&flags)
            .set_arg(&work.cut)
            .set_global_work_sizes(&[work.clusters * spec.cluster, work.rows])
            .set_local_work_sizes(&[ITEMS, 1])
            .enqueue_nd_range(queue)?;
        of_sums
            .set_arg(part.buffer())
            .set_arg(scratch.hidden.buffer())
            .set_arg(scratch.sums.buffer())
            .set_arg(&first)
            .set_arg(&neurons)
            .set_arg(&rows)
            .set_global_work_sizes(&[spec.d.next_multiple_of(ITEMS), work.rows, work.clusters])
            .set_local_work_sizes(&[ITEMS, 1, 1])
            .enqueue_nd_range(queue)?;
        begun
    };
    let done = scratch.read(queue, sums)?;
    queue.flush()?;
    Ok(Underway { sums, begun, done })
}
