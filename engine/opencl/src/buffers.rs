//! Device buffers, and the staging memory of the host that they are copied from and to.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;
use opencl_sys::{CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_ONLY, CL_MEM_READ_WRITE, CL_MEM_USE_HOST_PTR};

use crate::handles::{Arg, Context, Event, Mem, Queue};
use crate::library::Code;
use crate::work::INVALID;
use crate::{HostBytes, Room, Spec, Sums, Work};

/// A device buffer of `T`, with its length.
pub(super) struct Memory<T> {
    mem: Mem,
    len: usize,
    element: PhantomData<T>,
}

/// A device buffer of bytes.
pub(super) type Bytes = Memory<u8>;

impl<T: Copy> Memory<T> {
    /// Allocates `len` elements.
    pub fn new(context: &Context, len: usize) -> Result<Self, Code> {
        // OpenCL has no empty buffers.
        let len = len.max(1);
        let bytes = len.checked_mul(size_of::<T>()).ok_or(INVALID)?;
        Ok(Self {
            mem: context.memory(CL_MEM_READ_WRITE, bytes)?,
            len,
            element: PhantomData,
        })
    }

    /// The buffer as a kernel argument.
    pub fn arg(&self) -> Arg<'_> {
        Arg::Mem(&self.mem)
    }

    /// Checks that elements `start..start + len` exist.
    pub fn fits(&self, start: usize, len: usize) -> Result<(), Code> {
        match start.checked_add(len).is_some_and(|end| end <= self.len) {
            true => Ok(()),
            false => Err(INVALID),
        }
    }
}

/// Staging memory: host memory that the driver allocates, pinned where that makes copies faster.
pub(super) struct Staged<T> {
    start: NonNull<T>,
    len: usize,
    /// Keeps the mapping alive.
    _mem: Mem,
}

// SAFETY: the memory belongs to this value alone, and borrows of it keep other threads out.
unsafe impl<T: Send> Send for Staged<T> {}

impl<T: Pod> Staged<T> {
    /// Allocates `len` zeros.
    pub fn new(context: &Context, queue: &Queue, len: usize) -> Result<Self, Code> {
        let len = len.max(1);
        let bytes = len.checked_mul(size_of::<T>()).ok_or(INVALID)?;
        let mem = context.memory(CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, bytes)?;
        let start = NonNull::new(queue.map(&mem, bytes)?.cast::<T>()).ok_or(INVALID)?;
        if !start.is_aligned() {
            return Err(INVALID);
        }
        // SAFETY: the driver has mapped `bytes` bytes for the host to write, and they are aligned.
        unsafe { start.write_bytes(0, len) };
        Ok(Self {
            start,
            len,
            _mem: mem,
        })
    }
}

impl<T> Deref for Staged<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements are mapped and initialised; the mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Staged<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, with an exclusive borrow.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Bytes {
    /// Starts to copy `source` to byte `offset`. The event completes with the copy.
    ///
    /// # Safety
    /// The range fits, and `source` is neither changed nor freed before the event completes.
    pub unsafe fn copy_from(
        &self,
        queue: &Queue,
        offset: usize,
        source: &[u8],
    ) -> Result<Event, Code> {
        // SAFETY: the caller's promise.
        unsafe { queue.copy(&self.mem, offset, source) }
    }

    /// A buffer that is the memory of `host` itself, which must outlive it unchanged.
    pub fn of_host(context: &Context, host: &HostBytes) -> Result<Self, Code> {
        let bytes: &[u8] = (**host).as_ref();
        let flags = CL_MEM_READ_ONLY | CL_MEM_USE_HOST_PTR;
        // SAFETY: the caller keeps `host` alive as long as the buffer; kernels only read it, and safe code
        // cannot write through a shared reference.
        let mem = unsafe { context.memory_of(flags, bytes)? };
        Ok(Self {
            mem,
            len: bytes.len(),
            element: PhantomData,
        })
    }
}

/// Starts to copy elements from `start` on to staging memory. The event completes with the copy.
pub(super) fn read(
    queue: &Queue,
    source: &Memory<f32>,
    start: usize,
    target: &mut [f32],
) -> Result<Event, Code> {
    source.fits(start, target.len())?;
    // SAFETY: the range fits; `target` is staging memory, which is neither touched nor freed before the
    // work is taken.
    unsafe { queue.read(&source.mem, start * size_of::<f32>(), target) }
}

/// Copies `source` to byte `offset` and waits for it.
pub(super) fn write(
    queue: &Queue,
    target: &mut Bytes,
    offset: usize,
    source: &[u8],
) -> Result<(), Code> {
    target.fits(offset, source.len())?;
    if !source.is_empty() {
        // SAFETY: the range fits, and `source` is read before the call returns.
        unsafe { queue.write(&target.mem, offset, source, true)? };
    }
    Ok(())
}

/// Device buffers for inputs, hidden values and sums of one piece of work, and their staging memory, which is
/// not touched while the work runs.
pub(super) struct Scratch {
    /// Neurons per cluster.
    cluster: usize,
    /// Elements per row.
    d: usize,
    /// Input bytes per token.
    token_bytes: usize,
    pub x: Memory<u8>,
    pub mask: Memory<u64>,
    pub gate_bias: Memory<f32>,
    pub up_bias: Memory<f32>,
    pub hidden: Memory<f32>,
    /// Number of pairs that fired; zero between pieces of work.
    pub fired: Memory<i32>,
    /// Sums of clusters, followed by the number of pairs that fired.
    pub sums: Memory<f32>,
    /// Running totals of rows, followed by the number of pairs that fired.
    pub totals: Memory<f32>,
    staged_x: Staged<u8>,
    staged_mask: Vec<u64>,
    staged_biases: [Vec<f32>; 2],
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
            staged_x: Staged::new(context, queue, token_bytes * rows)?,
            staged_mask: Vec::with_capacity(pairs / 64),
            staged_biases: [Vec::with_capacity(neurons), Vec::with_capacity(neurons)],
            answer: Staged::new(context, queue, sums + 1)?,
        })
    }

    /// Starts to copy the inputs of `work` to the device.
    pub fn fill(&mut self, queue: &Queue, work: &Work<'_>) -> Result<(), Code> {
        self.gate_bias.fits(0, work.clusters * self.cluster)?;
        if work.x.len() != self.token_bytes * work.rows {
            return Err(INVALID);
        }
        let x = self.staged_x.get_mut(..work.x.len()).ok_or(INVALID)?;
        x.copy_from_slice(work.x);
        self.staged_mask.clear();
        self.staged_mask.extend_from_slice(work.mask.unwrap_or(&[]));
        let biases = [work.gate_bias, work.up_bias];
        for (staged, bias) in self.staged_biases.iter_mut().zip(biases) {
            staged.clear();
            staged.extend_from_slice(bias);
        }
        let [gate, up] = &self.staged_biases;
        begin(queue, &mut self.x, x)?;
        begin(queue, &mut self.mask, &self.staged_mask)?;
        begin(queue, &mut self.gate_bias, gate)?;
        begin(queue, &mut self.up_bias, up)
    }

    /// Checks that the intermediate values and results of `work` fit.
    pub fn fits(&self, work: &Work<'_>) -> Result<(), Code> {
        let pairs = work.clusters * work.rows;
        self.hidden.fits(0, pairs * self.cluster)?;
        self.sums.fits(0, pairs * self.d + 1)?;
        self.totals.fits(0, work.rows * self.d + 1)
    }

    /// Resets the counter after work that failed to start completely.
    pub fn reset(&mut self, queue: &Queue) -> Result<(), Code> {
        start_with(queue, &mut self.fired, &[0])
    }

    /// Starts to copy back `len` floats of results, followed by the number of pairs that fired.
    pub fn read(
        &mut self,
        queue: &Queue,
        sums: Sums,
        rows: usize,
        len: usize,
    ) -> Result<Event, Code> {
        let (source, count) = match sums {
            Sums::Each => (&self.sums, len),
            Sums::Total { .. } => (&self.totals, rows * self.d),
        };
        let target = self.answer.get_mut(..len + 1).ok_or(INVALID)?;
        read(queue, source, count - len, target)
    }

    /// The first `len` floats of the results of finished work, and the number of pairs that fired.
    pub fn answer(&self, len: usize) -> Option<(&[f32], u32)> {
        let (count, sums) = self.answer.get(..=len)?.split_last()?;
        Some((sums, count.to_bits()))
    }
}

/// Copies `source` to the start of a buffer and waits for it.
fn start_with<T: Copy>(queue: &Queue, target: &mut Memory<T>, source: &[T]) -> Result<(), Code> {
    target.fits(0, source.len())?;
    // SAFETY: the range fits, and `source` is read before the call returns.
    unsafe { queue.write(&target.mem, 0, source, true) }
}

/// Starts to copy `source` to the start of a buffer.
pub(super) fn begin<T: Copy>(
    queue: &Queue,
    target: &mut Memory<T>,
    source: &[T],
) -> Result<(), Code> {
    target.fits(0, source.len())?;
    if !source.is_empty() {
        // SAFETY: the range fits; `source` is staging memory, or a vector whose owner waits for the queue: neither is
        // touched or freed before the work is taken or the queue has finished.
        unsafe { queue.write(&target.mem, 0, source, false)? };
    }
    Ok(())
}
