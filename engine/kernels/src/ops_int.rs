//! The integer kernels as methods of [`Cpu`]: rows of integers times quantised activations.

use crate::{
    activations::{Activations, ActivationsRef, Chunk},
    columns::Columns,
    cpu::{Cpu, per_token},
    dtype::DType,
    matrix::Matrix,
    row::Row,
    simd,
};

impl Cpu {
    /// Quantises `tokens` tokens of equal length, stored one after the other in `xs`, into `out`.
    ///
    /// Each group of 32 has the scale `max |x| / 127`; a quant is `x · (127 / max |x|)`, rounded half to even. With
    /// one scale per token ([`with_scale_per_token`](crate::with_scale_per_token)) the scale ignores the four largest
    /// elements, which are clipped (`excess.rs`), unless outliers are pruned ([`Cpu::pruning`]). A group or token
    /// whose magnitudes are all below 2⁻¹⁰⁰ becomes zero. One with a NaN or an infinity has the scale NaN, and so has every
    /// result that uses it.
    ///
    /// # Panics
    /// If `xs.len()` is not a multiple of `tokens`.
    pub fn quantize_activations(self, xs: &[f32], tokens: usize, out: &mut Activations) {
        let n = xs.len().checked_div(tokens).unwrap_or(0);
        assert!(
            n * tokens == xs.len(),
            "{} activations are not {tokens} tokens",
            xs.len()
        );
        out.reshape(n, tokens);
        // Tokens without elements have no chunks.
        let (of_token, xs) = (out.chunks_per_token().max(1), xs.chunks_exact(n.max(1)));
        if !per_token(self) {
            for (x, chunks) in xs.zip(out.chunks_mut().chunks_exact_mut(of_token)) {
                simd::int::quantize_token(self, x, chunks);
            }
            return;
        }
        let (chunks, excess) = out.with_one_scale(self.prunes());
        let mut excess = excess.map(|excess| excess.iter_mut());
        for (x, chunks) in xs.zip(chunks.chunks_exact_mut(of_token)) {
            let excess = excess.as_mut().and_then(Iterator::next);
            simd::int::quantize_whole_token(self, x, chunks, excess);
        }
    }

    /// [`quantize_activations`](Cpu::quantize_activations) of one token into its part of
    /// [`Activations::chunks_mut`], with a scale for each group.
    ///
    /// # Panics
    /// If `chunks.len()` is not `ceil(x.len() / 512)`.
    #[inline]
    pub fn quantize_token(self, x: &[f32], chunks: &mut [Chunk]) {
        simd::int::quantize_token(self, x, chunks);
    }

    /// Sum of `row[i] * x[i]` for a q4, q4k, q8 or mxfp4 row and one token of quantised activations,
    /// by the chain rule (see the crate documentation).
    ///
    /// # Panics
    /// If the lengths differ, if the row is of another format, or if `x` is not one token.
    #[inline]
    pub fn dot_q(self, row: Row<'_>, x: ActivationsRef<'_>) -> f32 {
        simd::int::dot(self, row, x)
    }

    /// `y[r] = rows[r] · x` by the chain rule, for rows at any addresses, such as those of firing
    /// neurons.
    ///
    /// # Panics
    /// As [`dot_q`](Cpu::dot_q), if `y.len() != rows.len()`, or if the rows differ in format.
    #[inline]
    pub fn dot_rows_q(self, rows: &[Row<'_>], x: ActivationsRef<'_>, y: &mut [f32]) {
        simd::int::dot_rows(self, rows, x, y);
    }

    /// [`matvec`](Cpu::matvec) with quantised activations, by the chain rule. Rows may be blocks of GGUF
    /// files ([`DType::Block`]), which [`matmul_q`](Cpu::matmul_q) takes too, and the other products do not.
    ///
    /// # Panics
    /// As [`dot_q`](Cpu::dot_q), or if the rows do not fit in `bytes`.
    pub fn matvec_q(
        self,
        dtype: DType,
        bytes: &[u8],
        stride: usize,
        x: ActivationsRef<'_>,
        y: &mut [f32],
    ) {
        simd::int::matvec(
            self,
            Matrix::new(dtype, bytes, stride, x.n(), y.len()),
            x,
            y,
        );
    }

    /// `y.row(t)[r] = row r · token t` by the chain rule, bit-equal to
    /// [`matvec_q`](Cpu::matvec_q) of each token.
    ///
    /// The rows, as many as the width of `y`, are in `bytes` as for [`matvec`](Cpu::matvec). Widths
    /// that are multiples of 32 run fastest. `scratch` has at least [`matmul_scratch_q`] elements.
    ///
    /// # Panics
    /// If the lengths do not match as described, if `dtype` is another format, or if the rows do not
    /// fit in `bytes`.
    pub fn matmul_q(
        self,
        dtype: DType,
        bytes: &[u8],
        stride: usize,
        xs: ActivationsRef<'_>,
        y: &mut Columns<'_, f32>,
        scratch: &mut [f32],
    ) {
        let m = Matrix::new(dtype, bytes, stride, xs.n(), y.width());
        simd::int::matmul(self, m, xs, y, scratch);
    }

    /// [`matmul_q`](Cpu::matmul_q) for rows at any addresses.
    ///
    /// # Panics
    /// As `matmul_q`, or if the rows differ in format.
    pub fn matmul_rows_q(
        self,
        rows: &[Row<'_>],
        xs: ActivationsRef<'_>,
        y: &mut Columns<'_, f32>,
        scratch: &mut [f32],
    ) {
        simd::int::matmul_rows(self, rows, xs, y, scratch);
    }

    /// Products of some pairs of rows and tokens: `out[r × tokens + t] = rows[r] · token t` by the
    /// chain rule where bit `t` of the mask of row `r` is set, otherwise zero. A mask is
    /// `ceil(tokens / 64)` words, lowest bit first. A row is read once for all its tokens.
    ///
    /// # Panics
    /// As [`dot_q`](Cpu::dot_q), if the rows differ in format, if `masks` or `out` have another
    /// length than the rows and tokens ask for, or if a mask names a token that does not exist.
    pub fn dot_pairs_q(
        self,
        rows: &[Row<'_>],
        xs: ActivationsRef<'_>,
        masks: &[u64],
        out: &mut [f32],
    ) {
        simd::int::pairs(self, rows, xs, masks, out);
    }
}

/// Scratch elements that [`Cpu::matmul_q`] needs for rows of `n` elements, on every instruction
/// set.
pub const fn matmul_scratch_q(n: usize) -> usize {
    simd::int::scratch_len(n)
}

/// [`Cpu::dot_q`] with the integer sums of another processor, as many as [`DType::sums`] says: `Σ_j q[j] · x[j]` of the row's
/// stored integers, which are nibbles less 8 in q4 and q4c, nibbles in q4k, doubled floats in mxfp4. Same bits.
///
/// # Panics
/// As [`Cpu::dot_q`], or if `sums.len()` is another.
#[inline]
pub fn dot_of_sums(cpu: Cpu, row: Row<'_>, sums: &[i32], x: ActivationsRef<'_>) -> f32 {
    simd::int::of_sums(cpu, row, sums, x)
}
