//! Synchronisation primitives of the thread pool; see `gate.rs`.

pub(crate) use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread::{park, yield_now},
};
