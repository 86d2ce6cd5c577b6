//! The miss curve of drawn tokens, counted as `emberflow profile` counts a text's: by the engine's cache.

use emberflow::Failure;
use emberflow::cold::Cold;
use emberflow_engine::planner::Firing;
use emberflow_predictor::stats::Misses;
use emberflow_predictor::stats::misses::{SIZES, bin};
use emberflow_storage::cache::Key;

use super::token::draw;

/// Layers that are drawn: the others have misses like theirs.
const LAYERS: usize = 2;
/// Tokens that warm a cache up, and all.
const WARM: usize = 64;
const TOKENS: usize = 192;

/// The curve of a model whose neurons fire so often.
pub fn curve(firing: &Firing) -> Result<Misses, Failure> {
    let mut some = firing.clone();
    some.banks.truncate(LAYERS);
    let tokens = draw(&some, TOKENS, 2);
    let often: Vec<Vec<f64>> = (0..some.banks.len())
        .map(|bank| some.each(bank).collect())
        .collect();
    let class = |bank: usize, neuron: u32| bin(often[bank][neuron as usize]).round() as usize;
    let mut misses = Misses::default();
    for (bank, fired) in tokens[WARM..]
        .iter()
        .flat_map(|token| token.iter().enumerate())
    {
        fired
            .iter()
            .for_each(|&n| misses.needed[class(bank, n)] += 1);
    }
    let sizes: Vec<u32> = often.iter().map(|bank| bank.len() as u32).collect();
    let all: u32 = sizes.iter().sum();
    for (&share, missed) in SIZES.iter().zip(&mut misses.missed) {
        let slots = (share * f64::from(all)).round().max(1.0) as u64;
        let mut cold = Cold::new(slots, &sizes)?;
        let front = slots.div_ceil(sizes.len() as u64) as usize;
        for (bank, often) in often.iter().enumerate() {
            for (n, &often) in often.iter().enumerate() {
                let key = Key::new(bank as u32, n as u32);
                cold.set_prior(key, often);
                if n < front {
                    cold.fill(key);
                }
            }
        }
        for (number, token) in tokens.iter().enumerate() {
            for (bank, fired) in token.iter().enumerate() {
                cold.begin_layer(bank as u32);
                for &n in fired {
                    let found = cold.find(Key::new(bank as u32, n));
                    missed[class(bank, n)] += u64::from(!found && number >= WARM);
                }
                cold.end_layer();
            }
        }
    }
    Ok(misses)
}
