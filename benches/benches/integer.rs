//! Integer kernels per format and instruction set: q4 and q8 rows times quantised activations,
//! compared with the f32 path and a plain read of the same memory.
//!
//! Criterion prints the bound's unit with each time: bytes of rows per second if memory is the
//! limit (one token), multiply-adds per second (as elements) if arithmetic is (many tokens).

mod common;

use std::{hint::black_box, time::Duration};

use common::{floats, measure};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use emberflow_kernels::{
    Activations, Columns, Cpu, DType, Isa, matmul_scratch, matmul_scratch_q, quantize_row,
};

/// Width of a 7B model's residual stream.
const N: usize = 4096;
/// Rows that fit in a second-level cache in both formats.
const ROWS: usize = 64;
/// Rows of a call, as in a cluster of neurons.
const CLUSTER: usize = 128;
/// Rows that do not fit in any cache but the largest ones.
const MEMORY: usize = 256 << 20;
const DTYPES: [DType; 3] = [DType::Q4, DType::Q4k, DType::Q8];

/// The instruction sets that differ in their integer kernels.
fn cpus() -> impl Iterator<Item = Cpu> {
    Isa::ALL
        .into_iter()
        .filter(|isa| ![Isa::Scalar, Isa::Avx512].contains(isa))
        .filter_map(Cpu::with_isa)
}

fn rows(dtype: DType, count: usize) -> Vec<u8> {
    let mut row = vec![0; dtype.row_bytes(N)];
    let (quants, scales) = row.split_at_mut(dtype.quants_bytes(N));
    quantize_row(dtype, &floats(N), quants, scales).expect("finite values");
    row.repeat(count)
}

fn short<'a>(c: &'a mut Criterion, name: String) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.sample_size(10);
    group.warm_up_time(Duration::from_millis(200));
    group.measurement_time(Duration::from_secs(1));
    group
}

/// One token: rows from memory and from the cache.
fn decode(c: &mut Criterion) {
    let x = floats(N);
    for dtype in DTYPES {
        let stride = dtype.row_bytes(N);
        let count = MEMORY / stride;
        let memory = rows(dtype, count);
        let mut y = vec![0.0; count];
        for cpu in cpus() {
            let mut quantised = Activations::default();
            cpu.quantize_activations(&x, 1, &mut quantised);
            let token = quantised.token(0);
            let mut group = short(c, format!("decode/{}/{dtype}", cpu.name()));
            let bytes = |rows: usize| Throughput::Bytes((rows * stride) as u64);
            measure(&mut group, "memory/read", bytes(count), || {
                black_box(cpu.sum_bytes(black_box(&memory)));
            });
            measure(&mut group, "memory/integer", bytes(count), || {
                cpu.matvec_q(dtype, &memory, stride, token, &mut y);
            });
            measure(&mut group, "memory/f32", bytes(count), || {
                cpu.matvec(dtype, &memory, stride, N, &x, &mut y);
            });
            // one of three rows, as gates are stored in bundles
            let gates = count / 3;
            measure(&mut group, "memory/strided", bytes(gates), || {
                cpu.matvec_q(dtype, &memory, 3 * stride, token, &mut y[..gates]);
            });
            measure(&mut group, "cache/integer", bytes(ROWS), || {
                cpu.matvec_q(dtype, &memory, stride, token, &mut y[..ROWS]);
            });
            measure(&mut group, "cache/f32", bytes(ROWS), || {
                cpu.matvec(dtype, &memory, stride, N, &x, &mut y[..ROWS]);
            });
            group.finish();
        }
    }
}

/// Rows from memory and a few tokens: several texts decode together. A pass costs as much as for
/// one token while memory is the limit.
fn several(c: &mut Criterion) {
    for dtype in DTYPES {
        let stride = dtype.row_bytes(N);
        let weights = rows(dtype, MEMORY / stride);
        // as many rows per call as a thread processes of a matrix
        let calls = MEMORY / stride / CLUSTER;
        for cpu in cpus() {
            let mut group = short(c, format!("several/{}/{dtype}", cpu.name()));
            for tokens in [1, 2, 3, 4, 6, 8, 12, 16] {
                let xs = floats(tokens * N);
                let mut quantised = Activations::default();
                cpu.quantize_activations(&xs, tokens, &mut quantised);
                let mut y = vec![0.0; tokens * CLUSTER];
                let mut scratch = vec![0.0; matmul_scratch_q(N)];
                let bytes = Throughput::Bytes((calls * CLUSTER * stride) as u64);
                measure(&mut group, &format!("memory/{tokens}"), bytes, || {
                    for call in weights.chunks_exact(CLUSTER * stride) {
                        let mut y = Columns::new(&mut y, tokens, CLUSTER, CLUSTER);
                        cpu.matmul_q(dtype, call, stride, quantised.all(), &mut y, &mut scratch);
                    }
                });
            }
            group.finish();
        }
    }
}

/// Many tokens.
fn prefill(c: &mut Criterion) {
    for dtype in DTYPES {
        let stride = dtype.row_bytes(N);
        let weights = rows(dtype, ROWS);
        for cpu in cpus() {
            let mut group = short(c, format!("prefill/{}/{dtype}", cpu.name()));
            for tokens in [2, 8, 64, 256] {
                let xs = floats(tokens * N);
                let mut quantised = Activations::default();
                cpu.quantize_activations(&xs, tokens, &mut quantised);
                let mut y = vec![0.0; tokens * ROWS];
                let mut scratch = vec![0.0; matmul_scratch(N).max(matmul_scratch_q(N))];
                let products = Throughput::Elements((tokens * ROWS * N) as u64);
                measure(
                    &mut group,
                    &format!("integer/{tokens}"),
                    products.clone(),
                    || {
                        let mut y = Columns::new(&mut y, tokens, ROWS, ROWS);
                        cpu.matmul_q(
                            dtype,
                            &weights,
                            stride,
                            quantised.all(),
                            &mut y,
                            &mut scratch,
                        );
                    },
                );
                let mut y = Columns::new(&mut y, tokens, ROWS, ROWS);
                measure(&mut group, &format!("f32/{tokens}"), products, || {
                    cpu.matmul_columns(dtype, &weights, stride, N, &xs, &mut y, &mut scratch);
                });
            }
            group.finish();
        }
    }
}

/// Cost of quantising activations to integers, once per token and input.
fn activations(c: &mut Criterion) {
    let x = floats(N);
    let mut quantised = Activations::default();
    let mut group = short(c, "quantize_activations".into());
    for cpu in cpus() {
        measure(
            &mut group,
            cpu.name(),
            Throughput::Elements(N as u64),
            || {
                cpu.quantize_activations(black_box(&x), 1, &mut quantised);
            },
        );
    }
    group.finish();
}

criterion_group!(benches, decode, several, prefill, activations);
criterion_main!(benches);
