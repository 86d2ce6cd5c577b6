//! The interface for tensors that lie in files of another format.

use std::io;

/// Reads tensors that lie in other files.
pub trait OutsideTensors: std::fmt::Debug + Send + Sync {
    /// Fills `dst` with tensor number `tensor` of the specification.
    ///
    /// # Errors
    /// If the files cannot be read, or have changed.
    fn read(&self, tensor: usize, dst: &mut [u8]) -> io::Result<()>;
}
