//! The threads of `emberflow-storage` under a model checker.
//!
//! The modules below are that crate's sources, compiled with another `sync`: mutexes, conditions,
//! atomics and threads of `loom`, which runs a test repeatedly, in every distinct order of steps
//! (with a bounded number of preemptions) and with every value that the memory model allows for a
//! relaxed load. The tests of this crate are the models; each is small, as the number of orders
//! grows fast.
//!
//! Not modelled: the internals of crossbeam's channel (see `channel`) and parker, of io_uring and of the
//! kernel. The device is either the real `pread` pool or a scripted one.
#![allow(clippy::duplicate_mod)] // one file of the storage crate is a test module there

#[path = "../../src/arena.rs"]
pub mod arena;
#[path = "../../src/cache/mod.rs"]
pub mod cache;
#[path = "../../src/io/mod.rs"]
pub mod io;
#[path = "../../src/limits.rs"]
pub mod limits;
#[path = "../../src/pages.rs"]
pub mod pages;
#[path = "../../src/random.rs"]
mod random;
#[path = "../../src/io/scripted.rs"]
mod scripted;
#[path = "../../src/trace.rs"]
pub mod trace;

mod channel;
pub mod fault;
mod sync;

use std::fs::File;

use io::{FileSource, IoEngine, IoError, IoOptions, IoThread};
use limits::Limits;

pub use scripted::{Log, Script, Seen};

/// The real I/O thread on a device that plays `script`.
///
/// # Errors
/// As [`IoThread::spawn`], or if the file cannot be opened a second time.
pub fn scripted(
    file: &File,
    limits: Limits,
    script: Script,
    log: &Log,
) -> Result<IoThread, IoError> {
    let source = source(file)?;
    let log = Log::clone(log);
    let options = IoOptions {
        limits,
        ..IoOptions::default()
    };
    IoThread::start("model".into(), None, options, move || {
        let device = scripted::Scripted::new(script, log);
        Ok(IoEngine::new(source, Box::new(device), limits))
    })
}

/// A file as a source for the engines.
///
/// # Errors
/// [`IoError::Open`] when it cannot be opened a second time.
pub fn source(file: &File) -> Result<FileSource, IoError> {
    let file = file.try_clone().map_err(|e| IoError::Open {
        file: "model".into(),
        reason: e.to_string(),
    })?;
    Ok(FileSource::buffered_only(file, "model", 0))
}
