//! The container: round trips, lies, damage, interrupted packs.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a failure is a failed test"
)]

mod support;

mod round_trip;
