//! Whether next tokens are faster where a device computes neurons and products: measured in their first passes, because
//! forecasts can be wrong.
//!
//! For each number of rows passes are computed in turns with the device and without it, and the faster way stays. Only
//! where the CPU can read what the device holds and has its bits, so that no text depends on it, and where
//! `device_memory` does not ask for the device. Attention is not part of it: it has times by positions of its own.

use std::sync::Arc;

use serde::Serialize;

use crate::device::InUse;
use crate::options::Options;

/// Passes each way, of which the fastest counts; those that are enough where one way is clearly slower; and those before,
/// which may still fill caches.
const TRIALS: u32 = 6;
const ENOUGH: u32 = 3;
const FIRST: u32 = 2;

/// How many times as long the slower way takes, where that is clear.
const CLEAR: f64 = 1.1;

/// Most rows.
const ROWS: usize = 8;

/// What passes of some rows took: with the device, and without it.
#[derive(Debug, Clone, Copy)]
struct Tried {
    count: [u32; 2],
    best: [f64; 2],
}

/// Times of next tokens with a device and without it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NextTokens {
    /// Rows of a pass: a text's next token each.
    pub rows: usize,
    /// Milliseconds of the fastest pass with the device.
    pub with_ms: f64,
    /// The same without it.
    pub without_ms: f64,
    /// Whether such passes use it.
    pub used: bool,
}

/// See the module.
pub(crate) struct Trial {
    device: Arc<InUse>,
    by_rows: [Tried; ROWS],
    passes: u32,
}

impl Trial {
    /// Where nobody asked for the device, and the CPU can do without.
    pub fn new(device: &Arc<InUse>, options: &Options) -> Option<Self> {
        let asked = options.device_memory.is_some();
        let can = device.same_bits() && device.dense().facts().unified;
        let none = Tried {
            count: [0; 2],
            best: [f64::INFINITY; 2],
        };
        (can && !asked).then(|| Self {
            device: Arc::clone(device),
            by_rows: [none; ROWS],
            passes: 0,
        })
    }

    /// Begins a pass of so many next tokens, or another pass if `None`. Whether its time is to be taken.
    pub fn begin(&mut self, rows: Option<usize>) -> bool {
        let tried = rows.and_then(|rows| self.by_rows.get(rows.checked_sub(1)?));
        let (without, timed) = match tried {
            None => (false, false),
            Some(tried) => match tried.is_decided() {
                true => (!tried.used(), false),
                false => (tried.count[1] < tried.count[0], true),
            },
        };
        self.device.rest(without);
        self.passes = self.passes.saturating_add(timed.into());
        timed && self.passes > FIRST
    }

    /// Takes note of how many seconds a pass took whose time is taken.
    pub fn end(&mut self, rows: usize, seconds: f64) {
        let way = usize::from(self.device.rests());
        if let Some(tried) = rows.checked_sub(1).and_then(|i| self.by_rows.get_mut(i)) {
            tried.count[way] += 1;
            tried.best[way] = tried.best[way].min(seconds);
        }
    }

    /// What is known.
    pub fn found(&self) -> Vec<NextTokens> {
        let known = self.by_rows.iter().enumerate();
        let known = known.filter(|(_, tried)| tried.is_decided());
        let of = |(i, tried): (usize, &Tried)| NextTokens {
            rows: i + 1,
            with_ms: 1e3 * tried.best[0],
            without_ms: 1e3 * tried.best[1],
            used: tried.used(),
        };
        known.map(of).collect()
    }
}

impl Tried {
    fn is_decided(&self) -> bool {
        let ([a, b], [with, without]) = (self.count, self.best);
        let clear = with > CLEAR * without || without > CLEAR * with;
        a.min(b) >= if clear { ENOUGH } else { TRIALS }
    }

    fn used(&self) -> bool {
        self.best[0] <= self.best[1]
    }
}
