//! Times of passes on this machine: decoding texts, with and without prompt rows.

use std::time::{Duration, Instant};

use emberflow_engine::spans::PassSize;
use emberflow_engine::{Admission, Engine, Event, Request, RequestId, Stepped, Stepper};

use super::load::{ANSWER, PARALLEL, PROMPT};
use emberflow::Failure;

/// Numbers of decoding texts with which prompts are measured; one slot is for the prompt.
const DECODING: [usize; 4] = [0, 1, 3, PARALLEL - 1];
/// The longest prompt piece is divided into this many sizes.
const PIECES: usize = 4;
/// Measurements of each pass.
const TIMES: usize = 5;

/// Measured times of passes, in seconds.
#[derive(Debug)]
pub struct Passes {
    /// By number of decoding texts, from 1 on.
    pub decoding: Vec<f64>,
    /// By number of texts in [`DECODING`], then by one to [`PIECES`] parts of the longest prompt
    /// piece.
    pub prompts: Vec<Vec<f64>>,
    /// Most rows of a pass.
    pub chunk: usize,
    /// Layers; a pass can yield between two.
    pub layers: u32,
}

impl Passes {
    /// Measures an engine for [`PARALLEL`] texts.
    pub fn measure(engine: &mut Engine) -> Result<Self, Failure> {
        let mut passes = Self {
            decoding: Vec::new(),
            prompts: Vec::new(),
            chunk: engine.options().lab.chunk.max(PARALLEL),
            layers: engine.config().layers.max(1),
        };
        // Warm-up.
        measure(engine, PARALLEL, 0)?;
        for texts in 1..=PARALLEL {
            passes.decoding.push(measure(engine, texts, 0)?);
        }
        for texts in DECODING {
            let mut by_rows = Vec::new();
            for piece in 1..=PIECES {
                by_rows.push(measure(engine, texts, passes.rows(piece))?);
            }
            passes.prompts.push(by_rows);
        }
        Ok(passes)
    }

    /// Summary: the measured times, and the largest gain from batching.
    pub fn line(&self) -> String {
        let ms = |seconds: &f64| format!("{:.2}", 1e3 * seconds);
        let decoding: Vec<String> = self.decoding.iter().map(ms).collect();
        let longest: Vec<f64> = self
            .prompts
            .iter()
            .map(|by_rows| by_rows[PIECES - 1])
            .collect();
        let prompts: Vec<String> = longest.iter().map(ms).collect();
        let prompt = PROMPT as f64 / self.rows(PIECES) as f64 * longest[0];
        let all = (1..=PARALLEL).map(|texts| self.decode(texts) / texts as f64);
        let best = prompt + ANSWER as f64 * all.fold(f64::INFINITY, f64::min);
        format!(
            "passes: {} ms with 1 to {PARALLEL} texts that decode; {} ms with {} rows of a prompt with {DECODING:?}; \
             bound of batches: {:.2} times the throughput of one text after the other, for prompts gain nothing",
            decoding.join(", "),
            prompts.join(", "),
            self.rows(PIECES),
            (prompt + ANSWER as f64 * self.decode(1)) / best
        )
    }

    /// Rows of a pass of prompts. Prompts of one length do not overtake each other.
    pub fn size(&self) -> PassSize {
        PassSize {
            rows: self.chunk,
            free: self.chunk,
        }
    }

    /// Rows in `piece` parts of the longest prompt piece.
    fn rows(&self, piece: usize) -> usize {
        let most = (self.chunk - (PARALLEL - 1)).min(PROMPT);
        (most * piece / PIECES).max(1)
    }

    /// Time of a pass, interpolated linearly between measured ones.
    pub fn time(&self, texts: usize, rows: usize) -> Duration {
        let seconds = match rows {
            0 => self.decode(texts),
            _ => {
                let at = DECODING.iter().rposition(|&decoding| decoding <= texts);
                let at = at.unwrap_or(0).min(DECODING.len() - 2);
                let [low, high] = [at, at + 1].map(|at| self.prompt(at, rows));
                let step = (DECODING[at + 1] - DECODING[at]) as f64;
                low + (high - low) * (texts - DECODING[at]) as f64 / step
            }
        };
        Duration::from_secs_f64(seconds.max(1e-9))
    }

    fn decode(&self, texts: usize) -> f64 {
        let known = texts.clamp(1, self.decoding.len());
        self.decoding[known - 1] * texts.max(1) as f64 / known as f64
    }

    /// Time of a pass with `rows` prompt rows and the texts of `DECODING[at]`.
    fn prompt(&self, at: usize, rows: usize) -> f64 {
        let piece = (1..PIECES).find(|&piece| rows <= self.rows(piece));
        let piece = piece.unwrap_or(PIECES);
        let (rows, high) = (rows as f64, self.prompts[at][piece - 1]);
        let (from, low) = match piece {
            1 => (0, self.decode(DECODING[at])),
            _ => (self.rows(piece - 1), self.prompts[at][piece - 2]),
        };
        let step = (self.rows(piece) - from).max(1) as f64;
        low + (high - low) * (rows - from as f64) / step
    }
}

/// Median seconds of a pass with `texts` decoding texts and `rows` rows of a prompt. One that the stepper shortens, as it
/// would pause the texts for too long, counts in proportion.
fn measure(engine: &mut Engine, texts: usize, rows: usize) -> Result<f64, Failure> {
    let mut random = fastrand::Rng::with_seed(texts as u64);
    let mut stepper = Stepper::new(engine);
    let mut live = Vec::new();
    for _ in 0..texts {
        let id = admit(&mut stepper, PROMPT / 2, PROMPT / 2 + ANSWER, &mut random)?;
        live.push(id);
        // Runs until its prompt is complete.
        let begun = |event: &Event| matches!(event, Event::Token { id: of, .. } if *of == id);
        while !matches!(stepper.step()?, Stepped::Passed { events, .. } if events.iter().any(begun))
        {
        }
    }
    let mut times = Vec::new();
    for _ in 0..TIMES {
        let prompt = match rows {
            0 => None,
            _ => Some(admit(&mut stepper, rows, 1, &mut random)?),
        };
        let start = Instant::now();
        let passed = match stepper.step()? {
            Stepped::Passed { rows, .. } => rows,
            Stepped::Yielded | Stepped::Idle => 0,
        };
        let part = (texts + rows) as f64 / passed.max(1) as f64;
        times.push(start.elapsed().as_secs_f64() * part);
        // Frees its keys and values.
        prompt.and_then(|id| stepper.cancel(id));
    }
    for id in live {
        stepper.cancel(id);
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn admit(
    stepper: &mut Stepper<'_>,
    prompt: usize,
    answer: usize,
    random: &mut fastrand::Rng,
) -> Result<RequestId, Failure> {
    let vocab = stepper.engine().config().vocab;
    Ok(stepper.admit(Admission {
        sequence: stepper.engine().new_sequence()?,
        prompt: (0..prompt).map(|_| random.u32(..vocab)).collect(),
        request: Request {
            max_tokens: answer,
            ignore_eos: true,
            ..Request::default()
        },
        samples: 1,
        bias: Vec::new(),
        constraint: None,
    })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_measured_passes_time_is_in_proportion() {
        let passes = Passes {
            decoding: (1..=PARALLEL).map(|texts| texts as f64).collect(),
            prompts: DECODING
                .iter()
                .map(|&beside| {
                    let parts = 1..=PIECES;
                    parts.map(|piece| (beside + 10 * piece) as f64).collect()
                })
                .collect(),
            chunk: 47,
            layers: 4,
        };
        let seconds = |texts, rows| passes.time(texts, rows).as_secs_f64();
        assert_eq!(passes.rows(PIECES), 40);
        assert_eq!(seconds(3, 0), 3.0);
        assert_eq!(seconds(0, 40), 40.0);
        assert_eq!(seconds(0, 15), 15.0);
        assert_eq!(seconds(2, 40), 42.0, "between one and three texts");
        assert_eq!(seconds(7, 20), 27.0);
        assert!(seconds(8, 47) > seconds(7, 40), "beyond both ends");
    }
}
