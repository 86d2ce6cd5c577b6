//! Weights in memory allocated by the caller.

use std::ops::Range;
use std::sync::Arc;

/// A range of a shared block of bytes.
#[derive(Clone)]
pub struct SharedBytes {
    block: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// `range` of `block`; `None` if out of bounds.
    pub fn new(block: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Option<Self> {
        (*block).as_ref().get(range.clone())?;
        Some(Self { block, range })
    }

    /// The bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        &(*self.block).as_ref()[self.range.clone()]
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self {
            block: Arc::new(bytes),
            range,
        }
    }
}
