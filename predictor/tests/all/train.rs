//! Training on problems with a known answer.

use std::sync::Arc;

use emberflow_kernels::{Activations, Compute, Cpu, DType, Narrow};
use emberflow_predictor::section::{Directory, Kind, Training, encode};
use emberflow_predictor::train::{Design, Fires, GateLayer, Made, Texts, Trainer};
use emberflow_predictor::{Features, Shared, Sums, top_multiple};
use fastrand::Rng;

const D: usize = 96;
const NEURONS: usize = 200;
const TOKENS: usize = 1200;
const COARSE: Design = Design::Coarse(Narrow::Two);

/// Nearly normal.
fn normal(random: &mut Rng) -> f32 {
    (0..12).map(|_| random.f32()).sum::<f32>() - 6.0
}

struct Problem {
    gate: Vec<f32>,
    texts: [Vec<f32>; 3],
    fires: Fires,
}

impl Problem {
    /// Gates whose rank on the inputs is `rank`, and which fire in a sixth of the cases.
    fn planted(rank: usize, noise: f32) -> Self {
        let mut random = Rng::with_seed(7);
        let a: Vec<f32> = (0..rank * D).map(|_| normal(&mut random)).collect();
        let mut gate = Vec::new();
        for _ in 0..NEURONS {
            let b: Vec<f32> = (0..rank).map(|_| normal(&mut random)).collect();
            let row = (0..D).map(|i| (0..rank).map(|k| b[k] * a[k * D + i]).sum::<f32>());
            let row: Vec<f32> = row.map(|x| x + noise * normal(&mut random)).collect();
            // the first element of an input is always 1
            let size = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            gate.push(-size);
            gate.extend(&row[1..]);
        }
        let mut text = |tokens: usize| {
            let mut x: Vec<f32> = (0..tokens * D).map(|_| normal(&mut random)).collect();
            x.iter_mut().step_by(D).for_each(|x| *x = 1.0);
            x
        };
        Self {
            texts: [text(TOKENS), text(400), text(400)],
            gate,
            fires: Fires::Above(0.0),
        }
    }

    fn layer(&self) -> GateLayer<'_> {
        let [train, calibrate, measure] = &self.texts;
        GateLayer {
            d: D,
            gate: &self.gate,
            fires: self.fires,
            texts: Texts {
                train,
                calibrate,
                measure,
            },
            pruned: false,
            recall: 0.98,
        }
    }

    fn solve(&self, design: Design) -> Made {
        let on = Compute::new(2, None);
        let trainer = Trainer::new(&on);
        let covariance = trainer.covariance(D, &self.texts[0]);
        trainer
            .make(design, &self.layer(), &covariance)
            .expect("finite weights")
    }
}

fn low_rank(rank: usize) -> Design {
    Design::LowRank {
        rank,
        dtype: DType::Q8,
    }
}

#[test]
fn a_planted_low_rank_problem_is_solved() {
    // the always-one element adds a rank
    let problem = Problem::planted(31, 0.0);
    let made = problem.solve(low_rank(32));
    let q = made.bank.quality;
    assert!(q.active_share() > 0.1 && q.active_share() < 0.25, "{q:?}");
    assert!(q.recall() > 0.97 && q.overhead() < 1.05, "{q:?}");
    // too small a rank fails with a message
    let poor = problem.solve(low_rank(8)).bank.quality;
    assert!(poor.recall() > 0.95 && poor.overhead() > 1.5, "{poor:?}");
}

#[test]
fn the_second_factor_makes_up_for_the_rounding_of_the_first() {
    // Gates of any kind, on inputs that take few directions.
    let mut random = Rng::with_seed(11);
    let width = 95;
    let directions: Vec<f32> = (0..width * D).map(|_| normal(&mut random)).collect();
    let mut problem = Problem::planted(1, 1.0);
    for text in &mut problem.texts {
        for x in text.chunks_exact_mut(D) {
            x.fill(0.0);
            for direction in directions.chunks_exact(D) {
                let along = normal(&mut random) / (width as f32).sqrt();
                x.iter_mut()
                    .zip(direction)
                    .for_each(|(x, d)| *x += along * d);
            }
            x[0] = 1.0;
        }
    }
    let design = |dtype| Design::LowRank { rank: 96, dtype };
    let [q4, q8] = [DType::Q4, DType::Q8].map(|d| problem.solve(design(d)).bank.quality);
    eprintln!(
        "{} {} {} {}",
        q4.recall(),
        q4.overhead(),
        q8.recall(),
        q8.overhead()
    );
}

/// A twentieth of the gates fires, those above a cutoff that the predictor has to estimate.
#[test]
fn cutoffs_of_a_token_are_found_from_coarse_scores() {
    let mut problem = Problem::planted(90, 1.0);
    problem.fires = Fires::Top(top_multiple(0.95));
    let made = |narrow| problem.solve(Design::Coarse(narrow));
    let (two, made) = (made(Narrow::Two), made(Narrow::Three));
    assert_eq!(made.bank.kind, Kind::CoarseTop(Narrow::Three));
    for q in [two.bank.quality, made.bank.quality] {
        assert!((0.03..0.07).contains(&q.active_share()), "{q:?}");
        assert!(q.recall() > 0.95 && q.overhead() < 8.0, "{q:?}");
    }
    let excess = |of: &Made| of.bank.quality.overhead() - 1.0;
    assert!(
        excess(&made) < 0.7 * excess(&two),
        "{:?}",
        made.bank.quality
    );

    let training = Training {
        trained_on: TOKENS as u64,
        measured_on: 400,
        target: 0.98,
    };
    let section = encode(D, &[NEURONS], training, &[made.bank]);
    let directory = Directory::parse(&section, section.len() as u64, D, &[NEURONS]).unwrap();
    directory.check(&section).unwrap();
    let block: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(section);
    let predictor = directory.predictor(0, &block).unwrap();
    let (tokens, on) = (7, Compute::new(2, None));
    let text = &problem.texts[2][..tokens * D];
    let named = |text: &[f32]| {
        let tokens = text.len() / D;
        let mut quantized = Activations::default();
        on.cpu.quantize_activations(text, tokens, &mut quantized);
        let features = Features {
            normed: text,
            quantized: quantized.all(),
            residual: &[],
        };
        let mut shared = Shared::new(predictor.shape(), tokens);
        let mut margins = vec![0.0; NEURONS * tokens];
        predictor.prepare(&on, features, &mut shared);
        predictor.margins(on.cpu, features, &shared, 0, &mut margins);
        (margins, predictor.cutoffs(&shared).to_vec())
    };
    let (margins, cutoffs) = named(text);
    let mut sums = Sums::default();
    for (t, x) in text.chunks_exact(D).enumerate() {
        let gate = |row: &[f32]| row.iter().zip(x).map(|(g, x)| g * x).sum::<f32>();
        let gates: Vec<f32> = problem.gate.chunks_exact(D).map(gate).collect();
        let of = sums.moments(&gates, 1).next().unwrap();
        let off = f64::from(of.above(top_multiple(0.95)) - cutoffs[t]) / of.deviation;
        assert!(off.abs() < 0.2, "token {t}: {off} deviations");
        // alone or among others
        let (alone, its) = named(x);
        assert_eq!(its, [cutoffs[t]]);
        let among = margins.iter().skip(t).step_by(tokens);
        assert!(alone.iter().eq(among), "token {t}");
    }
}

#[test]
fn designs_stand_in_the_order_of_what_they_know() {
    let problem = Problem::planted(90, 1.0);
    let [sign, coarse] = [Design::Sign, COARSE].map(|d| problem.solve(d).bank.quality);
    for q in [sign, coarse] {
        assert!(q.recall() > 0.95, "{q:?}");
    }
    // the element that is always 1 costs one group of each coarse row its scale
    assert!(sign.overhead() < 6.2, "{sign:?}");
    assert!(
        coarse.overhead() < 0.75 * sign.overhead(),
        "{coarse:?} {sign:?}"
    );
}

#[test]
fn a_prediction_depends_on_its_token_alone_and_is_what_was_measured() {
    let cpu = Cpu::detect();
    let problem = Problem::planted(40, 1.0);
    let x = &problem.texts[2];
    let tokens = x.len() / D;
    for design in [Design::Sign, COARSE, low_rank(64)] {
        let made = problem.solve(design);
        let measured = made.bank.quality;
        assert_ne!(made.bank.kind, Kind::None);
        let section = encode(
            D,
            &[NEURONS],
            Training {
                trained_on: 0,
                measured_on: tokens as u64,
                target: 0.98,
            },
            &[made.bank],
        );
        let directory =
            Directory::parse(&section, section.len() as u64, D, &[NEURONS]).expect("a section");
        directory.check(&section).expect("a section");
        let block: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(section);
        let predictor = directory.predictor(0, &block).expect("a predictor");
        let mut runs: Vec<Vec<f32>> = Vec::new();
        for (chunk, range, threads) in [(1, 128, 1), (7, 128, 3), (64, 32, 2)] {
            let on = Compute::new(threads, None);
            let mut shared = Shared::new(predictor.shape(), chunk);
            let mut all = vec![0.0; tokens * NEURONS];
            for (c, x) in x.chunks(chunk * D).enumerate() {
                let here = x.len() / D;
                let mut quantized = Activations::default();
                cpu.quantize_activations(x, here, &mut quantized);
                let input = Features {
                    normed: x,
                    quantized: quantized.all(),
                    residual: x,
                };
                predictor.prepare(&on, input, &mut shared);
                for first in (0..NEURONS).step_by(range) {
                    let mut wanted = vec![9.0; range.min(NEURONS - first) * here];
                    predictor.predict(cpu, input, &shared, first, &mut wanted);
                    for (i, w) in wanted.iter().enumerate() {
                        let (n, t) = (first + i / here, c * chunk + i % here);
                        all[t * NEURONS + n] = *w;
                    }
                }
            }
            runs.push(all);
        }
        assert!(runs.windows(2).all(|r| r[0] == r[1]), "{design:?}");
        let wanted = runs[0].iter().filter(|&&w| w == 1.0).count();
        let unwanted = runs[0].iter().filter(|&&w| w == 0.0).count();
        assert_eq!(wanted as u64, measured.predicted, "{design:?}");
        assert_eq!(wanted + unwanted, tokens * NEURONS);
    }
}
