//! Limits of a configuration's numbers, and errors that name an invalid one.

use std::fmt::Debug;

/// Maximum width of the residual stream, of an FFN or of a projection.
pub(crate) const MAX_WIDTH: u32 = 1 << 22;
/// Maximum layers, experts per layer, and heads.
pub(crate) const MAX_COUNT: u32 = 1 << 12;
/// Maximum taps of a convolution, far above any release's.
pub(crate) const MAX_TAPS: u32 = 64;
/// Maximum head dimension.
pub(crate) const MAX_HEAD_DIM: u32 = 1 << 12;

/// An invalid field, without the file that it came from.
pub(crate) struct BadField {
    pub(crate) key: &'static str,
    pub(crate) found: String,
    pub(crate) expected: String,
}

impl BadField {
    pub(crate) fn some(
        key: &'static str,
        found: &dyn Debug,
        expected: impl Into<String>,
    ) -> Option<Self> {
        Some(Self {
            key,
            found: format!("{found:?}"),
            expected: expected.into(),
        })
    }

    /// The first of these numbers that is below its minimum or above its maximum.
    pub(crate) fn outside(numbers: &[(&'static str, u32, u32, u32)]) -> Option<Self> {
        let outside =
            |&&(_, value, least, most): &&(_, u32, u32, u32)| !(least..=most).contains(&value);
        let &(key, value, least, most) = numbers.iter().find(outside)?;
        Self::some(key, &value, format!("{least} to {most}"))
    }

    /// A number that is too large.
    pub(crate) fn above(key: &'static str, value: usize, most: u32) -> Option<Self> {
        Self::unless(
            value <= most as usize,
            key,
            &value,
            format!("at most {most}"),
        )
    }

    /// A number that should be above 0 and below 1.
    pub(crate) fn unless_share(key: &'static str, value: f32) -> Option<Self> {
        let holds = value.is_finite() && value > 0.0 && value < 1.0;
        Self::unless(holds, key, &value, "above 0 and below 1")
    }

    pub(crate) fn unless(
        holds: bool,
        key: &'static str,
        found: &dyn Debug,
        expected: impl Into<String>,
    ) -> Option<Self> {
        let bad = Self::some(key, found, expected);
        bad.filter(|_| !holds)
    }
}
