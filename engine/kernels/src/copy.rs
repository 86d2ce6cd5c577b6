//! Copies of bytes that are not read again soon.
#![allow(unsafe_code)]

/// Copies past the caches, where source and target lie right for it: a copy through them first reads
/// the lines that it overwrites, and evicts what is in use.
#[derive(Debug)]
pub struct PastCaches(());

impl PastCaches {
    /// Calls `copies`. Other threads may be told of what it copied once this returns.
    pub fn run(copies: impl FnOnce(&Self)) {
        // Ordered when it is dropped, after a panic too.
        let past = Self(());
        copies(&past);
    }

    /// Copies `from` to `to`, which are as long.
    ///
    /// # Panics
    /// If the lengths differ.
    #[cfg(target_arch = "x86_64")]
    pub fn copy(&self, to: &mut [u8], from: &[u8]) {
        use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
        assert_eq!(to.len(), from.len(), "a copy of another length");
        // SAFETY: any 16 bytes are a valid `__m128i`, and it has no other invariant.
        let (head, middle, tail) = unsafe { to.align_to_mut() };
        let (first, rest) = from.split_at(head.len());
        let (blocks, last) = rest.split_at(rest.len() - tail.len());
        head.copy_from_slice(first);
        for (to, from) in middle.iter_mut().zip(blocks.chunks_exact(16)) {
            // SAFETY: `to` is aligned and exclusive, `from` has 16 bytes; SSE2 is part of x86-64.
            // `drop` orders the stores before whatever tells other threads of them.
            unsafe { _mm_stream_si128(to, _mm_loadu_si128(from.as_ptr().cast())) };
        }
        tail.copy_from_slice(last);
    }

    /// Copies `from` to `to`, which are as long.
    ///
    /// # Panics
    /// If the lengths differ.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn copy(&self, to: &mut [u8], from: &[u8]) {
        to.copy_from_slice(from);
    }
}

impl Drop for PastCaches {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of x86-64.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_copies_at_any_alignment(
            from in prop::collection::vec(any::<u8>(), 0..300), at in 0usize..40, skip in 0usize..20,
        ) {
            let from = &from[skip.min(from.len())..];
            let mut to = vec![7; at + from.len() + 9];
            super::PastCaches::run(|past| past.copy(&mut to[at..at + from.len()], from));
            prop_assert_eq!(&to[at..at + from.len()], from);
            prop_assert!(to[..at].iter().chain(&to[at + from.len()..]).all(|&b| b == 7));
        }
    }
}
