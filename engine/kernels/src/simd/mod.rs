//! Vector kernels: generic bodies in `walk`, registers in one file per instruction set, and the
//! dispatch between them here.
//!
//! The functions of this module are safe because a [`Cpu`] exists only for a detected instruction
//! set, and because they check the lengths that the vector code relies on.

#![allow(unsafe_code)]

/// The kernels of one instruction set: each enables its features and inlines the
/// generic body. `$rows × $tokens` is the tile of a matrix product.
macro_rules! entry_points {
    ([$($feature:tt)*] $lanes:ty, $rows:literal, $tokens:literal) => {
        $(#[target_feature(enable = $feature)])*
        pub(super) fn dot(row: $crate::Row<'_>, x: &[f32]) -> f32 {
            // SAFETY: the features are enabled here; the dispatcher checked the length.
            unsafe { super::walk::dot::<$lanes>(row, x) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn axpy(a: f32, row: $crate::Row<'_>, y: &mut [f32]) {
            // SAFETY: as in `dot`.
            unsafe { super::walk::axpy::<$lanes>(a, row, y) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn dequantize(row: $crate::Row<'_>, out: &mut [f32]) {
            // SAFETY: as in `dot`.
            unsafe { super::walk::dequantize::<$lanes>(row, out) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn matvec(m: $crate::matrix::Matrix<'_>, x: &[f32], y: &mut [f32]) {
            for (r, y) in y.iter_mut().enumerate() {
                // SAFETY: as in `dot`.
                *y = unsafe { super::walk::dot::<$lanes>(m.row(r), x) };
            }
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn matmul(
            m: $crate::matrix::Matrix<'_>,
            xs: &[f32],
            y: &mut $crate::Columns<'_, f32>,
            scratch: &mut [f32],
        ) {
            // SAFETY: as in `dot`.
            unsafe { super::matmul::matmul::<$lanes, $rows, $tokens>(m, xs, y, scratch) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn f32_to_f16_bytes(src: &[f32], dst: &mut [u8]) {
            // SAFETY: as in `dot`.
            unsafe { super::walk::f32_to_f16_bytes::<$lanes>(src, dst) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn rmsnorm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
            $crate::elementwise::rmsnorm(x, weight, eps, out);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn rmsnorm_inplace(x: &mut [f32], weight: &[f32], eps: f32) {
            $crate::elementwise::rmsnorm_inplace(x, weight, eps);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn layernorm_inplace(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
            $crate::elementwise::layernorm_inplace(x, weight, bias, eps);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn softmax(x: &mut [f32]) {
            $crate::elementwise::softmax(x);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn sum_bytes(bytes: &[u8]) -> u64 {
            $crate::simd::sum::sum_bytes(bytes)
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn widen(narrow: $crate::Narrow, bytes: &[u8], n: usize, out: &mut [u8]) {
            $crate::narrow::widen(narrow, bytes, n, out);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn sign_bits(x: &[f32], bits: &mut [u8]) {
            $crate::signs::sign_bits(x, bits);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn sign_differences(bytes: &[u8], stride: usize, x: &[u8], y: &mut [u32]) {
            $crate::signs::sign_differences(bytes, stride, x, y);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn argmax(x: &[f32]) -> Option<usize> {
            $crate::select::argmax(x)
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn top_k(x: &[f32], k: usize, best: &mut Vec<(f32, u32)>) {
            $crate::select::top_k(x, k, best);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn exp_block(x: &mut [f32]) -> (f32, f32) {
            $crate::elementwise::exp_block(x)
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn blend(a: f32, y: &mut [f32], b: f32, x: &[f32]) {
            $crate::elementwise::blend(a, y, b, x);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn scale_by_sigmoid(x: &mut [f32], gate: &[f32]) {
            $crate::elementwise::scale_by_sigmoid(x, gate);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn delta_rule(
            before: Option<&[f32]>,
            state: &mut [f32],
            token: $crate::DeltaToken<'_>,
            out: &mut [f32],
        ) {
            $crate::delta::delta_rule(before, state, token, out);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn selective_scan(
            before: Option<&[f32]>,
            state: &mut [f32],
            token: $crate::ScanToken<'_>,
            out: &mut [f32],
        ) {
            $crate::scan::selective_scan(before, state, token, out);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn silu(x: &mut [f32]) {
            $crate::elementwise::silu(x);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn gelu(x: &mut [f32]) {
            $crate::elementwise::gelu(x);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn xielu(x: &mut [f32], of: $crate::math::Xielu) {
            $crate::elementwise::xielu(x, of);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn gelu_tanh(x: &mut [f32]) {
            $crate::elementwise::gelu_tanh(x);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn soft_cap(x: &mut [f32], cap: f32) {
            $crate::elementwise::soft_cap(x, cap);
        }

        $(#[target_feature(enable = $feature)])*
        pub(super) fn rope_rotate_half(x: &mut [f32], cos: &[f32], sin: &[f32]) {
            $crate::elementwise::rope_rotate_half(x, cos, sin);
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod int;
mod lanes;
mod matmul;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod portable;
mod stored;
mod strided;
pub(crate) mod sum;
mod walk;

pub(crate) use stored::{LINE, prefetch};

use crate::{
    blocks::decode_blocks,
    columns::Columns,
    cpu::{Cpu, Isa},
    delta::{Decay, DeltaToken},
    dtype::DType,
    matrix::Matrix,
    narrow::Narrow,
    row::Row,
    scan::ScanToken,
    signs::sign_bytes,
};

/// The entry points that `$entries` writes, for every instruction set in a module of its name, with
/// numbers that depend on its registers.
macro_rules! per_instruction_set {
    (
        $entries:ident,
        portable: $($portable:literal),*; avx2: $($avx2:literal),*;
        avx512: $($avx512:literal),*; neon: $($neon:literal),*
    ) => {
        pub(super) mod portable {
            $entries!([] crate::simd::portable::Portable, $($portable),*);
        }
        #[cfg(target_arch = "x86_64")]
        pub(super) mod avx2 {
            crate::cpu::with_features!(avx2, $entries, crate::simd::avx2::Avx2, $($avx2),*);
        }
        #[cfg(target_arch = "x86_64")]
        pub(super) mod avx512 {
            crate::cpu::with_features!(avx512, $entries, crate::simd::avx512::Avx512, $($avx512),*);
        }
        #[cfg(target_arch = "aarch64")]
        pub(super) mod neon {
            crate::cpu::with_features!(neon, $entries, crate::simd::neon::Neon, $($neon),*);
        }
    };
}
use per_instruction_set;

/// Calls the kernel of the token's instruction set, which is in the modules here or in
/// those of `$family`.
macro_rules! dispatch {
    ($cpu:expr, $kernel:ident $args:tt) => { dispatch!($cpu, $kernel $args, self) };
    ($cpu:expr, $kernel:ident ( $($arg:expr),* ), $family:ident) => {
        match $cpu.isa() {
            // SAFETY: a token with this ISA exists only where its features were detected.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx2Vnni => unsafe { $family::avx2::$kernel($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Vnni => unsafe { $family::avx512::$kernel($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm => unsafe {
                $family::neon::$kernel($($arg),*)
            },
            // No token exists for the instruction sets of other architectures.
            _ => $family::portable::$kernel($($arg),*),
        }
    };
}

pub(crate) mod attend;
mod axpy;
mod axpy_q4;
mod axpy_tokens;

fn check_len(what: &str, len: usize, expected: usize) {
    assert!(
        len == expected,
        "{what} has {len} elements, expected {expected}"
    );
}

/// Blocks are multiplied by quantised activations only.
fn check_format(dtype: DType) {
    assert!(
        !dtype.is_blocks(),
        "a row of {dtype} takes quantised activations"
    );
}

pub(crate) fn dot(cpu: Cpu, row: Row<'_>, x: &[f32]) -> f32 {
    check_format(row.dtype());
    check_len("x", x.len(), row.len());
    dispatch!(cpu, dot(row, x))
}

pub(crate) fn axpy(cpu: Cpu, a: f32, row: Row<'_>, y: &mut [f32]) {
    check_format(row.dtype());
    check_len("y", y.len(), row.len());
    dispatch!(cpu, axpy(a, row, y))
}

/// Rows added up must have one format and the length of the sum.
fn check_rows(rows: &[Row<'_>], n: usize) {
    for row in rows {
        check_format(row.dtype());
        check_len("y", n, row.len());
        let (dtype, first) = (row.dtype(), rows[0].dtype());
        assert!(dtype == first, "rows of {first} and {dtype}");
    }
}

pub(crate) fn axpy_rows(cpu: Cpu, factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
    check_len("factors", factors.len(), rows.len());
    check_rows(rows, y.len());
    dispatch!(cpu, axpy_rows(factors, rows, y), axpy)
}

pub(crate) fn sum_rows(cpu: Cpu, factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
    check_len("factors", factors.len(), rows.len());
    check_rows(rows, y.len());
    dispatch!(cpu, sum_rows(factors, rows, y), axpy)
}

/// Rows that all tokens add before the next ones: a cluster's, which stay in the second-level cache.
const CACHED_ROWS: usize = 128;

/// With `new`, starts from zero and ignores the contents of `ys`.
pub(crate) fn axpy_rows_tokens(
    cpu: Cpu,
    factors: &[f32],
    rows: &[Row<'_>],
    tokens: usize,
    new: bool,
    ys: &mut [f32],
) {
    let Some(first) = rows.first() else {
        if new {
            ys.fill(0.0);
        }
        return check_len("factors", factors.len(), 0);
    };
    check_len("factors", factors.len(), rows.len().saturating_mul(tokens));
    check_len("ys", ys.len(), first.len().saturating_mul(tokens));
    check_rows(rows, first.len());
    if (1..=few(cpu, *first)).contains(&tokens) && !factors.contains(&0.0) {
        return token_by_token(cpu, factors, rows, tokens, new, ys);
    }
    axpy_tokens::SCRATCH.with_borrow_mut(|scratch| {
        dispatch!(
            cpu,
            axpy_rows_tokens(factors, rows, tokens, new, ys, scratch),
            axpy
        )
    });
}

/// Tokens that add rows one after the other where no factor is zero: decoding rows into registers for
/// each is faster than through memory for all, most of all where [`axpy_q4`] does it.
fn few(cpu: Cpu, row: Row<'_>) -> usize {
    match (cpu.isa(), row.dtype()) {
        (Isa::Avx512 | Isa::Avx512Vnni, DType::Q4) => 8,
        _ => 4,
    }
}

/// [`axpy_rows_tokens`] of at least one row, for tokens that are too few to share decoded rows. Rows
/// that one token has read are in the cache for the next.
fn token_by_token(
    cpu: Cpu,
    factors: &[f32],
    rows: &[Row<'_>],
    tokens: usize,
    new: bool,
    ys: &mut [f32],
) {
    let mut own = [0.0; CACHED_ROWS];
    let parts = factors.chunks(CACHED_ROWS * tokens);
    for (part, (factors, rows)) in parts.zip(rows.chunks(CACHED_ROWS)).enumerate() {
        let own = &mut own[..rows.len()];
        for (t, y) in ys.chunks_mut(rows[0].len().max(1)).enumerate() {
            for (own, factors) in own.iter_mut().zip(factors.chunks(tokens)) {
                *own = factors[t];
            }
            if new && part == 0 {
                dispatch!(cpu, sum_rows(own, rows, y), axpy);
            } else {
                dispatch!(cpu, axpy_rows(own, rows, y), axpy);
            }
        }
    }
}

pub(crate) fn dequantize(cpu: Cpu, row: Row<'_>, out: &mut [f32]) {
    check_len("out", out.len(), row.len());
    if let DType::Block(format) = row.dtype() {
        return decode_blocks(format, row.quants(), out);
    }
    dispatch!(cpu, dequantize(row, out))
}

pub(crate) fn matvec(cpu: Cpu, m: Matrix<'_>, x: &[f32], y: &mut [f32]) {
    check_format(m.dtype());
    check_len("x", x.len(), m.n());
    check_len("y", y.len(), m.rows());
    dispatch!(cpu, matvec(m, x, y))
}

pub(crate) fn matmul(
    cpu: Cpu,
    m: Matrix<'_>,
    xs: &[f32],
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    check_len("xs", xs.len(), y.rows().saturating_mul(m.n()));
    check_len("a row of y", y.width(), m.rows());
    assert!(
        scratch.len() >= m.n(),
        "scratch has {} elements, needs {}",
        scratch.len(),
        m.n()
    );
    dispatch!(cpu, matmul(m, xs, y, scratch))
}

pub(crate) fn f32_to_f16_bytes(cpu: Cpu, src: &[f32], dst: &mut [u8]) {
    check_len("dst", dst.len(), src.len().saturating_mul(2));
    dispatch!(cpu, f32_to_f16_bytes(src, dst))
}

pub(crate) fn rmsnorm(cpu: Cpu, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    check_len("weight", weight.len(), x.len());
    check_len("out", out.len(), x.len());
    dispatch!(cpu, rmsnorm(x, weight, eps, out))
}

pub(crate) fn rmsnorm_inplace(cpu: Cpu, x: &mut [f32], weight: &[f32], eps: f32) {
    check_len("weight", weight.len(), x.len());
    dispatch!(cpu, rmsnorm_inplace(x, weight, eps))
}

pub(crate) fn layernorm_inplace(cpu: Cpu, x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    check_len("weight", weight.len(), x.len());
    check_len("bias", bias.len(), x.len());
    dispatch!(cpu, layernorm_inplace(x, weight, bias, eps))
}

pub(crate) fn softmax(cpu: Cpu, x: &mut [f32]) {
    dispatch!(cpu, softmax(x))
}

pub(crate) fn sum_bytes(cpu: Cpu, bytes: &[u8]) -> u64 {
    dispatch!(cpu, sum_bytes(bytes))
}

pub(crate) fn widen(cpu: Cpu, narrow: Narrow, bytes: &[u8], n: usize, out: &mut [u8]) {
    let row = narrow.row_bytes(n);
    let rows = bytes.len().checked_div(row).unwrap_or(0);
    check_len("bytes", bytes.len(), rows * row);
    check_len(
        "out",
        out.len(),
        rows.saturating_mul(DType::Q4.row_bytes(n)),
    );
    dispatch!(cpu, widen(narrow, bytes, n, out))
}

pub(crate) fn sign_bits(cpu: Cpu, x: &[f32], bits: &mut [u8]) {
    check_len("bits", bits.len(), sign_bytes(x.len()));
    dispatch!(cpu, sign_bits(x, bits))
}

pub(crate) fn sign_differences(cpu: Cpu, bytes: &[u8], stride: usize, x: &[u8], y: &mut [u32]) {
    assert!(
        x.len().is_multiple_of(8),
        "signs take whole words, got {} bytes",
        x.len()
    );
    let needed = match y.len().checked_sub(1) {
        Some(last) => last.saturating_mul(stride).saturating_add(x.len()),
        None => 0,
    };
    assert!(
        stride >= x.len() && needed <= bytes.len(),
        "{} rows of {} bytes every {stride} do not fit in {}",
        y.len(),
        x.len(),
        bytes.len()
    );
    dispatch!(cpu, sign_differences(bytes, stride, x, y))
}

pub(crate) fn argmax(cpu: Cpu, x: &[f32]) -> Option<usize> {
    dispatch!(cpu, argmax(x))
}

pub(crate) fn top_k(cpu: Cpu, x: &[f32], k: usize, best: &mut Vec<(f32, u32)>) {
    dispatch!(cpu, top_k(x, k, best))
}

pub(crate) fn exp_block(cpu: Cpu, x: &mut [f32]) -> (f32, f32) {
    dispatch!(cpu, exp_block(x))
}

pub(crate) fn blend(cpu: Cpu, a: f32, y: &mut [f32], b: f32, x: &[f32]) {
    check_len("x", x.len(), y.len());
    dispatch!(cpu, blend(a, y, b, x))
}

pub(crate) fn scale_by_sigmoid(cpu: Cpu, x: &mut [f32], gate: &[f32]) {
    check_len("gate", gate.len(), x.len());
    dispatch!(cpu, scale_by_sigmoid(x, gate))
}

pub(crate) fn delta_rule(
    cpu: Cpu,
    before: Option<&[f32]>,
    state: &mut [f32],
    token: DeltaToken<'_>,
    out: &mut [f32],
) {
    let (rows, columns) = (token.key.len(), out.len());
    check_len("query", token.query.len(), rows);
    if let Decay::ByRow(factors) = token.decay {
        check_len("decay", factors.len(), rows);
    }
    check_len("value", token.value.len(), columns);
    check_len("state", state.len(), rows * columns);
    if let Some(before) = before {
        check_len("before", before.len(), rows * columns);
    }
    dispatch!(cpu, delta_rule(before, state, token, out))
}

pub(crate) fn selective_scan(
    cpu: Cpu,
    before: Option<&[f32]>,
    state: &mut [f32],
    token: ScanToken<'_>,
    out: &mut [f32],
) {
    let (rows, columns) = (token.write.len(), out.len());
    check_len("read", token.read.len(), rows);
    check_len("input", token.input.len(), columns);
    check_len("state", state.len(), rows * columns);
    if let Some(before) = before {
        check_len("before", before.len(), rows * columns);
    }
    dispatch!(cpu, selective_scan(before, state, token, out))
}

pub(crate) fn silu(cpu: Cpu, x: &mut [f32]) {
    dispatch!(cpu, silu(x))
}

pub(crate) fn gelu(cpu: Cpu, x: &mut [f32]) {
    dispatch!(cpu, gelu(x))
}

pub(crate) fn xielu(cpu: Cpu, x: &mut [f32], of: crate::math::Xielu) {
    dispatch!(cpu, xielu(x, of))
}

pub(crate) fn gelu_tanh(cpu: Cpu, x: &mut [f32]) {
    dispatch!(cpu, gelu_tanh(x))
}

pub(crate) fn soft_cap(cpu: Cpu, x: &mut [f32], cap: f32) {
    dispatch!(cpu, soft_cap(x, cap))
}

pub(crate) fn rope_rotate_half(cpu: Cpu, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    check_len("sin", sin.len(), cos.len());
    assert!(
        cos.len() <= x.len() / 2,
        "rope rotates {} pairs of {}",
        cos.len(),
        x.len()
    );
    dispatch!(cpu, rope_rotate_half(x, cos, sin))
}
