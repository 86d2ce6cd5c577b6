//! Prints how fast the row kernels are, per format and instruction set, next to a plain
//! read of the same memory.
//!
//! `cargo run --release -p emberflow-kernels --example kernel_rates`; with `-- blocks` only the products of
//! matrices of blocks of GGUF files, beside those of the formats written here.

use std::{hint::black_box, time::Instant};

use emberflow_kernels::{
    Activations, Block, Columns, Cpu, DType, Row, Workers, matmul_scratch, matmul_scratch_q,
    with_scale_per_token,
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

/// Seconds of each kernel over cached rows of one format; `None` where it has no integer kernels.
struct Seconds {
    dot: f64,
    axpy: f64,
    sum: f64,
    dequantize: f64,
    matmul: f64,
    int_dot: Option<f64>,
    int_matmul: Option<f64>,
}

/// The inputs of all measurements.
struct Inputs {
    /// One token.
    x: Vec<f32>,
    /// [`TOKENS`] of them.
    xs: Vec<f32>,
}

fn measure(cpu: Cpu, dtype: DType, bytes: &[u8], inputs: &Inputs) -> Seconds {
    let (x, xs) = (&inputs.x, &inputs.xs);
    let row = dtype.row_bytes(N);
    let rows = |r: usize| Row::inline(dtype, N, &bytes[r * row..][..row]);
    let (mut y, mut out) = (vec![0.0f32; CACHED_ROWS], vec![0.0f32; N]);
    let mut many = vec![0.0f32; TOKENS * CACHED_ROWS];
    let mut scratch = vec![0.0f32; matmul_scratch(N).max(matmul_scratch_q(N))];
    let grouped = dtype.is_grouped();
    let mut q = Activations::default();
    let cpu = with_scale_per_token(cpu, dtype.is_per_channel());
    cpu.quantize_activations(xs, TOKENS, &mut q);
    Seconds {
        dot: seconds(|| cpu.matvec(dtype, bytes, row, N, black_box(x), black_box(&mut y))),
        axpy: seconds(|| {
            (0..CACHED_ROWS).for_each(|r| cpu.axpy(0.5, rows(r), black_box(&mut out)))
        }),
        sum: seconds(|| {
            let all: Vec<Row<'_>> = (0..CACHED_ROWS).map(rows).collect();
            cpu.sum_rows(&[0.5; CACHED_ROWS], &all, black_box(&mut out));
        }),
        dequantize: seconds(|| {
            (0..CACHED_ROWS).for_each(|r| cpu.dequantize(rows(r), black_box(&mut out)))
        }),
        matmul: seconds(|| {
            cpu.matmul(
                dtype,
                bytes,
                row,
                N,
                black_box(xs),
                TOKENS,
                &mut many,
                CACHED_ROWS,
                &mut scratch[..matmul_scratch(N)],
            );
        }),
        int_dot: grouped
            .then(|| seconds(|| cpu.matvec_q(dtype, bytes, row, q.token(0), black_box(&mut y)))),
        int_matmul: grouped.then(|| {
            seconds(|| {
                let mut y = Columns::new(&mut many, TOKENS, CACHED_ROWS, CACHED_ROWS);
                let scratch = &mut scratch[..matmul_scratch_q(N)];
                cpu.matmul_q(dtype, bytes, row, q.all(), &mut y, scratch);
            })
        }),
    }
}

/// Rows that fit in a private cache, per format and instruction set.
fn print_cached(inputs: &Inputs) {
    println!("{N} columns, {CACHED_ROWS} rows in cache; matmul with {TOKENS} tokens; 1 thread\n");
    println!(
        "{:14}{:6}{:>12}{:>12}{:>12}{:>12}{:>14}{:>12}{:>14}",
        "isa",
        "dtype",
        "dot GB/s",
        "axpy GB/s",
        "sum GB/s",
        "dequ GB/s",
        "matmul GF/s",
        "int dot",
        "int matmul"
    );
    let flops = (2 * TOKENS * CACHED_ROWS * N) as f64;
    for cpu in Cpu::all() {
        for dtype in DType::ALL {
            let bytes = weights(CACHED_ROWS * dtype.row_bytes(N));
            let gb = bytes.len() as f64 / 1e9;
            let s = measure(cpu, dtype, &bytes, inputs);
            print!(
                "{:14}{:6}{:12.1}{:12.1}{:12.1}{:12.1}{:14.1}",
                cpu.name(),
                dtype.name(),
                gb / s.dot,
                gb / s.axpy,
                gb / s.sum,
                gb / s.dequantize,
                flops / s.matmul / 1e9
            );
            if let (Some(dot), Some(matmul)) = (s.int_dot, s.int_matmul) {
                print!("{:12.1}{:14.1}", gb / dot, flops / matmul / 1e9);
            }
            println!();
        }
    }
}

/// Rows that come from memory, beside a plain read of the same bytes.
fn print_from_memory(x: &[f32]) {
    let cpu = Cpu::detect();
    let bytes = weights(256 << 20);
    let gb = bytes.len() as f64 / 1e9;
    let read = seconds(|| _ = black_box(sum_words(black_box(&bytes))));
    println!(
        "\n256 MiB from memory, 1 thread: plain read {:.1} GB/s",
        gb / read
    );
    for dtype in DType::ALL {
        let row = dtype.row_bytes(N);
        let mut y = vec![0.0f32; bytes.len() / row];
        let dot = seconds(|| cpu.matvec(dtype, &bytes, row, N, black_box(x), &mut y));
        let (isa, name) = (cpu.name(), dtype.name());
        print!("{isa:14}{name:6} dot {:.1} GB/s", gb / dot);
        if dtype.is_grouped() {
            let mut q = Activations::default();
            let cpu = with_scale_per_token(cpu, dtype.is_per_channel());
            cpu.quantize_activations(x, 1, &mut q);
            let dot = seconds(|| cpu.matvec_q(dtype, &bytes, row, q.token(0), &mut y));
            print!(", int dot {:.1} GB/s", gb / dot);
        }
        println!();
    }
}

/// Matrices of two shapes: one token from the last-level cache and from memory, then many tokens.
fn print_matrices() {
    let memory = weights(256 << 20);
    let gb = memory.len() as f64 / 1e9;
    let read = seconds(|| _ = black_box(sum_words(black_box(&memory))));
    println!("1 thread; plain read of 256 MiB {:.1} GB/s", gb / read);
    println!(
        "{:14}{:8}{:>13}{:>12}{:>12}{:>12}{:>12}{:>12}",
        "isa", "format", "rows × cols", "cache GB/s", "mem GB/s", "4 GF/s", "32 GF/s", "128 GF/s"
    );
    let own = [DType::Q8, DType::Q4, DType::Q4k, DType::Mxfp4].into_iter();
    let formats: Vec<DType> = own.chain(Block::ALL.map(DType::Block)).collect();
    for (rows, n) in [(8960, 1536), (1536, 8960)] {
        let xs: Vec<f32> = (0..128 * n).map(|i| (i as f32 * 0.3).sin()).collect();
        for cpu in Cpu::all().into_iter().skip(1) {
            let mut x = Activations::default();
            cpu.quantize_activations(&xs, 128, &mut x);
            for &dtype in &formats {
                let row = dtype.row_bytes(n);
                let mut y = vec![0.0f32; (memory.len() / row).max(128 * rows)];
                let one = |y: &mut [f32]| {
                    let s = seconds(|| cpu.matvec_q(dtype, &memory, row, x.token(0), y));
                    (y.len() * row) as f64 / s / 1e9
                };
                let (cached, from_memory) =
                    (one(&mut y[..rows]), one(&mut y[..memory.len() / row]));
                let mut scratch = vec![0.0; matmul_scratch_q(n)];
                let mut many = |tokens: usize| {
                    let s = seconds(|| {
                        let mut y = Columns::new(&mut y[..tokens * rows], tokens, rows, rows);
                        cpu.matmul_q(
                            dtype,
                            &memory,
                            row,
                            x.all().range(0, tokens),
                            &mut y,
                            &mut scratch,
                        );
                    });
                    (2 * tokens * rows * n) as f64 / s / 1e9
                };
                println!(
                    "{:14}{:8}{:>13}{:12.1}{:12.1}{:12.1}{:12.1}{:12.1}",
                    cpu.name(),
                    dtype.name(),
                    format!("{rows} × {n}"),
                    cached,
                    from_memory,
                    many(4),
                    many(32),
                    many(128)
                );
            }
        }
    }
}

/// Functions of single elements.
fn print_elementwise(x: &[f32]) {
    let cpu = Cpu::detect();
    let mut math = vec![0.0f32; N];
    let mut per_element = |name: &str, f: &dyn Fn(&mut [f32])| {
        let s = seconds(|| {
            math.copy_from_slice(x);
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
}

/// What handing work to threads costs.
fn print_empty_runs() {
    println!();
    for threads in [1, 2, 4] {
        let workers = Workers::new(threads, None);
        let s = seconds(|| (0..100).for_each(|_| workers.run(&|i| _ = black_box(i)))) / 100.0;
        println!("empty run with {threads} threads: {:.2} us", s * 1e6);
    }
}

fn main() {
    if std::env::args().any(|arg| arg == "blocks") {
        return print_matrices();
    }
    let inputs = Inputs {
        x: (0..N).map(|i| (i as f32 * 0.7).sin()).collect(),
        xs: (0..TOKENS * N).map(|i| (i as f32 * 0.3).sin()).collect(),
    };
    print_cached(&inputs);
    print_from_memory(&inputs.x);
    print_elementwise(&inputs.x);
    print_empty_runs();
}
