//! Errors of reads and of engine setup. Cloneable, because the first one is latched and reported
//! again.

use std::sync::Arc;

/// Why a read failed, or an engine could not start.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// The operating system or the device reported an error.
    #[error(
        "reading {len} bytes at offset {offset} of {file} failed: {}",
        std::io::Error::from_raw_os_error(*errno)
    )]
    Os {
        /// Label of the file.
        file: Arc<str>,
        /// Absolute offset in the file, in bytes.
        offset: u64,
        /// Bytes requested.
        len: u64,
        /// `errno`.
        errno: i32,
    },
    /// The file ends before the read does.
    #[error(
        "{file} ends at offset {end}, but {len} bytes were expected from offset {offset}; the \
         file is truncated"
    )]
    Eof {
        /// Label of the file.
        file: Arc<str>,
        /// Absolute offset in the file, in bytes.
        offset: u64,
        /// Bytes requested.
        len: u64,
        /// Offset of the end of the file.
        end: u64,
    },
    /// The request is invalid: it exceeds its slot, or offsets overflow.
    #[error(
        "read of {len} bytes at offset {offset} of {file} into slot bytes {slot_offset}.. of \
         {slot_len} is out of range"
    )]
    BadRequest {
        /// Label of the file.
        file: Arc<str>,
        /// Offset relative to the source's base, in bytes.
        offset: u64,
        /// Bytes requested.
        len: u64,
        /// Start inside the slot, in bytes.
        slot_offset: u32,
        /// Size of the slot in bytes.
        slot_len: usize,
    },
    /// Not read, because an earlier read failed.
    #[error("not read, because an earlier read failed: {first}")]
    Stopped {
        /// The failure that stopped the thread.
        first: Arc<IoError>,
    },
    /// Cancelled by the caller.
    #[error("read was cancelled before it started")]
    Cancelled,
    /// The file could not be opened or queried.
    #[error("cannot open {file} for reading: {reason}")]
    Open {
        /// Label of the file.
        file: Arc<str>,
        /// Message of the operating system.
        reason: String,
    },
    /// An engine or its thread could not start, or died.
    #[error("i/o engine {engine}: {reason}")]
    Engine {
        /// Name of the engine.
        engine: &'static str,
        /// What happened.
        reason: String,
    },
}

impl IoError {
    /// Whether this error stops the thread. `Cancelled` and `Stopped` are consequences of other
    /// events.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::Cancelled | Self::Stopped { .. })
    }
}
