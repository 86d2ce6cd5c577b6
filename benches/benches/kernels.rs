//! Float kernels per family, block format and instruction set. A kernel is bound by its throughput:
//! bytes read if memory is the limit, FLOPs (as elements) if arithmetic is, so criterion prints
//! GB/s or GFLOP/s with each time. `read` and `fma` are the bounds of this machine.

mod common;

use std::hint::black_box;

use common::{floats, measure};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use emberflow_kernels::{Cpu, DType, Isa, Row, Workers, quantize_row};

/// Width of a 7B model's residual stream.
const N: usize = 4096;

/// Rows that fit in a second-level cache in every format.
const ROWS: usize = 64;

/// Tokens of a prefill chunk.
const TOKENS: usize = 64;

const DTYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::Q8, DType::Q4];

/// The instruction sets that differ in their float kernels.
fn cpus() -> impl Iterator<Item = Cpu> {
    let isas = [Isa::Neon, Isa::Avx2, Isa::Avx512];
    isas.into_iter().filter_map(Cpu::with_isa)
}

fn row_bytes(dtype: DType) -> Vec<u8> {
    let mut quants = vec![0; dtype.quants_bytes(N)];
    let mut scales = vec![0; dtype.scales_bytes(N)];
    quantize_row(dtype, &floats(N), &mut quants, &mut scales).expect("finite values");
    quants.extend(scales);
    quants
}

/// A plain read of memory and of the cache, and independent fused multiply-adds.
fn bounds(c: &mut Criterion) {
    let memory = vec![1u8; 256 << 20];
    for cpu in cpus() {
        let mut group = c.benchmark_group(format!("bounds/{}", cpu.name()));
        for (name, bytes) in [
            ("read/memory", &memory[..]),
            ("read/16KiB", &memory[..16 << 10]),
        ] {
            measure(
                &mut group,
                name,
                Throughput::Bytes(bytes.len() as u64),
                || {
                    black_box(cpu.sum_bytes(black_box(bytes)));
                },
            );
        }
        // One group of columns for several tokens: all sums in registers.
        let rows = vec![Row::f32(&[1.0; 32]); ROWS];
        let (factors, mut ys) = (vec![1e-9; ROWS * 12], vec![0.0; 32 * 12]);
        let flops = Throughput::Elements(2 * 32 * (ROWS * 12) as u64);
        measure(&mut group, "fma", flops, || {
            cpu.axpy_rows_tokens(black_box(&factors), &rows, 12, &mut ys);
        });
        group.finish();
    }
}

/// Products and sums of rows, for one token and for many.
fn rows(c: &mut Criterion) {
    let (x, mut y) = (floats(N), vec![0.0; N]);
    let mut ys = vec![0.0; TOKENS * N];
    for cpu in cpus() {
        for dtype in DTYPES {
            let bytes = row_bytes(dtype).repeat(ROWS);
            let stored: Vec<Row<'_>> = bytes
                .chunks_exact(dtype.row_bytes(N))
                .map(|row| Row::inline(dtype, N, row))
                .collect();
            let mut group = c.benchmark_group(format!("rows/{}/{}", cpu.name(), dtype.name()));
            let all = Throughput::Bytes(bytes.len() as u64);
            measure(&mut group, "dot", all.clone(), || {
                for row in &stored {
                    black_box(cpu.dot(*row, black_box(&x)));
                }
            });
            let factors = vec![1e-9; ROWS * TOKENS];
            measure(&mut group, "axpy_rows", all, || {
                cpu.axpy_rows(black_box(&factors[..ROWS]), &stored, &mut y);
            });
            let flops = |count: usize| Throughput::Elements((2 * N * count) as u64);
            measure(&mut group, "axpy_rows_tokens", flops(ROWS * TOKENS), || {
                cpu.axpy_rows_tokens(black_box(&factors), &stored, TOKENS, &mut ys);
            });
            let sparse: Vec<f32> = (0..ROWS * TOKENS)
                .map(|i| if i * 7919 % 1009 < 101 { 1e-9 } else { 0.0 })
                .collect();
            let count = sparse.iter().filter(|a| **a != 0.0).count();
            measure(&mut group, "axpy_rows_tokens/10%", flops(count), || {
                cpu.axpy_rows_tokens(black_box(&sparse), &stored, TOKENS, &mut ys);
            });
            group.finish();
        }
    }
}

/// A block of keys and values of one head, from memory: decode with 4 queries per head, and
/// 16 queries of prefill.
fn attention(c: &mut Criterion) {
    const HEAD: usize = 128;
    const BLOCK: usize = 256;
    let block = BLOCK * HEAD * 2;
    let stored = vec![0x2cu8; 256 << 20];
    for cpu in cpus() {
        let mut group = c.benchmark_group(format!("attention/{}/f16", cpu.name()));
        for queries in [1, 4, 16] {
            let q = floats(queries * HEAD);
            let (mut scores, mut out) = (vec![0.0; queries * BLOCK], vec![0.0; queries * HEAD]);
            // the next block each time, so that every block comes from memory
            let mut blocks = stored.chunks_exact(block).cycle();
            let bytes = Throughput::Bytes(block as u64);
            let name = format!("key_scores/{queries}");
            measure(&mut group, &name, bytes.clone(), || {
                let keys = blocks.next().unwrap_or_default();
                cpu.key_scores(DType::F16, keys, HEAD, black_box(&q), &mut scores, BLOCK);
            });
            measure(&mut group, &format!("mix_values/{queries}"), bytes, || {
                let values = blocks.next().unwrap_or_default();
                cpu.mix_values(
                    DType::F16,
                    values,
                    HEAD,
                    black_box(&scores),
                    BLOCK,
                    &mut out,
                );
            });
        }
        group.finish();
    }
}

/// Norms, activations, and the steps after the logits.
fn elements(c: &mut Criterion) {
    const VOCAB: usize = 151_936;
    let x = floats(N);
    let (ones, mut y) = (vec![1.0; N], vec![0.0; N]);
    // distinct values in no order
    let logits: Vec<f32> = (0..VOCAB)
        .map(|i| (i * 7919 % VOCAB) as f32 / VOCAB as f32)
        .collect();
    let mut best = Vec::with_capacity(200);
    let (cos, sin) = (vec![0.6; 64], vec![0.8; 64]);
    for cpu in cpus() {
        let mut group = c.benchmark_group(format!("elements/{}", cpu.name()));
        let each = |n: usize| Throughput::Elements(n as u64);
        measure(&mut group, "rmsnorm", each(N), || {
            cpu.rmsnorm(black_box(&x), &ones, 1e-5, &mut y);
        });
        measure(&mut group, "rope", each(128), || {
            cpu.rope_rotate_half(black_box(&mut y[..128]), &cos, &sin);
        });
        type Kernel = fn(Cpu, &mut [f32]);
        let kernels: [(&str, Kernel); 4] = [
            ("softmax", Cpu::softmax),
            ("silu", Cpu::silu),
            ("gelu", Cpu::gelu),
            ("gelu_tanh", Cpu::gelu_tanh),
        ];
        for (name, kernel) in kernels {
            measure(&mut group, name, each(N), || {
                y.copy_from_slice(black_box(&x));
                kernel(cpu, &mut y);
            });
        }
        measure(&mut group, "argmax", each(VOCAB), || {
            black_box(cpu.argmax(black_box(&logits)));
        });
        measure(&mut group, "top_k/40", each(VOCAB), || {
            cpu.top_k(black_box(&logits), 40, &mut best);
        });
        group.finish();
    }
}

/// Cost of a parallel section.
fn workers(c: &mut Criterion) {
    let mut group = c.benchmark_group("workers");
    for threads in [2, 4] {
        let workers = Workers::new(threads, None);
        group.bench_function(format!("everyone/{threads}"), |b| {
            b.iter(|| workers.run(&|i| _ = black_box(i)));
        });
        group.bench_function(format!("2 items/{threads}"), |b| {
            b.iter(|| workers.for_each_chunk(2, &|_, i| _ = black_box(i)));
        });
    }
    group.finish();
}

criterion_group!(benches, bounds, rows, attention, elements, workers);
criterion_main!(benches);
