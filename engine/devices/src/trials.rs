//! Whether passes are faster without the devices: corrects their measured times by those of the run.
//!
//! What a device is to compute follows from times that were taken when the engine was opened, or in a run before. A device
//! that shares the cores of the compute threads, or their memory, slows them by more than these say. So the first passes that
//! decode, and those with rows of prompts, run with and without devices in turn, and if they are faster without, devices have
//! no part in the others:
//!
//! ```text
//! passes   │ first ones │ with │ without │ with │ without │ with │ without │ the faster way
//! counted                ·■■■    ·■■■      ·■■■    ·■■■      ·■■■   ·■■■
//! ```
//!
//! Only devices with the CPU's bits and the machine's memory take part in a trial: their clusters are computed from the same
//! bytes, and no text depends on the outcome. Those with a fixed share (`--device NAME=SIZE`) keep it. Outcomes are saved with
//! the verdicts on devices, and later starts begin with them.

use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use emberflow_engine::lane::LanePass;

use crate::backend::Facts;
use crate::check::Verdicts;
use crate::in_use::InUse;
use crate::left_out::LeftOut;

/// Passes that fill caches before any is counted.
const FIRST: usize = 4;
/// Passes in a row that run the same way. The first of them is not counted, as neurons change between device and CPU.
const BLOCK: usize = 4;
/// Most blocks of each way.
const ROUNDS: usize = 3;
/// Most counted passes of each way.
const COUNTED: usize = ROUNDS * (BLOCK - 1);
/// Numbers of rows with a trial each: 1, 2 to 3, 4 to 7, … from 512 on.
const CLASSES: usize = 10;

/// Passes of a similar number of rows. Those of one number are compared. Others run as these do and do not count, unless they
/// come in its place.
#[derive(Debug, Default)]
struct Trial {
    rows: usize,
    passes: usize,
    /// Passes of other numbers since the last one that counted.
    others: usize,
    /// Seconds of counted passes, with and without devices.
    seconds: [ArrayVec<f64, COUNTED>; 2],
    ended: bool,
    left_out: Option<LeftOut>,
    /// Whether saved outcomes were asked for.
    asked: bool,
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
    fn passed(&mut self, pass: LanePass, time: Duration) {
        if self.ended {
            return;
        }
        if pass.rows != self.rows {
            self.others += 1;
            if self.passes > 0 && self.others <= BLOCK {
                return;
            }
            *self = Self {
                rows: pass.rows,
                asked: self.asked,
                ..Self::default()
            };
        }
        self.others = 0;
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
            self.judge(!pass.decodes);
        }
    }

    /// Ends the trial if all passes of one way are faster than all of the other, or after the last block. Devices have no part
    /// if the median pass without them is faster than all with them: chance does not decide.
    fn judge(&mut self, prompt: bool) {
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
            prompt,
            rows: self.rows,
            with_ms: 1e3 * with,
            without_ms: 1e3 * without,
        });
    }
}

/// Where outcomes are saved: with the verdicts on a device, by names of the model, its memory and the devices.
#[derive(Debug)]
struct Saved {
    verdicts: Verdicts,
    device: Facts,
    of: String,
}

impl Saved {
    /// The name of such passes.
    fn name(&self, kind: usize, class: usize) -> String {
        let what = ["decoding", "prompts"][kind];
        format!(
            "{what}, passes of {} rows and more; {}",
            1 << class,
            self.of
        )
    }
}

/// The trials of a run.
#[derive(Debug, Default)]
pub(crate) struct DeviceTrials {
    /// Whether there are devices that may be left out.
    allowed: bool,
    saved: Option<Saved>,
    /// Of passes that decode, and of those with prompts.
    by_rows: [[Trial; CLASSES]; 2],
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

    /// The trial of such passes.
    fn of_pass(pass: LanePass) -> [usize; 2] {
        let class = pass.rows.max(1).ilog2() as usize;
        [usize::from(!pass.decodes), class.min(CLASSES - 1)]
    }

    /// Saves outcomes from now on, of the model and memory that `of` names, and begins with the saved ones.
    pub fn save_to(&mut self, verdicts: &Verdicts, devices: &[Arc<InUse>], of: &str) {
        let names: Vec<&str> = devices.iter().map(|of| &*of.facts().name).collect();
        self.saved = devices.first().map(|device| Saved {
            verdicts: verdicts.clone(),
            device: device.facts().clone(),
            of: format!("{of}; with {}", names.join(", ")),
        });
    }

    /// Begins a pass: whether it runs without devices.
    pub fn begin(&mut self, pass: LanePass) -> bool {
        let [kind, class] = Self::of_pass(pass);
        let trial = &mut self.by_rows[kind][class];
        if let (true, Some(saved)) = (self.allowed && !trial.asked, &self.saved) {
            trial.asked = true;
            let name = saved.name(kind, class);
            if let Some(found) = saved.verdicts.trial_before(&saved.device, &name) {
                (trial.ended, trial.left_out) = (true, found);
            }
        }
        self.is_without(pass)
    }

    /// Whether a pass runs without devices.
    pub fn is_without(&self, pass: LanePass) -> bool {
        let [kind, class] = Self::of_pass(pass);
        self.allowed && self.by_rows[kind][class].is_without()
    }

    /// Counts a pass.
    pub fn passed(&mut self, pass: LanePass, time: Duration) {
        let [kind, class] = Self::of_pass(pass);
        let trial = &mut self.by_rows[kind][class];
        if !self.allowed || trial.ended {
            return;
        }
        trial.passed(pass, time);
        if let (true, Some(saved)) = (trial.ended, &self.saved) {
            let (device, name) = (&saved.device, saved.name(kind, class));
            saved.verdicts.save_trial(device, &name, trial.left_out);
        }
    }

    /// The passes that run without devices.
    pub fn left_out(&self) -> Vec<LeftOut> {
        let all = self.by_rows.iter().flatten();
        all.filter_map(|of| of.left_out).collect()
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
        let pass = LanePass {
            rows,
            decodes: true,
        };
        run_of(trials, (0..passes).map(|_| pass), ms)
    }

    fn run_of(
        trials: &mut DeviceTrials,
        passes: impl Iterator<Item = LanePass>,
        ms: impl Fn(bool, usize) -> u64,
    ) -> String {
        let run = |(n, pass)| {
            let without = trials.is_without(pass);
            trials.passed(pass, Duration::from_millis(ms(without, n)));
            if without { 'o' } else { 'w' }
        };
        passes.enumerate().map(run).collect()
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
            prompt: false,
            rows: 1,
            with_ms: 70.0,
            without_ms: 38.0,
        };
        assert_eq!(all.left_out(), [left_out]);
        let words = "left out of decoding 1 text: 38.0 ms a pass without, 70.0 ms with";
        assert_eq!(left_out.to_string(), words);
        // Other numbers of rows have trials of their own.
        let of_two = LanePass {
            rows: 2,
            decodes: true,
        };
        assert!(!all.is_without(of_two));
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
    fn a_trial_begins_again_if_other_rows_come_in_place_of_its_own() {
        let mut all = trials();
        let ms = |without, _| [60, 30][usize::from(without)];
        run(&mut all, 2, 10, ms);
        assert_eq!(run(&mut all, 3, 17, ms), "ooooowwwwwwwooooo");
        assert_eq!(all.left_out()[0].rows, 3);
    }

    /// Texts come and go: passes of two and three rows in turn end the trial as those of two alone do.
    #[test]
    fn other_rows_between_its_own_do_not_end_a_trial() {
        let mut all = trials();
        let ms = |without, n: usize| [60, 30][usize::from(without)] + 10 * (n as u64 % 2);
        let passes = (0..26).map(|n| LanePass {
            rows: 2 + n % 2,
            decodes: true,
        });
        let ran = run_of(&mut all, passes, ms);
        assert_eq!(ran, "wwwwwwwwwwwwwwwooooooooooo");
        let left_out = all.left_out();
        assert_eq!(left_out.len(), 1);
        assert_eq!((left_out[0].rows, left_out[0].with_ms), (2, 60.0));
    }

    /// By the same rule, apart from passes that decode. The last piece of a prompt is shorter.
    #[test]
    fn prompts_are_judged_too() {
        let mut all = trials();
        let pieces = [512, 512, 512, 300].into_iter().cycle();
        let passes = |rows| LanePass {
            rows,
            decodes: false,
        };
        let ms = |without, _| [900, 400][usize::from(without)];
        run_of(&mut all, pieces.map(passes).take(16), ms);
        let left_out = all.left_out();
        let words =
            "left out of prompts in passes of 512 rows: 400.0 ms a pass without, 900.0 ms with";
        assert_eq!(left_out[0].to_string(), words);
        assert_eq!(left_out.len(), 1);
        assert!(all.is_without(passes(600)));
        assert!(!all.is_without(LanePass {
            rows: 512,
            decodes: true,
        }));
    }

    #[test]
    fn devices_that_must_stay_have_no_trial() {
        let mut all = DeviceTrials::default();
        assert_eq!(run(&mut all, 1, 12, |_, _| 60), "wwwwwwwwwwww");
    }
}
