//! Vectors at equal distances in memory.

/// Where the first of some vectors lies, and how far the next ones are.
#[derive(Clone, Copy)]
pub(super) struct Strided<P> {
    /// A pointer.
    pub base: P,
    /// From vector to vector, in the unit of the pointer.
    pub stride: usize,
}
