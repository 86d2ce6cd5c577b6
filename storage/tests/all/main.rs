//! The container, the cache and I/O. One binary, because linking many takes longer than running them.

mod cache_arena;
mod cache_lrfu;
mod cache_model;
mod cache_threads;
mod container;
mod io_caller;
mod io_common;
mod io_faults;
mod io_suite;
mod io_thread;
mod mapped;
