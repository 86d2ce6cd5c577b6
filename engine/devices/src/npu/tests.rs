use emberflow_kernels::{Activations, quantize_row, with_scale_per_token};
use emberflow_models::config::{Activation, FfnKind};

use super::*;
use crate::{DenseShape, ProductRoom, Room};

#[test]
fn tokens_at_once_fit_their_bytes() {
    for (n, expected) in [(8192, 256), (4000, 512), (8193, 255), (TOKEN_BYTES, 1)] {
        assert_eq!(tokens_at_once(n), expected, "{n}");
        assert!(expected * n.next_multiple_of(emberflow_kernels::GROUP) <= TOKEN_BYTES);
    }
    assert!(tokens_at_once(0) > 0 && tokens_at_once(2 * TOKEN_BYTES) == 1);
}

/// Graphs on ONNX Runtime's own kernels.
fn opened() -> Option<npu::Npu> {
    let opened = npu::Npu::open(Provider::Cpu);
    let needed = std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some();
    assert!(opened.is_ok() || !needed, "ONNX Runtime is missing");
    opened.ok()
}

/// A batch whose size changes from token to token, with room for it, runs graphs that are ready.
#[test]
fn a_batch_that_changes_its_size_compiles_nothing() {
    const N: usize = 96;
    const ROWS: usize = 200;
    let Some(opened) = opened() else { return };
    let mut graphs = Graphs::of(opened);
    let dtype = DType::Q8;
    let kind = FfnKind {
        activation: Activation::Relu,
        relu_on_up: false,
        ungated: false,
    };
    let of_open = [
        Program::Ffn(DenseShape { dtype, d: N, kind }),
        Program::Products { dtype, cols: N },
        Program::Products { dtype, cols: 2 * N },
    ];
    of_open.iter().for_each(|of| graphs.prepare(of).unwrap());
    let compiled = graphs.npu.compiled();
    // Two widths of rows, of each a graph for each number of tokens at least.
    assert!(compiled >= 2 * npu::WIDTHS.len() as u64);
    let bytes = vec![1; ROWS * dtype.row_bytes(2 * N)];
    let cpu = Cpu::detect();
    for tokens in [1, 3, 1, 40, 2, 130, 300, 32, 257, 1] {
        let room = Room {
            rows: tokens,
            clusters: 2,
            pairs: 2 * tokens,
        };
        graphs.prepare(&Program::Room(room)).unwrap();
        let room = ProductRoom {
            input: tokens * 2 * N,
            results: tokens * ROWS,
        };
        graphs.prepare(&Program::ProductRoom(room)).unwrap();
        for n in [N, 2 * N] {
            let mut quantized = Activations::default();
            cpu.quantize_activations(&vec![1.0; tokens * n], tokens, &mut quantized);
            let of = Multiplied {
                dtype,
                bytes: &bytes[..ROWS * dtype.row_bytes(n)],
                x: quantized.all(),
            };
            let (before, mut seen) = (graphs.npu.runs(), 0);
            graphs.multiply(&of, |_, _, _| seen += 1).unwrap();
            assert_eq!(seen, ROWS * tokens);
            assert!(graphs.npu.runs() > before);
            assert_eq!(graphs.npu.compiled(), compiled, "{tokens} tokens");
        }
    }
}

/// Rows of which each has its outliers in channels of its own, a few beyond the row.
#[test]
fn rows_with_other_outliers_need_no_runs_of_their_own() {
    const N: usize = 300;
    const ROWS: usize = 40;
    const TOKENS: usize = 3;
    let Some(opened) = opened() else { return };
    let mut random = fastrand::Rng::with_seed(5);
    let (dtype, len) = (DType::Q4c, DType::Q4c.row_bytes(N));
    let mut bytes = vec![0; ROWS * len];
    for row in bytes.chunks_exact_mut(len) {
        let weights: Vec<f32> = (0..N).map(|_| random.f32() - 0.5).collect();
        let (quants, scales) = row.split_at_mut(dtype.quants_bytes(N));
        quantize_row(dtype, &weights, quants, scales).unwrap();
    }
    bytes[7 * len - 2..7 * len].fill(0xff);
    let cpu = with_scale_per_token(Cpu::detect(), true);
    let mut x: Vec<f32> = (0..TOKENS * N).map(|_| random.f32() - 0.5).collect();
    x.iter_mut().step_by(97).for_each(|x| *x *= 40.0);
    let mut quantized = Activations::default();
    cpu.quantize_activations(&x, TOKENS, &mut quantized);
    let of = Multiplied {
        dtype,
        bytes: &bytes,
        x: quantized.all(),
    };
    let channels = |row| Outliers::of(of.row(row)).channels;
    assert!((1..ROWS).all(|row| channels(row) != channels(0)));
    let mut graphs = Graphs::of(opened);
    let program = Program::Products { dtype, cols: N };
    graphs.prepare(&program).unwrap();
    let mut seen = 0;
    let compare = |row, token, product: f32| {
        let expected = cpu.dot_q(of.row(row), of.x.range(token, 1));
        assert_eq!(product.to_bits(), expected.to_bits(), "{row} {token}");
        seen += 1;
    };
    graphs.multiply(&of, compare).unwrap();
    assert_eq!(seen, ROWS * TOKENS);
    assert!(graphs.npu.runs() <= TOKENS as u64, "{}", graphs.npu.runs());
}
