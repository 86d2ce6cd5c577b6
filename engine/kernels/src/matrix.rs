//! A checked view of the rows of a weight matrix.

use crate::{bounds::end_of_rows, dtype::DType, row::Row};

/// Rows of one format and length, at any addresses.
pub(crate) trait Rows: Copy {
    /// Number of rows.
    fn count(&self) -> usize;

    /// Row `r`, which is below `count()`.
    fn at(&self, r: usize) -> Row<'_>;
}

impl Rows for Matrix<'_> {
    #[inline(always)]
    fn count(&self) -> usize {
        self.rows
    }

    #[inline(always)]
    fn at(&self, r: usize) -> Row<'_> {
        self.row(r)
    }
}

impl Rows for &[Row<'_>] {
    #[inline(always)]
    fn count(&self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn at(&self, r: usize) -> Row<'_> {
        self[r]
    }
}

/// Rows of equal length, `stride` bytes apart, scales inline. All of them are in bounds.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    dtype: DType,
    bytes: &'a [u8],
    stride: usize,
    n: usize,
    rows: usize,
}

impl<'a> Matrix<'a> {
    /// # Panics
    /// If the stride is shorter than a row or the last row ends beyond `bytes`.
    pub(crate) fn new(
        dtype: DType,
        bytes: &'a [u8],
        stride: usize,
        n: usize,
        rows: usize,
    ) -> Matrix<'a> {
        let row = dtype.row_bytes(n);
        assert!(
            stride >= row,
            "stride {stride} is shorter than a {dtype} row of {row} bytes"
        );
        let end = end_of_rows(rows, stride, row);
        assert!(
            end.is_some_and(|end| end <= bytes.len()),
            "{rows} rows with stride {stride} do not fit in {} bytes",
            bytes.len()
        );
        Matrix {
            dtype,
            bytes,
            stride,
            n,
            rows,
        }
    }

    /// The format of the rows.
    #[inline(always)]
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements per row.
    #[inline]
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Number of rows.
    #[inline]
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Row `r`.
    #[inline(always)]
    pub(crate) fn row(&self, r: usize) -> Row<'a> {
        let start = r * self.stride;
        Row::inline(
            self.dtype,
            self.n,
            &self.bytes[start..start + self.dtype.row_bytes(self.n)],
        )
    }
}
