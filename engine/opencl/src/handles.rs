//! OpenCL's objects: each is released when it is dropped.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};

use opencl_sys::{
    CL_COMPLETE, CL_DEVICE_TYPE_ALL, CL_EVENT_COMMAND_EXECUTION_STATUS, CL_KERNEL_WORK_GROUP_SIZE,
    CL_MAP_READ, CL_MAP_WRITE, CL_PROFILING_COMMAND_END, CL_PROFILING_COMMAND_QUEUED,
    CL_PROGRAM_BUILD_LOG, CL_QUEUE_PROFILING_ENABLE, cl_command_queue, cl_context, cl_device_id,
    cl_device_info, cl_event, cl_int, cl_kernel, cl_mem, cl_mem_flags, cl_platform_id, cl_program,
    cl_uint, cl_ulong,
};

use crate::library::{Code, Functions, with_library};

/// Declares an object, and how it is released.
macro_rules! object {
    ($(#[$about:meta])* $name:ident: $raw:ty, $release:ident) => {
        $(#[$about])*
        pub(super) struct $name {
            raw: $raw,
            of: &'static Functions,
        }

        // SAFETY: OpenCL's objects may be used by any thread. Only the arguments of one kernel must not
        // be set by two at once, for which `Kernel::run` wants it exclusively.
        unsafe impl Send for $name {}

        impl $name {
            /// The object that a function of OpenCL made, if it did.
            fn made(raw: $raw, code: cl_int, of: &'static Functions) -> Result<Self, Code> {
                Code::check(code)?;
                Ok(Self { raw, of })
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: it is this handle's own, and released once. OpenCL keeps what work that
                // is under way uses.
                let code = unsafe { (self.of.$release)(self.raw) };
                if let Err(code) = Code::check(code) {
                    tracing::debug!(%code, "not released");
                }
            }
        }
    };
}

object!(
    /// A context of one device.
    Context: cl_context, clReleaseContext
);
object!(
    /// A queue of work, done in order.
    Queue: cl_command_queue, clReleaseCommandQueue
);
object!(
    /// Memory.
    Mem: cl_mem, clReleaseMemObject
);
object!(
    /// Compiled kernels.
    Program: cl_program, clReleaseProgram
);
object!(
    /// A kernel.
    Kernel: cl_kernel, clReleaseKernel
);
object!(
    /// The end of a piece of work.
    Event: cl_event, clReleaseEvent
);

/// A device of a platform. It needs no release.
pub(super) struct Found {
    id: cl_device_id,
    of: &'static Functions,
}

// SAFETY: it is a name of the device, for functions that any thread may call.
unsafe impl Send for Found {}

/// Devices of all platforms, in order; none without a library.
///
/// # Errors
/// No library.
pub(super) fn devices() -> Result<Vec<Found>, crate::Error> {
    with_library(|of| {
        let platforms = listed(|room, ids: *mut cl_platform_id, count| {
            // SAFETY: `ids` has room for so many.
            unsafe { (of.clGetPlatformIDs)(room, ids, count) }
        });
        let ids = platforms.into_iter().flat_map(|platform| {
            listed(|room, ids: *mut cl_device_id, count| {
                // SAFETY: a platform that was listed; `ids` has room for so many.
                unsafe { (of.clGetDeviceIDs)(platform, CL_DEVICE_TYPE_ALL, room, ids, count) }
            })
        });
        ids.map(|id| Found { id, of }).collect()
    })
}

/// Asks how many there are, then for so many; none where a driver fails.
fn listed<T>(ask: impl Fn(cl_uint, *mut *mut T, *mut cl_uint) -> cl_int) -> Vec<*mut T> {
    let mut count = 0;
    if Code::check(ask(0, null_mut(), &raw mut count)).is_err() {
        return Vec::new();
    }
    let mut ids = vec![null_mut(); count as usize];
    let mut now = 0;
    if count == 0 || Code::check(ask(count, ids.as_mut_ptr(), &raw mut now)).is_err() {
        return Vec::new();
    }
    ids.truncate(now as usize);
    ids
}

impl Found {
    /// The bytes of a fact; empty where the device does not tell.
    fn fact(&self, name: cl_device_info) -> Vec<u8> {
        bytes(|room, to, len| {
            // SAFETY: a device that was listed; `to` has so much room.
            unsafe { (self.of.clGetDeviceInfo)(self.id, name, room, to, len) }
        })
    }

    /// A text, without its end.
    pub fn text(&self, name: cl_device_info) -> String {
        text(&self.fact(name))
    }

    /// A number of 4 or 8 bytes; 0 where the device does not tell.
    pub fn number(&self, name: cl_device_info) -> u64 {
        let bytes = self.fact(name);
        let mut all = [0; 8];
        match bytes.len() {
            // Little-endian, as all targets are.
            4 | 8 => all[..bytes.len()].copy_from_slice(&bytes),
            _ => {}
        }
        u64::from_le_bytes(all)
    }

    /// A context with this device.
    pub fn context(&self) -> Result<Context, Code> {
        let mut code = 0;
        // SAFETY: one device that was listed, no properties, no callback.
        let raw = unsafe {
            (self.of.clCreateContext)(null(), 1, &self.id, None, null_mut(), &raw mut code)
        };
        Context::made(raw, code, self.of)
    }

    /// A queue, with a clock or without.
    pub fn queue(&self, context: &Context, clock: bool) -> Result<Queue, Code> {
        let (of, mut code) = (self.of, 0);
        let properties = if clock { CL_QUEUE_PROFILING_ENABLE } else { 0 };
        // SAFETY: the device is the context's.
        let raw =
            unsafe { (of.clCreateCommandQueue)(context.raw, self.id, properties, &raw mut code) };
        Queue::made(raw, code, of)
    }

    /// Most items that a work group of a kernel can have.
    pub fn most_items(&self, kernel: &Kernel) -> Result<usize, Code> {
        let (name, mut most) = (CL_KERNEL_WORK_GROUP_SIZE, 0usize);
        let (len, to) = (size_of::<usize>(), (&raw mut most).cast());
        // SAFETY: a kernel that was made for this device; the answer is one size.
        Code::check(unsafe {
            (self.of.clGetKernelWorkGroupInfo)(kernel.raw, self.id, name, len, to, null_mut())
        })?;
        Ok(most)
    }

    /// Compiles kernels; the error is the compiler's log.
    pub fn build(&self, context: &Context, source: &str, options: &str) -> Result<Program, String> {
        let (of, mut code) = (self.of, 0);
        let options = CString::new(options).map_err(|e| e.to_string())?;
        let (mut text, len) = (source.as_ptr().cast(), source.len());
        // SAFETY: one text of this length, which is copied.
        let raw = unsafe {
            (of.clCreateProgramWithSource)(context.raw, 1, &raw mut text, &len, &raw mut code)
        };
        let program = Program::made(raw, code, of).map_err(|code| code.to_string())?;
        // SAFETY: the program's own device; the options end with zero; no callback, so that it returns when
        // it is done.
        let code =
            unsafe { (of.clBuildProgram)(raw, 1, &self.id, options.as_ptr(), None, null_mut()) };
        match Code::check(code) {
            Ok(()) => Ok(program),
            Err(code) => {
                let log = bytes(|room, to, len| {
                    let name = CL_PROGRAM_BUILD_LOG;
                    // SAFETY: the program and its device; `to` has so much room.
                    unsafe { (of.clGetProgramBuildInfo)(raw, self.id, name, room, to, len) }
                });
                Err(format!("{code} {}", text_or(&log, "(it left no log)")))
            }
        }
    }
}

/// Asks how long an answer is, then for it; empty where a driver fails.
fn bytes(ask: impl Fn(usize, *mut c_void, *mut usize) -> cl_int) -> Vec<u8> {
    let mut len = 0;
    if Code::check(ask(0, null_mut(), &raw mut len)).is_err() {
        return Vec::new();
    }
    let mut bytes = vec![0; len];
    match Code::check(ask(len, bytes.as_mut_ptr().cast(), null_mut())) {
        Ok(()) => bytes,
        Err(_) => Vec::new(),
    }
}

fn text(bytes: &[u8]) -> String {
    let text = bytes.split(|&b| b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).trim().to_owned()
}

fn text_or(bytes: &[u8], otherwise: &str) -> String {
    match text(bytes) {
        text if text.is_empty() => otherwise.into(),
        text => text,
    }
}

impl Program {
    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Result<Kernel, Code> {
        let mut code = 0;
        let name = CString::new(name).map_err(|_| Code(opencl_sys::CL_INVALID_KERNEL_NAME))?;
        // SAFETY: a program that was built, a name that ends with zero.
        let raw = unsafe { (self.of.clCreateKernel)(self.raw, name.as_ptr(), &raw mut code) };
        Kernel::made(raw, code, self.of)
    }
}

impl Context {
    /// Memory of `len` bytes, by the driver.
    pub fn memory(&self, flags: cl_mem_flags, len: usize) -> Result<Mem, Code> {
        let mut code = 0;
        // SAFETY: no host pointer, so that the driver allocates the memory itself.
        let raw =
            unsafe { (self.of.clCreateBuffer)(self.raw, flags, len, null_mut(), &raw mut code) };
        Mem::made(raw, code, self.of)
    }

    /// Memory that is `host` itself where the flags say so.
    ///
    /// # Safety
    /// With a flag to use host memory, `host` outlives the memory, kernels only read it, and nobody changes what
    /// they read meanwhile.
    pub unsafe fn memory_of(&self, flags: cl_mem_flags, host: &[u8]) -> Result<Mem, Code> {
        let (mut code, at) = (0, host.as_ptr().cast_mut().cast());
        // SAFETY: `at` has so many bytes; the rest is the caller's promise.
        let raw =
            unsafe { (self.of.clCreateBuffer)(self.raw, flags, host.len(), at, &raw mut code) };
        Mem::made(raw, code, self.of)
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(super) enum Arg<'a> {
    /// Memory.
    Mem(&'a Mem),
    /// A number.
    Int(i32),
    /// A number.
    Float(f32),
    /// So many bytes of local memory.
    Local(usize),
}

impl Kernel {
    /// Begins to run it with `args` over `global` items in groups of `local`.
    ///
    /// # Safety
    /// The arguments are those of the kernel in number, order and type, and memory holds what the kernel
    /// reaches with them, until the work is done.
    pub unsafe fn run(
        &mut self,
        queue: &Queue,
        args: &[Arg<'_>],
        [global, local]: [&[usize]; 2],
    ) -> Result<Event, Code> {
        let of = self.of;
        for (i, arg) in args.iter().enumerate() {
            let (len, at): (usize, *const c_void) = match arg {
                Arg::Mem(mem) => (size_of::<cl_mem>(), (&raw const mem.raw).cast()),
                Arg::Int(value) => (size_of::<i32>(), std::ptr::from_ref(value).cast()),
                Arg::Float(value) => (size_of::<f32>(), std::ptr::from_ref(value).cast()),
                Arg::Local(len) => (*len, null()),
            };
            // SAFETY: `at` has so many bytes, which are copied, or is null for local memory; the kernel is this
            // thread's alone.
            Code::check(unsafe { (of.clSetKernelArg)(self.raw, i as cl_uint, len, at) })?;
        }
        let (dims, mut event) = (global.len().min(local.len()), null_mut());
        let (global, local) = (global.as_ptr(), local.as_ptr());
        // SAFETY: both lists have `dims` sizes; no offset, nothing to wait for; the rest is the
        // caller's promise.
        let code = unsafe {
            (of.clEnqueueNDRangeKernel)(
                queue.raw,
                self.raw,
                dims as cl_uint,
                null(),
                global,
                local,
                0,
                null(),
                &raw mut event,
            )
        };
        Event::made(event, code, of)
    }
}

impl Queue {
    /// Begins to copy bytes of `from`, from byte `at` on, to `to`; done when the event is.
    ///
    /// # Safety
    /// `from` is that long, and `to` is neither touched nor freed before.
    pub unsafe fn read<T: Copy>(&self, from: &Mem, at: usize, to: &mut [T]) -> Result<Event, Code> {
        let (of, mut event) = (self.of, null_mut());
        let (len, to) = (size_of_val(to), to.as_mut_ptr().cast());
        // SAFETY: `to` has so many bytes; the rest is the caller's promise.
        let code = unsafe {
            let (raw, none, event) = (from.raw, null(), &raw mut event);
            (of.clEnqueueReadBuffer)(self.raw, raw, 0, at, len, to, 0, none, event)
        };
        Event::made(event, code, of)
    }

    /// Copies `from` to byte `at` of `to`; waits for it, or only begins.
    ///
    /// # Safety
    /// `to` is long enough, and what is not waited for is neither changed nor freed before it is done.
    pub unsafe fn write<T: Copy>(
        &self,
        to: &Mem,
        at: usize,
        from: &[T],
        wait: bool,
    ) -> Result<(), Code> {
        let (len, from) = (size_of_val(from), from.as_ptr().cast());
        // SAFETY: `from` has so many bytes; the rest is the caller's promise.
        Code::check(unsafe {
            (self.of.clEnqueueWriteBuffer)(
                self.raw,
                to.raw,
                wait.into(),
                at,
                len,
                from,
                0,
                null(),
                null_mut(),
            )
        })
    }

    /// Begins to copy `from` to byte `at` of `to`; done when the event is.
    ///
    /// # Safety
    /// `to` is long enough, and `from` is neither changed nor freed before.
    pub unsafe fn copy(&self, to: &Mem, at: usize, from: &[u8]) -> Result<Event, Code> {
        let (of, mut event) = (self.of, null_mut());
        let (len, from) = (from.len(), from.as_ptr().cast());
        // SAFETY: nothing to wait for; the rest is the caller's promise.
        let code = unsafe {
            (of.clEnqueueWriteBuffer)(
                self.raw,
                to.raw,
                0,
                at,
                len,
                from,
                0,
                null(),
                &raw mut event,
            )
        };
        Event::made(event, code, of)
    }

    /// Where the host finds the first `len` bytes of memory that is the host's, until [`Queue::unmap`].
    pub fn map(&self, mem: &Mem, len: usize) -> Result<*mut u8, Code> {
        let (mut code, flags) = (0, CL_MAP_READ | CL_MAP_WRITE);
        // SAFETY: memory of this length, waited for; nothing to wait for before.
        let at = unsafe {
            (self.of.clEnqueueMapBuffer)(
                self.raw,
                mem.raw,
                1,
                flags,
                0,
                len,
                0,
                null(),
                null_mut(),
                &raw mut code,
            )
        };
        Code::check(code).map(|()| at.cast())
    }

    /// Ends what [`Queue::map`] began.
    pub fn unmap(&self, mem: &Mem, at: *mut u8) -> Result<(), Code> {
        let (of, at) = (self.of, at.cast());
        // SAFETY: where the memory was mapped; drivers refuse another place.
        Code::check(unsafe {
            (of.clEnqueueUnmapMemObject)(self.raw, mem.raw, at, 0, null(), null_mut())
        })
    }

    /// What comes from here on waits for an event, which may be of another queue.
    pub fn wait_for(&self, event: &Event) -> Result<(), Code> {
        // SAFETY: one event of this handle.
        Code::check(unsafe {
            (self.of.clEnqueueBarrierWithWaitList)(self.raw, 1, &event.raw, null_mut())
        })
    }

    /// Has the device begin.
    pub fn flush(&self) -> Result<(), Code> {
        // SAFETY: a queue of this handle.
        Code::check(unsafe { (self.of.clFlush)(self.raw) })
    }

    /// Waits for all of it.
    pub fn finish(&self) -> Result<(), Code> {
        // SAFETY: a queue of this handle.
        Code::check(unsafe { (self.of.clFinish)(self.raw) })
    }
}

impl Event {
    /// Waits for it.
    pub fn wait(&self) -> Result<(), Code> {
        // SAFETY: one event of this handle.
        Code::check(unsafe { (self.of.clWaitForEvents)(1, &self.raw) })
    }

    /// Whether it is over, well or not; does not wait.
    pub fn is_over(&self) -> Result<bool, Code> {
        let (name, mut status) = (CL_EVENT_COMMAND_EXECUTION_STATUS, 0 as cl_int);
        let to = (&raw mut status).cast();
        // SAFETY: an event of this handle; the status is an int.
        Code::check(unsafe {
            (self.of.clGetEventInfo)(self.raw, name, size_of::<cl_int>(), to, null_mut())
        })?;
        Ok(status <= CL_COMPLETE)
    }

    /// When it was put in the queue and when it ended, by the device's clock.
    pub fn queued(&self) -> Result<u64, Code> {
        self.time(CL_PROFILING_COMMAND_QUEUED)
    }

    /// See [`Event::queued`].
    pub fn ended(&self) -> Result<u64, Code> {
        self.time(CL_PROFILING_COMMAND_END)
    }

    fn time(&self, name: cl_uint) -> Result<u64, Code> {
        let mut time: cl_ulong = 0;
        let to = (&raw mut time).cast();
        // SAFETY: an event of this handle; times are of 8 bytes.
        Code::check(unsafe {
            (self.of.clGetEventProfilingInfo)(self.raw, name, size_of::<cl_ulong>(), to, null_mut())
        })?;
        Ok(time)
    }
}
