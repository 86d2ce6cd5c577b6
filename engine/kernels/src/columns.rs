//! A block of columns of a row-major matrix, writable while other threads write the rest.

#![allow(unsafe_code)]

use std::{marker::PhantomData, ops::Range};

use crate::bounds::end_of_rows;

/// A `rows × width` block of a row-major matrix in f32 or any other type. Row `r` of the
/// block is contiguous; rows lie `stride` elements apart.
pub struct Columns<'a, T> {
    // Row `r` is `base + r * stride .. + width`: in bounds, and accessed by no one else for `'a`.
    base: *mut T,
    rows: usize,
    stride: usize,
    width: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the block is exclusive, like a `&mut [T]`.
unsafe impl<T: Send> Send for Columns<'_, T> {}
// SAFETY: shared access reaches no element; see `row_mut` and the contract of `block`,
// whose blocks move elements between threads as `T: Send` permits.
unsafe impl<T: Send> Sync for Columns<'_, T> {}

impl<'a, T> Columns<'a, T> {
    /// The `rows × width` matrix whose rows start every `stride` elements of `data`. The last row
    /// need not be padded to the stride.
    ///
    /// # Panics
    /// If `width > stride` with more than one row, or if `data` is too short.
    pub fn new(data: &'a mut [T], rows: usize, stride: usize, width: usize) -> Columns<'a, T> {
        assert!(
            rows < 2 || width <= stride,
            "rows of {width} overlap at stride {stride}"
        );
        let end = end_of_rows(rows, stride, width);
        assert!(
            end.is_some_and(|end| end <= data.len()),
            "{rows} rows of {width} at stride {stride} do not fit in {} elements",
            data.len()
        );
        Columns {
            base: data.as_mut_ptr(),
            rows,
            stride,
            width,
            borrow: PhantomData,
        }
    }

    /// Number of rows.
    #[inline]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[inline]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The elements of one row.
    ///
    /// # Panics
    /// If `row >= self.rows()`.
    #[inline]
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row is in bounds, and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.stride), self.width) }
    }

    /// The block of `width` columns from `first` on.
    ///
    /// # Safety
    /// While the block lives, no other block may contain any of its columns, and `self` must not be
    /// used to access elements.
    pub(crate) unsafe fn block(&self, first: usize, width: usize) -> Columns<'_, T> {
        // SAFETY: passed on from the caller.
        unsafe { self.tile(0..self.rows, first, width) }
    }

    /// The part of [`block`](Columns::block) in `rows`.
    ///
    /// # Safety
    /// While the tile lives, no other tile may contain any of its elements, and `self` must not be
    /// used to access elements.
    pub(crate) unsafe fn tile(
        &self,
        rows: Range<usize>,
        first: usize,
        width: usize,
    ) -> Columns<'_, T> {
        assert!(
            first <= self.width
                && width <= self.width - first
                && rows.start <= rows.end
                && rows.end <= self.rows,
            "block beyond the matrix"
        );
        // Without rows there may be no memory to point into.
        let offset = if rows.is_empty() {
            0
        } else {
            rows.start * self.stride + first
        };
        // SAFETY: zero, or at most one past the end of the first row.
        let base = unsafe { self.base.add(offset) };
        Columns {
            base,
            rows: rows.len(),
            stride: self.stride,
            width,
            borrow: PhantomData,
        }
    }
}
