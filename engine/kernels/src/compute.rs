//! What computes: the processor's features and the threads.

use crate::cpu::Cpu;
use crate::workers::Workers;

/// The context of everything that is computed.
pub struct Compute {
    /// Chooses the kernels.
    pub cpu: Cpu,
    /// Share the work.
    pub workers: Workers,
}

impl Compute {
    /// The features of this processor, and `threads` threads, the caller's included, on `cores`, if
    /// they are given.
    pub fn new(threads: usize, cores: Option<&[usize]>) -> Self {
        Self {
            cpu: Cpu::detect(),
            workers: Workers::new(threads, cores),
        }
    }

    /// Threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }
}
