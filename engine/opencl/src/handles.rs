//! Owned handles of OpenCL objects; dropping a handle releases its object.

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

/// Declares a handle with its release function.
macro_rules! object {
    ($(#[$about:meta])* $name:ident: $raw:ty, $release:ident) => {
        $(#[$about])*
        pub(super) struct $name {
            raw: $raw,
            functions: &'static Functions,
        }

        // SAFETY: OpenCL's objects may be used by any thread. The exception, setting the arguments of one
        // kernel from two threads, is excluded by the exclusive borrow of `Kernel::run`.
        unsafe impl Send for $name {}

        impl $name {
            /// Takes ownership of a new object, if OpenCL has created it.
            fn made(raw: $raw, code: cl_int, functions: &'static Functions) -> Result<Self, Code> {
                Code::check(code)?;
                Ok(Self { raw, functions })
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: this handle owns the object and releases it once. OpenCL keeps objects that
                // running work uses.
                let code = unsafe { (self.functions.$release)(self.raw) };
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
    /// An in-order command queue.
    Queue: cl_command_queue, clReleaseCommandQueue
);
object!(
    /// A buffer.
    Mem: cl_mem, clReleaseMemObject
);
object!(
    /// A compiled program.
    Program: cl_program, clReleaseProgram
);
object!(
    /// A kernel.
    Kernel: cl_kernel, clReleaseKernel
);
object!(
    /// Completion of a command.
    Event: cl_event, clReleaseEvent
);

/// A device of a platform; root devices need no release.
pub(super) struct Found {
    id: cl_device_id,
    functions: &'static Functions,
}

// SAFETY: an identifier, passed only to functions that any thread may call.
unsafe impl Send for Found {}

/// Lists the devices of all platforms in order.
///
/// # Errors
/// No library.
pub(super) fn devices() -> Result<Vec<Found>, crate::Error> {
    with_library(|functions| {
        let platforms = listed(|room, ids: *mut cl_platform_id, count| {
            // SAFETY: `ids` has room for `room` platforms.
            unsafe { (functions.clGetPlatformIDs)(room, ids, count) }
        });
        let ids = platforms.into_iter().flat_map(|platform| {
            listed(|room, ids: *mut cl_device_id, count| {
                // SAFETY: a listed platform; `ids` has room for `room` devices.
                unsafe {
                    (functions.clGetDeviceIDs)(platform, CL_DEVICE_TYPE_ALL, room, ids, count)
                }
            })
        });
        ids.map(|id| Found { id, functions }).collect()
    })
}

/// Calls a listing function for the count, then for the list. Empty if the driver fails.
fn listed<T>(ask: impl Fn(cl_uint, *mut *mut T, *mut cl_uint) -> cl_int) -> Vec<*mut T> {
    let mut count = 0;
    if Code::check(ask(0, null_mut(), &raw mut count)).is_err() {
        return Vec::new();
    }
    let mut ids = vec![null_mut(); count as usize];
    let mut filled = 0;
    if count == 0 || Code::check(ask(count, ids.as_mut_ptr(), &raw mut filled)).is_err() {
        return Vec::new();
    }
    ids.truncate(filled as usize);
    ids
}

impl Found {
    /// Bytes of a property; empty if the driver does not report it.
    fn fact(&self, name: cl_device_info) -> Vec<u8> {
        bytes(|room, target, len| {
            // SAFETY: a listed device; `target` has `room` bytes.
            unsafe { (self.functions.clGetDeviceInfo)(self.id, name, room, target, len) }
        })
    }

    /// A text property.
    pub fn text(&self, name: cl_device_info) -> String {
        text(&self.fact(name))
    }

    /// A numeric property of 4 or 8 bytes; 0 if the driver does not report it.
    pub fn number(&self, name: cl_device_info) -> u64 {
        let bytes = self.fact(name);
        let mut number = [0; 8];
        match bytes.len() {
            // All targets are little-endian.
            4 | 8 => number[..bytes.len()].copy_from_slice(&bytes),
            _ => {}
        }
        u64::from_le_bytes(number)
    }

    /// Creates a context of this device.
    pub fn context(&self) -> Result<Context, Code> {
        let mut code = 0;
        // SAFETY: one listed device, no properties, no callback.
        let raw = unsafe {
            (self.functions.clCreateContext)(null(), 1, &self.id, None, null_mut(), &raw mut code)
        };
        Context::made(raw, code, self.functions)
    }

    /// Creates a queue, with a clock (profiling) or without.
    pub fn queue(&self, context: &Context, clock: bool) -> Result<Queue, Code> {
        let (functions, mut code) = (self.functions, 0);
        let properties = if clock { CL_QUEUE_PROFILING_ENABLE } else { 0 };
        // SAFETY: the context has this device.
        let raw = unsafe {
            (functions.clCreateCommandQueue)(context.raw, self.id, properties, &raw mut code)
        };
        Queue::made(raw, code, functions)
    }

    /// Maximum work items per group of a kernel.
    pub fn most_items(&self, kernel: &Kernel) -> Result<usize, Code> {
        let (name, mut most) = (CL_KERNEL_WORK_GROUP_SIZE, 0usize);
        let (len, target) = (size_of::<usize>(), (&raw mut most).cast());
        // SAFETY: a kernel of this device; the answer is one size.
        Code::check(unsafe {
            (self.functions.clGetKernelWorkGroupInfo)(
                kernel.raw,
                self.id,
                name,
                len,
                target,
                null_mut(),
            )
        })?;
        Ok(most)
    }

    /// Compiles a program; the error is the compiler's log.
    pub fn build(&self, context: &Context, source: &str, options: &str) -> Result<Program, String> {
        let (functions, mut code) = (self.functions, 0);
        let options = CString::new(options).map_err(|e| e.to_string())?;
        let (mut text, len) = (source.as_ptr().cast(), source.len());
        // SAFETY: one text of this length, which OpenCL copies.
        let raw = unsafe {
            (functions.clCreateProgramWithSource)(
                context.raw,
                1,
                &raw mut text,
                &len,
                &raw mut code,
            )
        };
        let program = Program::made(raw, code, functions).map_err(|code| code.to_string())?;
        // SAFETY: the program's own device and zero-terminated options. Without a callback the call returns
        // after the build.
        let code = unsafe {
            (functions.clBuildProgram)(raw, 1, &self.id, options.as_ptr(), None, null_mut())
        };
        match Code::check(code) {
            Ok(()) => Ok(program),
            Err(code) => {
                let log = bytes(|room, target, len| {
                    let name = CL_PROGRAM_BUILD_LOG;
                    // SAFETY: the program and its device; `target` has `room` bytes.
                    unsafe {
                        (functions.clGetProgramBuildInfo)(raw, self.id, name, room, target, len)
                    }
                });
                Err(format!("{code} {}", text_or(&log, "(it left no log)")))
            }
        }
    }
}

/// Calls a query for the length of the answer, then for the answer. Empty if the driver fails.
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
    /// Creates the kernel of this name.
    pub fn kernel(&self, name: &str) -> Result<Kernel, Code> {
        let mut code = 0;
        let name = CString::new(name).map_err(|_| Code(opencl_sys::CL_INVALID_KERNEL_NAME))?;
        // SAFETY: a built program and a zero-terminated name.
        let raw =
            unsafe { (self.functions.clCreateKernel)(self.raw, name.as_ptr(), &raw mut code) };
        Kernel::made(raw, code, self.functions)
    }
}

impl Context {
    /// Allocates `len` bytes of driver memory.
    pub fn memory(&self, flags: cl_mem_flags, len: usize) -> Result<Mem, Code> {
        let mut code = 0;
        // SAFETY: no host pointer, so that the driver allocates the memory itself.
        let raw = unsafe {
            (self.functions.clCreateBuffer)(self.raw, flags, len, null_mut(), &raw mut code)
        };
        Mem::made(raw, code, self.functions)
    }

    /// Creates a buffer from `host`, without a copy if the flags ask for host memory.
    ///
    /// # Safety
    /// With `CL_MEM_USE_HOST_PTR`, `host` outlives the buffer unchanged, and kernels only read it.
    pub unsafe fn memory_of(&self, flags: cl_mem_flags, host: &[u8]) -> Result<Mem, Code> {
        let (mut code, start) = (0, host.as_ptr().cast_mut().cast());
        // SAFETY: `start` points to `host.len()` bytes; the rest is the caller's promise.
        let raw = unsafe {
            (self.functions.clCreateBuffer)(self.raw, flags, host.len(), start, &raw mut code)
        };
        Mem::made(raw, code, self.functions)
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(super) enum Arg<'a> {
    /// A buffer.
    Mem(&'a Mem),
    /// An int.
    Int(i32),
    /// A float.
    Float(f32),
    /// Local memory of this many bytes.
    Local(usize),
}

impl Kernel {
    /// Starts the kernel with `args` over `global` work items in groups of `local`.
    ///
    /// # Safety
    /// The arguments match the kernel in number, order and type, and all accesses that follow from them are in
    /// bounds of buffers that live until the kernel ends.
    pub unsafe fn run(
        &mut self,
        queue: &Queue,
        args: &[Arg<'_>],
        [global, local]: [&[usize]; 2],
    ) -> Result<Event, Code> {
        let functions = self.functions;
        for (i, arg) in args.iter().enumerate() {
            let (len, value): (usize, *const c_void) = match arg {
                Arg::Mem(mem) => (size_of::<cl_mem>(), (&raw const mem.raw).cast()),
                Arg::Int(value) => (size_of::<i32>(), std::ptr::from_ref(value).cast()),
                Arg::Float(value) => (size_of::<f32>(), std::ptr::from_ref(value).cast()),
                Arg::Local(len) => (*len, null()),
            };
            // SAFETY: `value` points to `len` bytes, which OpenCL copies, or is null for local memory; the borrow
            // of the kernel is exclusive.
            Code::check(unsafe { (functions.clSetKernelArg)(self.raw, i as cl_uint, len, value) })?;
        }
        let (dims, mut event) = (global.len().min(local.len()), null_mut());
        let (global, local) = (global.as_ptr(), local.as_ptr());
        // SAFETY: both lists have `dims` sizes; no offset, no wait list; the rest is the caller's promise.
        let code = unsafe {
            (functions.clEnqueueNDRangeKernel)(
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
        Event::made(event, code, functions)
    }
}

impl Queue {
    /// Starts to copy bytes from `offset` of `source` to `target`. The event completes with the copy.
    ///
    /// # Safety
    /// The range is in bounds, and `target` is neither touched nor freed before the event completes.
    pub unsafe fn read<T: Copy>(
        &self,
        source: &Mem,
        offset: usize,
        target: &mut [T],
    ) -> Result<Event, Code> {
        let (functions, mut event) = (self.functions, null_mut());
        let (len, target) = (size_of_val(target), target.as_mut_ptr().cast());
        // SAFETY: `target` has `len` bytes; the rest is the caller's promise.
        let code = unsafe {
            let (raw, none, event) = (source.raw, null(), &raw mut event);
            (functions.clEnqueueReadBuffer)(self.raw, raw, 0, offset, len, target, 0, none, event)
        };
        Event::made(event, code, functions)
    }

    /// Copies `source` to `offset` of `target`; with `wait`, returns after the copy.
    ///
    /// # Safety
    /// The range is in bounds; without `wait`, `source` is neither changed nor freed before the copy ends.
    pub unsafe fn write<T: Copy>(
        &self,
        target: &Mem,
        offset: usize,
        source: &[T],
        wait: bool,
    ) -> Result<(), Code> {
        let (len, source) = (size_of_val(source), source.as_ptr().cast());
        // SAFETY: `source` has `len` bytes; the rest is the caller's promise.
        Code::check(unsafe {
            (self.functions.clEnqueueWriteBuffer)(
                self.raw,
                target.raw,
                wait.into(),
                offset,
                len,
                source,
                0,
                null(),
                null_mut(),
            )
        })
    }

    /// Starts to copy `source` to `offset` of `target`. The event completes with the copy.
    ///
    /// # Safety
    /// The range is in bounds, and `source` is neither changed nor freed before the event completes.
    pub unsafe fn copy(&self, target: &Mem, offset: usize, source: &[u8]) -> Result<Event, Code> {
        let (functions, mut event) = (self.functions, null_mut());
        let (len, source) = (source.len(), source.as_ptr().cast());
        // SAFETY: no wait list; the rest is the caller's promise.
        let code = unsafe {
            (functions.clEnqueueWriteBuffer)(
                self.raw,
                target.raw,
                0,
                offset,
                len,
                source,
                0,
                null(),
                &raw mut event,
            )
        };
        Event::made(event, code, functions)
    }

    /// Maps the first `len` bytes of a buffer into the host's memory, until [`Queue::unmap`].
    pub fn map(&self, mem: &Mem, len: usize) -> Result<*mut u8, Code> {
        let (mut code, flags) = (0, CL_MAP_READ | CL_MAP_WRITE);
        // SAFETY: a blocking call without a wait list.
        let start = unsafe {
            (self.functions.clEnqueueMapBuffer)(
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
        Code::check(code).map(|()| start.cast())
    }

    /// Ends the mapping at `start`.
    pub fn unmap(&self, mem: &Mem, start: *mut u8) -> Result<(), Code> {
        let (functions, start) = (self.functions, start.cast());
        // SAFETY: the address of a mapping; drivers refuse others.
        Code::check(unsafe {
            (functions.clEnqueueUnmapMemObject)(self.raw, mem.raw, start, 0, null(), null_mut())
        })
    }

    /// Makes later commands wait for an event, also one of another queue.
    pub fn wait_for(&self, event: &Event) -> Result<(), Code> {
        // SAFETY: one event of this handle.
        Code::check(unsafe {
            (self.functions.clEnqueueBarrierWithWaitList)(self.raw, 1, &event.raw, null_mut())
        })
    }

    /// Submits all commands to the device.
    pub fn flush(&self) -> Result<(), Code> {
        // SAFETY: a queue of this handle.
        Code::check(unsafe { (self.functions.clFlush)(self.raw) })
    }

    /// Waits for all commands.
    pub fn finish(&self) -> Result<(), Code> {
        // SAFETY: a queue of this handle.
        Code::check(unsafe { (self.functions.clFinish)(self.raw) })
    }
}

impl Event {
    /// Waits for the command.
    pub fn wait(&self) -> Result<(), Code> {
        // SAFETY: one event of this handle.
        Code::check(unsafe { (self.functions.clWaitForEvents)(1, &self.raw) })
    }

    /// Whether the command has ended, with success or an error; does not block.
    pub fn is_over(&self) -> Result<bool, Code> {
        let (name, mut status) = (CL_EVENT_COMMAND_EXECUTION_STATUS, 0 as cl_int);
        let (len, target) = (size_of::<cl_int>(), (&raw mut status).cast());
        // SAFETY: an event of this handle; the status is an int.
        Code::check(unsafe {
            (self.functions.clGetEventInfo)(self.raw, name, len, target, null_mut())
        })?;
        Ok(status <= CL_COMPLETE)
    }

    /// Time at which the command was enqueued, by the device's clock.
    pub fn queued(&self) -> Result<u64, Code> {
        self.time(CL_PROFILING_COMMAND_QUEUED)
    }

    /// Time at which the command ended, by the device's clock.
    pub fn ended(&self) -> Result<u64, Code> {
        self.time(CL_PROFILING_COMMAND_END)
    }

    fn time(&self, name: cl_uint) -> Result<u64, Code> {
        let mut time: cl_ulong = 0;
        let (len, target) = (size_of::<cl_ulong>(), (&raw mut time).cast());
        // SAFETY: an event of this handle; times have 8 bytes.
        Code::check(unsafe {
            (self.functions.clGetEventProfilingInfo)(self.raw, name, len, target, null_mut())
        })?;
        Ok(time)
    }
}
