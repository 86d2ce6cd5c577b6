//! Errors.

use crate::dtype::{DType, LONGEST};

/// Why a row cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QuantizeError {
    /// An element is NaN or infinite.
    NotFinite {
        /// Index in the row.
        index: usize,
        /// The element.
        value: f32,
    },
    /// An element is finite but its f16 form, or the f16 scale it needs, is infinite.
    OutOfRange {
        /// Index in the row.
        index: usize,
        /// The element.
        value: f32,
        /// The format that cannot hold it.
        dtype: DType,
    },
    /// A group has no form in a format that is never rounded to.
    NotExact {
        /// Index of the group's first element in the row.
        index: usize,
        /// The format.
        dtype: DType,
    },
    /// A row has more elements than a format can sum up.
    TooLong {
        /// Its elements.
        len: usize,
        /// The format.
        dtype: DType,
    },
}

impl std::fmt::Display for QuantizeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            QuantizeError::NotFinite { index, value } => {
                write!(f, "element {index} is {value}, expected a finite number")
            }
            QuantizeError::OutOfRange {
                index,
                value,
                dtype,
            } => {
                write!(f, "element {index} is {value}, beyond the range of {dtype}")
            }
            QuantizeError::TooLong { len, dtype } => {
                let most = LONGEST;
                write!(
                    f,
                    "rows of {len} elements are too long for {dtype}, which takes {most}; use q8 or q4"
                )
            }
            QuantizeError::NotExact { index, dtype } => {
                write!(f, "elements from {index} on have no exact form in {dtype}")
            }
        }
    }
}

impl std::error::Error for QuantizeError {}
