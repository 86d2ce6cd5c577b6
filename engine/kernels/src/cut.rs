//! Slices and pointers that several threads use at once, each a different part.

#![allow(unsafe_code)]

use std::{marker::PhantomData, ops::Range};

/// A pointer shared by several threads; each use justifies its exclusivity.
pub(crate) struct Shareable<T>(pub *mut T);

impl<T> Shareable<T> {
    // A method, so that closures capture the wrapper and not the bare pointer.
    pub fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: one thread at a time uses each element, and elements may move between threads.
unsafe impl<T: Send> Sync for Shareable<T> {}

/// A borrowed slice whose parts are used by different threads.
pub(crate) struct Cut<'a, T> {
    base: Shareable<T>,
    len: usize,
    slice: PhantomData<&'a ()>,
}

impl<'a, T> Cut<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            base: Shareable(slice.as_mut_ptr()),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// Clamps a range to the slice.
    fn within(&self, range: Range<usize>) -> Range<usize> {
        range.start.min(self.len)..range.end.min(self.len)
    }

    /// # Safety
    /// No one may write to this range while the result lives.
    pub unsafe fn get(&self, range: Range<usize>) -> &[T]
    where
        T: Sync,
    {
        let range = self.within(range);
        // SAFETY: the range is in the slice, which is borrowed, and no one writes to it.
        unsafe { std::slice::from_raw_parts(self.base.get().add(range.start), range.len()) }
    }

    /// # Safety
    /// No one else may use this range while the result lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_mut(&self, range: Range<usize>) -> &mut [T] {
        let range = self.within(range);
        // SAFETY: the range is in the slice, which is borrowed, and no one else uses it.
        unsafe { std::slice::from_raw_parts_mut(self.base.get().add(range.start), range.len()) }
    }
}
