//! How much memory rows take that start at equal distances.

/// Where the last of `rows` rows of `width` ends, `stride` from row to row; `None` where that
/// overflows.
pub(crate) fn end_of_rows(rows: usize, stride: usize, width: usize) -> Option<usize> {
    match rows.checked_sub(1) {
        Some(last) => last.checked_mul(stride)?.checked_add(width),
        None => Some(0),
    }
}
