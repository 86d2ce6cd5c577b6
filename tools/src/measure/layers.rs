//! Measures the fixed cost of a layer on a small model.

use std::time::Instant;

use emberflow_engine::planner::rates::Rates;
use emberflow_engine::{Budget, Engine, Logits, Model, Options, Probe, Sparsity};

use crate::Failure;

/// Warm-up tokens, and measured tokens.
const BEFORE: usize = 16;
const DECODED: usize = 64;

/// Measures the time of a layer beyond what `rates` explain. `open` opens a small model, which decodes entirely in
/// memory with each thread count; it is small so that the fixed cost dominates.
///
/// # Errors
/// The model cannot be opened or run.
pub fn layers(rates: &mut Rates, open: impl Fn() -> Result<Model, Failure>) -> Result<(), Failure> {
    for i in 0..rates.threads.len() {
        let options = Options {
            budget: Budget::FfnShare(1.0),
            threads: rates.threads[i].threads as usize,
            sparsity: Sparsity::Exact,
            context: BEFORE + DECODED,
            ..Options::default()
        };
        let mut engine = Engine::open(open()?, options)?;
        let layers = engine.config().layers;
        let expected = Probe::new(&mut engine).expected_with(rates)?;
        let mut sequence = engine.new_sequence()?;
        let vocab = engine.config().vocab;
        let mut times = Vec::with_capacity(DECODED);
        for position in 0..BEFORE + DECODED {
            let token = (position as u32 * 97 + 11) % vocab;
            let start = Instant::now();
            engine.forward(&mut sequence, &[token], Logits::Last)?;
            if position >= BEFORE {
                times.push(start.elapsed().as_nanos() as f64);
            }
        }
        times.sort_by(f64::total_cmp);
        let found = times[DECODED / 2];
        rates.threads[i].layer_ns = ((found - expected * 1e6) / f64::from(layers.max(1))).max(0.0);
    }
    Ok(())
}
