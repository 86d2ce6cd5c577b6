//! A device, its queue and its kernels.

use crate::buffers::Scratch;
use crate::ffn::{Prepared, start};
use crate::forms::{Extensions, Kernels, Maker, Order};
use crate::handles::{Context, Found, Queue, devices};
use crate::listed::{extensions, listed};
use crate::parts::Part;
use crate::products::{Place, Products};
use crate::staging::Streamed;
use crate::work::{Kind, Underway, driver, no_work};
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
                      processors: pocl-opencl-icd)"
                    .into(),
                _ => format!("there are {count} OpenCL devices, numbered from 0 (see doctor)"),
            })
        })?;
        let context = driver("open it", device.context())?;
        let mut facts = listed(&device);
        facts.unified &= !apart;
        facts.kernels = Kernels::of(&facts, &extensions(&device, &facts));
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
            extensions: extensions(&device, &facts),
            facts,
            found: device,
        })
    }

    /// What it is.
    pub fn facts(&self) -> &Listed {
        &self.facts
    }

    /// Makes the kernels of an FFN. Buffers of neurons and for pieces of work that were made before are given back.
    ///
    /// # Errors
    /// An order that this device does not have, or the driver's: its compiler's log.
    pub fn prepare(&mut self, spec: &Spec, kernels: &Kernels) -> Result<(), Error> {
        self.settle()?;
        self.prepared = None;
        self.parts.clear();
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
        self.order = kernels.order;
        self.prepared = Some(Prepared::new(&maker, spec, kernels, self.facts.units)?);
        Ok(())
    }

    /// Makes kernels for products of matrices of a format and width, and has them run from here on.
    ///
    /// # Errors
    /// As [`Device::prepare`].
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
        self.settle()?;
        let prepared = self.prepared.as_mut().ok_or_else(unprepared)?;
        prepared.scratch = None;
        let scratch = Scratch::new(&self.context, &self.queue, &prepared.spec, room);
        prepared.scratch = Some(driver("make buffers", scratch)?);
        Ok(())
    }

    /// Gives back the buffers that were reserved, and matrices.
    pub fn clear(&mut self) {
        // Nothing uses them any longer; a lost device has nothing to wait for.
        let _ = self.queue.finish();
        self.underway = None;
        self.parts.clear();
        self.products.clear();
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
        Ok(self.put(part))
    }

    /// A buffer of `len` bytes of the host's memory, which both read and nobody writes; its number.
    ///
    /// # Errors
    /// A memory of its own, fewer bytes, or the driver's.
    pub fn share_neurons(&mut self, host: HostBytes, len: usize) -> Result<usize, Error> {
        if !self.facts.unified || (*host).as_ref().len() < len {
            return Err(Error(format!("cannot share {len} bytes")));
        }
        let part = Part::shared(&self.context, host)?;
        Ok(self.put(part))
    }

    /// Puts a buffer where one was given back, or behind all; its number.
    fn put(&mut self, part: Part) -> usize {
        let free = |part: &Part| matches!(part, Part::Nothing);
        let number = self.parts.iter().position(free);
        let number = number.unwrap_or(self.parts.len());
        match self.parts.get_mut(number) {
            Some(place) => *place = part,
            None => self.parts.push(part),
        }
        number
    }

    /// Gives a buffer back. One that a failed device may still read is kept.
    pub fn release(&mut self, part: usize) {
        if let (Ok(()), Some(part)) = (self.queue.finish(), self.parts.get_mut(part)) {
            *part = Part::Nothing;
        }
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
        Ok(self.put(part))
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

    /// Waits until what was copied to a buffer has arrived, which took so long by the device's clock.
    ///
    /// # Errors
    /// The driver's, or no such buffer.
    pub fn arrived(&self, part: usize) -> Result<Taken, Error> {
        let nanoseconds = self.parts.get(part).ok_or_else(no_part)?.arrived()?;
        Ok(Taken {
            fired: 0,
            nanoseconds,
        })
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

    /// Waits for the work under way, and copies its sums to `out`, or its products, block by block `[tokens × rows]`.
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
        let answer = match underway.of {
            Kind::Products => (self.products.answer(underway.results)).map(|all| (all, 0)),
            Kind::Sums => {
                let scratch = self.prepared.as_ref().and_then(|p| p.scratch.as_ref());
                scratch.and_then(|scratch| scratch.answer(underway.results))
            }
        };
        let fired = match answer {
            Some((results, fired)) if results.len() == out.len() => {
                out.copy_from_slice(results);
                fired
            }
            _ => return Err(Error("was asked for other results".into())),
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
        self.settle()?;
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
