//! A checked view of one stored row.

use crate::dtype::DType;

/// One stored row of `n` elements. Its lengths are checked at construction, so the SIMD kernels
/// read it without further checks.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    dtype: DType,
    n: usize,
    quants: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Row<'a> {
    /// A row followed directly by its scales: `bytes` is quants ‖ scales.
    ///
    /// # Panics
    /// If `bytes.len()` is not `dtype.row_bytes(n)`. Check sizes from files first.
    #[inline(always)]
    pub fn inline(dtype: DType, n: usize, bytes: &'a [u8]) -> Row<'a> {
        assert!(
            bytes.len() == dtype.row_bytes(n),
            "a {dtype} row of {n} elements takes {} bytes, got {}",
            dtype.row_bytes(n),
            bytes.len()
        );
        let (quants, scales) = bytes.split_at(dtype.quants_bytes(n));
        Row {
            dtype,
            n,
            quants,
            scales,
        }
    }

    /// A row with separate scales, for example in RAM while the elements are on flash. `scales` is
    /// empty for the float formats.
    ///
    /// # Panics
    /// If the lengths are not `dtype.quants_bytes(n)` and `dtype.scales_bytes(n)`. Check sizes from
    /// files first.
    #[inline(always)]
    pub fn split(dtype: DType, n: usize, quants: &'a [u8], scales: &'a [u8]) -> Row<'a> {
        dtype.assert_lens(n, quants.len(), scales.len());
        Row {
            dtype,
            n,
            quants,
            scales,
        }
    }

    /// An f32 slice as a row, without a copy.
    #[inline]
    pub fn f32(values: &'a [f32]) -> Row<'a> {
        Row::split(DType::F32, values.len(), bytemuck::cast_slice(values), &[])
    }

    /// The storage format.
    #[inline]
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Number of elements.
    #[inline]
    pub fn len(self) -> usize {
        self.n
    }

    /// Whether the row has no elements.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.n == 0
    }

    /// The stored elements.
    #[inline]
    pub fn quants(self) -> &'a [u8] {
        self.quants
    }

    /// The scales; empty for the float formats.
    #[inline]
    pub fn scales(self) -> &'a [u8] {
        self.scales
    }
}
