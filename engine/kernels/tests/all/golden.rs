//! One number for all machines: a hash over the results of every kernel.
//!
//! The oracle of the other tests is compiled for the same machine as the kernels. This
//! test also holds two architectures to each other.

use emberflow_kernels::{
    Activations, Columns, Cpu, DType, GROUP, LANES, Row, SuperBlock, math, matmul_scratch,
    matmul_scratch_q, quantize_row, store_q4k_row, with_scale_per_token,
};

/// Changes only when a kernel's definition changes, which changes every logits hash.
const EXPECTED: u64 = 0xa6f3_b556_81de_62be;

/// FNV-1a over the bits of the results.
struct Hash(u64);

impl Hash {
    fn add(&mut self, values: &[f32]) {
        for byte in values.iter().flat_map(|v| v.to_bits().to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

/// The formats that take any numbers.
fn rounded() -> impl Iterator<Item = DType> {
    DType::ALL
        .into_iter()
        .filter(|&dtype| !matches!(dtype, DType::Mxfp4 | DType::Q4k) && !dtype.is_per_channel())
}

#[test]
fn every_machine_computes_the_same() {
    // A length with a tail, more tokens than one tile, and numbers from integers alone.
    const N: usize = 5 * LANES + 37;
    const ROWS: usize = 9;
    const TOKENS: usize = 21;
    let number = |i: usize| ((i * 7919 + i * i * 31) % 20_011) as f32 / 4096.0 - 2.4;
    let xs: Vec<f32> = (0..TOKENS * N).map(number).collect();
    let weights: Vec<f32> = (0..ROWS * N).map(|i| number(3 * i + 1) / 16.0).collect();
    for cpu in Cpu::all() {
        let mut hash = Hash(0xcbf2_9ce4_8422_2325);
        for dtype in rounded() {
            let mut bytes = vec![0; ROWS * dtype.row_bytes(N)];
            for (row, src) in bytes
                .chunks_exact_mut(dtype.row_bytes(N))
                .zip(weights.chunks(N))
            {
                let (quants, scales) = row.split_at_mut(dtype.quants_bytes(N));
                quantize_row(dtype, src, quants, scales).unwrap();
            }
            let mut y = vec![0.0; TOKENS * ROWS];
            let mut scratch = vec![0.0; matmul_scratch(N)];
            let stride = dtype.row_bytes(N);
            cpu.matmul(
                dtype,
                &bytes,
                stride,
                N,
                &xs,
                TOKENS,
                &mut y,
                ROWS,
                &mut scratch,
            );
            hash.add(&y);
            let mut sum = xs[..N].to_vec();
            cpu.axpy(0.77, Row::inline(dtype, N, &bytes[..stride]), &mut sum);
            hash.add(&sum);
        }
        let mut apply = |f: &dyn Fn(&mut [f32])| {
            let mut y = xs[..N].to_vec();
            f(&mut y);
            hash.add(&y);
        };
        let angles = || (0..40).map(|i| i as f32 * 0.37);
        let cos: Vec<f32> = angles().map(libm::cosf).collect();
        let sin: Vec<f32> = angles().map(libm::sinf).collect();
        apply(&|y| cpu.rmsnorm_inplace(y, &weights[..N], 1e-5));
        apply(&|y| cpu.softmax(y));
        apply(&|y| cpu.silu(y));
        apply(&|y| cpu.gelu(y));
        apply(&|y| cpu.gelu_tanh(y));
        apply(&|y| cpu.rope_rotate_half(y, &cos, &sin));
        apply(&|y| y.iter_mut().for_each(|y| *y = math::exp(*y * 20.0)));
        assert_eq!(hash.0, EXPECTED, "{}: {:#x}", cpu.name(), hash.0);
    }
}

/// As [`EXPECTED`], for q4 and q8 rows with quantised activations.
const EXPECTED_INTEGER: u64 = 0xcbc7_386c_c050_dc84;

#[test]
fn every_machine_computes_the_same_integers() {
    // Two chunks and a short one with a tail, and more rows and tokens than one tile.
    const N: usize = 2 * 512 + 3 * 32 + 5;
    const ROWS: usize = 37;
    const TOKENS: usize = 21;
    let number = |i: usize| ((i * 7919 + i * i * 31) % 20_011) as f32 / 4096.0 - 2.4;
    let xs: Vec<f32> = (0..TOKENS * N).map(number).collect();
    for cpu in Cpu::all() {
        let mut hash = Hash(0xcbf2_9ce4_8422_2325);
        let mut x = Activations::default();
        cpu.quantize_activations(&xs, TOKENS, &mut x);
        for dtype in [DType::Q8, DType::Q4] {
            let stride = dtype.row_bytes(N);
            let mut bytes = vec![0; ROWS * stride];
            for (r, row) in bytes.chunks_exact_mut(stride).enumerate() {
                let src: Vec<f32> = (0..N).map(|i| number(3 * (r * N + i) + 1) / 16.0).collect();
                let (quants, scales) = row.split_at_mut(dtype.quants_bytes(N));
                quantize_row(dtype, &src, quants, scales).unwrap();
            }
            let mut y = vec![0.0; TOKENS * ROWS];
            let mut scratch = vec![0.0; matmul_scratch_q(N)];
            let mut columns = Columns::new(&mut y, TOKENS, ROWS, ROWS);
            cpu.matmul_q(dtype, &bytes, stride, x.all(), &mut columns, &mut scratch);
            hash.add(&y);
        }
        assert_eq!(hash.0, EXPECTED_INTEGER, "{}: {:#x}", cpu.name(), hash.0);
    }
}

/// As [`EXPECTED`], for sums of rows and attention.
const EXPECTED_SUMS: u64 = 0x4aaa_d38a_fe44_ed4d;

#[test]
fn every_machine_sums_rows_and_attends_alike() {
    const N: usize = 18 * GROUP + 21;
    const ROWS: usize = 70;
    const TOKENS: usize = 17;
    const HEAD: usize = 40;
    let number = |i: usize| ((i * 7919 + i * i * 31) % 20_011) as f32 / 4096.0 - 2.4;
    let numbers = |count: usize, step: usize| -> Vec<f32> {
        (0..count).map(|i| number(step * i + 1) / 16.0).collect()
    };
    for cpu in Cpu::all() {
        let mut hash = Hash(0xcbf2_9ce4_8422_2325);
        for dtype in rounded() {
            let mut bytes = vec![0; ROWS * dtype.row_bytes(N)];
            let rows = bytes.chunks_exact_mut(dtype.row_bytes(N));
            for (row, src) in rows.zip(numbers(ROWS * N, 3).chunks(N)) {
                let (quants, scales) = row.split_at_mut(dtype.quants_bytes(N));
                quantize_row(dtype, src, quants, scales).unwrap();
            }
            let rows = bytes.chunks_exact(dtype.row_bytes(N));
            let rows: Vec<Row<'_>> = rows.map(|row| Row::inline(dtype, N, row)).collect();
            let factors = numbers(ROWS * TOKENS, 5);
            let mut y = numbers(N, 7);
            cpu.axpy_rows(&factors[..ROWS], &rows, &mut y);
            hash.add(&y);
            let mut ys = numbers(TOKENS * N, 11);
            cpu.axpy_rows_tokens(&factors, &rows, TOKENS, &mut ys);
            hash.add(&ys);
            // Some factors are zero: each token has rows of its own.
            let sparse: Vec<f32> = factors.iter().map(|a| a.max(0.0)).collect();
            cpu.axpy_rows_tokens(&sparse, &rows, TOKENS, &mut ys);
            hash.add(&ys);
        }
        let halves = numbers(4 * GROUP * HEAD.next_multiple_of(GROUP), 13);
        let mut kv = vec![0; 2 * halves.len()];
        cpu.f32_to_f16_bytes(&halves, &mut kv);
        let (queries, positions) = (7, 4 * GROUP);
        let mut scores = vec![0.0; queries * positions];
        let keys = &kv[..2 * positions * HEAD];
        cpu.key_scores(
            DType::F16,
            keys,
            HEAD,
            &numbers(queries * HEAD, 17),
            &mut scores,
            positions,
        );
        hash.add(&scores);
        for scores in scores.chunks_exact_mut(positions) {
            let (max, sum) = cpu.exp_block(scores);
            hash.add(&[max, sum]);
        }
        let width = HEAD.next_multiple_of(GROUP);
        let mut mixes = vec![0.0; queries * width];
        cpu.mix_values(DType::F16, &kv, width, &scores, positions, &mut mixes);
        hash.add(&mixes);
        let (first, second) = mixes.split_at_mut(width);
        cpu.blend(0.3, first, 1.7, &second[..width]);
        hash.add(first);
        assert_eq!(hash.0, EXPECTED_SUMS, "{}: {:#x}", cpu.name(), hash.0);
    }
}

/// As [`EXPECTED`], for q4k rows with activations of both kinds.
const EXPECTED_Q4K: u64 = 0x5368_4c74_8d2a_3ce0;

#[test]
fn every_machine_computes_q4k_the_same() {
    const N: usize = 2 * 512 + 11 * 32 + 5;
    const ROWS: usize = 37;
    let stride = DType::Q4k.row_bytes(N);
    let mut bytes = vec![0; ROWS * stride];
    for (r, row) in bytes.chunks_exact_mut(stride).enumerate() {
        let quants: Vec<u8> = (0..N).map(|i| ((r * 31 + i * i * 7) % 16) as u8).collect();
        let block = |b: usize| SuperBlock {
            d: half::f16::from_f32(0.01 + b as f32 / 512.0).to_bits(),
            dmin: half::f16::from_f32(0.02 + r as f32 / 1024.0).to_bits(),
            scales: std::array::from_fn(|g| ((g * 13 + b * 5 + r) % 64) as u8),
            mins: std::array::from_fn(|g| ((g * 29 + b * 3 + r) % 64) as u8),
        };
        let blocks: Vec<_> = (0..N.div_ceil(8 * GROUP)).map(block).collect();
        store_q4k_row(&quants, &blocks, row);
    }
    for cpu in Cpu::all() {
        let hash = hash_of_rows(cpu, DType::Q4k, N, &bytes);
        assert_eq!(hash, EXPECTED_Q4K, "{}: {hash:#x}", cpu.name());
    }
}

/// As [`EXPECTED`], for rows with one scale, with activations of both kinds.
const EXPECTED_PER_CHANNEL: [u64; 2] = [0x062b_365f_0701_93bc, 0xaa0c_60c8_5021_da25];

#[test]
fn every_machine_computes_rows_with_one_scale_the_same() {
    const N: usize = 2 * 512 + 11 * 32 + 5;
    const ROWS: usize = 37;
    let number = |i: usize| ((i * 7919 + i * i * 31) % 20_011) as f32 / 4096.0 - 2.4;
    let rows = [DType::Q8c, DType::Q4c].map(|dtype| {
        let stride = dtype.row_bytes(N);
        let mut bytes = vec![0; ROWS * stride];
        for (r, row) in bytes.chunks_exact_mut(stride).enumerate() {
            let weights: Vec<f32> = (0..N).map(|i| number(3 * i + r * N)).collect();
            let (quants, scales) = row.split_at_mut(dtype.quants_bytes(N));
            quantize_row(dtype, &weights, quants, scales).unwrap();
        }
        (dtype, bytes)
    });
    for cpu in Cpu::all() {
        let found = (rows.each_ref()).map(|(dtype, bytes)| hash_of_rows(cpu, *dtype, N, bytes));
        assert_eq!(found, EXPECTED_PER_CHANNEL, "{}: {found:#x?}", cpu.name());
    }
}

/// The hash of what rows come to with activations of both kinds.
fn hash_of_rows(cpu: Cpu, dtype: DType, n: usize, bytes: &[u8]) -> u64 {
    const TOKENS: usize = 21;
    let number = |i: usize| ((i * 7919 + i * i * 31) % 20_011) as f32 / 4096.0 - 2.4;
    let mut xs: Vec<f32> = (0..TOKENS * n).map(number).collect();
    if dtype.is_per_channel() {
        // beyond the scale of their token
        xs.iter_mut().step_by(231).for_each(|x| *x *= 30.0);
    }
    let stride = dtype.row_bytes(n);
    let count = bytes.len() / stride;
    let row = |r: usize| Row::inline(dtype, n, &bytes[r * stride..(r + 1) * stride]);
    let mut hash = Hash(0xcbf2_9ce4_8422_2325);
    let cpu = with_scale_per_token(cpu, dtype.is_per_channel());
    let mut x = Activations::default();
    cpu.quantize_activations(&xs, TOKENS, &mut x);
    let mut y = vec![0.0; TOKENS * count];
    let mut scratch = vec![0.0; matmul_scratch_q(n)];
    let mut columns = Columns::new(&mut y, TOKENS, count, count);
    cpu.matmul_q(dtype, bytes, stride, x.all(), &mut columns, &mut scratch);
    hash.add(&y);
    let rows: Vec<_> = (0..count).map(row).collect();
    let factors: Vec<f32> = (0..count * TOKENS).map(|i| number(5 * i)).collect();
    let mut sums = xs.clone();
    cpu.axpy_rows_tokens(&factors, &rows, TOKENS, &mut sums);
    hash.add(&sums);
    cpu.axpy_rows(&factors[..count], &rows, &mut sums[..n]);
    cpu.dequantize(row(3), &mut sums[n..2 * n]);
    hash.add(&sums[..2 * n]);
    hash.add(&[cpu.dot(row(5), &xs[..n])]);
    hash.0
}
