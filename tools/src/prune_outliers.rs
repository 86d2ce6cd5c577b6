//! `emberflow prune-outliers`: copies a container with one scale per row and prunes outlier activations of layers.
//!
//! In a pruned layer the CPU adds nothing to a device's products (llm.npu §3.3). Layers are pruned in the order of their
//! outliers' importance, least important first, as far as the perplexity on a text allows. The perplexity of the chosen
//! layers is measured, so the bound holds on that text. It is not monotonic in the number of layers, because rounding errors
//! are random: plain bisection could end far below the maximum, so the search first goes down from all layers in steps.

use std::io::Write;

use emberflow_engine::meta::{ContainerMeta, Pruned};
use emberflow_engine::{Engine, Importance, Probe, has_rows_with_one_scale};
use emberflow_kernels::Activations;
use emberflow_storage::container::Container;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::PruneOutliersArgs;
use crate::model::{open_model, open_packed, open_reserving};
use crate::perplexity::{self, WINDOW};
use crate::rewrite::{self, Changed};
use crate::tell::tell;
use crate::text::{self, Tokens};
use crate::{Failure, atomic, budget, print_json, progress};

/// Fewer scored tokens cause a warning: with 4,088 of them single layers of a model differed by 0.2 % by chance.
const FEW: u64 = 4000;

/// Steps from all layers down to none before the bisection.
const STEPS: usize = 8;

/// Output of `prune-outliers --json`. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct PrunedModel {
    /// Path of the container.
    pub output: String,
    /// Number of layers whose outliers are pruned.
    pub pruned: usize,
    /// Perplexity on the text without pruning.
    pub perplexity: f64,
    /// Perplexity with these layers pruned.
    pub perplexity_pruned: f64,
    /// Increase in percent.
    pub loss_percent: f64,
    /// Allowed increase in percent.
    pub bound_percent: f64,
    /// Number of scored tokens.
    pub tokens: u64,
    /// Numerics class of the measurement: `cpu`, or device and driver.
    pub numerics: String,
    /// All layers.
    pub layers: Vec<PrunedLayer>,
}

/// One layer. Keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct PrunedLayer {
    /// Layer number.
    pub layer: u32,
    /// Largest element of a token as a multiple of the limit of its scale: the geometric mean over tokens and inputs.
    pub importance: f64,
    /// Whether outliers are pruned.
    pub pruned: bool,
}

/// Runs the command.
pub fn command(args: &PruneOutliersArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    let reads = [args.model.file(), Some(args.file.as_path())];
    atomic::may_create(&args.output, args.force, &reads)?;
    let container = open_packed(&args.model)?;
    let meta = ContainerMeta::parse(container.meta(), container.path())?;
    if !has_rows_with_one_scale(&container, &meta.config) {
        return Err(Failure::usage(format!(
            "{} has no rows with one scale, so no outliers to prune: pack the checkpoint with --quant q8c or q4c",
            container.path().display()
        )));
    }
    let chosen = choose(args)?;
    if chosen.tokens < FEW {
        tell(format_args!(
            "emberflow: on {} tokens differences of some tenths of a percent are chance; use a longer text, or a larger --limit",
            chosen.tokens
        ));
    }
    // Another process may have created the output by now.
    atomic::may_create(&args.output, args.force, &reads)?;
    write(args, &container, meta, &chosen)?;
    chosen.print(args.json)
}

/// Writes the copy.
fn write(
    args: &PruneOutliersArgs,
    container: &Container,
    mut meta: ContainerMeta,
    chosen: &PrunedModel,
) -> Result<(), Failure> {
    let pruned = chosen.layers.iter().filter(|layer| layer.pruned);
    meta.pruned = Some(Pruned {
        layers: pruned.map(|layer| layer.layer).collect(),
        loss_percent: chosen.loss_percent,
        bound_percent: chosen.bound_percent,
        tokens: chosen.tokens,
        numerics: chosen.numerics.clone(),
    });
    let meta = serde_json::to_vec(&meta).map_err(std::io::Error::from)?;
    let changed = Changed {
        meta: Some(&meta),
        ..Changed::default()
    };
    rewrite::copy(container, &args.output, changed)
}

/// The model on the text.
struct ModelOnText {
    engine: Engine,
    tokens: Vec<u32>,
    window: usize,
    bar: ProgressBar,
}

impl ModelOnText {
    fn open(args: &PruneOutliersArgs) -> Result<Self, Failure> {
        let model = open_model(&args.model)?;
        let window = text::window(None, WINDOW, model.text().config().max_context)? as usize;
        let text = model.text().clone();
        let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
        let tokens = Tokens::open(&text, &args.file, Some(args.limit))?.next(limit)?;
        // Tokens; of a chunk the residual streams, and inputs of at most four times their width in 8 bits.
        let d = text.config().d_model as usize;
        let of_token = 8 * d + 2 * Activations::bytes(4 * d, 1);
        let bytes = (4 * tokens.len() + window * of_token) as u64;
        let engine = open_reserving(model, &args.engine, window, bytes, args.force)?;
        // Importance, without pruning, the steps, and the halvings of one of them.
        let halvings = (engine.config().layers as usize / STEPS + 1).ilog2() + 1;
        let total = (2 + STEPS + halvings as usize) * tokens.len();
        Ok(Self {
            engine,
            tokens,
            window,
            bar: progress::steps("tokens", total as u64),
        })
    }

    /// The importance of each layer's outliers.
    fn importance(&mut self) -> Result<Vec<f64>, Failure> {
        let lead = self.engine.text().start_tokens().to_vec();
        let body = self.window.saturating_sub(lead.len()).max(1);
        let mut sequence = self.engine.new_sequence()?;
        let mut layers = vec![Importance::default(); self.engine.config().layers as usize];
        for part in self.tokens.chunks(body) {
            sequence.clear();
            let window = [&lead[..], part].concat();
            for piece in window.chunks(self.engine.chunk()) {
                Probe::new(&mut self.engine).importance(&mut sequence, piece, &mut layers)?;
            }
            self.bar.inc(part.len() as u64);
        }
        Ok(layers.iter().map(Importance::mean).collect())
    }

    /// The perplexity with the outliers of these layers pruned, and the tokens that are scored.
    fn perplexity(&mut self, pruned: &[usize]) -> Result<(f64, u64), Failure> {
        Probe::new(&mut self.engine).set_pruned(|layer| pruned.contains(&layer));
        let mut left = &self.tokens[..];
        let mut next = |most: usize| {
            let (part, rest) = left.split_at(most.min(left.len()));
            left = rest;
            self.bar.inc(part.len() as u64);
            Ok(part.to_vec())
        };
        let result = perplexity::measure(&mut self.engine, &mut next, self.window, None)?;
        Ok((result.perplexity, result.tokens))
    }
}

/// Chooses the layers.
fn choose(args: &PruneOutliersArgs) -> Result<PrunedModel, Failure> {
    let mut on = ModelOnText::open(args)?;
    Probe::new(&mut on.engine).set_pruned(|_| false);
    if on.tokens.len() < 2 {
        return Err(Failure::usage(format!(
            "{} has fewer than two tokens",
            args.file.display()
        )));
    }
    let importance = on.importance()?;
    let (unpruned, tokens) = on.perplexity(&[])?;
    if !unpruned.is_finite() {
        return Err(Failure::usage(format!(
            "the perplexity of the text is {unpruned} without pruning: use another text"
        )));
    }
    let mut order: Vec<usize> = (0..importance.len()).collect();
    order.sort_by(|&a, &b| importance[a].total_cmp(&importance[b]));
    let most = unpruned * (1.0 + args.loss / 100.0);
    // Layers known to be within the bound with the perplexity, and the fewest known to be beyond it.
    let (mut within, mut beyond) = ((0, unpruned), order.len() + 1);
    let (mut next, step) = (order.len(), order.len().div_ceil(STEPS));
    while within.0 + 1 < beyond {
        let (perplexity, _) = on.perplexity(&order[..next])?;
        if perplexity <= most {
            within = (next, perplexity);
        } else {
            beyond = next;
        }
        next = match within.0 {
            0 if beyond > step => beyond - step,
            most => most.midpoint(beyond),
        };
    }
    on.bar.finish_and_clear();
    let (count, perplexity) = within;
    let layer = |(number, &importance): (usize, &f64)| PrunedLayer {
        layer: number as u32,
        importance,
        pruned: order[..count].contains(&number),
    };
    Ok(PrunedModel {
        output: args.output.display().to_string(),
        pruned: count,
        perplexity: unpruned,
        perplexity_pruned: perplexity,
        loss_percent: 100.0 * (perplexity / unpruned - 1.0),
        bound_percent: args.loss,
        tokens,
        numerics: (on.engine.lane()).map_or_else(|| "cpu".into(), |lane| lane.numerics),
        layers: importance.iter().enumerate().map(layer).collect(),
    })
}

impl PrunedModel {
    /// Prints a table, or JSON.
    fn print(&self, json: bool) -> Result<(), Failure> {
        if json {
            return print_json(self);
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "layer  importance  pruned")?;
        for layer in &self.layers {
            let pruned = if layer.pruned { "yes" } else { "no" };
            writeln!(
                out,
                "{:>5} {:>11.2}  {pruned}",
                layer.layer, layer.importance
            )?;
        }
        let of = self.layers.len();
        writeln!(
            out,
            "{} of {of} layers pruned: perplexity {:.4}, {:.4} without pruning ({:+.3} %, at most {} %) on {} tokens{}",
            self.pruned,
            self.perplexity_pruned,
            self.perplexity,
            self.loss_percent,
            self.bound_percent,
            self.tokens,
            in_class(&self.numerics)
        )?;
        if self.pruned == 0 {
            writeln!(
                out,
                "no number of layers is within the bound; a larger --loss allows more"
            )?;
        }
        Ok(writeln!(out, "wrote {}", self.output)?)
    }
}

/// Names a class of numerics that is not the CPU's.
fn in_class(numerics: &str) -> String {
    match numerics {
        "cpu" => String::new(),
        other => format!(", measured in the numerics of {other}"),
    }
}

/// The line of `inspect` about a container's pruned layers, of `of` layers.
pub fn summary(pruned: &Pruned, of: u32) -> String {
    format!(
        "pruned in {} of {of} layers: perplexity {:+.3} % (at most {} %) on {} tokens{}",
        pruned.layers.len(),
        pruned.loss_percent,
        pruned.bound_percent,
        pruned.tokens,
        in_class(&pruned.numerics)
    )
}
