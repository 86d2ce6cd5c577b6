//! The program's clock: the machine's, unless something is simulated.
//!
//! A simulated phone differs from this machine in two ways. Its other processors compute here, on the
//! CPU, while everybody else waits: [`pause`] stops the clock, so that this time is no part of the run.
//! And its CPU is faster or slower than the one here: [`set_rate`] lets the clock run at another speed,
//! so that what the compute threads do takes the phone's time. What is timed by [`Moment`]s, the
//! simulated disk included, is then that of one consistent phone.
//!
//! ```text
//! virtual now = virtual at the last change + rate · (real now − real at the last change)
//! ```

use std::ops::Sub;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Number of changes; odd while one is made. 0: the clock is the machine's.
static CHANGES: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds since the start at the last change: real, and of this clock.
static REAL: AtomicU64 = AtomicU64::new(0);
static VIRTUAL: AtomicU64 = AtomicU64::new(0);
/// Bits of its rate since then; 0.0 while it stands still.
static RATE: AtomicU64 = AtomicU64::new(1.0f64.to_bits());

/// What decides on the rate.
struct Wanted {
    /// When the clock runs.
    rate: f64,
    /// How many ask it to stand still.
    pauses: u32,
}

static WANTED: Mutex<Wanted> = Mutex::new(Wanted {
    rate: 1.0,
    pauses: 0,
});

fn wanted() -> MutexGuard<'static, Wanted> {
    WANTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nanoseconds of the machine's clock.
fn real() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds of this clock by the last change, at the machine's time that `at` gives.
fn since_last_change(at: impl Fn() -> u64) -> u64 {
    let [since, from] = [&REAL, &VIRTUAL].map(|part| part.load(Ordering::Acquire));
    let rate = f64::from_bits(RATE.load(Ordering::Acquire));
    from + (at().saturating_sub(since) as f64 * rate) as u64
}

/// A point in time of the program's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(u64);

impl Moment {
    /// The present.
    #[must_use]
    pub fn now() -> Self {
        loop {
            let before = CHANGES.load(Ordering::Acquire);
            let now = match before {
                0 => real(),
                _ => since_last_change(real),
            };
            fence(Ordering::SeqCst);
            if before.is_multiple_of(2) && CHANGES.load(Ordering::Acquire) == before {
                return Self(now);
            }
            std::hint::spin_loop();
        }
    }

    /// Time since then.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        Self::now() - self
    }
}

impl Sub for Moment {
    type Output = Duration;

    /// Zero if `other` is later.
    fn sub(self, other: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(other.0))
    }
}

/// How long this machine's clock takes for `time` of this one, while it runs.
#[must_use]
pub fn on_this_machine(time: Duration) -> Duration {
    time.div_f64(rate())
}

/// Seconds of this clock in a second of the machine's, while it runs.
#[must_use]
pub fn rate() -> f64 {
    wanted().rate
}

/// From now on `rate` seconds pass in a second of the machine's clock. Positive.
pub fn set_rate(rate: f64) {
    let mut wanted = wanted();
    wanted.rate = rate.max(1e-6);
    apply(&wanted);
}

/// Waits until `time` has passed since `start`, to the microsecond or so where the machine is idle.
pub fn wait_until(start: Moment, time: Duration) {
    loop {
        let left = on_this_machine(time.saturating_sub(start.elapsed()));
        match left {
            Duration::ZERO => return,
            left if left > SPIN => std::thread::sleep(left - SPIN),
            _ => std::hint::spin_loop(),
        }
    }
}

/// What sleeping is late by at most, mostly.
const SPIN: Duration = Duration::from_micros(100);

/// The clock stands still while this lives.
#[derive(Debug)]
pub struct Pause(());

/// Stops the clock.
#[must_use]
pub fn pause() -> Pause {
    let mut wanted = wanted();
    wanted.pauses += 1;
    apply(&wanted);
    Pause(())
}

impl Drop for Pause {
    fn drop(&mut self) {
        let mut wanted = wanted();
        wanted.pauses -= 1;
        apply(&wanted);
    }
}

/// Takes over what is wanted. Readers see all of it or nothing.
fn apply(wanted: &Wanted) {
    let rate = match wanted.pauses {
        0 => wanted.rate,
        _ => 0.0,
    };
    let changes = CHANGES.fetch_add(1, Ordering::AcqRel);
    // One time for both clocks, taken while no reader ends: none has seen a later one.
    fence(Ordering::SeqCst);
    let real = real();
    let now = match changes {
        0 => real,
        _ => since_last_change(|| real),
    };
    REAL.store(real, Ordering::Release);
    VIRTUAL.store(now, Ordering::Release);
    RATE.store(rate.to_bits(), Ordering::Release);
    CHANGES.fetch_add(1, Ordering::AcqRel);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread::sleep;

    use super::*;

    /// One test: the clock is the whole process's.
    #[test]
    fn pauses_are_left_out_other_rates_count_and_time_never_goes_back() {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut last = Moment::now();
                while !stop.load(Ordering::Relaxed) {
                    let now = Moment::now();
                    assert!(now >= last);
                    last = now;
                }
            });
            for _ in 0..100_000 {
                let before = Moment::now();
                drop(pause());
                assert!(Moment::now() >= before);
            }
            let (started, start) = (Instant::now(), Moment::now());
            for _ in 0..20 {
                let one = pause();
                let other = pause();
                let paused = Moment::now();
                drop(one);
                sleep(Duration::from_millis(5));
                assert_eq!(Moment::now(), paused);
                drop(other);
            }
            let (all, seen) = (started.elapsed(), start.elapsed());
            assert!(
                seen + Duration::from_millis(100) <= all,
                "{seen:?} of {all:?}"
            );
            set_rate(0.25);
            let (started, start) = (Instant::now(), Moment::now());
            wait_until(start, Duration::from_millis(10));
            let (all, seen) = (started.elapsed(), start.elapsed());
            assert!(seen >= Duration::from_millis(10) && all >= Duration::from_millis(40));
            assert!(seen <= all / 3, "{seen:?} of {all:?}");
            set_rate(1.0);
            stop.store(true, Ordering::Relaxed);
        });
    }
}
