//! What the threads of a pool meet by; see `gate.rs`.

pub(crate) use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread::{park, yield_now},
};
