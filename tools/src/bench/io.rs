//! `emberflow bench io`: measures the disk under a file through the engine's I/O path. If the result is saved for the
//! planner, CPU and memory are measured too.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use emberflow_engine::planner::rates::Rates;
use emberflow_storage::durable;
use emberflow_storage::io::IoChoice;
use emberflow_storage::profile::{
    Best, Conditions, DeviceProfile, FileFacts, Machine, MeasurePlan, Pattern, Point, ReadCost,
    Target, Watch, measure, settle, spread_of_rounds,
};
use serde::Serialize;

use super::facts::Facts;
use super::output::{Results, Table, may_write};
use crate::chart::{Axes, Panel, panels};
use crate::cli::{BenchIoArgs, ReadSize};
use crate::machine::{measure_for_plans, table as table_of_machine};
use crate::stats::Range;
use crate::tell::tell;
use crate::{Failure, atomic, progress, size};

/// Size of the test file of a full and of a quick measurement.
const FULL: u64 = 1 << 30;
const QUICK: u64 = 256 << 20;

/// Rounds of a full measurement, and milliseconds per point and round.
const ROUNDS: u32 = 3;
const MILLIS: u64 = 125;

/// Rounds of a quick measurement: at least two, to see the variation.
const QUICK_ROUNDS: u32 = 2;

/// Maximum duration of the initial reads, as a multiple of the time per point.
const SETTLE: u32 = 25;

/// Additional members of the JSON object: the profile and where it was saved.
#[derive(Serialize)]
struct IoReport<'a> {
    version: u32,
    file: &'a FileFacts,
    points: &'a [IoRow<'a>],
    best: &'a Option<Best>,
    /// Rates of CPU and memory, if they were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<&'a Rates>,
    conditions: &'a Option<Conditions>,
    /// Why the numbers may not be those of the device alone.
    doubt: Option<String>,
    saved_to: &'a Option<PathBuf>,
}

/// A point, from the round with the median speed.
#[derive(Serialize)]
struct IoRow<'a> {
    #[serde(flatten)]
    point: &'a Point,
    /// Throughput over the rounds, in MB/s.
    range: Range,
    /// Bound in MB/s: the highest throughput of any point, or that of the simulated device's model for this length
    /// and depth.
    bound_mb_per_s: f64,
    /// Throughput as a share of the bound, over the rounds.
    of_bound: Range,
}

/// Runs the command.
pub fn command(args: &BenchIoArgs) -> Result<(), Failure> {
    may_write(&args.output, "io", None, args.file.as_deref())?;
    if let Some(Some(path)) = &args.save {
        atomic::may_write_below(path, args.output.force, &[args.file.as_deref()])?;
    }
    // Check the engine before writing a large file.
    let choice: IoChoice = args.io.parse().map_err(Failure::usage)?;
    let target = match &args.file {
        Some(path) => Target::open(path)?,
        None => temporary(args.size.unwrap_or(if args.quick { QUICK } else { FULL }))?,
    };
    if target.facts().sector.is_none() {
        tell(
            "emberflow: no direct I/O on this file system: the numbers are those of the page cache, \
             not of the device",
        );
    }
    let plan = plan(args, engines(choice, &target)?);
    let least = if args.quick { QUICK_ROUNDS } else { ROUNDS };
    let (rounds, conditions) = measure_rounds(&target, &plan, args.rounds.unwrap_or(least))?;
    let points = middle(&rounds);
    let profile = DeviceProfile {
        conditions: Some(conditions),
        ..DeviceProfile::new(Machine::here(), target.facts().clone(), points)
    };
    let rows = rows(&profile.points, &rounds, choice);
    // Print the result even if it cannot be saved: it took minutes.
    let saved = save(args, &profile);
    let saved_to = saved.as_ref().ok().cloned().flatten();
    let machine = machine_for_plans(&saved_to)?;
    let mut notes = notes(&profile, choice, &saved_to);
    notes.extend(left_unsaved(args));
    let facts = Facts {
        file: Some(profile.file.clone()),
        ..Facts::here()
    };
    Results {
        bench: "io",
        model: None,
        svg: chart(&profile, &facts.line()),
        table: table(&rows),
        csv: csv(&rows),
        agreement: None,
        how: format!(
            "reads of {} by size, queue depth, range and engine, {} rounds, {} ms per \
             point",
            profile.file.path.display(),
            rounds.len(),
            plan.time.as_millis()
        ),
        facts,
        notes,
        body: IoReport {
            version: profile.version,
            file: &profile.file,
            points: &rows,
            best: &profile.best,
            rates: machine.as_ref(),
            conditions: &profile.conditions,
            doubt: profile.doubt(),
            saved_to: &saved_to,
        },
    }
    .finish(&args.output)?;
    if let Some(rates) = machine.filter(|_| !args.output.json) {
        write!(std::io::stdout().lock(), "\n{}", table_of_machine(&rates))?;
    }
    saved.map(drop)
}

/// Measures CPU and memory if the device profile was saved for the planner, which needs both.
fn machine_for_plans(saved_to: &Option<PathBuf>) -> Result<Option<Rates>, Failure> {
    let for_plans = saved_to.is_some() && *saved_to == DeviceProfile::default_path();
    for_plans.then(measure_for_plans).transpose()
}

/// Measures all points `rounds` times after the device's burst, watching for other load. Reads that no device served
/// are an error.
fn measure_rounds(
    target: &Target,
    plan: &MeasurePlan,
    rounds: u32,
) -> Result<(Vec<Vec<Point>>, Conditions), Failure> {
    let sim = |choice: &IoChoice| matches!(choice, IoChoice::Sim(_));
    let real = !plan.engines.iter().any(sim) && target.facts().sector.is_some();
    if real {
        target.filled()?;
    }
    let device = || target.device_bytes().filter(|_| real);
    let watch = Watch::start(device());
    let mut settled = None;
    if let Some(&engine) = plan.engines.first().filter(|_| real) {
        let bar = progress::steps("reading past the burst", 1);
        settled = Some(settle(target, engine, plan.settle)?);
        bar.finish_and_clear();
    }
    let mut read = settled.map_or(0, |s| s.bytes);
    let steps = u64::from(rounds) * plan.points(target.facts().len) as u64;
    let bar = progress::steps("measuring", steps);
    let mut all = Vec::new();
    for _ in 0..rounds {
        let round = measure(target, plan, |_| bar.inc(1))?;
        read += round.bytes;
        all.push(round.points);
    }
    bar.finish_and_clear();
    let conditions = Conditions {
        spread: spread_of_rounds(&all),
        first_mb_per_s: settled.map_or(0.0, |s| s.first),
        settled_mb_per_s: settled.map_or(0.0, |s| s.last),
        ..watch.end(read, device())
    };
    target.proven(read, &conditions)?;
    Ok((all, conditions))
}

/// Each point from the round with its median speed.
fn middle(rounds: &[Vec<Point>]) -> Vec<Point> {
    let count = rounds.first().map_or(0, Vec::len);
    let of = |i: usize| {
        let mut same: Vec<&Point> = rounds.iter().filter_map(|round| round.get(i)).collect();
        same.sort_by(|a, b| a.mb_per_s.total_cmp(&b.mb_per_s));
        same.get(same.len().saturating_sub(1) / 2)
            .map(|&p| p.clone())
    };
    (0..count).filter_map(of).collect()
}

fn rows<'a>(points: &'a [Point], rounds: &[Vec<Point>], choice: IoChoice) -> Vec<IoRow<'a>> {
    let all = rounds.iter().flatten().map(|p| p.mb_per_s);
    let fastest = all.fold(0.0, f64::max);
    let row = |(i, point): (usize, &'a Point)| {
        let bound_mb_per_s = match choice {
            IoChoice::Sim(options) => {
                let cost = ReadCost::simulated(&options, point.depth, point.range);
                let ns = cost.read_ns(u64::from(point.size), point.pattern);
                f64::from(point.size) * 1e3 / ns.max(1e-9)
            }
            _ => fastest,
        };
        let same = rounds.iter().filter_map(|round| round.get(i));
        let range = Range::of(&mut same.map(|p| p.mb_per_s).collect::<Vec<_>>());
        IoRow {
            point,
            range,
            bound_mb_per_s,
            of_bound: range.map(|mb_per_s| mb_per_s / bound_mb_per_s.max(1e-9)),
        }
    };
    points.iter().enumerate().map(row).collect()
}

/// Why the result of a quick measurement is not saved.
fn left_unsaved(args: &BenchIoArgs) -> Option<String> {
    let unsaved = args.io == "auto" && args.save.is_none();
    match args.quick {
        _ if !unsaved => None,
        true => Some("not saved for the planner: measure without --quick".into()),
        false if args.file.is_some() => Some("not saved for the planner: --save does it".into()),
        false => None,
    }
}

/// Notes: the bound, the best throughput, warnings, and where the profile was saved.
fn notes(profile: &DeviceProfile, choice: IoChoice, saved_to: &Option<PathBuf>) -> Vec<String> {
    let bound = match choice {
        IoChoice::Sim(_) => "throughput of the simulated device's model at that length and depth",
        _ => "highest throughput of this run at any length and depth",
    };
    let mut notes = vec![format!("bound: {bound}")];
    notes.extend(profile.best.as_ref().map(|best| {
        format!(
            "best: {} at depth {}; {}; {}",
            best.engine,
            best.depth,
            random(profile),
            sequential(best)
        )
    }));
    if let Some(c) = profile
        .conditions
        .filter(|c| c.first_mb_per_s > 1.25 * c.settled_mb_per_s)
    {
        notes.push(format!(
            "the device gave {:.0} MB/s at first and {:.0} afterwards; measured after this burst",
            c.first_mb_per_s, c.settled_mb_per_s
        ));
    }
    if let Some(c) = profile.conditions.filter(|_| profile.file.sector.is_some()) {
        let proof = match c.device_bytes {
            Some(_) => "direct reads: confirmed by the device's byte counter",
            None => "direct reads; not confirmed by a device counter",
        };
        notes.extend((!matches!(choice, IoChoice::Sim(_))).then(|| proof.to_owned()));
    }
    if let Some(doubt) = profile.doubt() {
        notes.push(format!(
            "measured under load ({doubt}): measure again on an idle machine"
        ));
    }
    let saved = saved_to
        .iter()
        .map(|path| format!("saved to {}", path.display()));
    notes.extend(saved);
    notes
}

/// Random throughput by read size. Long reads alone would be misleading: most reads of a run are short.
pub fn random(profile: &DeviceProfile) -> String {
    let speeds = profile.random_by_size();
    let speed = |&(len, mb): &(u32, f64)| format!("{mb:.0} in {}", size::show(u64::from(len)));
    let speeds: Vec<String> = speeds.iter().map(speed).collect();
    format!("MB/s random: {}", speeds.join(", "))
}

/// Sequential throughput in words.
pub fn sequential(best: &Best) -> String {
    match best.sequential_mb_per_s {
        Some(speed) => format!("{speed:.0} MB/s sequential"),
        None => "sequential not measured".into(),
    }
}

/// Saves the profile to the given path or for the planner; returns the path.
fn save(args: &BenchIoArgs, profile: &DeviceProfile) -> Result<Option<PathBuf>, Failure> {
    let wanted = args.saves_by_itself() && profile.file.sector.is_some();
    let path = match &args.save {
        Some(Some(path)) => Some(path.clone()),
        Some(None) => Some(DeviceProfile::default_path().ok_or_else(|| {
            Failure::usage("--save needs a path: neither XDG_CACHE_HOME nor HOME is set")
        })?),
        None if wanted => DeviceProfile::default_path(),
        None => None,
    };
    if let Some(path) = &path {
        profile.save(path)?;
    }
    Ok(path)
}

fn plan(args: &BenchIoArgs, engines: Vec<IoChoice>) -> MeasurePlan {
    let mut plan = if args.quick {
        MeasurePlan::quick(engines)
    } else {
        MeasurePlan::full(engines)
    };
    if !args.sizes.is_empty() {
        let random = |s: &ReadSize| match s {
            ReadSize::Random(n) => Some(*n),
            ReadSize::Sequential => None,
        };
        plan.random = args.sizes.iter().filter_map(random).collect();
        if plan.random.len() == args.sizes.len() {
            plan.sequential.clear();
        }
    }
    if !args.depths.is_empty() {
        plan.depths = args.depths.clone();
    }
    if !args.ranges.is_empty() {
        plan.ranges = args.ranges.iter().copied().filter(|&r| r > 0).collect();
    }
    match args.millis {
        Some(ms) => {
            plan.time = Duration::from_millis(u64::from(ms));
            plan.settle = plan.settle.min(plan.time * SETTLE);
        }
        None if !args.quick => plan.time = Duration::from_millis(MILLIS),
        None => {}
    }
    plan
}

/// The engines to measure.
fn engines(choice: IoChoice, target: &Target) -> Result<Vec<IoChoice>, Failure> {
    if choice != IoChoice::Auto {
        target.works(choice)?;
        return Ok(vec![choice]);
    }
    let mut engines = vec![IoChoice::Pread];
    match target.works(IoChoice::Uring) {
        Ok(()) => engines.insert(0, IoChoice::Uring),
        Err(reason) => tell(format_args!("emberflow: measuring pread only: {reason}")),
    }
    Ok(engines)
}

/// A file of `len` bytes in the current folder that is deleted when this process ends.
fn temporary(len: u64) -> Result<Target, Failure> {
    let dir = Path::new(".");
    let path = dir.join(format!(".emberflow-bench-{}.tmp", std::process::id()));
    let mut file = (File::options().read(true).write(true).create_new(true))
        .open(&path)
        .map_err(Failure::file(&path))?;
    std::fs::remove_file(&path).map_err(Failure::file(&path))?;
    // Random data: some devices do not store zeros or repetitions.
    let mut block = vec![0u8; 1 << 20];
    let bar = progress::bytes("writing a test file", len);
    let mut state = len | 1;
    let mut left = len;
    while left > 0 {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let n = left.min(block.len() as u64);
        file.write_all(&block[..n as usize])
            .map_err(Failure::file(&path))?;
        left -= n;
        bar.inc(n);
    }
    durable::sync_all(&file, &path).map_err(Failure::file(&path))?;
    file.rewind().map_err(Failure::file(&path))?;
    bar.finish_and_clear();
    Ok(Target::unnamed(file, dir)?)
}

/// Engine, pattern and range of a group of points.
type Group<'a> = (&'a str, Pattern, u64);

fn groups<'a>(points: impl Iterator<Item = &'a Point>) -> Vec<Group<'a>> {
    let mut seen = Vec::new();
    for p in points {
        let group = (p.engine.as_str(), p.pattern, p.range);
        if !seen.contains(&group) {
            seen.push(group);
        }
    }
    seen.sort_by_key(|&(engine, pattern, range)| {
        (
            engine != "uring",
            engine.to_owned(),
            pattern == Pattern::Sequential,
            range,
        )
    });
    seen
}

fn is_of(point: &Point, group: Group<'_>) -> bool {
    (point.engine.as_str(), point.pattern, point.range) == group
}

fn describe((engine, pattern, range): Group<'_>) -> String {
    match pattern {
        Pattern::Random => format!("{engine}, random over {}", size::show(range)),
        Pattern::Sequential => format!("{engine}, sequential"),
    }
}

/// Text output: one row per size, with all depths and the fastest depth.
fn table(rows: &[IoRow<'_>]) -> Table {
    let points = || rows.iter().map(|r| r.point);
    let depths: BTreeSet<u32> = points().map(|p| p.depth).collect();
    let mut columns = vec!["reads".to_owned(), "size".into()];
    columns.extend(depths.iter().map(|depth| format!("MB/s at {depth}")));
    let best = [
        "best at",
        "MB/s",
        "of bound",
        "IOPS",
        "CPU us",
        "I/O thread",
        "P50 us",
        "P99 us",
    ];
    columns.extend(best.map(str::to_owned));
    let mut table = Table {
        columns,
        rows: Vec::new(),
    };
    for group in groups(points()) {
        let here = || rows.iter().filter(move |r| is_of(r.point, group));
        let sizes: BTreeSet<u32> = here().map(|r| r.point.size).collect();
        for size in sizes {
            let here = || here().filter(move |r| r.point.size == size);
            let mut cells = vec![describe(group), size::show(u64::from(size))];
            cells.extend(depths.iter().map(|&depth| {
                let point = here().find(|r| r.point.depth == depth);
                point.map_or("–".into(), |r| format!("{:.0}", r.range.median))
            }));
            if let Some(r) = here().max_by(|a, b| a.range.median.total_cmp(&b.range.median)) {
                let p = r.point;
                let share = r.of_bound.map(|share| 100.0 * share);
                cells.extend([p.depth.to_string(), r.range.show(0)]);
                cells.extend([format!("{} %", share.show(0)), format!("{:.0}", p.iops)]);
                let cpu = [p.cpu_us_per_read, p.io_cpu_us_per_read];
                cells.extend(cpu.map(|us| format!("{us:.2}")));
                cells.extend([p.p50_us, p.p99_us].map(|us| format!("{us:.0}")));
            }
            table.rows.push(cells);
        }
    }
    table
}

fn csv(rows: &[IoRow<'_>]) -> Table {
    let mut table = Table::new(
        "engine | pattern | size | depth | range | mb_per_s | mb_per_s_min | \
         mb_per_s_max | bound_mb_per_s | of_bound | iops | cpu_us_per_read | \
         io_cpu_us_per_read | p50_us | p99_us",
    );
    for r in rows {
        let p = r.point;
        let pattern = match p.pattern {
            Pattern::Random => "random",
            Pattern::Sequential => "sequential",
        };
        let mut cells = vec![p.engine.clone(), pattern.into()];
        cells.extend([p.size.to_string(), p.depth.to_string(), p.range.to_string()]);
        let speeds = [r.range.median, r.range.min, r.range.max, r.bound_mb_per_s];
        cells.extend(speeds.map(|v| format!("{v:.2}")));
        let times = [p.cpu_us_per_read, p.io_cpu_us_per_read, p.p50_us, p.p99_us];
        cells.extend(
            [r.of_bound.median, p.iops]
                .iter()
                .chain(&times)
                .map(|v| format!("{v:.4}")),
        );
        table.rows.push(cells);
    }
    table
}

/// One panel per engine and range: throughput over queue depth, one curve per size.
fn chart(profile: &DeviceProfile, facts: &str) -> String {
    let charts: Vec<Panel> = groups(profile.points.iter())
        .into_iter()
        .map(|group| {
            let points = profile.points.iter().filter(|p| is_of(p, group));
            let sizes: BTreeSet<u32> = points.clone().map(|p| p.size).collect();
            let curve = |&size: &u32| {
                let mut at: Vec<(f64, f64)> = (points.clone().filter(|p| p.size == size))
                    .map(|p| (f64::from(p.depth), p.mb_per_s))
                    .collect();
                at.sort_by(|a, b| a.0.total_cmp(&b.0));
                (size::show(u64::from(size)), at)
            };
            Panel {
                title: describe(group),
                x: "queue depth",
                y: "MB/s",
                curves: sizes.iter().map(curve).collect(),
            }
        })
        .collect();
    let title = format!("MB/s by queue depth: {facts}");
    panels(&title, Axes::Logs, &charts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use emberflow_storage::profile::FileFacts;

    fn profile() -> DeviceProfile {
        let point = |engine: &str, size, depth, mb_per_s| Point {
            engine: engine.into(),
            pattern: Pattern::Random,
            size,
            depth,
            range: 1 << 30,
            mb_per_s,
            iops: 1.0,
            io_cpu_us_per_read: 1.0,
            cpu_us_per_read: 2.0,
            p50_us: 3.0,
            p99_us: 4.0,
            reads: 5,
        };
        let points = vec![
            point("pread", 4096, 1, 77.0),
            point("uring", 4096, 1, 88.0),
            point("uring", 4096, 8, 333.0),
            point("uring", 8192, 8, 555.0),
        ];
        DeviceProfile::new(Machine::default(), FileFacts::default(), points)
    }

    #[test]
    fn every_number_is_in_its_place() {
        let profile = profile();
        let slower = |p: &Point| Point {
            mb_per_s: p.mb_per_s * 0.5,
            ..p.clone()
        };
        let faster = |p: &Point| Point {
            mb_per_s: p.mb_per_s * 2.0,
            ..p.clone()
        };
        let rounds = [
            profile.points.iter().map(faster).collect(),
            profile.points.clone(),
            profile.points.iter().map(slower).collect::<Vec<_>>(),
        ];
        assert_eq!(middle(&rounds), profile.points);
        let rows = rows(&profile.points, &rounds, IoChoice::Pread);
        let text = table(&rows).markdown();
        let row = |start: &str| {
            let row = text.lines().find(|l| l.contains(start)).expect(start);
            row.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let of = "uring, random over 1.0 GiB | 4.0 KiB";
        assert!(
            row(of).contains("4.0 KiB | 88 | 333 | 8 | 333 (166 to 666) | 30 (15 to 60) % |"),
            "{text}"
        );
        // 555 of the maximum of 1110.
        let of = "uring, random over 1.0 GiB | 8.0 KiB";
        assert!(
            row(of).contains("| – | 555 | 8 | 555 (278 to 1110) | 50 (25 to 100) % |"),
            "{text}"
        );
        let first = text.find("uring").zip(text.find("pread"));
        assert!(first.is_some_and(|(uring, pread)| uring < pread), "{text}");
        assert!(
            csv(&rows)
                .csv()
                .contains("uring,random,8192,8,1073741824,555.00,277.50,1110.00,1110.00,0.5000,")
        );
        let notes = notes(&profile, IoChoice::Pread, &None);
        assert!(
            notes[1]
                .contains("best: uring at depth 8; MB/s random: 333 in 4.0 KiB, 555 in 8.0 KiB;"),
            "{notes:?}"
        );
    }

    #[test]
    fn the_chart_has_a_panel_per_engine() {
        let text = chart(&profile(), "here");
        assert!(text.contains("uring, random") && text.contains("pread, random"));
        assert!(text.contains("here") && text.ends_with("</svg>\n"));
    }
}
