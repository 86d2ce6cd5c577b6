//! `emberflow-lab serve`: latency of interactive requests next to background work, by scheduling
//! policy.
//!
//! The load of Agent.xpu (§6.1): Poisson arrivals of both classes, independent, for 15 minutes. A
//! minute of the paper is scaled to this machine: it is the time of six requests (`--serial`) that
//! run one after the other, so the paper's six background requests alone saturate serial service.
//! The same arrivals are served twice: by class, as the server does, and first come, first served.
//! With `--simulate` only passes are measured, and the server's schedule runs over them in
//! simulated time, so that traces can be long.

mod load;
mod passes;
mod simulated;

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use emberflow_engine::{Engine, Request};
use serde::Serialize;
use tokio::sync::mpsc::unbounded_channel;

use self::load::{ANSWER, Arrival, Load, PARALLEL, PROMPT, Served};
use self::passes::Passes;
use self::simulated::simulate;
use crate::cli::ServeArgs;
use emberflow::bench::facts::Facts;
use emberflow::bench::output::{Results, Rows, Table, may_write};
use emberflow::chart::{Labels, bars};
use emberflow::cli::DraftArgs;
use emberflow::model::{Use, open_model, open_serving};
use emberflow::serve::schedule::{Schedule, Scheduling};
use emberflow::serve::shared::Shared;
use emberflow::serve::worker::{Job, Out, Work, work};
use emberflow::stats::Range;
use emberflow::{Failure, progress};

const BOTH: [Scheduling; 2] = [Scheduling::FirstCome, Scheduling::Classes];

/// A load under one scheduling policy.
#[derive(Debug, Serialize)]
struct ServeRow {
    /// Interactive requests per scaled minute.
    reactive_per_minute: f64,
    scheduling: &'static str,
    /// Interactive requests of all rounds.
    reactive_requests: usize,
    /// Their milliseconds per token of prompt and answer, from arrival to end: mean and 90th
    /// percentile.
    reactive_ms_per_token: Range,
    reactive_p90_ms_per_token: Range,
    /// Milliseconds from arrival until they run.
    reactive_wait_ms: Range,
    /// Background requests of all rounds: number, tokens per second, milliseconds per token.
    proactive_requests: usize,
    proactive_tokens_per_s: Range,
    proactive_ms_per_token: Range,
}

/// Runs the command.
pub fn command(args: &ServeArgs) -> Result<(), Failure> {
    let (repeat, facts) = (&args.repeat, Facts::here());
    may_write(&repeat.output, "serve", Some(&args.model), None)?;
    let model = open_model(&args.model)?;
    let name = model.text().config().name.clone();
    let wanted = Use {
        context: PROMPT + ANSWER,
        prompt: 0,
        batch: PARALLEL,
        spans: 0,
        reserve: 0,
        drafts: DraftArgs::OFF,
        force: false,
    };
    let mut engine = open_serving(model, &args.engine.engine(), &wanted)?;
    let mut server = Server {
        passes: if args.simulate {
            Some(Passes::measure(&mut engine)?)
        } else {
            None
        },
        engine,
    };
    let minute = server.serial()? * args.serial;
    let mut rates = vec![0.0];
    rates.extend(&args.reactive);
    let found = server.serve_all(args, &rates, minute)?;
    let mut rows = Vec::new();
    for (at, rounds) in found.iter().enumerate() {
        rows.push(row(rates[at / BOTH.len()], BOTH[at % BOTH.len()], rounds));
    }
    let notes = notes(args, &server, minute, &rows);
    let (minutes, rounds) = (minutes(args), repeat.rounds());
    Results {
        bench: "serve",
        model: Some(name),
        svg: chart(&facts.line(), &rows),
        table: table(&rows),
        csv: csv(&rows),
        agreement: None,
        facts,
        how: format!(
            "prompts of {PROMPT} tokens, answers of {ANSWER}, {PARALLEL} texts at once, {minutes} scaled minutes, \
             {rounds} rounds{}",
            if args.simulate { ", simulated over measured passes" } else { "" }
        ),
        body: Rows { rows: &rows },
        notes,
    }
    .finish(&repeat.output)
}

/// Serves loads in real or in simulated time.
struct Server {
    engine: Engine,
    /// Times of passes, for simulated time.
    passes: Option<Passes>,
}

/// Length of a load in scaled minutes.
fn minutes(args: &ServeArgs) -> f64 {
    if args.repeat.quick { 1.0 } else { args.minutes }
}

impl Server {
    /// Serves all loads with both policies, round by round. Returns the rounds by rate and policy.
    fn serve_all(
        &mut self,
        args: &ServeArgs,
        rates: &[f64],
        minute: Duration,
    ) -> Result<Vec<Vec<Vec<Served>>>, Failure> {
        let rounds = args.repeat.rounds();
        let steps = u64::from(rounds) * (BOTH.len() * rates.len()) as u64;
        let bar = progress::steps("serving", steps);
        let mut found = vec![Vec::new(); BOTH.len() * rates.len()];
        for round in 0..rounds {
            for (at, &rate) in rates.iter().enumerate() {
                let load = Load {
                    reactive: rate,
                    proactive: args.proactive,
                    minute,
                    minutes: minutes(args),
                };
                let arrivals = load.arrivals(u64::from(round));
                for (of, &scheduling) in BOTH.iter().enumerate() {
                    let served = self.serve(&arrivals, scheduling)?;
                    found[at * BOTH.len() + of].push(served);
                    bar.inc(1);
                }
            }
        }
        bar.finish_and_clear();
        Ok(found)
    }

    fn serve(
        &mut self,
        arrivals: &[Arrival],
        scheduling: Scheduling,
    ) -> Result<Vec<Served>, Failure> {
        match &self.passes {
            Some(passes) => Ok(simulate(arrivals, scheduling, passes)),
            None => serve(&mut self.engine, arrivals, scheduling),
        }
    }

    /// Time of a single request: median of five after a warm-up.
    fn serial(&mut self) -> Result<Duration, Failure> {
        let mut times = Vec::new();
        for number in 0..6 {
            let alone = Arrival {
                at: Duration::ZERO,
                proactive: false,
                number,
            };
            let served = self.serve(&[alone], Scheduling::FirstCome)?;
            times.extend(served.iter().map(|one| one.ended - one.began));
        }
        let times = &mut times[1..];
        times.sort_unstable();
        Ok(times[times.len() / 2])
    }
}

/// Serves a load, from the first arrival to the end of the last request.
fn serve(
    engine: &mut Engine,
    arrivals: &[Arrival],
    scheduling: Scheduling,
) -> Result<Vec<Served>, Failure> {
    let shared = Arc::new(Shared::default());
    let (sender, jobs) = channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let vocab = engine.config().vocab;
    std::thread::scope(|scope| {
        let (clients, all) = (shared.clone(), arrivals.to_vec());
        let thread = Builder::new().name("ember-clients".into());
        let clients = thread.spawn_scoped(scope, move || {
            let start = Instant::now();
            runtime.block_on(async {
                let ask = |arrival: Arrival| {
                    let client = Client {
                        arrival,
                        jobs: sender.clone(),
                        shared: clients.clone(),
                        interrupts: Schedule::interrupts(scheduling, arrival.proactive),
                        start,
                        vocab,
                    };
                    client.ask()
                };
                let waiting = futures_util::future::join_all(all.into_iter().map(ask)).await;
                drop(sender);
                waiting
            })
        })?;
        work(engine, &jobs, &shared, scheduling, None, || {})?;
        match clients.join() {
            Ok(served) => served.into_iter().collect(),
            Err(_) => Err(Failure::Fault("the clients' thread has failed".to_owned())),
        }
    })
}

/// A client that sends one request.
struct Client {
    arrival: Arrival,
    jobs: Sender<Work>,
    shared: Arc<Shared>,
    /// Interrupts the engine's pass, as the HTTP side does for interactive requests.
    interrupts: bool,
    start: Instant,
    vocab: u32,
}

impl Client {
    async fn ask(self) -> Result<Served, Failure> {
        let Arrival {
            at,
            proactive,
            number,
        } = self.arrival;
        tokio::time::sleep_until((self.start + at).into()).await;
        let failed = |why: String| Failure::Fault(format!("a request failed: {why}"));
        let (out, mut answer) = unbounded_channel();
        let mut random = fastrand::Rng::with_seed(number.into());
        let prompt = (0..PROMPT).map(|_| random.u32(..self.vocab)).collect();
        let job = Job {
            request: Request {
                max_tokens: ANSWER,
                ignore_eos: true,
                ..Request::default()
            },
            proactive,
            ..Job::new(prompt, out)
        };
        let arrived = self.start.elapsed();
        let sent = self.jobs.send(Work::Texts(Box::new(job)));
        sent.map_err(|_| failed("the engine has stopped".to_owned()))?;
        if self.interrupts {
            self.shared.interrupt();
        }
        let mut began = arrived;
        loop {
            match answer.recv().await {
                Some(Out::Started { .. }) => began = self.start.elapsed(),
                Some(Out::Done { .. }) => {
                    return Ok(Served {
                        proactive,
                        arrived,
                        began,
                        ended: self.start.elapsed(),
                    });
                }
                Some(Out::Failed(why)) => return Err(failed(why)),
                Some(_) => {}
                None => return Err(failed("the engine has stopped".to_owned())),
            }
        }
    }
}

fn row(rate: f64, scheduling: Scheduling, rounds: &[Vec<Served>]) -> ServeRow {
    let range = |of: &dyn Fn(&[Served]) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(|round| of(round)).collect();
        Range::of(&mut values)
    };
    let latencies = |round: &[Served], proactive: bool| -> Vec<f64> {
        let of = round.iter().filter(|one| one.proactive == proactive);
        let ms = |one: &Served| (one.ended - one.arrived).as_secs_f64() * 1e3;
        let mut all: Vec<f64> = of.map(|one| ms(one) / (PROMPT + ANSWER) as f64).collect();
        all.sort_unstable_by(f64::total_cmp);
        all
    };
    let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len().max(1) as f64;
    let count = |proactive| {
        let all = rounds.iter().flatten();
        all.filter(|one| one.proactive == proactive).count()
    };
    ServeRow {
        reactive_per_minute: rate,
        scheduling: scheduling.name(),
        reactive_requests: count(false),
        reactive_ms_per_token: range(&|round| mean(&latencies(round, false))),
        reactive_p90_ms_per_token: range(&|round| {
            let all = latencies(round, false);
            all.get(all.len() * 9 / 10).copied().unwrap_or(0.0)
        }),
        reactive_wait_ms: range(&|round| {
            let of = round.iter().filter(|one| !one.proactive);
            let ms: Vec<f64> = of
                .map(|one| (one.began - one.arrived).as_secs_f64() * 1e3)
                .collect();
            mean(&ms)
        }),
        proactive_requests: count(true),
        proactive_tokens_per_s: range(&|round| {
            let of = round.iter().filter(|one| one.proactive);
            let first = of.clone().map(|one| one.arrived).min();
            let last = of.clone().map(|one| one.ended).max();
            let time = last.unwrap_or_default() - first.unwrap_or_default();
            (of.count() * ANSWER) as f64 / time.as_secs_f64().max(1e-9)
        }),
        proactive_ms_per_token: range(&|round| mean(&latencies(round, true))),
    }
}

/// Explains the numbers and compares the policies.
fn notes(args: &ServeArgs, server: &Server, minute: Duration, rows: &[ServeRow]) -> Vec<String> {
    let (serial, proactive) = (f64::from(args.serial), args.proactive);
    let alone = minute.as_secs_f64() * 1e3 / serial;
    let mut notes = vec![format!(
        "bound: a request alone takes {alone:.0} ms, {:.2} ms per token; a scaled minute is {serial} of them, {:.2} s; \
         {proactive} background requests arrive in it",
        alone / (PROMPT + ANSWER) as f64,
        minute.as_secs_f64()
    )];
    notes.extend(server.passes.as_ref().map(Passes::line));
    for pair in rows.chunks_exact(BOTH.len()) {
        let [first, classes] = pair else { continue };
        let times = |of: fn(&ServeRow) -> Range| of(classes).median / of(first).median.max(1e-9);
        let load = (first.reactive_per_minute + proactive) / serial;
        let mut note = format!(
            "{} interactive requests per minute, {}: ",
            first.reactive_per_minute,
            served_in_turn(load)
        );
        if first.reactive_requests > 0 {
            note += &format!(
                "their latency is {:.1} % below first come, first served; ",
                100.0 - 100.0 * times(|row| row.reactive_ms_per_token)
            );
        }
        note += &format!(
            "background work has {:.2} times its tokens per second and {:.2} times its latency",
            times(|row| row.proactive_tokens_per_s),
            times(|row| row.proactive_ms_per_token)
        );
        notes.push(note);
    }
    notes
}

/// Describes serial service at utilisation ρ: the mean wait in a queue with Poisson arrivals and
/// constant service time `s` is `s·ρ / (2·(1 − ρ))` (Pollaczek–Khinchine).
fn served_in_turn(load: f64) -> String {
    let percent = 100.0 * load;
    if load < 1.0 {
        format!(
            "{percent:.0} % of serial service (in the mean over long times {:.1} times alone, so at most {:.0} % \
             below)",
            1.0 + load / (2.0 * (1.0 - load)),
            100.0 - 100.0 / (1.0 + load / (2.0 * (1.0 - load)))
        )
    } else {
        format!("{percent:.0} % of serial service, whose queue grows")
    }
}

fn table(rows: &[ServeRow]) -> Table {
    let mut table = Table::new(
        "interactive/min | scheduling | ms/token | P90 | until it runs, ms | background tokens/s | ms/token",
    );
    for r in rows {
        let reactive = |range: Range| match r.reactive_requests {
            0 => "–".to_owned(),
            _ => range.show(2),
        };
        table.rows.push(vec![
            r.reactive_per_minute.to_string(),
            r.scheduling.to_owned(),
            reactive(r.reactive_ms_per_token),
            reactive(r.reactive_p90_ms_per_token),
            reactive(r.reactive_wait_ms),
            r.proactive_tokens_per_s.show(1),
            r.proactive_ms_per_token.show(2),
        ]);
    }
    table
}

fn csv(rows: &[ServeRow]) -> Table {
    let mut table = Table::new(
        "reactive_per_minute | scheduling | reactive_requests | reactive_ms_per_token | reactive_p90_ms_per_token | \
         reactive_wait_ms | proactive_requests | proactive_tokens_per_s | proactive_ms_per_token",
    );
    for r in rows {
        let number = |range: Range| format!("{:.4}", range.median);
        table.rows.push(vec![
            r.reactive_per_minute.to_string(),
            r.scheduling.to_owned(),
            r.reactive_requests.to_string(),
            number(r.reactive_ms_per_token),
            number(r.reactive_p90_ms_per_token),
            number(r.reactive_wait_ms),
            r.proactive_requests.to_string(),
            number(r.proactive_tokens_per_s),
            number(r.proactive_ms_per_token),
        ]);
    }
    table
}

fn chart(facts: &str, rows: &[ServeRow]) -> String {
    let names = BOTH.map(|scheduling| scheduling.name().to_owned());
    let groups: Vec<(String, Vec<f64>)> = rows
        .chunks_exact(BOTH.len())
        .filter(|pair| pair[0].reactive_requests > 0)
        .map(|pair| {
            let values = pair.iter().map(|r| r.reactive_ms_per_token.median);
            (pair[0].reactive_per_minute.to_string(), values.collect())
        })
        .collect();
    let labels = Labels {
        title: "latency of interactive requests next to background work",
        facts,
        x: "interactive requests per scaled minute",
        y: "ms per token of prompt and answer, mean",
    };
    bars(&labels, &names, &groups)
}
