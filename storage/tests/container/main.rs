//! The container: round trips, lies, damage, interrupted packs.
#![expect(clippy::unwrap_used, reason = "a failure is a failed test")]

mod damage;
mod forger;
mod lies;
mod resume;
mod round_trip;
mod support;
