//! The context of all computation: instruction set and threads.

use std::sync::Arc;

use crate::cpu::Cpu;
use crate::workers::Workers;

/// Instruction set and threads.
pub struct Compute {
    /// Selects the kernels.
    pub cpu: Cpu,
    /// Divide the work.
    pub workers: Arc<Workers>,
}

impl Compute {
    /// Detects this processor's features, and starts a pool of `threads` threads, including the
    /// caller's, pinned to `cores` if given.
    pub fn new(threads: usize, cores: Option<&[usize]>) -> Self {
        Self {
            cpu: Cpu::detect(),
            workers: Arc::new(Workers::new(threads, cores)),
        }
    }

    /// The same threads, with kernels that prune outliers of activations or not ([`Cpu::pruning`]).
    #[must_use]
    pub fn pruning(&self, pruned: bool) -> Self {
        Self {
            cpu: self.cpu.pruning(pruned),
            workers: Arc::clone(&self.workers),
        }
    }

    /// Number of threads, including the caller's.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }
}
