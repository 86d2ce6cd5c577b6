//! Row products and updates per block format and instruction set. The bound is
//! the bytes of the row, so criterion prints the throughput in bytes.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use emberflow_kernels::{Cpu, DType, Row, quantize_row};

/// Width of a 7B model's residual stream.
const N: usize = 4096;

const DTYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::Q8, DType::Q4];

fn row_bytes(dtype: DType) -> Vec<u8> {
    let values: Vec<f32> = (0..N)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0)
        .collect();
    let mut quants = vec![0; dtype.quants_bytes(N)];
    let mut scales = vec![0; dtype.scales_bytes(N)];
    quantize_row(dtype, &values, &mut quants, &mut scales).expect("finite values");
    quants.extend(scales);
    quants
}

fn rows(c: &mut Criterion) {
    let x: Vec<f32> = (0..N).map(|i| (i % 7) as f32 - 3.0).collect();
    for cpu in Cpu::all() {
        let mut group = c.benchmark_group(format!("dot/{}", cpu.name()));
        for dtype in DTYPES {
            let bytes = row_bytes(dtype);
            group.throughput(Throughput::Bytes(bytes.len() as u64));
            group.bench_function(BenchmarkId::from_parameter(dtype.name()), |b| {
                b.iter(|| cpu.dot(Row::inline(dtype, N, black_box(&bytes)), black_box(&x)));
            });
        }
        group.finish();
        let mut group = c.benchmark_group(format!("axpy/{}", cpu.name()));
        let mut y = vec![0.0; N];
        for dtype in DTYPES {
            let bytes = row_bytes(dtype);
            group.throughput(Throughput::Bytes(bytes.len() as u64));
            group.bench_function(BenchmarkId::from_parameter(dtype.name()), |b| {
                b.iter(|| cpu.axpy(1e-9, Row::inline(dtype, N, black_box(&bytes)), &mut y));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, rows);
criterion_main!(benches);
