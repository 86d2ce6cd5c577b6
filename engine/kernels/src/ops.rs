//! Every kernel as a method of [`Cpu`].
//!
//! Rows here are floats or in a format written by this crate: blocks of GGUF files ([`DType::Block`]) can
//! only be decoded, and multiplied by quantised activations (`ops_int.rs`).
//!
//! Mismatched lengths are programmer errors and panic with a message; check sizes from files before
//! calling. Nothing allocates.

use crate::{
    columns::Columns,
    cpu::Cpu,
    delta::DeltaToken,
    dtype::DType,
    matrix::Matrix,
    narrow::Narrow,
    row::Row,
    scan::ScanToken,
    simd::{self, attend::Head},
};

impl Cpu {
    /// Sum of `row[i] * x[i]` by the lane rule (see the crate documentation).
    ///
    /// # Panics
    /// If `x.len() != row.len()`, or if the row is blocks.
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

    /// `y[j] = fma(factors[i] * scale, q, y[j])` for `i` in order, where row `i` holds
    /// `scale · q` at `j`; the scale is 1 for the float formats. One call with many rows
    /// returns the same bits as one call per row.
    ///
    /// # Panics
    /// If the number of factors differs from that of rows, or if a row differs from the others in
    /// its format or from `y` in its length.
    #[inline]
    pub fn axpy_rows(self, factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
        simd::axpy_rows(self, factors, rows, y);
    }

    /// [`axpy_rows`](Cpu::axpy_rows) starting from zero: ignores and overwrites `y`.
    ///
    /// # Panics
    /// As [`axpy_rows`](Cpu::axpy_rows).
    #[inline]
    pub fn sum_rows(self, factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
        simd::sum_rows(self, factors, rows, y);
    }

    /// [`axpy_rows`](Cpu::axpy_rows) for `tokens` tokens that share the rows: row `i` has the
    /// factor `factors[i * tokens + t]` for token `t`, whose sum is row `t` of `ys`, `tokens × n`.
    /// Skips rows with a zero factor; the bits are those of `axpy_rows` with the other rows.
    ///
    /// # Panics
    /// If the lengths do not match as described, or if the rows differ in format or length.
    #[inline]
    pub fn axpy_rows_tokens(
        self,
        factors: &[f32],
        rows: &[Row<'_>],
        tokens: usize,
        ys: &mut [f32],
    ) {
        simd::axpy_rows_tokens(self, factors, rows, tokens, false, ys);
    }

    /// [`axpy_rows_tokens`](Cpu::axpy_rows_tokens) starting from zero: ignores and overwrites `ys`.
    ///
    /// # Panics
    /// As [`axpy_rows_tokens`](Cpu::axpy_rows_tokens).
    #[inline]
    pub fn sum_rows_tokens(self, factors: &[f32], rows: &[Row<'_>], tokens: usize, ys: &mut [f32]) {
        simd::axpy_rows_tokens(self, factors, rows, tokens, true, ys);
    }

    /// `out[i] = row[i]`, exact in f32 for every format written here. Blocks of GGUF files are decoded as
    /// [`decode_blocks`](crate::decode_blocks) says.
    ///
    /// # Panics
    /// If `out.len() != row.len()`.
    #[inline]
    pub fn dequantize(self, row: Row<'_>, out: &mut [f32]) {
        simd::dequantize(self, row, out);
    }

    /// `y[r] = row r · x` for `y.len()` rows of `n` elements, scales inline.
    ///
    /// Row `r` starts at `bytes[r * stride]`. A stride longer than a row reads rows out of neuron
    /// bundles.
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
        simd::matvec(self, Matrix::new(dtype, bytes, stride, n, y.len()), x, y);
    }

    /// `y[t * y_stride + r] = row r · token t` for `tokens` tokens; bit-equal to
    /// [`matvec`](Cpu::matvec) of each token.
    ///
    /// `xs` is `tokens × n`. `y` ends with the last row of the last token, so the number
    /// of rows is `y.len() - (tokens - 1) * y_stride`: pass all of a `tokens × y_stride`
    /// matrix to fill it. Rows are dequantised once, into `scratch`, which needs at least
    /// `n` elements; [`matmul_scratch`] gives the length that runs fastest.
    ///
    /// # Panics
    /// If the lengths do not match as described, or if the rows do not fit in `bytes` as in
    /// [`matvec`](Cpu::matvec).
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
        let Some(last) = tokens.checked_sub(1) else {
            return;
        };
        let rows = last
            .checked_mul(y_stride)
            .and_then(|before| y.len().checked_sub(before));
        let Some(rows) = rows.filter(|&rows| tokens == 1 || rows <= y_stride) else {
            panic!(
                "y has {} elements, not {tokens} tokens with stride {y_stride}",
                y.len()
            );
        };
        let mut y = Columns::new(y, tokens, y_stride, rows);
        self.matmul_columns(dtype, bytes, stride, n, xs, &mut y, scratch);
    }

    /// [`matmul`](Cpu::matmul) into a block of columns: row `t` of `y` is token `t`, its width the
    /// number of weight rows. With
    /// [`Workers::for_each_column_block`](crate::Workers::for_each_column_block) several threads
    /// share one product: block `first` uses the weight rows from `first` on.
    ///
    /// # Panics
    /// As [`matmul`](Cpu::matmul).
    #[allow(clippy::too_many_arguments)]
    pub fn matmul_columns(
        self,
        dtype: DType,
        bytes: &[u8],
        stride: usize,
        n: usize,
        xs: &[f32],
        y: &mut Columns<'_, f32>,
        scratch: &mut [f32],
    ) {
        simd::matmul(
            self,
            Matrix::new(dtype, bytes, stride, n, y.width()),
            xs,
            y,
            scratch,
        );
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

    /// `x[i] = (c[i] * s) * weight[i] + bias[i]`, the last two fused, with `c[i] = x[i] − mean(x)`
    /// and `s = 1 / sqrt(mean(c²) + eps)`; both sums follow the lane rule.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn layernorm_inplace(self, x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
        simd::layernorm_inplace(self, x, weight, bias, eps);
    }

    /// `x[i] = exp(x[i] − max) * (1 / sum)`; the sum follows the lane rule.
    ///
    /// Values of −∞ become exactly 0. If all are −∞ the result is NaN.
    #[inline]
    pub fn softmax(self, x: &mut [f32]) {
        simd::softmax(self, x);
    }

    /// Widens narrow rows of `n` elements, consecutive in `bytes`, to q4 rows with the same
    /// values, consecutive in `out`.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of rows or `out` not as many q4 rows.
    #[inline]
    pub fn widen(self, narrow: Narrow, bytes: &[u8], n: usize, out: &mut [u8]) {
        simd::widen(self, narrow, bytes, n, out);
    }

    /// The signs of `x` as bits: 1 for an element below zero. See [`sign_bytes`](crate::sign_bytes)
    /// for the length of `bits`.
    ///
    /// # Panics
    /// If `bits.len() != sign_bytes(x.len())`.
    #[inline]
    pub fn sign_bits(self, x: &[f32], bits: &mut [u8]) {
        simd::sign_bits(self, x, bits);
    }

    /// `y[r]` = number of bits of row `r`, at `bytes[r * stride]`, that differ from `x`. For signs
    /// ([`sign_bits`](Cpu::sign_bits)) this is the number of negative products.
    ///
    /// # Panics
    /// If `x` is not whole words of 8 bytes, if `stride` is shorter than `x`, or if the last row
    /// ends beyond `bytes`.
    #[inline]
    pub fn sign_differences(self, bytes: &[u8], stride: usize, x: &[u8], y: &mut [u32]) {
        simd::sign_differences(self, bytes, stride, x, y);
    }

    /// [`argmax`](crate::argmax), vectorised.
    #[inline]
    pub fn argmax(self, x: &[f32]) -> Option<usize> {
        simd::argmax(self, x)
    }

    /// The `k` largest values with their indices, in descending order, equal ones by ascending
    /// index; skips NaN. Overwrites `best`, without allocating if it has capacity for `2 * k + 64`
    /// elements.
    #[inline]
    pub fn top_k(self, x: &[f32], k: usize, best: &mut Vec<(f32, u32)>) {
        simd::top_k(self, x, k, best);
    }

    /// Sum of the little-endian 64-bit words, the last one padded with zeros; wraps. Reads memory
    /// as fast as one thread can, see [`read_bandwidth`](crate::read_bandwidth).
    #[inline]
    pub fn sum_bytes(self, bytes: &[u8]) -> u64 {
        simd::sum_bytes(self, bytes)
    }

    /// `x[i] = exp(x[i] − max)`, not divided by the sum: part of a
    /// [`softmax`](Cpu::softmax). Returns `max` and the sum, which follows the lane rule.
    #[inline]
    pub fn exp_block(self, x: &mut [f32]) -> (f32, f32) {
        simd::exp_block(self, x)
    }

    /// `y[i] = fma(b, x[i], a * y[i])`.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn blend(self, a: f32, y: &mut [f32], b: f32, x: &[f32]) {
        simd::blend(self, a, y, b, x);
    }

    /// Scores of several queries over blocks of 32 keys: row `q` of `scores`, at `q * stride`,
    /// becomes `scores[p] = fma(query[d], key p [d], …)`, `d` from 0 to `head_dim`.
    ///
    /// A block of `keys` holds `[head_dim][32 positions]` elements of a float format; `queries` is
    /// `q × head_dim`. The stride is at least the positions of all blocks; elements beyond them are
    /// not touched.
    ///
    /// # Panics
    /// If `dtype` is a block format or the lengths do not match as described.
    #[inline]
    pub fn key_scores(
        self,
        dtype: DType,
        keys: &[u8],
        head_dim: usize,
        queries: &[f32],
        scores: &mut [f32],
        stride: usize,
    ) {
        let keys = Head {
            dtype,
            bytes: keys,
            width: head_dim,
        };
        simd::attend::key_scores(self, keys, queries, scores, stride);
    }

    /// Weighted sums of values for several queries: row `q` of `out` becomes `out[j] =
    /// fma(weights[q * stride + p], value p [j], out[j])` for every position `p` in order.
    ///
    /// `values` is `positions × width` elements of a float format, with a width that is a multiple
    /// of 32; `out` is `q × width`.
    ///
    /// # Panics
    /// If `dtype` is a block format or the lengths do not match as described.
    #[inline]
    pub fn mix_values(
        self,
        dtype: DType,
        values: &[u8],
        width: usize,
        weights: &[f32],
        stride: usize,
        out: &mut [f32],
    ) {
        let values = Head {
            dtype,
            bytes: values,
            width,
        };
        simd::attend::mix_values(self, values, weights, stride, out);
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

    /// [`math::xielu`](crate::math::xielu) of every element.
    #[inline]
    pub fn xielu(self, x: &mut [f32], of: crate::math::Xielu) {
        simd::xielu(self, x, of);
    }

    /// [`math::gelu_tanh`](crate::math::gelu_tanh) of every element.
    #[inline]
    pub fn gelu_tanh(self, x: &mut [f32]) {
        simd::gelu_tanh(self, x);
    }

    /// Rotary embedding of one head in the rotate-half layout: with `h = cos.len()`, rotates the
    /// pair `(x[i], x[i + h])` by the angle of `cos[i]`, `sin[i]`. Elements from `2h` on are
    /// unchanged (partial rotary).
    ///
    /// `x[i] = fma(a, cos, −(b·sin))` and `x[i + h] = fma(b, cos, a·sin)`.
    ///
    /// # Panics
    /// If `cos` and `sin` differ in length or `2h > x.len()`.
    #[inline]
    pub fn rope_rotate_half(self, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        simd::rope_rotate_half(self, x, cos, sin);
    }

    /// Writes `src` as little-endian f16, rounded to nearest even; `dst` is then a [`DType::F16`]
    /// row, as in the KV cache. Values beyond the f16 range become infinite.
    ///
    /// # Panics
    /// If `dst.len() != 2 * src.len()`.
    #[inline]
    pub fn f32_to_f16_bytes(self, src: &[f32], dst: &mut [u8]) {
        simd::f32_to_f16_bytes(self, src, dst);
    }
}

/// Scratch elements with which [`Cpu::matmul`] of rows of `n` elements runs fastest on every
/// instruction set.
pub const fn matmul_scratch(n: usize) -> usize {
    n.saturating_mul(4)
}

/// One token of the gated delta rule (Yang et al., 2024), for a state of `key.len()` rows and
/// `value.len()` columns:
///
/// ```text
/// S ← decay ∘ S        w = beta·(value − keyᵀ·S)        S ← S + key ⊗ w        out = queryᵀ·S
/// ```
///
/// `decay` is one number, or one for each row. The sums run over the rows in order. The state is read from `before`, if there is one, and
/// written to `state`.
///
/// # Panics
/// If the lengths do not match as described.
#[inline]
pub fn delta_rule(
    cpu: Cpu,
    before: Option<&[f32]>,
    state: &mut [f32],
    token: DeltaToken<'_>,
    out: &mut [f32],
) {
    simd::delta_rule(cpu, before, state, token, out);
}

/// One token of the scan of a state-space model (Dao and Gu, 2024), for a state of `write.len()` rows
/// and `input.len()` columns:
///
/// ```text
/// S ← decay·S + write ⊗ step·input        out = readᵀ·S + skip·input
/// ```
///
/// The sum runs over the rows in order. The state is read from `before`, if there is one, and written
/// to `state`.
///
/// # Panics
/// If the lengths do not match as described.
#[inline]
pub fn selective_scan(
    cpu: Cpu,
    before: Option<&[f32]>,
    state: &mut [f32],
    token: ScanToken<'_>,
    out: &mut [f32],
) {
    simd::selective_scan(cpu, before, state, token, out);
}

/// `x = cap · tanh(x / cap)` of every element, by [`math::tanh`](crate::math::tanh).
#[inline]
pub fn soft_cap(cpu: Cpu, x: &mut [f32], cap: f32) {
    simd::soft_cap(cpu, x, cap);
}

/// `x[i] = x[i] / (1 + e^−gate[i])`.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub fn scale_by_sigmoid(cpu: Cpu, x: &mut [f32], gate: &[f32]) {
    simd::scale_by_sigmoid(cpu, x, gate);
}
