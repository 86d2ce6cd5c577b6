//! Statistics of the bundled models' routing and activations on a text, for capacities and
//! outliers.
//!
//! The first half of the text sets capacities, popularity and limits; the second half is counted.

use emberflow::cli::{EngineArgs, ModelArg, SparsityArg};
use emberflow::model::{open_model, open_observed, open_routed};
use emberflow::text::Tokens;
use emberflow::{Failure, progress};
use emberflow_devices::tiers::{GroupLimits, Placement, RouteCounts, expected, imbalance};
use emberflow_engine::{Engine, FfnSeen, Logits};
use emberflow_models::demo::Demo;
use serde::Serialize;

use super::outliers::{ChannelCounts, MOST, Shadowed};

use crate::cli::PhoneArgs;

/// Share of the outliers in hot channels (llm.npu, Fig. 11).
const HOT: f64 = 0.8;

/// Experts in static shapes. JSON keys are a contract.
#[derive(Debug, Serialize)]
pub struct Routed {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts per token.
    pub chosen: usize,
    /// Busiest expert over the mean, by layer.
    pub imbalance: Vec<f64>,
    /// RouteCounts of all passes and layers.
    #[serde(flatten)]
    pub routes: RouteCounts,
    /// Rows of graphs without a token.
    pub padding_share: f64,
    /// RouteCounts beyond a capacity.
    pub overflow_share: f64,
    /// Share of the most popular four and eight experts that are equally popular in both halves.
    pub overlap: [f64; 2],
}

/// Outliers in the inputs of one kind of matrix, over all layers.
#[derive(Debug, Serialize)]
pub struct Outliers {
    /// The matrices.
    pub of: &'static str,
    /// Channels of a layer.
    pub channels: usize,
    /// Channels with an outlier in a pass, mean.
    pub per_pass: f64,
    /// The same as a share.
    pub share: f64,
    /// Share of the channels with any outlier.
    pub ever: f64,
    /// Share of the channels that contain [`HOT`] of the outliers; 0 without outliers.
    pub hot_share: f64,
}

/// A bundled model on a text.
#[derive(Debug, Serialize)]
pub struct Recorded {
    /// Its name.
    pub model: &'static str,
    /// Tokens of the second half.
    pub tokens: usize,
    /// Tokens of a pass.
    pub rows: usize,
    /// For a mixture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<Routed>,
    /// By kind of matrix.
    pub outliers: Vec<Outliers>,
}

/// Runs both bundled models.
///
/// # Errors
/// A text that cannot be read or is shorter than two passes, and errors of runs.
pub fn recorded(args: &PhoneArgs, file: &std::path::Path) -> Result<Vec<Recorded>, Failure> {
    let of = |demo: Demo| of_model(args, file, demo);
    Demo::ALL.into_iter().map(of).collect()
}

fn of_model(args: &PhoneArgs, file: &std::path::Path, demo: Demo) -> Result<Recorded, Failure> {
    let named = ModelArg {
        model: Some(demo.name().into()),
    };
    let model = open_model(&named)?;
    let c = model.text().config().clone();
    let ids = Tokens::open(model.text(), file, Some(args.limit))?.rest()?;
    let rows = args.rows as usize;
    let half = ids.len() / 2 / rows * rows;
    if half == 0 {
        return Err(Failure::usage(format!(
            "{} has {} tokens; two passes of {rows} are needed, so give a longer text or fewer --rows",
            file.display(),
            ids.len()
        )));
    }
    let start = model.text().start_tokens().to_vec();
    let mut engine_args: EngineArgs = args.engine.engine();
    engine_args.lab.chunk = rows;
    let experts = c.mixture.is_some().then_some(c.experts as usize);
    let open = match experts {
        Some(_) => open_routed,
        None => {
            engine_args.sparsity = SparsityArg::Exact;
            open_observed
        }
    };
    // Inputs in 32 bits, quantised and split, and the text.
    let copies = 16 * rows as u64 * u64::from(c.ffn + c.d_model);
    let reserve = copies + 4 * ids.len() as u64;
    let mut engine = open(model, &engine_args, rows + start.len(), reserve, args.force)?;
    let mut first = Seen::default();
    let mut see = |seen: &FfnSeen<'_>| first.see(seen, experts);
    passes(&mut engine, &start, &ids[..half], rows, &mut see)?;
    let mut second = first.second(rows, args.beyond);
    let mut see = |seen: &FfnSeen<'_>| second.see(seen, experts);
    passes(&mut engine, &start, &ids[half..2 * half], rows, &mut see)?;
    Ok(Recorded {
        model: demo.name(),
        tokens: half,
        rows,
        experts: experts.map(|experts| second.routed(&first, experts)),
        outliers: second.outliers(),
    })
}

/// Runs texts of `rows` tokens, each as one pass. Tokens that begin every text are a separate pass, which is not
/// observed.
fn passes(
    engine: &mut Engine,
    start: &[u32],
    ids: &[u32],
    rows: usize,
    see: &mut dyn FnMut(&FfnSeen<'_>),
) -> Result<(), Failure> {
    let mut sequence = engine.new_sequence()?;
    let bar = progress::steps("running", ids.len() as u64);
    for pass in ids.chunks(rows) {
        sequence.clear();
        if !start.is_empty() {
            engine.forward(&mut sequence, start, Logits::None)?;
        }
        engine.forward_observed(&mut sequence, pass, Logits::None, &mut *see)?;
        bar.inc(pass.len() as u64);
    }
    bar.finish_and_clear();
    Ok(())
}

/// One layer of the first half.
#[derive(Debug, Default)]
struct Layer {
    /// Tokens of each expert.
    visits: Vec<u64>,
    chosen: usize,
    /// Sum of squares and number of the inputs of Gate and Up, and of Down.
    squares: [f64; 2],
    values: [u64; 2],
}

#[derive(Debug, Default)]
struct Seen {
    layers: Vec<Layer>,
}

/// Tokens of each expert in a pass.
fn visits(seen: &FfnSeen<'_>, experts: usize) -> Vec<u64> {
    let mut out = vec![0; experts];
    for choice in seen.choices {
        out[choice.expert as usize] += 1;
    }
    out
}

/// Inputs of Gate and Up, `[tokens x width]`, and of Down, `[tokens x neurons]`; the latter are empty for experts.
fn inputs(seen: &FfnSeen<'_>) -> [Vec<f32>; 2] {
    let neurons = if seen.choices.is_empty() {
        seen.hidden.len() / seen.tokens.max(1)
    } else {
        0
    };
    let mut hidden = Vec::with_capacity(neurons * seen.tokens);
    for token in 0..seen.tokens {
        hidden.extend((0..neurons).map(|neuron| seen.hidden[neuron * seen.tokens + token]));
    }
    [seen.x.to_vec(), hidden]
}

impl Seen {
    fn see(&mut self, seen: &FfnSeen<'_>, experts: Option<usize>) {
        if self.layers.len() <= seen.layer {
            self.layers.resize_with(seen.layer + 1, Layer::default);
        }
        let layer = &mut self.layers[seen.layer];
        if let Some(experts) = experts {
            layer.visits.resize(experts, 0);
            layer.chosen = seen.choices.len() / seen.tokens.max(1);
            let all = layer.visits.iter_mut().zip(visits(seen, experts));
            all.for_each(|(all, here)| *all += here);
        }
        for (i, x) in inputs(seen).iter().enumerate() {
            layer.squares[i] += x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            layer.values[i] += x.len() as u64;
        }
    }

    /// Parameters for counting the second half: capacities by layer, and scales that hold `beyond` times the root
    /// mean square.
    fn second(&self, rows: usize, beyond: f64) -> Counted {
        let of = |layer: &Layer| {
            let limits = GroupLimits {
                rows,
                expert_bytes: 1,
                graph_bytes: u64::MAX,
                short: false,
            };
            let scale = [0, 1].map(|i| {
                let mean = layer.squares[i] / layer.values[i].max(1) as f64;
                (beyond * mean.sqrt()) as f32 / MOST as f32
            });
            let visits: Vec<f64> = layer.visits.iter().map(|&n| n as f64).collect();
            CountedLayer {
                placed: Placement {
                    groups: limits.groups(&expected(&visits, rows, layer.chosen), |_| true),
                    on_cpu: Vec::new(),
                },
                visits: vec![0; layer.visits.len()],
                scale,
                counts: [None, None],
            }
        };
        Counted {
            layers: self.layers.iter().map(of).collect(),
            routes: RouteCounts::default(),
        }
    }
}

struct CountedLayer {
    placed: Placement,
    visits: Vec<u64>,
    scale: [f32; 2],
    counts: [Option<ChannelCounts>; 2],
}

/// The second half.
struct Counted {
    layers: Vec<CountedLayer>,
    routes: RouteCounts,
}

impl Counted {
    fn see(&mut self, seen: &FfnSeen<'_>, experts: Option<usize>) {
        let Some(layer) = self.layers.get_mut(seen.layer) else {
            return;
        };
        if let Some(experts) = experts {
            let here = visits(seen, experts);
            self.routes.add(&layer.placed, &here);
            let all = layer.visits.iter_mut().zip(here);
            all.for_each(|(all, here)| *all += here);
        }
        for (i, x) in inputs(seen)
            .iter()
            .enumerate()
            .filter(|(_, x)| !x.is_empty())
        {
            let channels = x.len() / seen.tokens.max(1);
            let x = Shadowed::quantised(x, channels, layer.scale[i]);
            let new = || ChannelCounts::new(channels);
            layer.counts[i].get_or_insert_with(new).add(&x);
        }
    }

    fn routed(&self, first: &Seen, experts: usize) -> Routed {
        let both = || first.layers.iter().zip(&self.layers);
        let overlap = |most: usize| {
            let same = both().map(|(a, b)| {
                let [a, b] = [popular(&a.visits, most), popular(&b.visits, most)];
                a.iter().filter(|expert| b.contains(expert)).count() as f64 / a.len().max(1) as f64
            });
            same.sum::<f64>() / self.layers.len().max(1) as f64
        };
        Routed {
            experts,
            chosen: first.layers.first().map_or(0, |layer| layer.chosen),
            imbalance: first
                .layers
                .iter()
                .map(|layer| imbalance(&layer.visits))
                .collect(),
            routes: self.routes,
            padding_share: self.routes.padding_share(),
            overflow_share: self.routes.overflow_share(),
            overlap: [4, 8].map(overlap),
        }
    }

    fn outliers(&self) -> Vec<Outliers> {
        let of = |(i, of): (usize, &'static str)| {
            let counts = self
                .layers
                .iter()
                .filter_map(|layer| layer.counts[i].as_ref());
            let counts: Vec<&ChannelCounts> = counts.collect();
            let layers = counts.len() as f64;
            let mean = |f: &dyn Fn(&ChannelCounts) -> f64| {
                counts.iter().map(|counts| f(counts)).sum::<f64>() / layers
            };
            counts.first().map(|first| Outliers {
                of,
                channels: first.channels(),
                per_pass: mean(&ChannelCounts::per_pass),
                share: mean(&ChannelCounts::share),
                ever: mean(&ChannelCounts::ever),
                hot_share: mean(&|counts| counts.hot(HOT) as f64 / counts.channels() as f64),
            })
        };
        ["Gate and Up", "Down"]
            .into_iter()
            .enumerate()
            .filter_map(of)
            .collect()
    }
}

/// The `most` experts with the most visits.
fn popular(visits: &[u64], most: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..visits.len()).collect();
    order.sort_by_key(|&expert| std::cmp::Reverse(visits[expert]));
    order.truncate(most);
    order
}

impl Recorded {
    /// As text, with the papers' values.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{}, {} tokens in passes of {}:\n",
            self.model, self.tokens, self.rows
        );
        if let Some(experts) = &self.experts {
            let most = experts.imbalance.iter().copied().fold(0.0, f64::max);
            out += &format!(
                "  {} of {} experts, the busiest up to {most:.2} times the mean; rows of graphs without a token {:.1} % \
                 (NPUMoE 5.6: 31.7 to 37.5), routes beyond a capacity {:.1} % (10 to 20), the same experts popular \
                 in both halves: {:.0} % of 4, {:.0} % of 8 (5.8: 86, 94)\n",
                experts.chosen,
                experts.experts,
                100.0 * experts.padding_share,
                100.0 * experts.overflow_share,
                100.0 * experts.overlap[0],
                100.0 * experts.overlap[1],
            );
        }
        for outliers in &self.outliers {
            out += &outliers.text();
        }
        out
    }
}

impl Outliers {
    /// As text, with the paper's values.
    fn text(&self) -> String {
        if self.ever == 0.0 {
            return format!(
                "  inputs of {}: none of {} channels has an outlier\n",
                self.of, self.channels
            );
        }
        format!(
            "  inputs of {}: {:.1} of {} channels have an outlier in a pass, {:.2} % (llm.npu, Fig. 10: 0.1 to 0.3); \
             {:.1} % ever (3.3: 78); {:.1} % have {:.0} % of the outliers (Fig. 11: under 3)\n",
            self.of,
            self.per_pass,
            self.channels,
            100.0 * self.share,
            100.0 * self.ever,
            100.0 * self.hot_share,
            100.0 * HOT,
        )
    }
}
