//! Names of parts of a device's memory.

/// A part of a device's memory, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part(pub(crate) usize);
