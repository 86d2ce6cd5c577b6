//! Parts of a container: tensors and banks, and their locations.

/// One dense tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Unique name: 1 to 64 bytes of visible ASCII.
    pub name: String,
    /// Block format; a number that only the caller interprets.
    pub dtype: u32,
    /// Shape, 1 to 4 dimensions, none of them zero.
    pub dims: Vec<u64>,
    /// Bytes, at least 1.
    pub len: u64,
}

/// The neurons of one FFN or of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BankSpec {
    /// Layer.
    pub layer: u32,
    /// Expert inside the layer; 0 for a dense FFN.
    pub expert: u32,
    /// Neurons, at least 1.
    pub neurons: u32,
    /// For the caller; opaque here.
    pub flags: u32,
}

/// A range of the container in bytes, relative to its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Extent {
    /// First byte after the range. Extents of a [`Layout`](super::Layout) cannot overflow.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }
}

/// Location of one bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BankPlace {
    /// Its bundles.
    pub data: Extent,
    /// Its scales in the SCALES section; empty when scales are inline.
    pub scales: Extent,
    /// Index of its first neuron in the checksum table.
    pub first_checksum: u64,
}
