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

/// The [`Place`] of a device: a macro, because it borrows fields while `products` is borrowed mutably.
macro_rules! place {
    ($device:ident) => {
        Place {
            device: &$device.found,
            context: &$device.context,
            extensions: &$device.extensions,
            queue: &$device.queue,
            unified: $device.facts.unified,
            order: $device.order,
            longest: $device.facts.longest,
        }
    };
}

/// An OpenCL device.
pub struct Device {
    underway: Option<Underway>,
    /// Number of the buffer that the current work reads; it may have been filled while other work ran.
    streamed: Option<usize>,
    /// Queue of all kernels. It has a clock only where CPU and device share memory and slow each other down: profiling
    /// costs the driver 20 µs per piece of work and 9 µs per kernel (NVIDIA 580).
    queue: Queue,
    /// Queue of copies to buffers that running kernels do not use.
    copies: Queue,
    prepared: Option<Prepared>,
    /// Layout of weights in the device's own memory.
    order: Order,
    parts: Vec<Part>,
    products: Products,
    context: Context,
    found: Found,
    extensions: Extensions,
    facts: Listed,
}

impl Device {
    /// Opens a device by number. With `apart` it is treated as one with separate memory.
    ///
    /// # Errors
    /// No such device, or a driver error.
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

    /// Properties of the device.
    pub fn facts(&self) -> &Listed {
        &self.facts
    }

    /// Compiles the kernels of an FFN and frees all neuron and work buffers.
    ///
    /// # Errors
    /// An unsupported layout, or a driver error with the compiler's log.
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

    /// Compiles and selects the kernels for matrices of one format and width.
    ///
    /// # Errors
    /// See [`Device::prepare`].
    pub fn prepare_products(&mut self, spec: &MatrixSpec, kernels: Kernels) -> Result<(), Error> {
        self.settle()?;
        let place = place!(self);
        self.products.set_kernels(&place, spec, kernels).map(|_| ())
    }

    /// Waits for commands of work that failed to start completely.
    fn settle(&mut self) -> Result<(), Error> {
        driver("finish", self.queue.finish())?;
        self.underway = None;
        Ok(())
    }

    /// Allocates buffers for work up to `room`.
    ///
    /// # Errors
    /// A driver error, or not enough memory.
    pub fn make_room(&mut self, room: &Room) -> Result<(), Error> {
        self.settle()?;
        let prepared = self.prepared.as_mut().ok_or_else(unprepared)?;
        prepared.scratch = None;
        let scratch = Scratch::new(&self.context, &self.queue, &prepared.spec, room);
        prepared.scratch = Some(driver("make buffers", scratch)?);
        Ok(())
    }

    /// Frees all neuron buffers and matrices.
    pub fn clear(&mut self) {
        // An error means that the device is lost and nothing uses the buffers any more.
        let _ = self.queue.finish();
        self.underway = None;
        self.parts.clear();
        self.products.clear();
    }

    /// Allocates a buffer of `len` bytes and returns its number. `advise` sees host memory before it is first touched.
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

    /// Makes the first `len` bytes of read-only host memory a buffer, without a copy, and returns its number.
    ///
    /// # Errors
    /// A device with separate memory, fewer bytes than `len`, or a driver error.
    pub fn share_neurons(&mut self, host: HostBytes, len: usize) -> Result<usize, Error> {
        if !self.facts.unified || (*host).as_ref().len() < len {
            return Err(Error(format!("cannot share {len} bytes")));
        }
        let part = Part::shared(&self.context, host)?;
        Ok(self.put(part))
    }

    /// Stores a buffer in the first free place and returns its number.
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

    /// Frees a buffer, unless a failed device may still read it.
    pub fn release(&mut self, part: usize) {
        if let (Ok(()), Some(part)) = (self.queue.finish(), self.parts.get_mut(part)) {
            *part = Part::Nothing;
        }
    }

    /// Allocates a buffer that may be rewritten whenever no work uses it, and returns its number.
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

    /// Copies bytes to offset `at` of a buffer.
    ///
    /// # Errors
    /// A range outside the buffer, shared memory that is already in use, or a driver error.
    pub fn write(&mut self, part: usize, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.parts.get_mut(part).ok_or_else(no_part)?;
        to.write(&self.copies, at, bytes)
    }

    /// Host memory of a buffer, read-only from now on; `None` on a device with separate memory.
    ///
    /// # Errors
    /// No such buffer, or a driver error.
    pub fn host_bytes(&mut self, part: usize) -> Result<Option<HostBytes>, Error> {
        let part = self.parts.get_mut(part).ok_or_else(no_part)?;
        part.host(&self.context)
    }

    /// Starts a piece of work; only one runs at a time.
    ///
    /// # Errors
    /// Work that exceeds the buffers, or a driver error.
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

    /// Waits for copies to a buffer and returns their duration.
    ///
    /// # Errors
    /// A driver error, or no such buffer.
    pub fn arrived(&self, part: usize) -> Result<Taken, Error> {
        let nanoseconds = self.parts.get(part).ok_or_else(no_part)?.arrived()?;
        Ok(Taken {
            fired: 0,
            nanoseconds,
        })
    }

    /// Whether the current work has finished; does not block.
    ///
    /// # Errors
    /// A driver error, or no current work.
    pub fn is_done(&self) -> Result<bool, Error> {
        let underway = self.underway.as_ref().ok_or_else(no_work)?;
        // Failed work counts as finished: `take` reports the error.
        driver("tell how far it is", underway.done.is_over())
    }

    /// Waits for the current work and copies its sums to `out`, or its products, one `[tokens × rows]` block after another.
    ///
    /// # Errors
    /// A driver error, or no current work.
    pub fn take(&mut self, out: &mut [f32]) -> Result<Taken, Error> {
        let underway = self.underway.take().ok_or_else(no_work)?;
        driver("compute", underway.done.wait())?;
        // The result is valid only if all weights arrived.
        if let Some(part) = self.streamed.take() {
            self.arrived(part)?;
        }
        let answer = match underway.kind {
            Kind::Products => (self.products.answer(underway.results)).map(|results| (results, 0)),
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

    /// Registers a matrix and returns its number. It is copied only to devices with separate memory.
    ///
    /// # Errors
    /// A driver error, or not enough memory.
    pub fn share(&mut self, spec: &MatrixSpec, bytes: HostBytes) -> Result<usize, Error> {
        let place = place!(self);
        self.products.share(&place, spec, bytes)
    }

    /// Frees a matrix, unless a failed device may still read it.
    pub fn give_back(&mut self, matrix: usize) {
        if self.queue.finish().is_ok() {
            self.products.give_back(matrix);
        }
    }

    /// Allocates buffers for products: `x` input bytes and `y` results.
    ///
    /// # Errors
    /// A driver error, or not enough memory.
    pub fn make_product_room(&mut self, x: usize, y: usize) -> Result<(), Error> {
        self.settle()?;
        self.products.make_room([x, y], &self.context, &self.queue)
    }

    /// Starts the products of `blocks` with `tokens` tokens, whose input is `x`.
    ///
    /// # Errors
    /// Unknown blocks, work that exceeds the buffers, or a driver error.
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
        // The queue may still use buffers and staging memory. An error means that the device is lost.
        let _ = self.queue.finish();
    }
}

fn no_part() -> Error {
    Error("has no such buffer".into())
}

fn unprepared() -> Error {
    Error("is not prepared".into())
}
