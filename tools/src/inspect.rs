//! `emberflow inspect`: shows what is in a container.

use std::fmt::Write as _;
use std::io::Write as _;

use emberflow_engine::meta::{ContainerMeta, Order};
use emberflow_kernels::DType;
use emberflow_models::config::{Mixture, ModelConfig};
use emberflow_predictor::stats::{ActivationStats, BATCHES, LayerStats, hot_share};
use emberflow_storage::container::{BundleGeometry, Container, Placement, Section, TensorEntry};
use serde::Serialize;

use crate::activity::activity;
use crate::chart::{Axes, Panel, panels};
use crate::cli::InspectArgs;
use crate::inspect_predictors::{Predictors, predictors};
use crate::model::open_container;
use crate::profile::show_experts::{self, ShownExperts};
use crate::{Failure, atomic, print_json, prune_outliers, size};

/// Output of `inspect --json`. Keys are a contract.
#[derive(Debug, Serialize)]
pub struct Inspection {
    /// Path of the container.
    pub file: String,
    /// File size in bytes.
    pub bytes: u64,
    /// Metadata without the tokenizer.
    pub meta: serde_json::Value,
    /// Bundle geometry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bundle: Option<Bundle>,
    /// Sections with payload and padding.
    pub sections: Vec<SectionReport>,
    /// Activity per layer; `None` without activation statistics.
    pub temperature: Option<Vec<LayerTemperature>>,
    /// How often experts are chosen; `None` without routing statistics.
    pub experts: Option<ShownExperts>,
    /// Predictors of active neurons; `None` without any.
    pub predictors: Option<Predictors>,
    /// What the activation statistics contain besides counts.
    pub statistics: Option<Statistics>,
    /// Tensors, with `--tensors`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors: Option<Vec<TensorReport>>,
}

/// Layout of one neuron's bundle in bytes.
#[derive(Debug, Serialize)]
pub struct Bundle {
    /// Alignment for direct I/O.
    pub sector: u32,
    /// Where scales are stored: `inline` or `resident`.
    pub scales: &'static str,
    /// Gate part without padding.
    pub gate_bytes: u32,
    /// Up and Down without padding.
    pub rest_bytes: u32,
    /// Whether the Gate part fills whole sectors and can be read alone.
    pub split: bool,
    /// Total on flash.
    pub stride: u32,
    /// Padding as a share of the stride.
    pub padding_share: f64,
}

/// One section.
#[derive(Debug, Serialize)]
pub struct SectionReport {
    /// Section name.
    pub name: &'static str,
    /// Bytes without padding.
    pub payload: u64,
    /// Bytes of padding, for alignment and in bundles.
    pub padding: u64,
}

/// What the statistics contain besides counts.
#[derive(Debug, Serialize)]
pub struct Statistics {
    /// Tokens profiled.
    pub tokens: u64,
    /// Batches recorded, by size 1, 2, 4, 8, 16, 32.
    pub steps: Vec<u64>,
    /// Per layer, the probability that a neuron active for a token is also active for the next.
    pub persistence: Vec<f64>,
}

/// Activity of one layer.
#[derive(Debug, Serialize)]
pub struct LayerTemperature {
    /// Layer number.
    pub layer: u32,
    /// Mean share of active neurons per token.
    pub active_share: f64,
    /// Smallest share of neurons that accounts for 80 % of all activations.
    pub hot_share_80: f64,
    /// Share of tokens for which a neuron is active, for the neurons at 0, 10 … 100 % of the order, hottest first.
    pub deciles: Vec<f64>,
}

/// One tensor.
#[derive(Debug, Serialize)]
pub struct TensorReport {
    /// Name in the container.
    pub name: String,
    /// Block format.
    pub dtype: String,
    /// `[rows, cols]`.
    pub shape: Vec<u64>,
    /// Size in bytes.
    pub bytes: u64,
}

/// Runs the command.
pub fn command(args: &InspectArgs) -> Result<(), Failure> {
    atomic::may_write_each([&args.svg], args.force, &[args.model.file()])?;
    let container = open_container(&args.model)?;
    let meta = ContainerMeta::parse(container.meta(), container.path())?;
    let stats = activity(&container, &meta.config)?;
    if let Some(path) = &args.svg {
        let Some(stats) = &stats else {
            return Err(Failure::usage(
                "this container has no activation statistics to plot; pack it with --stats",
            ));
        };
        let picture = match experts(&container, stats) {
            Some(experts) => show_experts::svg(&experts),
            None => temperature_svg(&meta, stats),
        };
        atomic::write(path, picture.as_bytes())?;
    }
    let inspection = inspect(&container, &meta, stats.as_ref(), args.tensors)?;
    if args.json {
        print_json(&inspection)
    } else {
        let mut out = std::io::stdout().lock();
        Ok(out.write_all(text(&inspection, &meta).as_bytes())?)
    }
}

fn inspect(
    container: &Container,
    meta: &ContainerMeta,
    stats: Option<&ActivationStats>,
    with_tensors: bool,
) -> Result<Inspection, Failure> {
    let mut shown = serde_json::to_value(meta).map_err(std::io::Error::from)?;
    shown["tokenizer"] = format!("{} bytes of tokenizer.json", meta.tokenizer.len()).into();
    Ok(Inspection {
        file: container.path().display().to_string(),
        bytes: container.file_len(),
        meta: shown,
        bundle: (!container.banks().is_empty()).then(|| Bundle::of(container.geometry())),
        sections: container
            .section_sizes()
            .iter()
            .filter(|s| !container.is_outside() || s.section == Section::Dense)
            .map(|s| SectionReport {
                name: s.section.name(),
                payload: s.payload,
                padding: s.len - s.payload,
            })
            .collect(),
        temperature: stats.filter(|s| s.routing().is_none()).map(temperature),
        experts: stats.and_then(|stats| experts(container, stats)),
        predictors: predictors(container, &meta.config)?,
        statistics: (stats.filter(|s| s.routing().is_none())).and_then(statistics),
        tensors: with_tensors.then(|| container.tensors().iter().map(TensorReport::of).collect()),
    })
}

impl Bundle {
    fn of(g: &BundleGeometry) -> Self {
        Self {
            sector: g.sector,
            scales: if g.placement == Placement::Inline {
                "inline"
            } else {
                "resident"
            },
            gate_bytes: g.gate_len,
            rest_bytes: g.rest_len,
            split: g.is_split(),
            stride: g.stride,
            padding_share: 1.0 - f64::from(g.payload()) / f64::from(g.stride),
        }
    }
}

impl TensorReport {
    fn of(t: &TensorEntry) -> Self {
        Self {
            name: t.name.clone(),
            dtype: DType::from_code(t.dtype).map_or("unknown".into(), |d| d.name().into()),
            shape: t.dims.clone(),
            bytes: t.len,
        }
    }
}

/// How often experts are chosen, if the statistics contain it.
fn experts(container: &Container, stats: &ActivationStats) -> Option<ShownExperts> {
    let profile = stats.profile.as_deref()?;
    let file = container.path().display().to_string();
    Some(show_experts::shown(file, stats, profile, stats.routing()?))
}

/// Activation counts of a layer's neurons, descending.
fn sorted_counts(layer: &LayerStats) -> Vec<u64> {
    let experts = layer.experts.iter();
    let mut counts: Vec<u64> = experts.flat_map(|e| e.counts.iter().copied()).collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    counts
}

fn temperature(stats: &ActivationStats) -> Vec<LayerTemperature> {
    let layers = stats.layers.iter().zip(stats.active_share());
    layers
        .map(|(layer, active_share)| {
            let counts = sorted_counts(layer);
            LayerTemperature {
                layer: layer.layer,
                active_share,
                hot_share_80: hot_share(&counts, 0.8),
                deciles: deciles(&counts, stats.tokens),
            }
        })
        .collect()
}

/// What the statistics contain besides counts; `None` without a profile.
fn statistics(stats: &ActivationStats) -> Option<Statistics> {
    let profile = stats.profile.as_ref()?;
    let sum = |list: &[u64]| list.iter().map(|&c| c as f64).sum::<f64>();
    let experts = stats.layers.iter().flat_map(|l| &l.experts);
    let banks = experts.zip(&profile.banks);
    Some(Statistics {
        tokens: stats.tokens,
        steps: profile.steps.to_vec(),
        persistence: banks
            .map(|(e, b)| sum(&b.stayed) / sum(&e.counts).max(1.0))
            .collect(),
    })
}

fn deciles(sorted: &[u64], tokens: u64) -> Vec<f64> {
    (0..=10)
        .map(|i| {
            let at = (i * sorted.len() / 10).min(sorted.len().saturating_sub(1));
            sorted
                .get(at)
                .map_or(0.0, |&c| c as f64 / tokens.max(1) as f64)
        })
        .collect()
}

fn text(i: &Inspection, meta: &ContainerMeta) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_model(&mut out, i, meta)
        .and_then(|()| write_sections(&mut out, i))
        .and_then(|()| write_activity(&mut out, i))
        .and_then(|()| write_tensors(&mut out, i));
    out
}

/// Describes the experts of a layer.
fn experts_text(c: &ModelConfig, mixture: &Mixture) -> String {
    let mut text = format!(
        "{} of {} experts of {} neurons",
        mixture.chosen, c.experts, c.ffn
    );
    if mixture.shared > 0 {
        let _ = write!(text, ", a shared one of {}", mixture.shared);
    }
    if !mixture.dense_layers.is_empty() {
        let dense = mixture.dense_layers.len();
        let _ = write!(
            text,
            " ({dense} dense layers of {} neurons)",
            mixture.dense_ffn
        );
    }
    text
}

/// Writes file, model, formats, bundle and source.
fn write_model(out: &mut String, i: &Inspection, meta: &ContainerMeta) -> std::fmt::Result {
    let c = &meta.config;
    writeln!(out, "{}: {}", i.file, size::show(i.bytes))?;
    writeln!(
        out,
        "model      {} ({}): {} layers, d_model {}, {} query / {} kv heads of {}, vocabulary {}",
        c.name, c.family, c.layers, c.d_model, c.heads, c.kv_heads, c.head_dim, c.vocab
    )?;
    let neurons = match &c.mixture {
        None => format!("{} neurons per layer", c.ffn),
        Some(mixture) => experts_text(c, mixture),
    };
    writeln!(
        out,
        "ffn        {neurons}, {:?}{}",
        c.ffn_kind.activation,
        if c.ffn_kind.relu_on_up {
            ", relu on up"
        } else {
            ""
        }
    )?;
    writeln!(
        out,
        "formats    ffn {}, attention {}, embedding {}; {} order",
        meta.quant.ffn,
        meta.quant.attention,
        meta.quant.embedding,
        match meta.order {
            Order::Original => "original",
            Order::Temperature => "temperature",
            Order::Coactivation => "coactivation",
        }
    )?;
    if let Some(b) = &i.bundle {
        writeln!(
            out,
            "bundle     gate {} + up/down {} bytes, {} on flash ({}-byte sectors, {:.1} % padding{}, scales {})",
            b.gate_bytes,
            b.rest_bytes,
            b.stride,
            b.sector,
            100.0 * b.padding_share,
            if b.split { ", gate readable alone" } else { "" },
            b.scales
        )?;
    }
    if let Some(pruned) = &meta.pruned {
        writeln!(
            out,
            "outliers   {}",
            prune_outliers::summary(pruned, c.layers)
        )?;
    }
    writeln!(
        out,
        "source     {} ({})",
        meta.source.name, meta.source.fingerprint
    )
}

fn write_sections(out: &mut String, i: &Inspection) -> std::fmt::Result {
    writeln!(
        out,
        "sections   {:<16} {:>12} {:>12}",
        "", "payload", "padding"
    )?;
    for s in &i.sections {
        let (payload, padding) = (size::show(s.payload), size::show(s.padding));
        writeln!(out, "           {:<16} {payload:>12} {padding:>12}", s.name)?;
    }
    Ok(())
}

/// Writes temperature, predictors and persistence.
fn write_activity(out: &mut String, i: &Inspection) -> std::fmt::Result {
    if let Some(layers) = &i.temperature {
        writeln!(
            out,
            "temperature: share of tokens for which the neuron at 0, 10 … 100 % of the order is active"
        )?;
        for l in layers {
            let curve: Vec<String> = l.deciles.iter().map(|d| format!("{:.2}", d)).collect();
            writeln!(
                out,
                "  layer {:>2}: {:>5.1} % active, 80 % of activations in {:>4.1} % of neurons: {}",
                l.layer,
                100.0 * l.active_share,
                100.0 * l.hot_share_80,
                curve.join(" ")
            )?;
        }
    }
    if let Some(experts) = &i.experts {
        out.push_str(&show_experts::text(experts));
    }
    for line in i.predictors.iter().flat_map(Predictors::lines) {
        writeln!(out, "{line}")?;
    }
    if let Some(s) = &i.statistics {
        let mut largest = (BATCHES.iter().zip(&s.steps)).filter(|&(_, &steps)| steps > 0);
        let list: Vec<String> = s.persistence.iter().map(|p| format!("{p:.2}")).collect();
        writeln!(
            out,
            "persistence by layer: {} ({} tokens; batches up to {})",
            list.join(" "),
            s.tokens,
            largest.next_back().map_or(1, |(&size, _)| size)
        )?;
    }
    Ok(())
}

fn write_tensors(out: &mut String, i: &Inspection) -> std::fmt::Result {
    for t in i.tensors.iter().flatten() {
        writeln!(
            out,
            "  {:<28} {:<5} {:?} {}",
            t.name,
            t.dtype,
            t.shape,
            size::show(t.bytes)
        )?;
    }
    Ok(())
}

/// One curve per layer: activation frequency over the neurons, hottest first.
fn temperature_svg(meta: &ContainerMeta, stats: &ActivationStats) -> String {
    let tokens = stats.tokens.max(1) as f64;
    let curves = stats
        .layers
        .iter()
        .map(|layer| {
            let counts = sorted_counts(layer);
            let n = counts.len().max(2) as f64 - 1.0;
            let points = counts
                .iter()
                .enumerate()
                .map(|(i, &c)| (i as f64 / n, c as f64 / tokens))
                .collect();
            (format!("layer {}", layer.layer), points)
        })
        .collect::<Vec<_>>();
    let panel = Panel {
        title: format!(
            "{}: temperature ({} tokens)",
            meta.config.name, stats.tokens
        ),
        x: "share of neurons, hottest first",
        y: "share of tokens that fire it",
        curves,
    };
    panels("", Axes::Shares, &[panel])
}
