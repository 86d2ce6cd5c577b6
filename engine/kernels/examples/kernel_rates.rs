//! Prints how fast the row kernels are, per format and instruction set, next to a plain
//! read of the same memory.
//!
//! `cargo run --release -p emberflow-kernels --example kernel_rates`

use std::{hint::black_box, time::Instant};

use emberflow_kernels::{
    Activations, Columns, Cpu, DType, Workers, matmul_scratch, matmul_scratch_q,
};

const N: usize = 4096;
/// Fits in a private cache, so that the kernel and not the memory is measured.
const CACHED_ROWS: usize = 64;
const TOKENS: usize = 64;

/// Seconds of one call: the best of many short windows, so that other programs on the
/// machine disturb the result little.
fn seconds(mut f: impl FnMut()) -> f64 {
    f();
    let mut best = f64::INFINITY;
    let all = Instant::now();
    while all.elapsed().as_secs_f64() < 0.2 {
        let (start, mut calls) = (Instant::now(), 0);
        while calls == 0 || start.elapsed().as_secs_f64() < 0.0003 {
            f();
            calls += 1;
        }
        best = best.min(start.elapsed().as_secs_f64() / f64::from(calls));
    }
    best
}

fn sum_words(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 16];
    for chunk in bytes.chunks_exact(128) {
        for (sum, word) in sums.iter_mut().zip(chunk.chunks_exact(8)) {
            *sum = sum.wrapping_add(u64::from_le_bytes(word.try_into().unwrap_or_default()));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Bytes that are ordinary numbers in every format (as f32 about 0.02).
fn weights(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| {
            if i % 2 == 0 {
                (i * 37 % 251) as u8
            } else {
                0x3c
            }
        })
        .collect()
}

fn main() {
    let x: Vec<f32> = (0..N).map(|i| (i as f32 * 0.7).sin()).collect();
    let xs: Vec<f32> = (0..TOKENS * N).map(|i| (i as f32 * 0.3).sin()).collect();
    let mut y = vec![0.0f32; CACHED_ROWS];
    println!("{N} columns, {CACHED_ROWS} rows in cache; matmul with {TOKENS} tokens; 1 thread\n");
    println!(
        "{:14}{:6}{:>12}{:>12}{:>12}{:>14}{:>12}{:>14}",
        "isa",
        "dtype",
        "dot GB/s",
        "axpy GB/s",
        "dequ GB/s",
        "matmul GF/s",
        "int dot",
        "int matmul"
    );
    for cpu in Cpu::all() {
        for dtype in DType::ALL {
            let row = dtype.row_bytes(N);
            let bytes = weights(CACHED_ROWS * row);
            let rows =
                |r: usize| emberflow_kernels::Row::inline(dtype, N, &bytes[r * row..][..row]);
            let gb = bytes.len() as f64 / 1e9;
            let dot =
                seconds(|| cpu.matvec(dtype, &bytes, row, N, black_box(&x), black_box(&mut y)));
            let mut out = vec![0.0f32; N];
            let axpy = seconds(|| {
                (0..CACHED_ROWS).for_each(|r| cpu.axpy(0.5, rows(r), black_box(&mut out)))
            });
            let dequantize = seconds(|| {
                (0..CACHED_ROWS).for_each(|r| cpu.dequantize(rows(r), black_box(&mut out)))
            });
            let mut many = vec![0.0f32; TOKENS * CACHED_ROWS];
            let mut scratch = vec![0.0f32; matmul_scratch(N)];
            let matmul = seconds(|| {
                cpu.matmul(
                    dtype,
                    &bytes,
                    row,
                    N,
                    black_box(&xs),
                    TOKENS,
                    &mut many,
                    CACHED_ROWS,
                    &mut scratch,
                );
            });
            let flops = (2 * TOKENS * CACHED_ROWS * N) as f64;
            print!(
                "{:14}{:6}{:12.1}{:12.1}{:12.1}{:14.1}",
                cpu.name(),
                dtype.name(),
                gb / dot,
                gb / axpy,
                gb / dequantize,
                flops / matmul / 1e9
            );
            if dtype.is_grouped() {
                let mut q = Activations::default();
                cpu.quantize_activations(&xs, TOKENS, &mut q);
                let token = q.token(0);
                let dot = seconds(|| cpu.matvec_q(dtype, &bytes, row, token, black_box(&mut y)));
                let mut scratch = vec![0.0f32; matmul_scratch_q(N)];
                let matmul = seconds(|| {
                    let mut y = Columns::new(&mut many, TOKENS, CACHED_ROWS, CACHED_ROWS);
                    cpu.matmul_q(dtype, &bytes, row, q.all(), &mut y, &mut scratch);
                });
                print!("{:12.1}{:14.1}", gb / dot, flops / matmul / 1e9);
            }
            println!();
        }
    }

    let cpu = Cpu::detect();
    let bytes = weights(256 << 20);
    let read = seconds(|| _ = black_box(sum_words(black_box(&bytes))));
    println!(
        "\n256 MiB from memory, 1 thread: plain read {:.1} GB/s",
        bytes.len() as f64 / read / 1e9
    );
    for dtype in DType::ALL {
        let row = dtype.row_bytes(N);
        let mut y = vec![0.0f32; bytes.len() / row];
        let dot = seconds(|| cpu.matvec(dtype, &bytes, row, N, black_box(&x), &mut y));
        print!(
            "{:14}{:6} dot {:.1} GB/s",
            cpu.name(),
            dtype.name(),
            bytes.len() as f64 / dot / 1e9
        );
        if dtype.is_grouped() {
            let mut q = Activations::default();
            cpu.quantize_activations(&x, 1, &mut q);
            let dot = seconds(|| cpu.matvec_q(dtype, &bytes, row, q.token(0), &mut y));
            print!(", int dot {:.1} GB/s", bytes.len() as f64 / dot / 1e9);
        }
        println!();
    }

    let mut math = vec![0.0f32; N];
    let mut per_element = |name: &str, f: &dyn Fn(&mut [f32])| {
        let s = seconds(|| {
            math.copy_from_slice(&x);
            f(black_box(&mut math));
        });
        println!("{name:10}{:8.2} ns per element", s * 1e9 / N as f64);
    };
    println!();
    let ones = vec![1.0f32; N];
    per_element("softmax", &|y| cpu.softmax(y));
    per_element("silu", &|y| cpu.silu(y));
    per_element("gelu", &|y| cpu.gelu(y));
    per_element("gelu_tanh", &|y| cpu.gelu_tanh(y));
    per_element("rmsnorm", &|y| cpu.rmsnorm_inplace(y, &ones, 1e-5));

    println!();
    for threads in [1, 2, 4] {
        let workers = Workers::new(threads, None);
        let s = seconds(|| (0..100).for_each(|_| workers.run(&|i| _ = black_box(i)))) / 100.0;
        println!("empty run with {threads} threads: {:.2} us", s * 1e6);
    }
}
