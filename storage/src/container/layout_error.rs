//! Why sizes or counts cannot make a container.

/// Why sizes or counts cannot make a container.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A sum or product does not fit its type.
    #[error("the size of {what} overflows")]
    Overflow {
        /// Name of the computed value.
        what: &'static str,
    },
    /// A count or size exceeds the format's bounds.
    #[error("{what} is {found}, more than the format's limit of {limit}")]
    Limit {
        /// Name of the count or size.
        what: &'static str,
        /// The count or size found.
        found: u64,
        /// The largest one accepted.
        limit: u64,
    },
    /// The bundle geometry contradicts itself.
    #[error("bundle geometry: {field} is {found}, expected {expected}")]
    Geometry {
        /// Field of [`BundleGeometry`](super::BundleGeometry).
        field: &'static str,
        /// Value found.
        found: u64,
        /// Values that would do.
        expected: String,
    },
    /// A tensor has no usable name.
    #[error("tensor {index} has the name {name:?}, expected 1 to 64 visible ascii characters")]
    TensorName {
        /// Index in the directory.
        index: usize,
        /// The name found.
        name: String,
    },
    /// Two tensors share a name.
    #[error("tensors {first} and {second} are both named {name:?}")]
    DuplicateTensor {
        /// Index of the earlier one.
        first: usize,
        /// Index of the later one.
        second: usize,
        /// Their name.
        name: String,
    },
    /// A shape is empty, has a zero, too many dimensions or too many elements.
    #[error("tensor {name:?} has the shape {dims:?}, expected 1 to 4 dimensions without zeros")]
    TensorShape {
        /// Name of the tensor.
        name: String,
        /// The shape found.
        dims: Vec<u64>,
    },
    /// A tensor without bytes.
    #[error("tensor {name:?} has no bytes")]
    TensorEmpty {
        /// Name of the tensor.
        name: String,
    },
    /// Banks are not strictly ascending by (layer, expert).
    #[error(
        "bank {index} is layer {layer} expert {expert}, which does not come after the bank \
         before it; banks are sorted by layer and expert, each once"
    )]
    BankOrder {
        /// Index in the directory.
        index: usize,
        /// Its layer.
        layer: u32,
        /// Its expert.
        expert: u32,
    },
    /// A bank without neurons.
    #[error("bank {index} (layer {layer} expert {expert}) has no neurons")]
    BankEmpty {
        /// Index in the directory.
        index: usize,
        /// Its layer.
        layer: u32,
        /// Its expert.
        expert: u32,
    },
}
