//! The context of all computation: instruction set and threads.

use crate::cpu::Cpu;
use crate::workers::Workers;

/// Instruction set and threads.
pub struct Compute {
    /// Selects the kernels.
    pub cpu: Cpu,
    /// Divide the work.
    pub workers: Workers,
}

impl Compute {
    /// Detects this processor's features, and starts a pool of `threads` threads, including the
    /// caller's, pinned to `cores` if given.
    pub fn new(threads: usize, cores: Option<&[usize]>) -> Self {
        Self {
            cpu: Cpu::detect(),
            workers: Workers::new(threads, cores),
        }
    }

    /// Number of threads, including the caller's.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }
}
