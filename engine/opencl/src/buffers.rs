//! Memory of an OpenCL device, and the host memory that it is copied from and to.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;
use opencl_sys::{CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_ONLY, CL_MEM_READ_WRITE, CL_MEM_USE_HOST_PTR};

use crate::handles::{Arg, Context, Event, Mem, Queue};
use crate::library::Code;
use crate::work::INVALID;
use crate::{HostBytes, Room, Spec, Sums, Work};

/// A buffer of `T`, and its length.
pub(super) struct Memory<T> {
    mem: Mem,
    len: usize,
    of: PhantomData<T>,
}

/// A buffer of bytes.
pub(super) type Bytes = Memory<u8>;

impl<T: Copy> Memory<T> {
    /// `len` elements.
    pub fn new(context: &Context, len: usize) -> Result<Self, Code> {
        // No buffer is empty.
        let len = len.max(1);
        let bytes = len.checked_mul(size_of::<T>()).ok_or(INVALID)?;
        Ok(Self {
            mem: context.memory(CL_MEM_READ_WRITE, bytes)?,
            len,
            of: PhantomData,
        })
    }

    /// For kernels.
    pub fn arg(&self) -> Arg<'_> {
        Arg::Mem(&self.mem)
    }

    /// Whether so many elements are there.
    pub fn fits(&self, at: usize, len: usize) -> Result<(), Code> {
        match at.checked_add(len).is_some_and(|end| end <= self.len) {
            true => Ok(()),
            false => Err(INVALID),
        }
    }
}

/// Memory of the host that the device copies from and to. The driver makes it, and pins it where it copies faster that
/// way.
pub(super) struct Staged<T> {
    at: NonNull<T>,
    len: usize,
    /// Keeps it.
    _mem: Mem,
}

// SAFETY: memory of its own, which one thread uses at a time, as its owner is borrowed.
unsafe impl<T: Send> Send for Staged<T> {}

impl<T: Pod> Staged<T> {
    /// `len` elements, all zero.
    pub fn new(context: &Context, queue: &Queue, len: usize) -> Result<Self, Code> {
        let len = len.max(1);
        let bytes = len.checked_mul(size_of::<T>()).ok_or(INVALID)?;
        let mem = context.memory(CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, bytes)?;
        let at = NonNull::new(queue.map(&mem, bytes)?.cast::<T>()).ok_or(INVALID)?;
        if !at.is_aligned() {
            return Err(INVALID);
        }
        // SAFETY: the driver has mapped so many bytes, aligned, for the host to write.
        unsafe { at.write_bytes(0, len) };
        Ok(Self { at, len, _mem: mem })
    }
}

impl<T> Deref for Staged<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: so many elements were mapped, and set to zero; the memory lives as long as this.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Staged<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; this is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Bytes {
    /// Begins to copy `from` to byte `at`; done when the event is.
    ///
    /// # Safety
    /// It fits, and `from` is neither changed nor freed before.
    pub unsafe fn copy_from(&self, queue: &Queue, at: usize, from: &[u8]) -> Result<Event, Code> {
        // SAFETY: the caller's promise.
        unsafe { queue.copy(&self.mem, at, from) }
    }

    /// The memory of `host` itself, which has to outlive it and is not changed meanwhile.
    pub fn of_host(context: &Context, host: &HostBytes) -> Result<Self, Code> {
        let bytes: &[u8] = (**host).as_ref();
        let flags = CL_MEM_READ_ONLY | CL_MEM_USE_HOST_PTR;
        // SAFETY: the caller keeps `host` alive as long as the buffer; kernels only read it, and nobody
        // else may write behind a shared reference.
        let mem = unsafe { context.memory_of(flags, bytes)? };
        Ok(Self {
            mem,
            len: bytes.len(),
            of: PhantomData,
        })
    }
}

/// Begins to copy elements of a buffer, from number `at` on, to `to`; done when the event is.
pub(super) fn read(
    queue: &Queue,
    from: &Memory<f32>,
    at: usize,
    to: &mut [f32],
) -> Result<Event, Code> {
    from.fits(at, to.len())?;
    // SAFETY: the length fits; `to` is staging memory, which is neither touched nor freed before the
    // work is taken.
    unsafe { queue.read(&from.mem, at * size_of::<f32>(), to) }
}

/// Copies `from` to byte `at`, and waits for it.
pub(super) fn write(queue: &Queue, to: &mut Bytes, at: usize, from: &[u8]) -> Result<(), Code> {
    to.fits(at, from.len())?;
    if !from.is_empty() {
        // SAFETY: `from` is read before the call returns, and its length fits, as was just checked.
        unsafe { queue.write(&to.mem, at, from, true)? };
    }
    Ok(())
}

/// Inputs, hidden values and sums of one piece of work, and their copies in host memory. The latter
/// are not touched while work is under way.
pub(super) struct Scratch {
    /// Neurons of a cluster.
    cluster: usize,
    /// Elements of a row.
    d: usize,
    /// Bytes of a token's input.
    token_bytes: usize,
    pub x: Memory<u8>,
    pub mask: Memory<u64>,
    pub gate_bias: Memory<f32>,
    pub up_bias: Memory<f32>,
    pub hidden: Memory<f32>,
    /// Pairs that fired, zero between pieces of work.
    pub fired: Memory<i32>,
    /// Sums of clusters, and behind them how many pairs fired.
    pub sums: Memory<f32>,
    /// Those of rows, and the same.
    pub totals: Memory<f32>,
    of_x: Staged<u8>,
    of_mask: Vec<u64>,
    of_bias: [Vec<f32>; 2],
    answer: Staged<f32>,
}

impl Scratch {
    pub fn new(context: &Context, queue: &Queue, spec: &Spec, room: &Room) -> Result<Self, Code> {
        let (rows, neurons) = (room.rows, room.clusters * spec.cluster);
        let (pairs, sums) = (room.pairs * spec.cluster, room.pairs * spec.d);
        let token_bytes = spec.token_bytes;
        let mut fired = Memory::new(context, 1)?;
        start_with(queue, &mut fired, &[0])?;
        Ok(Self {
            cluster: spec.cluster,
            d: spec.d,
            token_bytes,
            x: Memory::new(context, token_bytes * rows)?,
            mask: Memory::new(context, pairs / 64)?,
            gate_bias: Memory::new(context, neurons)?,
            up_bias: Memory::new(context, neurons)?,
            hidden: Memory::new(context, pairs)?,
            fired,
            sums: Memory::new(context, sums + 1)?,
            totals: Memory::new(context, rows * spec.d + 1)?,
            of_x: Staged::new(context, queue, token_bytes * rows)?,
            of_mask: Vec::with_capacity(pairs / 64),
            of_bias: [Vec::with_capacity(neurons), Vec::with_capacity(neurons)],
            answer: Staged::new(context, queue, sums + 1)?,
        })
    }

    /// Begins to copy the inputs of `work`.
    pub fn fill(&mut self, queue: &Queue, work: &Work<'_>) -> Result<(), Code> {
        self.gate_bias.fits(0, work.clusters * self.cluster)?;
        if work.x.len() != self.token_bytes * work.rows {
            return Err(INVALID);
        }
        let x = self.of_x.get_mut(..work.x.len()).ok_or(INVALID)?;
        x.copy_from_slice(work.x);
        self.of_mask.clear();
        self.of_mask.extend_from_slice(work.mask.unwrap_or(&[]));
        for (to, from) in self.of_bias.iter_mut().zip([work.gate_bias, work.up_bias]) {
            to.clear();
            to.extend_from_slice(from);
        }
        let [gate, up] = &self.of_bias;
        begin(queue, &mut self.x, x)?;
        begin(queue, &mut self.mask, &self.of_mask)?;
        begin(queue, &mut self.gate_bias, gate)?;
        begin(queue, &mut self.up_bias, up)
    }

    /// Whether what is computed of `work` fits.
    pub fn fits(&self, work: &Work<'_>) -> Result<(), Code> {
        let pairs = work.clusters * work.rows;
        self.hidden.fits(0, pairs * self.cluster)?;
        self.sums.fits(0, pairs * self.d + 1)?;
        self.totals.fits(0, work.rows * self.d + 1)
    }

    /// Counts anew, after work of which not all was begun.
    pub fn reset(&mut self, queue: &Queue) -> Result<(), Code> {
        start_with(queue, &mut self.fired, &[0])
    }

    /// Begins to copy back what a piece of work with `sums` comes to, `len` floats, and behind them how many pairs
    /// fired; done when the event is.
    pub fn read(
        &mut self,
        queue: &Queue,
        sums: Sums,
        rows: usize,
        len: usize,
    ) -> Result<Event, Code> {
        let (from, count) = match sums {
            Sums::Each => (&self.sums, len),
            Sums::Total { .. } => (&self.totals, rows * self.d),
        };
        let to = self.answer.get_mut(..len + 1).ok_or(INVALID)?;
        read(queue, from, count - len, to)
    }

    /// So many sums of work that is done, and how many pairs fired.
    pub fn answer(&self, len: usize) -> Option<(&[f32], u32)> {
        let (count, sums) = self.answer.get(..=len)?.split_last()?;
        Some((sums, count.to_bits()))
    }
}

/// Copies `from` to the start of a buffer, and waits for it.
fn start_with<T: Copy>(queue: &Queue, to: &mut Memory<T>, from: &[T]) -> Result<(), Code> {
    to.fits(0, from.len())?;
    // SAFETY: `from` is read before the call returns, and its length fits, as was just checked.
    unsafe { queue.write(&to.mem, 0, from, true) }
}

/// Begins to copy `from` to the start of a buffer.
pub(super) fn begin<T: Copy>(queue: &Queue, to: &mut Memory<T>, from: &[T]) -> Result<(), Code> {
    to.fits(0, from.len())?;
    if !from.is_empty() {
        // SAFETY: the length fits; `from` is staging memory, or a vector whose owner waits for the queue: neither is
        // touched or freed before the work is taken, or the queue has finished.
        unsafe { queue.write(&to.mem, 0, from, false)? };
    }
    Ok(())
}
