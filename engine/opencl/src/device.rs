//! A device, its queue and its kernels.

use crate::buffers::Scratch;
use crate::ffn::{Prepared, start};
use crate::forms::{Extensions, Kernels, Maker, Order};
use crate::handles::{Context, Found, Queue, devices};
use crate::listed::{has_dp4a, listed};
use crate::parts::Part;
use crate::products::{Place, Products};
use crate::staging::Streamed;
use crate::work::{Underway, driver, no_work};
use crate::{Block, Error, HostBytes, Listed, MatrixSpec, Room, Spec, Taken, Work};

/// Where matrices are put: what a device has beside them.
macro_rules! place {
    ($of:ident) => {
        Place {
            device: &$of.found,
            context: &$of.context,
            extensions: &$of.extensions,
            queue: &$of.queue,
            unified: $of.facts.unified,
            order: $of.order,
            longest: $of.facts.longest,
        }
    };
}

/// An OpenCL device.
pub struct Device {
    underway: Option<Underway>,
    /// The buffer that it computes from, which may have been filled beside other work.
    streamed: Option<usize>,
    /// For all work. With a clock only where the CPU has the same memory, and slows it: a clock takes a driver 20 µs for a
    /// piece of work, and 9 for a kernel (NVIDIA 580).
    queue: Queue,
    /// For what is copied to buffers while work on others is under way.
    copies: Queue,
    prepared: Option<Prepared>,
    /// How parts and matrices lie that are not the host's.
    order: Order,
    parts: Vec<Part>,
    products: Products,
    context: Context,
    found: Found,
    extensions: Extensions,
    facts: Listed,
}

impl Device {
    /// Opens the device of this number. With `apart` it is taken to have a memory of its own, whatever it says.
    ///
    /// # Errors
    /// No such device, or the driver's.
    pub fn open(number: usize, apart: bool) -> Result<Self, Error> {
        let found = devices()?;
        let count = found.len();
        let device = found.into_iter().nth(number).ok_or_else(|| {
            Error(match count {
                0 => "the OpenCL library knows no device: install the driver of yours (for \
                      processors: pocl-opencl-icd), or use --device none"
                    .into(),
                _ => format!("there are {count} OpenCL devices, numbered from 0 (see doctor)"),
            })
        })?;
        let context = driver("open it", device.context())?;
        let mut facts = listed(&device);
        facts.unified &= !apart;
        Ok(Self {
            underway: None,
            streamed: None,
            queue: driver("make a queue", device.queue(&context, facts.unified))?,
            copies: driver("make a queue", device.queue(&context, false))?,
            prepared: None,
            order: Order::Rows,
            parts: Vec::new(),
            products: Products::default(),
            context,
            extensions: Extensions::of(&facts.extensions, has_dp4a(&device, &facts)),
            facts,
            found: device,
        })
    }

    /// What it is.
    pub fn facts(&self) -> &Listed {
        &self.facts
    }

    /// Takes note of an FFN; [`Device::set_kernels`] makes its kernels. Buffers that were made before are given back.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&mut self, spec: &Spec) -> Result<(), Error> {
        driver("finish", self.queue.finish())?;
        (self.underway, self.prepared) = (None, None);
        self.parts.clear();
        self.prepared = Some(Prepared::new(spec, self.facts.units));
        Ok(())
    }

    /// The kernels for rows of a format; `grouped` where products are those of integers.
    pub fn kernels(&self, grouped: bool) -> Kernels {
        Kernels::of(&self.facts, &self.extensions, grouped)
    }

    /// Makes kernels, and has them run from here on. With another order buffers of neurons are given back.
    ///
    /// # Errors
    /// An order that this device does not have, or the driver's: its compiler's log. The kernels before run then.
    pub fn set_kernels(&mut self, kernels: &Kernels) -> Result<(), Error> {
        self.settle()?;
        if self.facts.unified && kernels.order == Order::Tiles {
            return Err(Error(
                "has rows that the host reads too: not in tiles".into(),
            ));
        }
        let maker = Maker {
            device: &self.found,
            context: &self.context,
            extensions: &self.extensions,
        };
        let prepared = self.prepared.as_mut().ok_or_else(unprepared)?;
        prepared.make(&maker, kernels)?;
        if self.order != kernels.order {
            self.order = kernels.order;
            self.parts.clear();
        }
        Ok(())
    }

    /// Makes kernels for products of matrices of a format and width, and has them run from here on.
    ///
    /// # Errors
    /// As [`Device::set_kernels`].
    pub fn prepare_products(&mut self, spec: &MatrixSpec, kernels: Kernels) -> Result<(), Error> {
        self.settle()?;
        let place = place!(self);
        self.products.set_kernels(&place, spec, kernels).map(|_| ())
    }

    /// Waits for what may be under way although it could not all be begun.
    fn settle(&mut self) -> Result<(), Error> {
        driver("finish", self.queue.finish())?;
        self.underway = None;
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
        let scratch = Scratch::new(&self.context, &self.queue, &prepared.spec, room);
        prepared.scratch = Some(driver("make buffers", scratch)?);
        Ok(())
    }

    /// Gives back the buffers that were reserved, and kernels that do not run.
    pub fn clear(&mut self) {
        // Nothing uses them any longer; a lost device has nothing to wait for.
        let _ = self.queue.finish();
        self.underway = None;
        self.parts.clear();
        self.products.clear();
        self.products.trim();
        if let Some(prepared) = &mut self.prepared {
            prepared.trim();
        }
    }

    /// A buffer of `len` bytes; its number. `advise` is told of memory of the host before it is touched.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn reserve(&mut self, len: usize, advise: &dyn Fn(&mut [u8])) -> Result<usize, Error> {
        if len as u64 > self.facts.longest {
            return Err(Error(format!(
                "has no buffers of {len} bytes, {} at most: give it less (--device NAME=SIZE)",
                self.facts.longest
            )));
        }
        let part = Part::new(&self.context, len, self.facts.unified, advise)?;
        self.parts.push(part);
        Ok(self.parts.len() - 1)
    }

    /// A buffer that may be written again and again, but not while work on it is under way; its number.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn reserve_for_streams(&mut self, len: usize) -> Result<usize, Error> {
        let part = match self.facts.unified {
            true => Part::rewritten(&self.context, len)?,
            false => {
                let queue = driver("make a queue", self.found.queue(&self.context, true))?;
                Part::Streamed(Streamed::new(&self.context, queue, len)?)
            }
        };
        self.parts.push(part);
        Ok(self.parts.len() - 1)
    }

    /// Copies bytes to a buffer, from byte `at` on.
    ///
    /// # Errors
    /// No such place, a buffer of the machine's memory that is in use, or the driver's.
    pub fn write(&mut self, part: usize, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.parts.get_mut(part).ok_or_else(no_part)?;
        to.write(&self.copies, at, bytes)
    }

    /// The bytes of a buffer, which the host may read as well; `None` where the device has a memory of its
    /// own. Nothing is written to it from here on.
    ///
    /// # Errors
    /// No such buffer, or the driver's.
    pub fn host_bytes(&mut self, part: usize) -> Result<Option<HostBytes>, Error> {
        let part = self.parts.get_mut(part).ok_or_else(no_part)?;
        part.host(&self.context)
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
            context,
            ..
        } = self;
        let part = parts.get_mut(work.part).ok_or_else(no_part)?;
        part.order(queue)?;
        let part = part.arg(context)?;
        let prepared = prepared.as_mut().ok_or_else(unprepared)?;
        match start(queue, prepared, part, work) {
            Ok(begun) => {
                self.underway = Some(begun);
                self.streamed = Some(work.part);
                Ok(())
            }
            Err(code) => {
                // Some of it may have begun, and read what the host fills next.
                let _ = queue.finish();
                let scratch = prepared.scratch.as_mut();
                let _ = scratch.map(|scratch| scratch.reset(queue));
                driver("compute", Err(code))
            }
        }
    }

    /// Waits until what was copied to a buffer has arrived; how many nanoseconds that took, by the device's clock.
    ///
    /// # Errors
    /// The driver's, or no such buffer.
    pub fn arrived(&self, part: usize) -> Result<u64, Error> {
        self.parts.get(part).ok_or_else(no_part)?.arrived()
    }

    /// Whether the work under way is done; does not wait.
    ///
    /// # Errors
    /// The driver's, or no such work.
    pub fn is_done(&self) -> Result<bool, Error> {
        let underway = self.underway.as_ref().ok_or_else(no_work)?;
        // Complete, or an error that `take` reports.
        driver("tell how far it is", underway.done.is_over())
    }

    /// Waits for the work under way, and copies its sums to `out`.
    ///
    /// # Errors
    /// The driver's, or no such work.
    pub fn take(&mut self, out: &mut [f32]) -> Result<Taken, Error> {
        let underway = self.underway.take().ok_or_else(no_work)?;
        driver("compute", underway.done.wait())?;
        // Work whose weights did not arrive is none.
        if let Some(part) = self.streamed.take() {
            self.arrived(part)?;
        }
        let scratch = self.prepared.as_ref().and_then(|p| p.scratch.as_ref());
        let scratch = scratch.ok_or_else(unprepared)?;
        let fired = match scratch.answer(underway.sums) {
            Some((sums, fired)) if sums.len() == out.len() => {
                out.copy_from_slice(sums);
                fired
            }
            _ => return Err(Error("was asked for other sums".into())),
        };
        Ok(Taken {
            fired: fired.into(),
            nanoseconds: underway.nanoseconds(),
        })
    }

    /// Makes a matrix known; its number. On a device with the machine's memory it is not copied.
    ///
    /// # Errors
    /// The driver's, or no memory.
    pub fn share(&mut self, spec: &MatrixSpec, bytes: HostBytes) -> Result<usize, Error> {
        let place = place!(self);
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
        self.products.make_room([x, y], &self.context, &self.queue)
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
        if begun.is_err() {
            let _ = self.queue.finish();
        }
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
