//! Products of rows with the inputs of several tokens, stored by neuron.

use std::cell::RefCell;

use emberflow_kernels::{ActivationsRef, Columns, Cpu, DType, matmul_scratch, matmul_scratch_q};

/// Rows multiplied together: as many as the multi-token kernels pack.
pub(crate) const ROWS: usize = 32;

/// Tokens multiplied together, so that their products stay in the L1 cache.
const TOKENS: usize = 64;

/// Buffers of a thread.
#[derive(Default)]
struct Work {
    scratch: Vec<f32>,
    products: Vec<f32>,
    rows: Vec<u8>,
}

thread_local! {
    static WORK: RefCell<Work> = RefCell::default();
}

/// Bytes of a thread's buffers for rows of up to `n` elements.
pub(crate) fn work_bytes(n: usize) -> u64 {
    let floats = scratch_len(n).saturating_add(ROWS * TOKENS);
    let rows = ROWS.saturating_mul(DType::Q4.row_bytes(n));
    floats.saturating_mul(4).saturating_add(rows) as u64
}

fn scratch_len(n: usize) -> usize {
    matmul_scratch_q(n).max(matmul_scratch(n))
}

/// Grows a buffer to at least `len` elements and returns the first `len`.
fn room<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// Calls `f` with this thread's buffers, including `len` bytes for rows.
pub(crate) fn with_rows<R>(len: usize, f: impl FnOnce(&mut [u8], &mut Multiplier<'_>) -> R) -> R {
    WORK.with_borrow_mut(|work| {
        let Work {
            scratch,
            products,
            rows,
        } = work;
        f(room(rows, len), &mut Multiplier { scratch, products })
    })
}

/// Calls `f` with this thread's buffers.
pub(crate) fn with_multiplier<R>(f: impl FnOnce(&mut Multiplier<'_>) -> R) -> R {
    with_rows(0, |_, multiplier| f(multiplier))
}

/// Inputs of several tokens.
#[derive(Clone, Copy)]
pub(crate) enum Inputs<'a> {
    /// For rows of grouped formats.
    Quantized(ActivationsRef<'a>),
    /// For rows of floats: contiguous vectors of `n` elements.
    Floats { x: &'a [f32], n: usize },
}

impl Inputs<'_> {
    fn n(&self) -> usize {
        match *self {
            Self::Quantized(x) => x.n(),
            Self::Floats { n, .. } => n,
        }
    }

    fn tokens(&self) -> usize {
        match *self {
            Self::Quantized(x) => x.tokens(),
            Self::Floats { x, n } => x.len() / n.max(1),
        }
    }

    /// `count` tokens from `first` on.
    fn range(&self, first: usize, count: usize) -> Self {
        match *self {
            Self::Quantized(x) => Self::Quantized(x.range(first, count)),
            Self::Floats { x, n } => Self::Floats {
                x: &x[first * n..(first + count) * n],
                n,
            },
        }
    }
}

/// Multiplies with a thread's buffers.
pub(crate) struct Multiplier<'a> {
    scratch: &'a mut Vec<f32>,
    products: &'a mut Vec<f32>,
}

impl Multiplier<'_> {
    /// `out[i × tokens + t]` = row `i` of `rows` · token `t`, bit-equal to the product of that row
    /// and token alone.
    pub fn by_row(&mut self, cpu: Cpu, dtype: DType, rows: &[u8], x: Inputs<'_>, out: &mut [f32]) {
        let (row, tokens) = (dtype.row_bytes(x.n()), x.tokens());
        if tokens == 1 {
            return one(cpu, dtype, rows, x, out);
        }
        let scratch = room(self.scratch, scratch_len(x.n()));
        for (rows, out) in (rows.chunks(ROWS * row)).zip(out.chunks_mut(ROWS * tokens)) {
            let width = rows.len() / row;
            for first in (0..tokens).step_by(TOKENS) {
                let count = TOKENS.min(tokens - first);
                let products = room(self.products, count * width);
                let mut y = Columns::new(products, count, width, width);
                columns(cpu, dtype, rows, x.range(first, count), &mut y, scratch);
                for (i, out) in out.chunks_exact_mut(tokens).enumerate() {
                    let of_row = products[i..].iter().step_by(width);
                    for (out, &product) in out[first..first + count].iter_mut().zip(of_row) {
                        *out = product;
                    }
                }
            }
        }
    }

    /// `out.row(t)[i]` = row `i` · token `t`.
    pub fn by_token(
        &mut self,
        cpu: Cpu,
        dtype: DType,
        rows: &[u8],
        x: Inputs<'_>,
        out: &mut Columns<'_, f32>,
    ) {
        if x.tokens() == 1 {
            return one(cpu, dtype, rows, x, out.row_mut(0));
        }
        let scratch = room(self.scratch, scratch_len(x.n()));
        columns(cpu, dtype, rows, x, out, scratch);
    }
}

/// Products with one token.
fn one(cpu: Cpu, dtype: DType, rows: &[u8], x: Inputs<'_>, out: &mut [f32]) {
    let row = dtype.row_bytes(x.n());
    match x {
        Inputs::Quantized(x) => cpu.matvec_q(dtype, rows, row, x, out),
        Inputs::Floats { x, n } => cpu.matvec(dtype, rows, row, n, x, out),
    }
}

/// Products with several tokens.
fn columns(
    cpu: Cpu,
    dtype: DType,
    rows: &[u8],
    x: Inputs<'_>,
    out: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    let row = dtype.row_bytes(x.n());
    match x {
        Inputs::Quantized(x) => cpu.matmul_q(dtype, rows, row, x, out, scratch),
        Inputs::Floats { x, n } => cpu.matmul_columns(dtype, rows, row, n, x, out, scratch),
    }
}

#[cfg(test)]
mod tests {
    use emberflow_kernels::{Activations, quantize_row};
    use proptest::prelude::*;

    use super::*;

    fn numbers(seed: u64, len: usize) -> Vec<f32> {
        let mut rng = fastrand::Rng::with_seed(seed);
        (0..len).map(|_| rng.f32() * 2.0 - 1.0).collect()
    }

    proptest! {
            #![proptest_config(ProptestConfig::with_cases(64))]

            /// The number of tokens multiplied at once changes no bit.
            #[test]
            fn products_are_those_of_each_token(
                dtype in prop::sample::select(vec![DType::Q4, DType::Q8, DType::F16, DType::F32]),
                n in 1usize..200,
                rows in 1usize..70,
                tokens in 1usize..140,
                seed in any::<u64>(),
            ) {
                let (cpu, row) = (Cpu::detect(), dtype.row_bytes(n));
                let (x, weights) = (numbers(seed, tokens * n), numbers(!seed, rows * n));
                let mut bytes = vec![0; rows * row];
                for (bytes, weights) in bytes.chunks_exact_mut(row).zip(weights.chunks_exact(n)) {
                    let (quants, scales) = bytes.split_at_mut(dtype.quants_bytes(n));
                    quantize_row(dtype, weights, quants, scales).unwrap();
                }
                let mut quantized = Activations::with_capacity(n, tokens);
                cpu.quantize_activations(&x, tokens, &mut quantized);
                let input = if dtype.is_grouped() {
    Inputs::Quantized(quantized.all())
    } else {
    Inputs::Floats { x: &x, n }
    };
                let (mut by_row, mut by_token) = (vec![0.0; rows * tokens], vec![0.0; rows * tokens]);
                with_multiplier(|m| {
                    m.by_row(cpu, dtype, &bytes, input, &mut by_row);
                    m.by_token(cpu, dtype, &bytes, input, &mut Columns::new(&mut by_token, tokens, rows, rows));
                });
                let mut alone = vec![0.0; rows];
                for t in 0..tokens {
                    one(cpu, dtype, &bytes, input.range(t, 1), &mut alone);
                    for (i, expected) in alone.iter().enumerate() {
                        for found in [by_row[i * tokens + t], by_token[t * rows + i]] {
                            prop_assert_eq!(found.to_bits(), expected.to_bits(), "row {}, token {}", i, t);
                        }
                    }
                }
            }
        }

    /// A thread's buffers never exceed the budgeted bytes.
    #[test]
    fn memory_is_as_much_as_is_counted() {
        for (n, tokens) in [(32, 1), (96, 5), (2048, 200)] {
            let rows = DType::Q4.row_bytes(n) * ROWS;
            let mut quantized = Activations::with_capacity(n, tokens);
            Cpu::detect().quantize_activations(&vec![1.0; n * tokens], tokens, &mut quantized);
            let mut out = vec![0.0; ROWS * tokens];
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    with_rows(rows, |bytes, m| {
                        let x = Inputs::Quantized(quantized.all());
                        m.by_row(Cpu::detect(), DType::Q4, bytes, x, &mut out);
                    });
                    WORK.with_borrow(|work| {
                        let floats = work.scratch.capacity() + work.products.capacity();
                        let bytes = 4 * floats + work.rows.capacity();
                        assert!(bytes as u64 <= work_bytes(n), "{bytes} for {n}");
                    });
                });
            });
        }
    }
}
