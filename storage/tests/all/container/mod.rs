//! The container: round trips, invalid fields, damage, interrupted packs.

mod damage;
mod forger;
mod lies;
mod resume;
mod round_trip;
mod support;
