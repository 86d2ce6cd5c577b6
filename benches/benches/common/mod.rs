//! Code shared by the kernel benches.

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Throughput};

/// Numbers that every format stores without loss of their order.
pub fn floats(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0)
        .collect()
}

/// Measures `f`, with the bytes that it moves or the operations that it computes.
pub fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    throughput: Throughput,
    mut f: impl FnMut(),
) {
    group.throughput(throughput);
    group.bench_function(BenchmarkId::from_parameter(name), |b| b.iter(&mut f));
}
