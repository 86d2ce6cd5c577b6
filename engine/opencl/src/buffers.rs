//! Memory of an OpenCL device, and the host memory that it is copied from and to.

use std::cell::UnsafeCell;
use std::marker::PhantomData;

use opencl_sys::{CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_ONLY, CL_MEM_READ_WRITE, CL_MEM_USE_HOST_PTR};

use crate::handles::{Arg, Context, Event, Mem, Queue};
use crate::library::Code;
use crate::work::INVALID;
use crate::{HostBytes, Room, Spec, Work};

/// A buffer of `T`, and its length.
pub(super) struct Memory<T> {
    mem: Mem,
    len: usize,
    of: PhantomData<T>,
}

/// A buffer of bytes.
pub(super) type Bytes = Memory<u8>;

impl<T: Copy> Memory<T> {
    /// `len` elements, in host memory where that is the device's own.
    pub fn new(context: &Context, len: usize, unified: bool) -> Result<Self, Code> {
        let place = if unified { CL_MEM_ALLOC_HOST_PTR } else { 0 };
        // No buffer is empty.
        let len = len.max(1);
        let bytes = len.checked_mul(size_of::<T>()).ok_or(INVALID)?;
        Ok(Self {
            mem: context.memory(CL_MEM_READ_WRITE | place, bytes)?,
            len,
            of: PhantomData,
        })
    }

    /// For kernels.
    pub fn arg(&self) -> Arg<'_> {
        Arg::Mem(&self.mem)
    }

    /// The handle, to map it.
    pub fn mem(&self) -> &Mem {
        &self.mem
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether so many elements are there.
    pub fn fits(&self, at: usize, len: usize) -> Result<(), Code> {
        match at.checked_add(len).is_some_and(|end| end <= self.len) {
            true => Ok(()),
            false => Err(INVALID),
        }
    }
}

/// Bytes as cells.
fn cells(bytes: &[u8]) -> &[UnsafeCell<u8>] {
    // SAFETY: the same memory, of which a cell claims less.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) }
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
        // SAFETY: the caller keeps `host` alive as long as the buffer; kernels only read it, and nobody
        // else may write behind a shared reference.
        unsafe { Self::of_cells(context, cells(bytes)) }
    }

    /// The memory of `bytes` itself.
    ///
    /// # Safety
    /// It outlives the buffer, kernels only read it, and nobody changes what they read meanwhile.
    pub unsafe fn of_cells(context: &Context, bytes: &[UnsafeCell<u8>]) -> Result<Self, Code> {
        let flags = CL_MEM_READ_ONLY | CL_MEM_USE_HOST_PTR;
        // SAFETY: passed on from the caller.
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
    pub fired: Memory<i32>,
    pub sums: Memory<f32>,
    of_x: Vec<u8>,
    of_mask: Vec<u64>,
    of_bias: [Vec<f32>; 2],
    of_fired: [i32; 1],
    pub answer: Vec<f32>,
    pub count: [i32; 1],
}

impl Scratch {
    pub fn new(context: &Context, spec: &Spec, room: &Room) -> Result<Self, Code> {
        let (rows, neurons) = (room.rows, room.clusters * spec.cluster);
        let (pairs, sums) = (room.pairs * spec.cluster, room.pairs * spec.d);
        let token_bytes = spec.token_bytes;
        Ok(Self {
            cluster: spec.cluster,
            d: spec.d,
            token_bytes,
            x: Memory::new(context, token_bytes * rows, true)?,
            mask: Memory::new(context, pairs / 64, true)?,
            gate_bias: Memory::new(context, neurons, true)?,
            up_bias: Memory::new(context, neurons, true)?,
            hidden: Memory::new(context, pairs, false)?,
            fired: Memory::new(context, 1, true)?,
            sums: Memory::new(context, sums, true)?,
            of_x: Vec::with_capacity(token_bytes * rows),
            of_mask: Vec::with_capacity(pairs / 64),
            of_bias: [Vec::with_capacity(neurons), Vec::with_capacity(neurons)],
            of_fired: [0],
            answer: vec![0.0; sums],
            count: [0],
        })
    }

    /// Begins to copy the inputs of `work`.
    pub fn fill(&mut self, queue: &Queue, work: &Work<'_>) -> Result<(), Code> {
        let neurons = work.clusters * self.cluster;
        self.hidden.fits(0, neurons * work.rows)?;
        self.gate_bias.fits(0, neurons)?;
        self.sums.fits(0, work.rows * self.d)?;
        if work.x.len() != self.token_bytes * work.rows {
            return Err(INVALID);
        }
        self.of_x.clear();
        self.of_x.extend_from_slice(work.x);
        self.of_mask.clear();
        self.of_mask.extend_from_slice(work.mask.unwrap_or(&[]));
        for (to, from) in self.of_bias.iter_mut().zip([work.gate_bias, work.up_bias]) {
            to.clear();
            to.extend_from_slice(from);
        }
        let [gate, up] = &self.of_bias;
        begin(queue, &mut self.x, &self.of_x)?;
        begin(queue, &mut self.mask, &self.of_mask)?;
        begin(queue, &mut self.gate_bias, gate)?;
        begin(queue, &mut self.up_bias, up)?;
        begin(queue, &mut self.fired, &self.of_fired)
    }

    /// Begins to copy `len` sums back; done when the event is.
    pub fn read(&mut self, queue: &Queue, len: usize) -> Result<Event, Code> {
        self.sums.fits(0, len)?;
        let answer = &mut self.answer[..len];
        let count = &mut self.count;
        // SAFETY: both lengths fit, and neither vector is touched or freed before the work is
        // taken: it is waited for by `take` and `prepare`, and the queue is dropped before them.
        unsafe {
            let counted = queue.read(&self.fired.mem, 0, count)?;
            match answer.is_empty() {
                true => Ok(counted),
                false => queue.read(&self.sums.mem, 0, answer),
            }
        }
    }
}

/// Begins to copy `from` to the start of a buffer.
pub(super) fn begin<T: Copy>(queue: &Queue, to: &mut Memory<T>, from: &[T]) -> Result<(), Code> {
    to.fits(0, from.len())?;
    if !from.is_empty() {
        // SAFETY: the length fits; `from` is staging memory, which is neither touched nor freed
        // before the work is taken, as in `read`.
        unsafe { queue.write(&to.mem, 0, from, false)? };
    }
    Ok(())
}

/// The same, from byte `at` on.
pub(super) fn begin_part(
    queue: &Queue,
    to: &mut Bytes,
    at: usize,
    from: &[u8],
) -> Result<(), Code> {
    to.fits(at, from.len())?;
    // SAFETY: as in `begin`; pages are held until the work is taken.
    unsafe { queue.write(&to.mem, at, from, false) }
}

/// The same, of floats to bytes.
pub(super) fn begin_floats(queue: &Queue, to: &mut Bytes, from: &[f32]) -> Result<(), Code> {
    to.fits(0, size_of_val(from))?;
    if !from.is_empty() {
        // SAFETY: as in `begin`.
        unsafe { queue.write(&to.mem, 0, from, false)? };
    }
    Ok(())
}
