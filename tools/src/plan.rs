//! `emberflow plan`: how a memory budget is divided, and the expected speed.

use std::io::Write;
use std::path::Path;

use emberflow_engine::meta::Quant;
use emberflow_engine::planner::{Plan, Planner};
use emberflow_engine::{Budget, Error, Lab, Model, Options, Speculation};
use emberflow_storage::io::IoChoice;
use emberflow_storage::mem::Mem;
use serde::Serialize;

use crate::chart::{Axes, Panel, panels};
use crate::cli::{ModelArg, PackQuant, PlanArgs};
use crate::hub::Workload;
use crate::hub::name::ModelName;
use crate::model::{open_lane, open_model};
use crate::pack::described;
use crate::tell::tell;
use crate::{Failure, atomic, budget, hub, machine, print_json, prompt, serve, size};

/// Number of budgets if none is given.
const STEPS: u64 = 8;

/// Output of `plan --json`.
#[derive(Serialize)]
struct PlanReport {
    model: String,
    /// Context length of the plans.
    context: usize,
    /// Formats of the weights; of a description, those that `pack` chooses.
    quant: Quant,
    smallest_bytes: u64,
    full_bytes: u64,
    plans: Vec<Plan>,
    /// Budgets without a plan.
    too_small: Vec<TooSmall>,
}

/// A budget that is too small for the model.
#[derive(Serialize)]
struct TooSmall {
    budget_bytes: u64,
    /// The smallest that works.
    smallest_bytes: u64,
}

/// The plans of several budgets.
#[derive(Default)]
struct Planned {
    plans: Vec<Plan>,
    too_small: Vec<TooSmall>,
    /// A line for each budget.
    table: String,
}

impl Planned {
    /// Plans each budget. One that is too small does not hide the others.
    ///
    /// # Errors
    /// All are too small, or another error.
    fn of(planner: &Planner, budgets: &[u64]) -> Result<Self, Error> {
        let mut planned = Self {
            table: HEAD.to_owned(),
            ..Self::default()
        };
        let mut refused = None;
        for &budget_bytes in budgets {
            match planner.plan(budget_bytes) {
                Ok(plan) => {
                    planned.table += &row(&plan);
                    planned.plans.push(plan);
                }
                Err(why) => {
                    let Error::BudgetTooSmall { smallest, .. } = why else {
                        return Err(why);
                    };
                    planned.table += &format!(
                        "{:>10} is too small; the smallest that works is {}\n",
                        size::show(budget_bytes),
                        size::show(smallest)
                    );
                    planned.too_small.push(TooSmall {
                        budget_bytes,
                        smallest_bytes: smallest,
                    });
                    refused.get_or_insert(why);
                }
            }
        }
        match refused {
            Some(why) if planned.plans.is_empty() => Err(why),
            _ => Ok(planned),
        }
    }
}

/// Runs the command.
pub fn command(args: &PlanArgs) -> Result<(), Failure> {
    let arg = ModelArg {
        model: args.model.clone(),
    };
    if let Some(name) = arg
        .model
        .as_deref()
        .and_then(hub::name_of)
        .filter(|name| !name.is_of_ollama())
    {
        return plan_by_name(args, &name);
    }
    atomic::may_write_each([&args.svg], args.force, &[arg.file()])?;
    let model = model_of(&arg, args.quant)?;
    machine::load_or_measure(&model, disk_of(&arg, args.io))?;
    // As in `run`, load the tokenizer before planning: its memory counts.
    model.text().encode(prompt::DEFAULT)?;
    let c = model.text().config();
    let (name, context) = (c.name.clone(), args.context.min(c.max_context) as usize);
    let quant = model.text().meta().quant.clone();
    // As a server does. A vocabulary without grammars is its error, and no plan's.
    let served = args.served.requests;
    let _compiler = served.map(|_| serve::compiler(model.text(), 1));
    let planner = Planner::open(model, options(args, context)?)?;
    // The smallest budget that a separate `run` process will accept.
    let smallest = planner.smallest_to_name();
    let full = planner.full_budget().max(smallest);
    let budgets: Vec<u64> = if args.memory.is_empty() {
        let step = |i| smallest + (full - smallest) / (STEPS - 1) * i;
        (0..STEPS - 1).map(step).chain([full]).collect()
    } else {
        args.memory.iter().map(|&b| planner.budget(b)).collect()
    };
    let Planned {
        plans,
        too_small,
        table,
    } = Planned::of(&planner, &budgets)?;
    let mem = Mem::system();
    let small = |budget: &u64| too_small.iter().any(|small| small.budget_bytes == *budget);
    let wanted = args.memory.iter().zip(&budgets);
    let wanted = wanted.filter(|(_, budget)| !small(budget));
    for ((&wanted, _), plan) in wanted.zip(&plans) {
        let crowded = || budget::exceeds_free(wanted, plan.memory.held(), &mem);
        if let Some(why) = budget::exceeds_limit(wanted, &mem).or_else(crowded) {
            tell(format_args!("emberflow: {why}; run needs --force for it"));
        }
    }
    if let Some(path) = &args.svg {
        atomic::write(path, chart(&name, &plans).as_bytes())?;
    }
    if args.json {
        return print_json(&PlanReport {
            model: name,
            context,
            quant,
            smallest_bytes: smallest,
            full_bytes: full,
            plans,
            too_small,
        });
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{name}, FFN in {}, attention in {}, embedding in {}, context {context}: smallest budget {}, {} for the whole \
         model and the longest prompt chunks\n",
        quant.ffn,
        quant.attention,
        quant.embedding,
        size::show(smallest),
        size::show(full)
    )?;
    write!(out, "{table}")?;
    if let Some(plan) = plans.iter().find(|plan| plan.streamed_bytes > 0) {
        writeln!(
            out,
            "below {}, attention and output head ({}) are on disk, too, and read for every token",
            size::show(planner.needs().smallest_budget()),
            size::show(plan.streamed_bytes)
        )?;
    }
    if let [plan] = plans.as_slice() {
        write!(out, "\n{}", details(plan))?;
    }
    if let Some(plan) = plans.first() {
        write!(out, "\n{}", basis(plan))?;
    }
    Ok(())
}

/// Plans for models that are not here.
fn plan_by_name(args: &PlanArgs, name: &ModelName) -> Result<(), Failure> {
    let plan = |memory| {
        let workload = Workload::text(memory, Some(args.context));
        hub::plan(name, workload, args.json)
    };
    match (args.memory.as_slice(), &args.svg, args.quant) {
        _ if args.served.requests.is_some() || args.served.reserve > 0 => Err(Failure::usage(
            "options of servers are for files on this machine",
        )),
        ([], None, None) => plan(Budget::Auto),
        ([budget], None, None) => plan(*budget),
        _ => Err(Failure::usage(format!(
            "{name} is not on this machine: of its files a plan takes one --memory, no --svg and no --quant"
        ))),
    }
}

/// Options of the plan.
fn options(args: &PlanArgs, context: usize) -> Result<Options, Failure> {
    Ok(Options {
        threads: args.threads.unwrap_or(0).into(),
        sparsity: args.sparsity.into(),
        context,
        batch: args.served.requests.unwrap_or(1).into(),
        preemption: args.served.requests.is_some(),
        reserve: args.served.reserve,
        lane: open_lane(&args.device)?,
        speculation: Speculation::AUTO,
        lab: Lab {
            io: args.io,
            ..Lab::default()
        },
        ..Options::default()
    })
}

/// The model, or one without weights.
fn model_of(arg: &ModelArg, quant: Option<PackQuant>) -> Result<Model, Failure> {
    match (arg.description(), quant) {
        (Some(_), Some(PackQuant::Size(_))) => Err(Failure::usage(
            "--quant auto:SIZE chooses formats by the errors of weights, which a config.json does not have: name one format",
        )),
        (Some(config), quant) => {
            let quant = quant.unwrap_or(PackQuant::AsSource);
            Ok(Model::open(described(config, &quant.into())?)?)
        }
        (None, Some(_)) => Err(Failure::usage(
            "--quant is for a config.json: a container has the formats that pack --quant gave it",
        )),
        (None, None) => open_model(arg),
    }
}

/// The file that is read to measure its disk.
fn disk_of(arg: &ModelArg, io: IoChoice) -> Option<&Path> {
    let is_read = arg.description().is_none() && !matches!(io, IoChoice::Sim(_));
    arg.file().filter(|_| is_read)
}

/// Titles of the columns.
const HEAD: &str =
    "    budget  FFN held  gates     hot      cold      hits   tok/s  prompt  limit\n";

fn row(p: &Plan) -> String {
    let held = |what: &str| size::show(p.memory.ledger.held(what));
    let [gates, hot, cold] = match p.memory.tiles {
        0 => [gates(p), held("hot"), held("cold")],
        // Of a model without neurons, the tiles.
        _ => ["-".into(), "-".into(), held("tiles")],
    };
    format!(
        "{:>10} {:>8.0}%  {:<5} {:>9} {:>9} {:>7.1}% {:>7.2} {:>7.1}  {}\n",
        size::show(p.memory.budget()),
        100.0 * p.ffn_resident_share,
        gates,
        hot,
        cold,
        100.0 * p.expert_hit_rate.unwrap_or(p.decode.cold_hit_rate),
        p.decode.tokens_per_s,
        p.prefill.tokens_per_s,
        p.decode.limit
    )
}

/// Location of Gate rows: resident, streamed, or the resident share.
fn gates(p: &Plan) -> String {
    match p.gates_resident_share {
        _ if p.ffn_resident_share >= 1.0 => "held".into(),
        1.0 => "held".into(),
        0.0 => "read".into(),
        share => format!("{:.0}%", 100.0 * share),
    }
}

fn details(p: &Plan) -> String {
    let mut out = String::from("memory\n");
    for &(what, bytes) in p.memory.ledger.entries() {
        out += &format!("  {what:<12} {:>10}\n", size::show(bytes));
    }
    let d = &p.decode;
    out += &format!(
        "a token     {:.2} ms: {:.2} compute, {:.2} I/O wait ({:.2} device time)\n\
         reads       {:.0} per token, {} in total; {} each or {} sequential, {} per neuron\n",
        d.ms,
        d.compute_ms,
        d.wait_ms,
        d.io_ms,
        d.reads,
        size::show(d.bytes_read as u64),
        size::show(p.random_read_bytes),
        size::show(p.sequential_read_bytes),
        p.reads_per_bundle
    );
    out += &format!(
        "{}threads     {} compute; I/O thread {}\n\
         prompts     {} tokens per chunk\n\
         attention   {}\n\
         hot         ",
        drafts(p),
        p.compute_threads,
        p.io_core
            .map_or("not pinned".into(), |c| format!("on core {c}")),
        p.chunk,
        match p.prefetch_clusters {
            0 => "no FFN reads during attention".into(),
            n => format!("up to {n} missing clusters of the next FFN are read during attention"),
        }
    );
    let cuts = p.hot_cut.iter().map(|cut| {
        format!(
            "{:.0} % of the neurons fire in half of the passes of {} ({} clusters, {} of them held)",
            100.0 * cut.share,
            match cut.batch {
                1 => "one text".into(),
                batch => format!("{batch} texts"),
            },
            cut.clusters,
            cut.resident
        )
    });
    let cuts: Vec<String> = cuts.collect();
    out += &format!("{}\n", cuts.join(",\n            "));
    for device in &p.devices {
        out += &format!("device      {}\n", device.text);
    }
    out
}

/// What drafts can give.
fn drafts(p: &Plan) -> String {
    let best = p.drafts.iter().max_by(|a, b| a.gain.total_cmp(&b.gain));
    best.map_or_else(String::new, |best| {
        format!(
            "drafts      checking {} in a pass takes {:.2} times as long; if three of four are right, {:.1} times the \
             speed at most\n",
            best.drafts, best.times_as_long, best.gain
        )
    })
}

fn basis(p: &Plan) -> String {
    let b = &p.basis;
    let mut out = match (b.machine_measured, &b.machine_doubt) {
        (false, _) => "CPU and memory: assumed; emberflow bench io measures them\n".into(),
        (true, None) => "CPU and memory: measured\n".into(),
        (true, Some(why)) => {
            format!("CPU and memory: measured under load ({why}); the next plan measures again\n")
        }
    };
    out += &format!("storage device: {}", b.device);
    out += match (b.device_measured, b.device_doubtful) {
        (false, _) => "; emberflow bench io MODEL --save measures it\n",
        (true, true) => "; emberflow bench io measures it again\n",
        (true, false) => "\n",
    };
    if !b.statistics {
        out += "the model has no activation statistics, so hit rates are a guess: pack it with --stats\n";
    } else if b.neurons_assumed {
        out += "there are no statistics of neurons inside experts, so their activity is a guess\n";
    }
    out
}

fn chart(name: &str, plans: &[Plan]) -> String {
    let gib = |p: &Plan| p.memory.budget() as f64 / f64::from(1 << 30);
    let curve = |what: &str, f: &dyn Fn(&Plan) -> f64| {
        (
            what.to_owned(),
            plans.iter().map(|p| (gib(p), f(p))).collect(),
        )
    };
    let panel = Panel {
        title: name.to_owned(),
        x: "budget, GiB",
        y: "tokens/s",
        curves: vec![
            curve("decode", &|p| p.decode.tokens_per_s),
            curve("prompt", &|p| p.prefill.tokens_per_s),
        ],
    };
    panels("expected speed", Axes::Logs, &[panel])
}
