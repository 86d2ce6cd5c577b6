//! Every kernel as a method of [`Cpu`].
//!
//! Lengths that do not fit together are programmer errors and panic with a message;
//! sizes from files have to be checked before they get here. Nothing allocates.

use crate::{cpu::Cpu, dtype::DType, row::Row, simd};

impl Cpu {
    /// Sum of `row[i] * x[i]` by the lane rule (see the crate documentation).
    ///
    /// # Panics
    /// If `x.len() != row.len()`.
    #[inline]
    pub fn dot(self, row: Row<'_>, x: &[f32]) -> f32 {
        simd::dot(self, row, x)
    }

    /// [`dot`](Cpu::dot) of two f32 slices.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn dot_f32(self, a: &[f32], b: &[f32]) -> f32 {
        simd::dot(self, Row::f32(a), b)
    }

    /// `y[i] = fma(a, row[i], y[i])`.
    ///
    /// # Panics
    /// If `y.len() != row.len()`.
    #[inline]
    pub fn axpy(self, a: f32, row: Row<'_>, y: &mut [f32]) {
        simd::axpy(self, a, row, y);
    }

    /// `out[i] = row[i]`, exact in f32 for every format.
    ///
    /// # Panics
    /// If `out.len() != row.len()`.
    #[inline]
    pub fn dequantize(self, row: Row<'_>, out: &mut [f32]) {
        simd::dequantize(self, row, out);
    }

    /// `y[r] = row r · x` for `y.len()` rows of `n` elements, scales inline.
    ///
    /// Row `r` starts at `bytes[r * stride]`. A stride longer than a row lets rows be read
    /// out of neuron bundles.
    ///
    /// # Panics
    /// If `x.len() != n`, if `stride` is shorter than a row, or if the last row ends
    /// beyond `bytes`.
    pub fn matvec(
        self,
        dtype: DType,
        bytes: &[u8],
        stride: usize,
        n: usize,
        x: &[f32],
        y: &mut [f32],
    ) {
        check_rows(dtype, bytes, stride, n, y.len());
        for (r, y) in y.iter_mut().enumerate() {
            *y = self.dot(row_at(dtype, bytes, stride, n, r), x);
        }
    }

    /// `y[t * y_stride + r] = row r · token t` for `tokens` tokens; bit-equal to
    /// [`matvec`](Cpu::matvec) of each token.
    ///
    /// `xs` is `tokens × n`. `y` ends with the last row of the last token, so the number
    /// of rows is `y.len() - (tokens - 1) * y_stride`: pass all of a `tokens × y_stride`
    /// matrix to fill it. Each row is dequantised once, into `scratch`, which needs at
    /// least `n` elements.
    ///
    /// # Panics
    /// If the lengths do not fit together as described, or if the rows do not fit in
    /// `bytes` as in [`matvec`](Cpu::matvec).
    #[allow(clippy::too_many_arguments)]
    pub fn matmul(
        self,
        dtype: DType,
        bytes: &[u8],
        stride: usize,
        n: usize,
        xs: &[f32],
        tokens: usize,
        y: &mut [f32],
        y_stride: usize,
        scratch: &mut [f32],
    ) {
        assert!(
            tokens.checked_mul(n) == Some(xs.len()),
            "xs has {} elements, expected {tokens} tokens of {n}",
            xs.len()
        );
        assert!(
            scratch.len() >= n,
            "scratch has {} elements, needs {n}",
            scratch.len()
        );
        let Some(last) = tokens.checked_sub(1) else {
            return;
        };
        let rows = last
            .checked_mul(y_stride)
            .and_then(|before| y.len().checked_sub(before));
        let Some(rows) = rows.filter(|&rows| rows <= y_stride) else {
            panic!(
                "y has {} elements, not {tokens} tokens with stride {y_stride}",
                y.len()
            );
        };
        check_rows(dtype, bytes, stride, n, rows);
        let scratch = &mut scratch[..n];
        for r in 0..rows {
            self.dequantize(row_at(dtype, bytes, stride, n, r), scratch);
            for t in 0..tokens {
                y[t * y_stride + r] = self.dot_f32(scratch, &xs[t * n..(t + 1) * n]);
            }
        }
    }

    /// `out[i] = (x[i] * s) * weight[i]` with `s = 1 / sqrt(mean(x²) + eps)`; the squares
    /// are summed by the lane rule.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn rmsnorm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        simd::rmsnorm(self, x, weight, eps, out);
    }

    /// [`rmsnorm`](Cpu::rmsnorm) in place, as for the query and key norms of one head.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn rmsnorm_inplace(self, x: &mut [f32], weight: &[f32], eps: f32) {
        simd::rmsnorm_inplace(self, x, weight, eps);
    }

    /// `x[i] = exp(x[i] − max) * (1 / sum)`; the sum follows the lane rule.
    ///
    /// Values of −∞ become exactly 0. If all are −∞ the result is NaN.
    #[inline]
    pub fn softmax(self, x: &mut [f32]) {
        simd::softmax(self, x);
    }

    /// [`math::silu`](crate::math::silu) of every element.
    #[inline]
    pub fn silu(self, x: &mut [f32]) {
        simd::silu(self, x);
    }

    /// [`math::gelu`](crate::math::gelu) of every element, the error-function form.
    #[inline]
    pub fn gelu(self, x: &mut [f32]) {
        simd::gelu(self, x);
    }

    /// [`math::gelu_tanh`](crate::math::gelu_tanh) of every element.
    #[inline]
    pub fn gelu_tanh(self, x: &mut [f32]) {
        simd::gelu_tanh(self, x);
    }

    /// Rotary embedding of one head in the rotate-half layout: with `h = cos.len()`, the
    /// pair `(x[i], x[i + h])` is turned by the angle of `cos[i]`, `sin[i]`. Elements from
    /// `2h` on stay as they are (partial rotary).
    ///
    /// `x[i] = fma(a, cos, −(b·sin))` and `x[i + h] = fma(b, cos, a·sin)`.
    ///
    /// # Panics
    /// If `cos` and `sin` differ in length or `2h > x.len()`.
    #[inline]
    pub fn rope_rotate_half(self, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        simd::rope_rotate_half(self, x, cos, sin);
    }

    /// Writes `src` as little-endian f16, rounded to nearest even; `dst` then is a
    /// [`DType::F16`] row, as in the KV cache. Values beyond the f16 range become
    /// infinite.
    ///
    /// # Panics
    /// If `dst.len() != 2 * src.len()`.
    #[inline]
    pub fn f32_to_f16_bytes(self, src: &[f32], dst: &mut [u8]) {
        simd::f32_to_f16_bytes(self, src, dst);
    }
}

fn check_rows(dtype: DType, bytes: &[u8], stride: usize, n: usize, rows: usize) {
    let row = dtype.row_bytes(n);
    assert!(
        stride >= row,
        "stride {stride} is shorter than a {dtype} row of {row} bytes"
    );
    let end = rows
        .checked_sub(1)
        .map_or(Some(0), |last| last.checked_mul(stride)?.checked_add(row));
    assert!(
        end.is_some_and(|end| end <= bytes.len()),
        "{rows} rows with stride {stride} do not fit in {} bytes",
        bytes.len()
    );
}

fn row_at(dtype: DType, bytes: &[u8], stride: usize, n: usize, r: usize) -> Row<'_> {
    Row::inline(dtype, n, &bytes[r * stride..][..dtype.row_bytes(n)])
}
