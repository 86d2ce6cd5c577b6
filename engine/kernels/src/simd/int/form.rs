//! The formats of weights that meet quantised activations, as types.

use crate::dtype::DType;

/// A grouped format.
pub(super) trait Form {
    /// Its name among the formats.
    const DTYPE: DType;
    /// Whether a weight is a nibble, and no byte.
    const NIBBLES: bool;
    /// Whether a nibble stands for a number that is 8 less.
    const CENTRED: bool;
    /// Whether a minimum is taken from all weights of a group, by the chain rule's second step.
    const MINS: bool;
}

/// Bytes times a scale.
pub(super) struct Q8;
/// Nibbles less 8, times a scale.
pub(super) struct Q4;
/// Nibbles times a scale, less a minimum.
pub(super) struct Q4k;

impl Form for Q8 {
    const DTYPE: DType = DType::Q8;
    const NIBBLES: bool = false;
    const CENTRED: bool = false;
    const MINS: bool = false;
}

impl Form for Q4 {
    const DTYPE: DType = DType::Q4;
    const NIBBLES: bool = true;
    const CENTRED: bool = true;
    const MINS: bool = false;
}

impl Form for Q4k {
    const DTYPE: DType = DType::Q4k;
    const NIBBLES: bool = true;
    const CENTRED: bool = false;
    const MINS: bool = true;
}

/// Evaluates the call with `$form` standing for the type of a grouped format.
macro_rules! with_form {
    ($dtype:expr, $form:ident => $call:expr) => {
        match $dtype {
            $crate::DType::Q4 => {
                type $form = $crate::simd::int::form::Q4;
                $call
            }
            $crate::DType::Q4k => {
                type $form = $crate::simd::int::form::Q4k;
                $call
            }
            _ => {
                type $form = $crate::simd::int::form::Q8;
                $call
            }
        }
    };
}
pub(super) use with_form;
