//! Prompts of a mixture of experts whose Gate and Up a device computes in groups: time, runs of graphs, padding and overflow by
//! the number of experts in a group, beside the CPU alone and the choice by measured times.
//!
//! ```text
//! cargo run --release -p emberflow-benches --example expert_groups -- [MODEL.ember] [CHUNK] [TOKENS]
//! ```

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use emberflow_devices::{Device, DeviceChoice, Grouping, OnDevices, Provider, device_report};
use emberflow_engine::{Budget, Engine, Lab, Logits, Model, Options, demo_container};
use emberflow_models::demo::Demo;

/// Timed runs of each; the fastest counts.
const RUNS: usize = 9;

/// Device memory for experts: all of them.
const HELD: u64 = 8 << 30;

struct Run {
    name: String,
    devices: Vec<Device>,
    grouping: Grouping,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let model = args.iter().find(|arg| arg.ends_with(".ember"));
    let numbers: Vec<usize> = args.iter().filter_map(|arg| arg.parse().ok()).collect();
    let chunk = numbers.first().copied().unwrap_or(256);
    let tokens = numbers.get(1).copied().unwrap_or(2 * chunk);
    let device = DeviceChoice::Npu(Provider::Cpu).open()?;
    let devices: Vec<Device> = device.into_iter().collect();
    let plain = Run {
        name: "the CPU".into(),
        devices: Vec::new(),
        grouping: Grouping::Measured,
    };
    let mut runs = vec![plain];
    for experts in [1, 4, 8, 16] {
        runs.push(Run {
            name: format!("groups of {experts}"),
            devices: devices.clone(),
            grouping: Grouping::All {
                experts,
                capacity: 0,
            },
        });
    }
    runs.push(Run {
        name: "by measured times".into(),
        devices,
        grouping: Grouping::Measured,
    });
    println!(
        "passes of {chunk}, {tokens} tokens; ms/token, by the CPU too; a pass: groups, runs of graphs; shares in %"
    );
    for run in &runs {
        println!("{}", measured(run, model.map(Path::new), [chunk, tokens])?);
    }
    Ok(())
}

/// The prompt of a run, the fastest of some times.
fn measured(
    run: &Run,
    model: Option<&Path>,
    [chunk, tokens]: [usize; 2],
) -> Result<String, Box<dyn Error>> {
    let model = match model {
        Some(path) => Model::load(path)?,
        None => Model::open(demo_container(Demo::Experts)?)?,
    };
    // Varied tokens of the model's own text, where it has one.
    let text = include_str!("../../models/demo/heldout.txt");
    let text: String = text.chars().take(12 * tokens).collect();
    let prompt: Vec<u32> = model
        .text()
        .encode(&text)?
        .into_iter()
        .take(tokens)
        .collect();
    let devices = OnDevices::new(run.devices.clone());
    let options = Options {
        budget: Budget::Bytes(1 << 40),
        context: tokens + 1,
        lane: devices.holding(HELD).grouping(run.grouping).lane(),
        lab: Lab {
            chunk,
            ..Lab::default()
        },
        ..Options::default()
    };
    let mut engine = Engine::open(model, options)?;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let mut sequence = engine.new_sequence()?;
        let start = Instant::now();
        for some in prompt.chunks(chunk) {
            engine.forward(&mut sequence, some, Logits::Last)?;
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    let ms = 1e3 * best / prompt.len() as f64;
    let passes = (RUNS * prompt.len().div_ceil(chunk)) as f64;
    let Some(work) = device_report(&engine).and_then(|device| device.experts) else {
        return Ok(format!("{:18} {ms:7.4}", run.name));
    };
    Ok(format!(
        "{:18} {ms:7.4}  groups {:6.1}  runs {:6.1}  padding {:5.1}  overflow {:5.1}  cold {:5.1}",
        run.name,
        work.groups as f64 / passes,
        work.graph_runs as f64 / passes,
        100.0 * work.padding_share,
        100.0 * work.overflow_share,
        100.0 * work.cold_share,
    ))
}
