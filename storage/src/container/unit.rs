//! The pieces in which a container is written.

/// A piece of the file that is written, checksummed and journalled as a whole. The order of
/// variants is the order in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// The predictor section.
    Predictor,
    /// Dense tensor by index in [`Spec::tensors`](super::Spec::tensors).
    Tensor(usize),
    /// Bank by index in [`Spec::banks`](super::Spec::banks).
    Bank(usize),
}

impl std::fmt::Display for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Predictor => f.write_str("the predictor"),
            Self::Tensor(i) => write!(f, "tensor {i}"),
            Self::Bank(i) => write!(f, "bank {i}"),
        }
    }
}
