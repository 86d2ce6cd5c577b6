//! Rows of q4, q4k, q8 and mxfp4 times quantised activations, by the chain rule of the crate
//! documentation: generic bodies in `dot` and `gemm`, registers in one file per
//! instruction set, and the choice between them here.

// Indexed loops over a tile are unrolled, so its accumulators stay in registers. Iterators were
// not, which cost four fifths of the speed.
#![allow(clippy::needless_range_loop)]

/// The integer kernels of one instruction set.
macro_rules! entry_points {
    ([$($feature:tt)*] $unit:ty) => {
        use $crate::{
            ActivationsRef, Chunk, Columns, Row,
            excess::{EXCESSES, Excess},
            matrix::Rows,
        };

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn quantize_token(x: &[f32], chunks: &mut [Chunk]) {
            // SAFETY: the features are enabled here.
            unsafe { $crate::simd::int::quantize::quantize_token::<$unit>(x, chunks) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn quantize_whole_token(
            x: &[f32],
            chunks: &mut [Chunk],
            excess: Option<&mut [Excess; EXCESSES]>,
        ) {
            // SAFETY: the features are enabled here.
            unsafe { $crate::simd::int::quantize::quantize_whole_token::<$unit>(x, chunks, excess) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn dot(row: Row<'_>, x: &[Chunk]) -> f32 {
            // SAFETY: the features are enabled here; the dispatcher checked the lengths.
            unsafe { $crate::simd::int::dot::dot::<$unit>(row, x) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn of_sums(row: Row<'_>, sums: &[i32], x: &[Chunk]) -> f32 {
            // SAFETY: as in `dot`.
            unsafe { $crate::simd::int::dot::of_sums::<$unit>(row, sums, x) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn dots<R: Rows>(rows: R, x: &[Chunk], y: &mut [f32]) {
            // SAFETY: as in `dot`.
            unsafe { $crate::simd::int::dot::dots::<$unit, R>(rows, x, y) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn pairs(
            rows: &[Row<'_>],
            xs: ActivationsRef<'_>,
            masks: &[u64],
            out: &mut [f32],
        ) {
            // SAFETY: as in `dot`.
            unsafe { $crate::simd::int::dot::pairs::<$unit>(rows, xs, masks, out) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn add_outliers<R: Rows>(
            rows: R,
            xs: ActivationsRef<'_>,
            place: impl FnMut(usize, usize, &[f32]),
        ) {
            $crate::simd::int::channel::add_outliers(rows, xs, place);
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn add_excess<R: Rows>(
            rows: R,
            xs: ActivationsRef<'_>,
            place: impl FnMut(usize, usize, &[f32]),
        ) {
            $crate::simd::int::channel::add_excess(rows, xs, place);
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn matmul<R: Rows>(
            rows: R,
            xs: ActivationsRef<'_>,
            y: &mut Columns<'_, f32>,
            scratch: &mut [f32],
        ) {
            // SAFETY: as in `dot`.
            unsafe { $crate::simd::int::gemm::matmul::<$unit, R>(rows, xs, y, scratch) }
        }
    };
}

/// The kernels of blocks of one instruction set. Each format has functions of its own: one with all of them takes
/// the compiler much longer.
macro_rules! block_entry_points {
    ([$($feature:tt)*] $unit:ty) => {
        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn block_dots(
            m: $crate::matrix::Matrix<'_>,
            x: &[Chunk],
            y: &mut [f32],
        ) {
            if let $crate::DType::Block(format) = m.dtype() {
                $crate::blocks::with_block!(format, B => dots_of::<B>(m, x, y));
            }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd::int) fn block_matmul(
            m: $crate::matrix::Matrix<'_>,
            xs: ActivationsRef<'_>,
            y: &mut Columns<'_, f32>,
            scratch: &mut [f32],
        ) {
            let $crate::DType::Block(format) = m.dtype() else {
                return;
            };
            if xs.tokens() < <$unit as $crate::simd::int::blocks::BlockTile>::FROM {
                $crate::blocks::with_block!(format, B => few_of::<B>(m, xs, y));
            } else {
                $crate::blocks::with_like!(format, L => many_like::<L>(m, xs, y, scratch));
            }
        }

        $(#[target_feature(enable = $feature)])*
        fn dots_of<B: $crate::blocks::Format>(
            m: $crate::matrix::Matrix<'_>,
            x: &[Chunk],
            y: &mut [f32],
        ) {
            use $crate::simd::int::blocks::BlockTile;
            // SAFETY: the features are enabled here; the dispatcher checked the lengths.
            unsafe { $crate::simd::int::blocks::dots::<<$unit as BlockTile>::Few, B>(m, x, y) }
        }

        $(#[target_feature(enable = $feature)])*
        fn few_of<B: $crate::blocks::Format>(
            m: $crate::matrix::Matrix<'_>,
            xs: ActivationsRef<'_>,
            y: &mut Columns<'_, f32>,
        ) {
            // SAFETY: as in `dots_of`.
            unsafe { $crate::simd::int::blocks::few::<$unit, B>(m, xs, y) }
        }

        $(#[target_feature(enable = $feature)])*
        fn many_like<L: $crate::blocks::Format>(
            m: $crate::matrix::Matrix<'_>,
            xs: ActivationsRef<'_>,
            y: &mut Columns<'_, f32>,
            scratch: &mut [f32],
        ) {
            // SAFETY: as in `dots_of`.
            unsafe { $crate::simd::int::blocks::many::<$unit, L>(m, xs, y, scratch) }
        }
    };
}

/// The methods of [`gemm::Tile`] on chains that are one register of floats, by its intrinsics.
#[cfg(target_arch = "x86_64")]
macro_rules! chains_of_floats {
    (
        $zero:ident, $load:ident, $store:ident, $splat:ident,
        $mul:ident, $add:ident, $mul_add:ident, $less:ident, $from_i32:ident, $more:ident
    ) => {
        /// # Safety
        /// As for the method of `Tile`.
        #[inline(always)]
        unsafe fn more(a: Self::Sums, b: Self::Sums) -> Self::Sums {
            // SAFETY: the caller guarantees the ISA.
            unsafe { $more(a, b) }
        }

        /// # Safety
        /// As for the method of `Tile`.
        #[inline(always)]
        unsafe fn zero() -> Self::Floats {
            // SAFETY: the caller guarantees the ISA.
            unsafe { $zero() }
        }

        /// # Safety
        /// As for the method of `Tile`.
        #[inline(always)]
        unsafe fn add(
            chain: Self::Floats,
            sums: Self::Sums,
            scales: *const f32,
            scale: f32,
        ) -> Self::Floats {
            // SAFETY: the caller guarantees the ISA and a register of scales.
            unsafe {
                let scales = $mul($load(scales), $splat(scale));
                $mul_add($from_i32(sums), scales, chain)
            }
        }

        /// # Safety
        /// As for the method of `Tile`.
        #[inline(always)]
        unsafe fn less(chain: Self::Floats, mins: *const f32, sum: f32) -> Self::Floats {
            // SAFETY: the caller guarantees the ISA and a register of minimums.
            unsafe { $less($load(mins), $splat(sum), chain) }
        }

        /// # Safety
        /// As for the method of `Tile`.
        #[inline(always)]
        unsafe fn plus(a: Self::Floats, b: Self::Floats) -> Self::Floats {
            // SAFETY: the caller guarantees the ISA.
            unsafe { $add(a, b) }
        }

        /// # Safety
        /// As for the method of `Tile`.
        #[inline(always)]
        unsafe fn store(values: Self::Floats, to: *mut f32) {
            // SAFETY: the caller guarantees the ISA and room for a register.
            unsafe { $store(to, values) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(in crate::simd) mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_gemm;
#[cfg(target_arch = "x86_64")]
pub(in crate::simd) mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_few;
#[cfg(target_arch = "x86_64")]
mod avx512_gemm;
mod blocks;
mod channel;
mod dot;
mod form;
mod gemm;
#[cfg(target_arch = "aarch64")]
pub(in crate::simd) mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_gemm;
mod portable;
mod quantize;
mod unit;

pub(crate) use gemm::scratch_len;

use super::check_len;
use crate::{
    ActivationsRef, Chunk, Columns, Row,
    activations::CHUNK,
    cpu::{Cpu, Isa},
    dtype::DType,
    excess::{EXCESSES, Excess},
    matrix::{Matrix, Rows},
};

/// Calls the kernel of the token's instruction set.
macro_rules! dispatch {
    ($cpu:expr, $kernel:ident ( $($arg:expr),* )) => {
        match $cpu.isa() {
            // AVX-512 without VNNI has no byte products beyond those of AVX2.
            // SAFETY: a token with this ISA exists only where its features were detected.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 => unsafe { avx2::base::$kernel($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni => unsafe { avx2::vnni::$kernel($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => unsafe { avx512::$kernel($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { neon::base::$kernel($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => unsafe { neon::dotprod::$kernel($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => unsafe { neon::i8mm::$kernel($($arg),*) },
            // No token exists for the instruction sets of other architectures.
            _ => portable::$kernel($($arg),*),
        }
    };
}

impl<'a> ActivationsRef<'a> {
    /// The bytes of all tokens' chunks, token after token, laid out as `activations.rs` says: for
    /// devices.
    pub fn bytes(&self) -> &'a [u8] {
        let chunks = self.chunks();
        // SAFETY: a chunk has no padding (its fields fill its 768 bytes), u8 needs no alignment, and
        // the length is that of the same memory in bytes.
        unsafe { std::slice::from_raw_parts(chunks.as_ptr().cast(), size_of_val(chunks)) }
    }
}

/// With a scale for each group.
pub(crate) fn quantize_token(cpu: Cpu, x: &[f32], chunks: &mut [Chunk]) {
    check_len("chunks", chunks.len(), x.len().div_ceil(CHUNK));
    dispatch!(cpu, quantize_token(x, chunks))
}

/// With one scale for the token; that of its largest element without `excess`.
pub(crate) fn quantize_whole_token(
    cpu: Cpu,
    x: &[f32],
    chunks: &mut [Chunk],
    excess: Option<&mut [Excess; EXCESSES]>,
) {
    check_len("chunks", chunks.len(), x.len().div_ceil(CHUNK));
    dispatch!(cpu, quantize_whole_token(x, chunks, excess))
}

/// Calls `place` with a row, a token and a part of the products of some rows from that one on: of the outliers of q4c rows, and of
/// the token's excess.
fn add_outliers<R: Rows>(
    cpu: Cpu,
    rows: R,
    xs: ActivationsRef<'_>,
    mut place: impl FnMut(usize, usize, &[f32]),
) {
    if rows.count() > 0 && rows.at(0).dtype() == DType::Q4c {
        dispatch!(cpu, add_outliers(rows, xs, &mut place));
    }
    if !xs.excess().is_empty() {
        dispatch!(cpu, add_excess(rows, xs, place));
    }
}

/// Adds parts of products to the others of the same rows.
#[inline(always)]
fn add(products: &mut [f32], more: &[f32]) {
    for (product, more) in products.iter_mut().zip(more) {
        *product += more;
    }
}

pub(crate) fn dot(cpu: Cpu, row: Row<'_>, x: ActivationsRef<'_>) -> f32 {
    check_token(x);
    check_row(row, x);
    let mut sum = dispatch!(cpu, dot(row, x.chunks()));
    add_outliers(cpu, &[row][..], x, |_, _, more| sum += more[0]);
    sum
}

pub(crate) fn of_sums(cpu: Cpu, row: Row<'_>, sums: &[i32], x: ActivationsRef<'_>) -> f32 {
    check_token(x);
    check_row(row, x);
    check_len("sums", sums.len(), row.dtype().sums(row.len()));
    let mut product = dispatch!(cpu, of_sums(row, sums, x.chunks()));
    if !x.excess().is_empty() {
        dispatch!(
            cpu,
            add_excess(&[row][..], x, |_, _, more| product += more[0])
        );
    }
    product
}

pub(crate) fn dot_rows(cpu: Cpu, rows: &[Row<'_>], x: ActivationsRef<'_>, y: &mut [f32]) {
    check_token(x);
    check_len("y", y.len(), rows.len());
    check_rows(rows, x);
    dispatch!(cpu, dots(rows, x.chunks(), y));
    add_outliers(cpu, rows, x, |r, _, more| add(&mut y[r..], more));
}

pub(crate) fn matvec(cpu: Cpu, m: Matrix<'_>, x: ActivationsRef<'_>, y: &mut [f32]) {
    check_token(x);
    check_len("y", y.len(), m.rows());
    if m.rows() > 0 {
        check_matrix(m, x);
        match m.dtype().is_blocks() {
            true => dispatch!(cpu, block_dots(m, x.chunks(), y)),
            false => dispatch!(cpu, dots(m, x.chunks(), y)),
        }
        add_outliers(cpu, m, x, |r, _, more| add(&mut y[r..], more));
    }
}

pub(crate) fn matmul(
    cpu: Cpu,
    m: Matrix<'_>,
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    check_result(xs, y, m.rows(), scratch);
    if m.rows() > 0 && xs.tokens() > 0 {
        check_matrix(m, xs);
        match m.dtype().is_blocks() {
            true => dispatch!(cpu, block_matmul(m, xs, y, scratch)),
            false => dispatch!(cpu, matmul(m, xs, y, scratch)),
        }
        add_outliers(cpu, m, xs, |r, t, more| add(&mut y.row_mut(t)[r..], more));
    }
}

pub(crate) fn matmul_rows(
    cpu: Cpu,
    rows: &[Row<'_>],
    xs: ActivationsRef<'_>,
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    check_result(xs, y, rows.len(), scratch);
    check_rows(rows, xs);
    dispatch!(cpu, matmul(rows, xs, y, scratch));
    add_outliers(cpu, rows, xs, |r, t, more| {
        add(&mut y.row_mut(t)[r..], more)
    });
}

pub(crate) fn pairs(
    cpu: Cpu,
    rows: &[Row<'_>],
    xs: ActivationsRef<'_>,
    masks: &[u64],
    out: &mut [f32],
) {
    let (tokens, words) = (xs.tokens(), xs.tokens().div_ceil(64));
    check_len("out", out.len(), rows.len() * tokens);
    check_len("masks", masks.len(), rows.len() * words);
    let beyond = match tokens % 64 {
        0 => 0,
        rest => u64::MAX << rest,
    };
    let mut last = masks.chunks_exact(words.max(1)).map(|mask| mask[words - 1]);
    assert!(
        last.all(|word| word & beyond == 0),
        "a mask names tokens beyond {tokens}"
    );
    check_rows(rows, xs);
    if tokens > 0 {
        dispatch!(cpu, pairs(rows, xs, masks, out));
        let place = |first: usize, t: usize, more: &[f32]| {
            for (r, more) in (first..).zip(more) {
                if masks[r * words + t / 64] >> (t % 64) & 1 == 1 {
                    out[r * tokens + t] += more;
                }
            }
        };
        add_outliers(cpu, rows, xs, place);
    }
}

fn check_result(xs: ActivationsRef<'_>, y: &Columns<'_, f32>, rows: usize, scratch: &[f32]) {
    check_len("y", y.rows(), xs.tokens());
    check_len("a row of y", y.width(), rows);
    assert!(
        scratch.len() >= scratch_len(xs.n()),
        "scratch has {} elements, needs {}",
        scratch.len(),
        scratch_len(xs.n())
    );
}

fn check_token(x: ActivationsRef<'_>) {
    assert!(x.tokens() == 1, "{} tokens, expected one", x.tokens());
}

/// All rows have the format of the first and the length of the activations.
fn check_rows(rows: &[Row<'_>], x: ActivationsRef<'_>) {
    for &row in rows {
        check_row(row, x);
        assert!(
            row.dtype() == rows[0].dtype(),
            "rows of {} and {}",
            rows[0].dtype(),
            row.dtype()
        );
    }
}

/// The rows are integers of the length of the activations.
fn check_matrix(m: Matrix<'_>, x: ActivationsRef<'_>) {
    match m.dtype().is_blocks() {
        true => check_len("a row", m.n(), x.n()),
        false => check_row(m.row(0), x),
    }
}

fn check_row(row: Row<'_>, x: ActivationsRef<'_>) {
    assert!(
        !row.dtype().is_blocks(),
        "rows of {} are multiplied as matrices",
        row.dtype()
    );
    assert!(
        row.dtype().is_grouped(),
        "a row of {} takes f32 activations",
        row.dtype()
    );
    assert!(
        x.per_token() || !row.dtype().is_per_channel(),
        "a row of {} takes activations with one scale per token",
        row.dtype()
    );
    check_len("a row", row.len(), x.n());
}
