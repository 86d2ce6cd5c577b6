//! Reading from flash: a device trait, one engine over all devices, and the thread that runs it.
//!
//! ```text
//! caller            I/O thread                       kernel
//! Read{slot} -----> queue: priority, batch, offset
//!                   split at `block`, merge neighbours
//!                   command -----------------------> O_DIRECT into the slot
//!                   short? interrupted? resume       |
//! Completion{slot} <-------------------- outcome <---'
//! ```
//!
//! A [`Slot`] moves into a [`Read`] and comes back in its [`Completion`], so no one can look at
//! bytes the device is still writing. Reads complete in any order.

mod caller;
pub(crate) mod device;
#[cfg(test)]
mod drain_tests;
mod engine;
mod error;
mod filter;
mod mapped;
mod merge;
mod pread;
mod probe;
mod profile;
#[cfg(test)]
mod scripted;
mod sigbus;
mod sim;
mod slip;
mod source;
pub(crate) mod sys;
mod thread;
mod trial;
mod uring;

use crate::arena::Slot;
use crate::limits::Limits;
use device::Device;

pub use caller::CallerIo;
pub use engine::{IoEngine, IoEngineStats};
pub use error::IoError;
pub use mapped::Mapped;
pub use merge::Merge;
pub use probe::{UringFacts, probe_uring};
pub use profile::{Core, Profile};
pub use sim::{Faults, SimClock, SimOptions};
pub use source::{FileSource, aligned_cover};
pub use sys::{DioAlign, process_cpu_ns};
pub use thread::{IoOptions, IoStats, IoThread};

/// Urgency of a read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// A caller waits for it.
    #[default]
    Now,
    /// May be needed soon. Goes after all urgent reads, and can be cancelled.
    Prefetch,
}

/// A request: `len` bytes at `offset` of the source into the slot.
///
/// Uses direct I/O if offset, length and memory address meet [`FileSource::dio_align`], as slots
/// and container sections do. Any other alignment works through the page cache, more slowly.
#[derive(Debug)]
pub struct Read {
    /// Returned in the completion; free for the caller to use.
    pub tag: u64,
    /// Bytes from the base of the source.
    pub offset: u64,
    /// Bytes to read.
    pub len: u32,
    /// Destination.
    pub slot: Slot,
    /// First byte in the slot.
    pub slot_offset: u32,
    /// Urgency.
    pub priority: Priority,
}

impl Read {
    /// An urgent read to the start of `slot`.
    #[must_use]
    pub fn new(tag: u64, offset: u64, len: u32, slot: Slot) -> Self {
        Self {
            tag,
            offset,
            len,
            slot,
            slot_offset: 0,
            priority: Priority::Now,
        }
    }

    /// The same read, to `slot_offset` bytes into the slot.
    #[must_use]
    pub fn at(mut self, slot_offset: u32) -> Self {
        self.slot_offset = slot_offset;
        self
    }

    /// The same read as a prefetch.
    #[must_use]
    pub fn prefetch(mut self) -> Self {
        self.priority = Priority::Prefetch;
        self
    }
}

/// A finished read. Returns the slot, filled or not.
#[derive(Debug)]
pub struct Completion {
    /// Tag of the read.
    pub tag: u64,
    /// Slot of the read. Its bytes are undefined if the result is an error.
    pub slot: Slot,
    /// Whether all bytes arrived.
    pub result: Result<(), IoError>,
}

impl Completion {
    /// Gives a read's slot back.
    fn of(read: Read, result: Result<(), IoError>) -> Self {
        Self {
            tag: read.tag,
            slot: read.slot,
            result,
        }
    }
}

/// Which device carries reads out.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum IoChoice {
    /// The best that a probe finds working: `uring`, else `pread`.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// A pool of threads with blocking reads.
    Pread,
    /// A modelled device over the real file.
    Sim(SimOptions),
}

impl std::str::FromStr for IoChoice {
    type Err = String;

    /// `auto`, `uring`, `pread` or `sim:PROFILE`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "pread" => Ok(Self::Pread),
            _ => match text.strip_prefix("sim:") {
                Some(profile) => Ok(Self::Sim(SimOptions::new(profile.parse()?, 0))),
                None => Err(format!(
                    "unknown i/o engine \"{text}\", known are auto, uring, pread and sim:PROFILE"
                )),
            },
        }
    }
}

impl IoEngine {
    /// Opens an engine for `source`. [`IoChoice::Auto`] logs its choice and the reason.
    ///
    /// Call it on the thread that will use the engine: io_uring rings are bound to it.
    ///
    /// # Errors
    /// [`IoError::Engine`] if the requested device does not work here.
    pub fn open(source: FileSource, choice: IoChoice, limits: Limits) -> Result<Self, IoError> {
        Self::open_with(source, choice, limits, Ring::OfThread)
    }

    /// As [`IoEngine::open`], for an engine that any thread may use, one at a time.
    pub(crate) fn open_unbound(
        source: FileSource,
        choice: IoChoice,
        limits: Limits,
    ) -> Result<Self, IoError> {
        Self::open_with(source, choice, limits, Ring::Unbound)
    }

    fn open_with(
        source: FileSource,
        choice: IoChoice,
        limits: Limits,
        ring: Ring,
    ) -> Result<Self, IoError> {
        let uring = |source: &FileSource, limits: Limits| uring(source, limits, ring);
        let device = match choice {
            IoChoice::Auto => match uring(&source, limits) {
                Ok(ring) => ring,
                Err(reason) => {
                    tracing::info!(%reason, "i/o engine: pread, as io_uring does not work here");
                    pread(limits)?
                }
            },
            IoChoice::Uring => uring(&source, limits)?,
            IoChoice::Pread => pread(limits)?,
            IoChoice::Sim(options) => Box::new(sim::Sim::new(&source, options, limits.depth)),
        };
        tracing::debug!(engine = device.name(), file = %source.label(), "i/o engine ready");
        Ok(Self::new(source, device, limits))
    }
}

/// Which threads may use a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ring {
    /// The one that made it.
    OfThread,
    /// Any, one at a time.
    Unbound,
}

fn uring(source: &FileSource, limits: Limits, ring: Ring) -> Result<Box<dyn Device>, IoError> {
    let refused = |reason| IoError::Engine {
        engine: "uring",
        reason,
    };
    if let Some(reason) = filter::forbids_uring() {
        return Err(refused(reason));
    }
    match uring::Uring::new(source, limits.depth, ring) {
        Ok(ring) => Ok(Box::new(ring)),
        Err(e) => Err(refused(e.to_string())),
    }
}

fn pread(limits: Limits) -> Result<Box<dyn Device>, IoError> {
    if limits.lanes <= 1 {
        return Ok(Box::new(pread::Inline::new(1)));
    }
    let pool = pread::Pool::new(limits.lanes).map_err(|e| IoError::Engine {
        engine: "pread",
        reason: format!("starting {} threads: {e}", limits.lanes),
    })?;
    Ok(Box::new(pool))
}
