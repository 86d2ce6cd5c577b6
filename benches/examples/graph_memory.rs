//! Memory of an NPU's graphs on ONNX Runtime's CPU provider: shared by all layers of a model, beside a set for each layer.
//!
//! ```text
//! cargo run --release -p emberflow-benches --example graph_memory -- [LAYERS] [ELEMENTS OF A ROW]...
//! ```
//!
//! Default is the bundled model: 8 layers, rows of 320 elements.

use std::error::Error;

use emberflow_benches::bench::graph_memory::{Graphs, form, measure};
use emberflow_npu::{Form, Provider};

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Result<Vec<usize>, _> = std::env::args().skip(1).map(|arg| arg.parse()).collect();
    let numbers = numbers?;
    let layers = numbers.first().copied().unwrap_or(8);
    let forms: Vec<Form> = match numbers.get(1..).unwrap_or_default() {
        [] => vec![form(320)],
        rows => rows.iter().map(|&elements| form(elements)).collect(),
    };
    let found = measure(Provider::Cpu, &forms, layers)?;
    let line = |name: &str, of: Graphs| {
        println!(
            "{name:<15} {:>5} graphs {:>8.1} MiB {:>7.2} s",
            of.count,
            of.bytes as f64 / (1u32 << 20) as f64,
            of.seconds
        );
    };
    line("one set", found.shared);
    line("a set a layer", found.of_layers);
    println!("saved {:.1} %", 100.0 * found.saved());
    Ok(())
}
