//! Whether tokens are decoded faster without the devices: corrects their measured times by those of the run.
//!
//! What a device is to compute follows from times that were taken when the engine was opened, or in a run before. A device
//! that shares the cores of the compute threads, or their memory, slows them by more than these say. So the first decoding
//! passes run with and without devices in turn, and if they are faster without, devices have no part in the others:
//!
//! ```text
//! passes   │ first ones │ with │ without │ with │ without │ with │ without │ the faster way
//! counted                ·■■■    ·■■■      ·■■■    ·■■■      ·■■■   ·■■■
//! ```
//!
//! Only devices with the CPU's bits and the machine's memory take part in a trial: their clusters are computed from the same
//! bytes, and no text depends on the outcome. Those with a fixed share (`--device NAME=SIZE`) keep it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use serde::{Deserialize, Serialize};

use crate::in_use::InUse;

/// Passes that fill caches before any is counted.
const FIRST: usize = 4;
/// Passes in a row that run the same way. The first of them is not counted, as neurons change between device and CPU.
const BLOCK: usize = 4;
/// Most blocks of each way.
const ROUNDS: usize = 3;
/// Most counted passes of each way.
const COUNTED: usize = ROUNDS * (BLOCK - 1);
/// Numbers of rows with a trial each: 1, 2 to 3, 4 to 7, …
const CLASSES: usize = 8;

/// Decoding passes that are faster without devices.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Rows of a pass.
    pub rows: usize,
    /// Median of the passes with devices in milliseconds.
    pub with_ms: f64,
    /// Median of those without.
    pub without_ms: f64,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = if self.rows == 1 { "text" } else { "texts" };
        write!(
            f,
            "left out of decoding {} {texts}: {:.1} ms a pass without, {:.1} ms with",
            self.rows, self.without_ms, self.with_ms
        )
    }
}

/// Passes of a similar number of rows.
#[derive(Debug, Default)]
struct Trial {
    rows: usize,
    passes: usize,
    /// Seconds of counted passes, with and without devices.
    seconds: [ArrayVec<f64, COUNTED>; 2],
    ended: bool,
    left_out: Option<LeftOut>,
}

impl Trial {
    /// Whether the next pass runs without devices.
    fn is_without(&self) -> bool {
        match self.ended {
            true => self.left_out.is_some(),
            false => self.passes >= FIRST && (self.passes - FIRST) / BLOCK % 2 == 1,
        }
    }

    /// Counts a pass.
    fn passed(&mut self, rows: usize, time: Duration) {
        if self.ended {
            return;
        }
        if rows != self.rows {
            *self = Self {
                rows,
                ..Self::default()
            };
        }
        let without = self.is_without();
        self.passes += 1;
        let Some(counted) = self.passes.checked_sub(FIRST + 1) else {
            return;
        };
        if counted % BLOCK > 0 {
            // Full only once the trial has ended.
            let _ = self.seconds[usize::from(without)].try_push(time.as_secs_f64());
        }
        if (counted + 1).is_multiple_of(2 * BLOCK) {
            self.judge();
        }
    }

    /// Ends the trial if all passes of one way are faster than all of the other, or after the last block. Devices have no part
    /// if the median pass without them is faster than all with them: chance does not decide.
    fn judge(&mut self) {
        for seconds in &mut self.seconds {
            seconds.sort_unstable_by(f64::total_cmp);
        }
        let [with, without] = &self.seconds;
        let ends = [with, without].map(|all| [all.first(), all.last()].map(|s| *s.unwrap_or(&0.0)));
        let [[with_least, with_most], [without_least, without_most]] = ends;
        let clear = without_most < with_least || with_most < without_least;
        if !clear && with.len() < COUNTED {
            return;
        }
        self.ended = true;
        let [with, without] = [with, without].map(|all| all[all.len() / 2]);
        self.left_out = (without < with_least).then_some(LeftOut {
            rows: self.rows,
            with_ms: 1e3 * with,
            without_ms: 1e3 * without,
        });
    }
}

/// The trials of a run.
#[derive(Debug, Default)]
pub(crate) struct DeviceTrials {
    /// Whether there are devices that may be left out.
    allowed: bool,
    by_rows: [Trial; CLASSES],
}

impl DeviceTrials {
    /// Of devices that may be left out if no bit changes, the CPU has all bytes, and nobody has given them a size.
    pub fn of(devices: &[Arc<InUse>], has_size: bool) -> Self {
        let may = |device: &Arc<InUse>| device.verdict.same_bits && device.facts().unified;
        Self {
            allowed: !has_size && devices.iter().all(may),
            ..Self::default()
        }
    }

    fn class(rows: usize) -> usize {
        (rows.max(1).ilog2() as usize).min(CLASSES - 1)
    }

    /// Whether a decoding pass of `rows` rows runs without devices.
    pub fn is_without(&self, rows: usize) -> bool {
        self.allowed && self.by_rows[Self::class(rows)].is_without()
    }

    /// Counts a decoding pass of `rows` rows.
    pub fn passed(&mut self, rows: usize, time: Duration) {
        if self.allowed {
            self.by_rows[Self::class(rows)].passed(rows, time);
        }
    }

    /// The passes that run without devices.
    pub fn left_out(&self) -> Vec<LeftOut> {
        self.by_rows.iter().filter_map(|of| of.left_out).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How each pass ran, `w` with and `o` without devices. `ms`: milliseconds of a pass, by that and its number.
    fn run(
        trials: &mut DeviceTrials,
        rows: usize,
        passes: usize,
        ms: impl Fn(bool, usize) -> u64,
    ) -> String {
        let pass = |n| {
            let without = trials.is_without(rows);
            trials.passed(rows, Duration::from_millis(ms(without, n)));
            if without { 'o' } else { 'w' }
        };
        (0..passes).map(pass).collect()
    }

    fn trials() -> DeviceTrials {
        DeviceTrials {
            allowed: true,
            ..DeviceTrials::default()
        }
    }

    #[test]
    fn a_device_that_halves_the_speed_is_left_out_after_two_blocks() {
        let mut all = trials();
        // Passes that are not counted say the opposite.
        let ms = |without, n| match n % 4 {
            0 if n > 3 => [1, 1000][usize::from(without)],
            _ => [70, 38][usize::from(without)],
        };
        assert_eq!(run(&mut all, 1, 16, ms), "wwwwwwwwoooooooo");
        let left_out = LeftOut {
            rows: 1,
            with_ms: 70.0,
            without_ms: 38.0,
        };
        assert_eq!(all.left_out(), [left_out]);
        let words = "left out of decoding 1 text: 38.0 ms a pass without, 70.0 ms with";
        assert_eq!(left_out.to_string(), words);
        // Other numbers of rows have trials of their own.
        assert!(!all.is_without(2));
        assert_eq!(run(&mut all, 2, 16, |_, _| 50)[..9], *"wwwwwwwwo");
        assert_eq!(all.left_out(), [left_out]);
    }

    #[test]
    fn a_device_that_helps_stays() {
        let mut all = trials();
        let ms = |without, _| [30, 60][usize::from(without)];
        assert_eq!(run(&mut all, 1, 16, ms), "wwwwwwwwoooowwww");
        assert!(all.left_out().is_empty());
    }

    /// Medians decide where single passes do not, and a device that makes no difference stays.
    #[test]
    fn what_is_not_clear_takes_three_rounds() {
        let slower =
            |without: bool, n: usize| [60, 50][usize::from(without)] + 30 * u64::from(n == 9);
        let mut all = trials();
        assert_eq!(
            run(&mut all, 1, 30, slower),
            "wwwwwwwwoooowwwwoooowwwwoooooo"
        );
        assert_eq!(all.left_out()[0].without_ms, 50.0);
        let mut all = trials();
        assert_eq!(
            run(&mut all, 1, 30, |_, _| 60),
            "wwwwwwwwoooowwwwoooowwwwooooww"
        );
        assert!(all.left_out().is_empty());
    }

    #[test]
    fn a_trial_begins_again_with_other_rows() {
        let mut all = trials();
        let ms = |without, _| [60, 30][usize::from(without)];
        run(&mut all, 2, 10, ms);
        assert_eq!(run(&mut all, 3, 13, ms), "owwwwwwwooooo");
        assert_eq!(all.left_out()[0].rows, 3);
    }

    #[test]
    fn devices_that_must_stay_have_no_trial() {
        let mut all = DeviceTrials::default();
        assert_eq!(run(&mut all, 1, 12, |_, _| 60), "wwwwwwwwwwww");
    }
}
