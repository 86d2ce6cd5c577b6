//! `emberflow-lab phone`: prompts and texts on the processors of a phone, simulated from published times (llm.npu, NPUMoE,
//! HeteroInfer, PowerInfer-2), compared with the authors' measurements; and plans of the engine's planner for such a phone
//! ([`plans`]). Only the statistics of the bundled models' routing and activations come from real runs.
//!
//! [`outliers`] does not depend on phones: it splits. Capacities are the engine's: [`emberflow_devices::tiers`].

mod draw;
mod figures;
#[cfg(test)]
mod figures_tests;
mod heteroinfer;
mod hot_channels;
mod llm_npu;
mod npumoe;
pub mod outliers;
pub mod plans;
mod powerinfer;
mod recorded;
pub mod schedule;
#[cfg(test)]
mod schedule_tests;
pub mod subgraphs;

use std::io::{self, Write};

use emberflow::{Failure, atomic, print_json};
use serde::Serialize;

use self::draw::Drawn;
use self::figures::{Figure, FigureValue};
use self::llm_npu::Orders;
use self::npumoe::Variants;
use self::plans::PhonePlan;
use self::recorded::Recorded;
use crate::cli::{Paper, PhoneArgs};

/// Output of the command. JSON keys are a contract.
#[derive(Debug, Serialize)]
struct PhoneReport {
    bench: &'static str,
    figures: Vec<Figure>,
    notes: Vec<String>,
    plans: Vec<PhonePlan>,
    recorded: Vec<Recorded>,
}

/// Chunks of a prompt of 512 tokens.
const CHUNKS: usize = 2;

/// All simulated values.
fn values(orders: &Orders, variants: &Variants) -> Vec<FigureValue> {
    let papers = [
        llm_npu::figures(orders),
        variants.figures(),
        heteroinfer::figures(),
        powerinfer::figures(),
    ];
    papers.concat()
}

/// All simulated figures, and their explanations.
fn simulate_all() -> PhoneReport {
    let (orders, variants) = (Orders::of(CHUNKS), Variants::run());
    let values = values(&orders, &variants);
    PhoneReport {
        bench: "phone",
        figures: figures::figures(&values),
        notes: vec![
            orders.note(),
            llm_npu::unpruned_note(&orders),
            variants.note(),
            powerinfer::note(),
        ],
        plans: Vec::new(),
        recorded: Vec::new(),
    }
}

fn drawn(paper: Paper) -> Result<Drawn, Failure> {
    Ok(match paper {
        Paper::LlmNpu => Orders::of(CHUNKS).drawn(),
        Paper::Npumoe => Variants::run().drawn(),
        Paper::Heteroinfer => heteroinfer::drawn(),
        Paper::Powerinfer2 => powerinfer::drawn(),
        Paper::Plan => plans::drawn()?,
    })
}

/// Runs the command.
///
/// # Errors
/// A chart that cannot be written; with a text, errors of running the bundled models on it.
pub fn command(args: &PhoneArgs) -> Result<(), Failure> {
    atomic::may_write_each([&args.svg], args.force, &[args.file.as_deref()])?;
    let mut report = simulate_all();
    // A chart of a paper needs no plans, which take seconds.
    if args.svg.is_none() || args.paper == Paper::Plan {
        report.plans = plans::plans()?;
    }
    if let Some(file) = &args.file {
        report.recorded = recorded::recorded(args, file)?;
    }
    if let Some(path) = &args.svg {
        atomic::write(path, drawn(args.paper)?.svg().as_bytes())?;
    }
    if args.json {
        return print_json(&report);
    }
    print(&report, &mut io::stdout().lock()).map_err(Failure::from)
}

fn print(report: &PhoneReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "| paper | section | | simulated | published | ratio | rests on |\n|---|---|---|---|---|---|---|"
    )?;
    for figure in &report.figures {
        let [low, high] = figure.published;
        let published = if low == high {
            format!("{low}")
        } else {
            format!("{low} to {high}")
        };
        let differs = match figure.differs.as_str() {
            "" => String::new(),
            why => format!("; differs: {why}"),
        };
        writeln!(
            out,
            "| {} | {} | {} | {} {} | {published} | {:.2} | {}{differs} |",
            figure.paper,
            figure.place,
            figure.what,
            three_digits(figure.simulated),
            figure.unit,
            figure.ratio,
            figure.rests_on,
        )?;
    }
    writeln!(out)?;
    for note in &report.notes {
        writeln!(out, "{note}")?;
    }
    if !report.plans.is_empty() {
        write!(out, "\n{}", plans::text(&report.plans))?;
    }
    for recorded in &report.recorded {
        write!(out, "\n{}", recorded.text())?;
    }
    Ok(())
}

/// With three digits.
fn three_digits(value: f64) -> String {
    let whole = value.abs().max(0.1).log10().floor() as i32 + 1;
    let decimals = usize::try_from(3 - whole).unwrap_or(0);
    format!("{value:.decimals$}")
}
