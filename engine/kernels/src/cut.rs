//! Slices and pointers that several threads use at once, each another part.

#![allow(unsafe_code)]

use std::{marker::PhantomData, ops::Range};

/// A pointer that several threads may hold; each use says why it is exclusive.
pub(crate) struct Shareable<T>(pub *mut T);

impl<T> Shareable<T> {
    // A method, so that closures capture the wrapper and not the bare pointer.
    pub fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: the elements it leads to are used by one thread at a time and may move there.
unsafe impl<T: Send> Sync for Shareable<T> {}

/// A borrowed slice that several threads use different parts of.
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

    /// The part of a range that the slice has.
    fn within(&self, range: Range<usize>) -> Range<usize> {
        range.start.min(self.len)..range.end.min(self.len)
    }

    /// # Safety
    /// Nobody writes to this range as long as the result lives.
    pub unsafe fn get(&self, range: Range<usize>) -> &[T]
    where
        T: Sync,
    {
        let range = self.within(range);
        // SAFETY: the range lies in the slice, which is borrowed, and nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.base.get().add(range.start), range.len()) }
    }

    /// # Safety
    /// Nobody else uses this range as long as the result lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_mut(&self, range: Range<usize>) -> &mut [T] {
        let range = self.within(range);
        // SAFETY: the range lies in the slice, which is borrowed, and nobody else uses it.
        unsafe { std::slice::from_raw_parts_mut(self.base.get().add(range.start), range.len()) }
    }
}
