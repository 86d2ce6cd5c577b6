//! Cost of a change of the number of live texts: the hot cut follows it, pass by pass. Compares the passes just
//! after a change with the mean of all passes with the same number of texts.
//!
//! ```text
//! cargo run --release -p emberflow-benches --example swap -- MODEL.ember [SHARE] [DEVICE]
//! ```
//!
//! With `SWAP_PASSES` set it prints each pass.

use std::time::Instant;

use std::error::Error;

use emberflow_devices::{DeviceChoice, OnDevices, device_report};
use emberflow_engine::{Budget, Engine, Lab, Logits, Model, Options, Sequence, Span};

/// Numbers of live texts, alternating.
const LIVE: [usize; 2] = [1, 4];
/// Passes with the same number of texts, and those of them that count as just after a change.
const PASSES: usize = 32;
const AFTER: usize = 8;
/// Repetitions of both; the first is the warm-up.
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args
        .next()
        .ok_or("usage: swap MODEL.ember [SHARE] [DEVICE]")?;
    let share: f64 = args.next().map_or(Ok(0.5), |share| share.parse())?;
    let name = args.next().unwrap_or_else(|| "none".into());
    let choice: DeviceChoice = name.parse()?;
    let io = if name.starts_with("sim:") {
        "sim:ufs4"
    } else {
        "auto"
    };
    let options = Options {
        budget: Budget::FfnShare(share),
        context: PASSES * ROUNDS * LIVE.len() + 16,
        batch: LIVE[1],
        lane: OnDevices::new(choice.open()?.into_iter().collect()).lane(),
        lab: Lab {
            io: io.parse()?,
            ..Lab::default()
        },
        ..Options::default()
    };
    let mut engine = Engine::open(Model::load(&path)?, options)?;
    let new = |engine: &mut Engine| engine.new_sequence();
    let mut texts = (0..LIVE[1])
        .map(|_| new(&mut engine))
        .collect::<Result<Vec<Sequence>, _>>()?;
    let times = rounds(&mut engine, &mut texts)?;
    if let Some(device) = device_report(&engine) {
        println!("{}: {} clusters", device.name, device.clusters);
    }
    LIVE.into_iter().for_each(|live| show(&times, live));
    Ok(())
}

/// Milliseconds of the passes, by round and by number of live texts.
type Times = Vec<(usize, Vec<f64>)>;

/// All rounds.
fn rounds(engine: &mut Engine, texts: &mut [Sequence]) -> Result<Times, Box<dyn Error>> {
    let verbose = std::env::var_os("SWAP_PASSES").is_some();
    let mut times = Vec::new();
    for (round, live) in (0..ROUNDS).flat_map(|round| LIVE.map(|live| (round, live))) {
        engine.set_batch(live)?;
        let mut passes = Vec::new();
        for i in 0..PASSES {
            let token = 40 + ((round * PASSES + i) * 31 % 900) as u32;
            let before = engine.counters();
            let ms = pass(engine, &mut texts[..live], token)?;
            let did = engine.counters();
            if verbose {
                println!(
                    "round {round}, {live} live, pass {i}: {ms:.2} ms, {:.1} MB read, waited {:.2} ms",
                    (did.bytes_read - before.bytes_read) as f64 / 1e6,
                    (did.wait_ns - before.wait_ns) as f64 / 1e6
                );
            }
            passes.push(ms);
        }
        times.push((live, passes));
    }
    Ok(times)
}

/// Prints how the passes with `live` texts compare with their mean.
fn show(times: &Times, live: usize) {
    let of: Vec<&Vec<f64>> = (times.iter().skip(LIVE.len()))
        .filter(|of| of.0 == live)
        .map(|of| &of.1)
        .collect();
    let all = || of.iter().flat_map(|passes| passes.iter().copied());
    let mean = all().sum::<f64>() / all().count() as f64;
    let largest = |some: &mut dyn Iterator<Item = f64>| some.fold(0.0, f64::max) / mean;
    let after = largest(&mut of.iter().flat_map(|p| p[..AFTER].iter().copied()));
    let later = largest(&mut of.iter().flat_map(|p| p[AFTER..].iter().copied()));
    // The same pass after each of the changes, to separate the effect from chance.
    let typical = (0..AFTER).map(|i| {
        let mut each: Vec<f64> = of.iter().map(|passes| passes[i]).collect();
        each.sort_by(f64::total_cmp);
        each[each.len() / 2]
    });
    let typical = largest(&mut typical.into_iter());
    println!(
        "{live} live, {mean:.2} ms a pass; of the mean: the slowest of {AFTER} passes after a change {after:.2} \
         (median of the changes {typical:.2}), of the others {later:.2}"
    );
}

/// A pass of one token of each text, in milliseconds.
fn pass(engine: &mut Engine, texts: &mut [Sequence], token: u32) -> Result<f64, Box<dyn Error>> {
    let tokens: Vec<[u32; 1]> = (0..texts.len() as u32).map(|i| [token + i]).collect();
    let mut spans: Vec<Span<'_>> = (texts.iter_mut().zip(&tokens))
        .map(|(sequence, tokens)| Span { sequence, tokens })
        .collect();
    let start = Instant::now();
    engine.forward_batch(&mut spans, Logits::Last)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}
