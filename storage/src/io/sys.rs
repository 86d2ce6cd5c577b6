//! System calls that the standard library does not offer, each behind a function that states its
//! requirements.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A piece of memory that a command reads into. Same layout as the kernel's `iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Piece(libc::iovec);

// SAFETY: a piece is an address and a length. A reader into it must own that memory, by the
// contract of `Device::start`, on whatever thread it runs.
unsafe impl Send for Piece {}

impl Piece {
    pub(crate) const EMPTY: Self = Self::new(std::ptr::null_mut(), 0);

    pub(crate) const fn new(at: *mut u8, len: usize) -> Self {
        Self(libc::iovec {
            iov_base: at.cast(),
            iov_len: len,
        })
    }

    pub(crate) fn addr(&self) -> usize {
        self.0.iov_base as usize
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Removes `n` filled bytes from the front.
    pub(crate) fn advance(&mut self, n: usize) {
        let n = n.min(self.0.iov_len);
        self.0.iov_base = self.ptr().wrapping_add(n).cast();
        self.0.iov_len -= n;
    }
}

/// A device command: one file range into a list of pieces.
#[derive(Clone, Copy)]
pub(crate) struct Command {
    /// Returned with the result.
    pub(crate) id: u32,
    pub(crate) fd: RawFd,
    /// Number of `fd` among the source's descriptors, as which ring devices register it.
    pub(crate) file: u32,
    pub(crate) offset: u64,
    pub(crate) pieces: *const Piece,
    pub(crate) count: u32,
}

// SAFETY: by the contract of `Device::start` the pieces stay in place and unused until the command
// is reported done, so it may run on another thread.
unsafe impl Send for Command {}

impl Command {
    /// The pieces to read into.
    ///
    /// # Safety
    /// Only between `Device::start` and the report of the outcome, while the pieces are valid.
    pub(crate) unsafe fn pieces<'a>(&self) -> &'a [Piece] {
        // SAFETY: valid for `count` pieces by the caller's contract, and no one writes to them.
        unsafe { std::slice::from_raw_parts(self.pieces, self.count as usize) }
    }

    /// Reads once and returns the byte count or a negative error number, like a kernel completion.
    ///
    /// # Safety
    /// The pieces and their memory must be valid, and the memory exclusive.
    pub(crate) unsafe fn run(&self) -> i32 {
        let Ok(offset) = libc::off64_t::try_from(self.offset) else {
            return -libc::EINVAL;
        };
        // SAFETY: passed on from the caller; `Piece` is layout-compatible with `iovec`.
        let n = unsafe {
            libc::preadv64(
                self.fd,
                self.pieces.cast(),
                self.count as libc::c_int,
                offset,
            )
        };
        if n < 0 {
            return -io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO);
        }
        i32::try_from(n).unwrap_or(i32::MAX)
    }
}

/// Alignments that direct I/O needs on a file, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DioAlign {
    /// Alignment of memory addresses.
    pub mem: u32,
    /// Alignment of file offsets and lengths.
    pub offset: u32,
}

/// What the file system reports about direct I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DioAnswer {
    /// Supported with these alignments.
    Yes(DioAlign),
    /// Not supported.
    No,
    /// This kernel or file system does not report it.
    Unknown,
}

/// Queries `statx(STATX_DIOALIGN)`.
pub(crate) fn dio_align(file: &File) -> DioAnswer {
    // The kernel fixes the structure at 256 bytes. The C library's version may lack the two fields,
    // so take them by position.
    const STATX_DIOALIGN: u32 = 0x2000;
    const MEM_ALIGN: usize = 0x98 / 4;
    const OFFSET_ALIGN: usize = 0x9c / 4;
    let mut out = [0u32; 64];
    // SAFETY: `out` has the size the kernel writes; an empty path with AT_EMPTY_PATH names the fd.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_statx,
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            STATX_DIOALIGN,
            out.as_mut_ptr(),
        )
    };
    if rc != 0 || out[0] & STATX_DIOALIGN == 0 {
        return DioAnswer::Unknown;
    }
    let (mem, offset) = (out[MEM_ALIGN], out[OFFSET_ALIGN]);
    if mem.is_power_of_two() && offset.is_power_of_two() {
        DioAnswer::Yes(DioAlign { mem, offset })
    } else {
        DioAnswer::No
    }
}

/// Tells the kernel that page-cache reads are random, so it does not read ahead megabytes around
/// each neuron.
pub(crate) fn advise_random(file: &File) {
    // SAFETY: advice on a file descriptor we own; failure is harmless.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
}

/// Reads the first `len` bytes of a command, piece by piece. Returns as [`Command::run`].
///
/// # Safety
/// The memory of the pieces must be valid and exclusive.
pub(crate) unsafe fn read_front(fd: RawFd, offset: u64, pieces: &[Piece], len: usize) -> i32 {
    let mut got = 0;
    for piece in pieces {
        let want = piece.len().min(len - got);
        if want == 0 {
            break;
        }
        let part = Piece::new(piece.ptr(), want);
        let command = Command {
            id: 0,
            fd,
            file: 0,
            offset: offset + got as u64,
            pieces: &part,
            count: 1,
        };
        // SAFETY: the front part of a piece, passed on from the caller.
        let n = unsafe { command.run() };
        if n < 0 && got == 0 {
            return n;
        }
        got += n.max(0) as usize;
        if (n.max(0) as usize) < want {
            break;
        }
    }
    got as i32
}

/// Inverts one bit of the pieces' memory, counted from the start.
///
/// # Safety
/// The memory of the pieces must be valid and exclusive.
pub(crate) unsafe fn flip_bit(pieces: &[Piece], bit: u64) {
    let mut byte = (bit / 8) as usize;
    for piece in pieces {
        if byte < piece.len() {
            // SAFETY: inside the piece, passed on from the caller.
            unsafe { *piece.ptr().add(byte) ^= 1 << (bit % 8) };
            return;
        }
        byte -= piece.len();
    }
}

/// Sets this thread's timer slack to the minimum, so timed waits end within a microsecond instead
/// of the usual 50.
pub(crate) fn precise_sleeps() {
    // SAFETY: sets a property of the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
}

/// Requests a scheduler time slice of `ns` for this thread (EEVDF with per-thread slices, Linux
/// 6.12). A slice shorter than that of the compute threads lets it preempt them as soon as it
/// wakes. Needs no privilege; no effect on older kernels.
pub(crate) fn request_time_slice(ns: u64) {
    /// The kernel's `sched_attr` in its first version.
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        size: u32,
        /// 0 is the default policy.
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    // SAFETY: the struct has the size it names; both calls affect only this thread.
    unsafe {
        let attributes = Attributes {
            size: size_of::<Attributes>() as u32,
            nice: libc::getpriority(libc::PRIO_PROCESS, 0),
            runtime: ns,
            ..Attributes::default()
        };
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
    }
}

/// CPU time of this thread so far, in nanoseconds.
pub(crate) fn thread_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// CPU time of all threads of this process so far, in nanoseconds.
#[must_use]
pub fn process_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `t` is a valid timespec to write to.
    unsafe { libc::clock_gettime(clock, &mut t) };
    (t.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(t.tv_nsec as u64)
}

/// A kernel counter that one thread sets and a ring can wait for.
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> io::Result<Self> {
        // Blocking on purpose: a ring read of a non-blocking one would end at once.
        // SAFETY: a plain system call; the descriptor it returns is ours alone.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just opened and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Ends the read that waits for this event, or the next one to start.
    pub(crate) fn signal(&self) {
        let one = 1u64;
        // SAFETY: writes 8 bytes from a local to a descriptor that is open while `self` lives.
        // It could only block after 2^64 - 2 signals without a read.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
