//! Cost of predicting a layer of a given shape, compared with reading its gate rows in q4.
//!
//! ```sh
//! cargo run --release -p emberflow-predictor --example predict_rates -- 4096 14336 2
//! ```
//!
//! Weights are random, since only the time counts. They cover many layers, more than the caches
//! hold, as in decoding.

use std::time::Instant;

use emberflow_kernels::{Activations, Compute, DType, Narrow, sign_bytes};
use emberflow_predictor::{
    CoarseGate, Features, LowRank, LowRankSpec, Predictor, RANGE, Reads, Shared, SharedBytes,
    SignBit, Thresholds,
};

/// Minimum bytes of weights of all layers together.
const BYTES: usize = 128 << 20;

fn main() {
    let mut numbers = std::env::args()
        .skip(1)
        .map(|a| a.parse().expect("a number"));
    let d: usize = numbers.next().unwrap_or(4096);
    let neurons: usize = numbers.next().unwrap_or(14336);
    let threads: usize = numbers.next().unwrap_or(2);
    let on = Compute::new(threads, None);
    let gates = neurons * DType::Q4.row_bytes(d);
    println!(
        "{d} × {neurons}, {} threads, {}; gate rows in q4: {:.1} MB per layer",
        on.threads(),
        on.cpu.name(),
        gates as f64 / 1e6
    );
    let mut random = fastrand::Rng::with_seed(1);
    let mut bytes = |len: usize| -> SharedBytes {
        // f16 scales stay finite
        let bytes = (0..len).map(|_| random.u8(..) & 0x3b);
        bytes.collect::<Vec<u8>>().into()
    };
    let thresholds = |bytes: SharedBytes| Thresholds::Each(bytes);
    let one = neurons * sign_bytes(d);
    let layers: Vec<Box<dyn Predictor>> = (0..BYTES.div_ceil(one))
        .map(|_| Box::new(SignBit::new(bytes(one), d, d as u32 / 2)) as Box<dyn Predictor>)
        .collect();
    measure("sign", &on, d, neurons, &layers, gates);
    drop(layers);
    for rank in [64, 128, 256, 512, 736] {
        let spec = LowRankSpec {
            d,
            neurons,
            rank,
            fc1: DType::Q4,
            fc2: DType::Q4,
            reads: Reads::Normed,
            relu: false,
        };
        let one = spec.fc1_bytes() + spec.fc2_bytes();
        let layers: Vec<Box<dyn Predictor>> = (0..BYTES.div_ceil(one))
            .map(|_| {
                let each = thresholds(bytes(2 * neurons));
                let (fc1, fc2) = (bytes(spec.fc1_bytes()), bytes(spec.fc2_bytes()));
                Box::new(LowRank::new(spec, fc1, fc2, each)) as Box<dyn Predictor>
            })
            .collect();
        let name = format!("rank {rank}");
        measure(&name, &on, d, neurons, &layers, gates);
    }
    for narrow in [Narrow::Two, Narrow::Three] {
        let one = neurons * narrow.row_bytes(d);
        let layers: Vec<Box<dyn Predictor>> = (0..BYTES.div_ceil(one))
            .map(|_| {
                let each = thresholds(bytes(2 * neurons));
                Box::new(CoarseGate::new(narrow, bytes(one), d, each)) as Box<dyn Predictor>
            })
            .collect();
        let name = format!("coarse, {narrow:?}");
        measure(&name, &on, d, neurons, &layers, gates);
    }
}

fn measure(
    name: &str,
    on: &Compute,
    d: usize,
    neurons: usize,
    layers: &[Box<dyn Predictor>],
    gates: usize,
) {
    let x: Vec<f32> = (0..d)
        .map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0)
        .collect();
    let mut quantized = Activations::default();
    on.cpu.quantize_activations(&x, 1, &mut quantized);
    let input = Features {
        normed: &x,
        quantized: quantized.all(),
        residual: &x,
    };
    let mut shared = Shared::new(layers[0].shape(), 1);
    let mut wanted = vec![0.0; neurons];
    let mut rounds: Vec<f64> = (0..9)
        .map(|_| {
            let start = Instant::now();
            for layer in layers {
                layer.prepare(on, input, &mut shared);
                let shared = &shared;
                on.workers
                    .for_each_part_mut(&mut wanted, RANGE, &|_, block, wanted| {
                        layer.predict(on.cpu, input, shared, block * RANGE, wanted);
                    });
            }
            start.elapsed().as_secs_f64() / layers.len() as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    let (seconds, bytes) = (rounds[rounds.len() / 2], layers[0].bytes() as f64);
    println!(
        "{name:<9} {:>8.2} MB per layer ({:>4.1} % of the gate rows), {:>8.0} us, {:>5.1} GB/s",
        bytes / 1e6,
        100.0 * bytes / gates as f64,
        seconds * 1e6,
        bytes / seconds / 1e9
    );
}
