//! How many rows a pass with prompts has while texts decode.
//!
//! A text that decodes has its next token after the pass, so a prompt's chunk of hundreds of rows makes it pause. The
//! chunk is then as long as the last pass says that it takes [`LONGEST_PAUSE`](crate::LONGEST_PAUSE), or the time in
//! which the pass reads its weights from storage, whichever is longer:
//!
//! ```text
//! compute │ row · rows ───────────────────▶│             rows = max(pause, reads) / row
//! storage │ reads, once for any number of rows ─────▶│
//! ```
//!
//! A shorter chunk would read the same bytes again for the rest of the prompt, while the threads wait. Below
//! [`FREE_ROWS`] it would do so from memory.
//!
//! No text depends on the chunk.

use std::time::Duration;

use super::spans::FREE_ROWS;

/// A pass that was not interrupted.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassTime {
    pub rows: usize,
    pub time: Duration,
    /// The part of it in which threads waited for storage.
    pub waited: Duration,
    /// Time in which storage read for it.
    pub read: Duration,
}

/// What the last pass with prompts took.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Seconds to compute a row, and to read the weights.
    last: Option<[f64; 2]>,
}

impl Pace {
    /// Counts a pass with prompts. Those of a few rows say little: a row in them takes longer.
    pub fn passed(&mut self, pass: PassTime) {
        if pass.rows < FREE_ROWS {
            return;
        }
        let computed = pass.time.saturating_sub(pass.waited).as_secs_f64();
        let read = pass.read.min(pass.time).as_secs_f64();
        self.last = Some([computed / pass.rows as f64, read]);
    }

    /// Rows that take `pause`, in multiples of [`FREE_ROWS`]; so many before any pass was counted.
    pub fn rows(&self, pause: Duration) -> usize {
        let Some([row, read]) = self.last else {
            return FREE_ROWS;
        };
        // Saturates where rows take no time.
        let rows = (pause.as_secs_f64().max(read) / row) as usize;
        (rows / FREE_ROWS).max(1).saturating_mul(FREE_ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::LONGEST_PAUSE;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// The rows after a pass of `rows` rows that took `time`, of it `waited`, and read for `read`, in milliseconds.
    fn after(rows: usize, time: u64, waited: u64, read: u64) -> usize {
        let mut pace = Pace::default();
        pace.passed(PassTime {
            rows,
            time: ms(time),
            waited: ms(waited),
            read: ms(read),
        });
        pace.rows(LONGEST_PAUSE)
    }

    #[test]
    fn a_pass_takes_half_a_second() {
        // 5 ms a row: 100 rows.
        assert_eq!(after(512, 2560, 0, 0), 96);
        assert_eq!(after(96, 480, 0, 0), 96, "and stays there");
        // 1 ms a row.
        assert_eq!(after(64, 64, 0, 0), 480);
        // 66 ms a row, on a loaded machine.
        assert_eq!(after(512, 34_000, 0, 0), FREE_ROWS);
    }

    /// With 2 s of reads and 5 ms a row, 400 rows are computed meanwhile, whatever the chunk was before.
    #[test]
    fn no_byte_is_read_more_often_than_the_threads_can_use_it() {
        let pass = |rows: u64| {
            let computed = 5 * rows;
            let time = computed.max(2000);
            after(rows as usize, time, time - computed, 2000)
        };
        assert_eq!([32, 100, 384, 512].map(pass), [384; 4]);
        // Shorter than the pause, reads do not matter.
        assert_eq!(after(512, 2560, 0, 300), 96);
        // A queue that is busy with other reads counts no longer than the pass.
        assert_eq!(after(512, 2560, 0, 9000), 512);
    }

    #[test]
    fn what_is_not_known_is_tried_with_few_rows() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows(LONGEST_PAUSE), FREE_ROWS);
        let pass = |rows, time| PassTime {
            rows,
            time: ms(time),
            waited: ms(0),
            read: ms(0),
        };
        pace.passed(pass(FREE_ROWS - 1, 1));
        assert_eq!(pace.rows(LONGEST_PAUSE), FREE_ROWS);
        pace.passed(pass(FREE_ROWS, 0));
        assert!(pace.rows(LONGEST_PAUSE) > 1 << 40, "rows take no time");
        assert_eq!(pace.rows(Duration::MAX) % FREE_ROWS, 0);
    }
}
