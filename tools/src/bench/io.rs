//! `emberflow bench io`: what the device under a file gives, through our own reading path.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use emberflow_storage::io::EngineChoice;
use emberflow_storage::profile::{DeviceProfile, Machine, Pattern, Plan, Point, Target, measure};
use serde::Serialize;

use crate::cli::{BenchIoArgs, ReadSize};
use crate::{Failure, print_json, progress, size, svg};

const FULL: u64 = 1 << 30;
const QUICK: u64 = 64 << 20;

/// What `--json` prints: the profile and where it went.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    profile: &'a DeviceProfile,
    saved_to: Option<PathBuf>,
}

/// Runs the command.
pub fn command(args: &BenchIoArgs) -> Result<(), Failure> {
    // Before a gigabyte is written for nothing.
    let choice: EngineChoice = args.io.parse().map_err(Failure::usage)?;
    let target = match &args.file {
        Some(path) => Target::open(path)?,
        None => temporary(args.size.unwrap_or(if args.quick { QUICK } else { FULL }))?,
    };
    if target.facts().sector.is_none() {
        eprintln!(
            "emberflow: no direct I/O on this file system: these are numbers of the page cache, \
             not of the device"
        );
    }
    let plan = plan(args, engines(choice, &target)?);
    let bar = progress::steps("measuring", plan.points(target.facts().len) as u64);
    let points = measure(&target, &plan, |_| bar.inc(1))?;
    bar.finish_and_clear();
    let profile = DeviceProfile::new(Machine::here(), target.facts().clone(), points);
    if let Some(path) = &args.svg {
        std::fs::write(path, chart(&profile)).map_err(Failure::file(path))?;
    }
    // Minutes of measuring are shown even where they cannot be kept.
    let saved = save(args, &profile);
    let saved_to = saved.as_ref().ok().cloned().flatten();
    if args.json {
        print_json(&Report {
            profile: &profile,
            saved_to,
        })?;
    } else {
        print!("{}", table(&profile));
        if let Some(path) = saved_to {
            println!("saved to {}", path.display());
        }
    }
    saved.map(drop)
}

/// Saves the profile where the user or the planner wants it, and says where.
fn save(args: &BenchIoArgs, profile: &DeviceProfile) -> Result<Option<PathBuf>, Failure> {
    // A part of the picture is no base for plans unless the user says so.
    let partial = args.quick
        || args.io != "auto"
        || !args.sizes.is_empty()
        || !args.depths.is_empty()
        || !args.ranges.is_empty();
    let wanted = !partial && profile.file.sector.is_some();
    let path = match &args.save {
        Some(Some(path)) => Some(path.clone()),
        Some(None) => Some(DeviceProfile::default_path().ok_or_else(|| {
            Failure::usage("--save needs a path, as neither XDG_CACHE_HOME nor HOME is set")
        })?),
        None if wanted => DeviceProfile::default_path(),
        None => None,
    };
    if let Some(path) = &path {
        profile.save(path)?;
    }
    Ok(path)
}

fn plan(args: &BenchIoArgs, engines: Vec<EngineChoice>) -> Plan {
    let mut plan = if args.quick {
        Plan::quick(engines)
    } else {
        Plan::full(engines)
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
    if let Some(ms) = args.millis {
        plan.time = Duration::from_millis(u64::from(ms));
    }
    plan
}

/// The engines to measure.
fn engines(choice: EngineChoice, target: &Target) -> Result<Vec<EngineChoice>, Failure> {
    if choice != EngineChoice::Auto {
        target.works(choice)?;
        return Ok(vec![choice]);
    }
    let mut engines = vec![EngineChoice::Pread];
    match target.works(EngineChoice::Uring) {
        Ok(()) => engines.insert(0, EngineChoice::Uring),
        Err(reason) => eprintln!("emberflow: only pread is measured: {reason}"),
    }
    Ok(engines)
}

/// A file of `len` bytes in the current folder that is gone when this process is.
fn temporary(len: u64) -> Result<Target, Failure> {
    let dir = Path::new(".");
    let path = dir.join(format!(".emberflow-bench-{}.tmp", std::process::id()));
    let mut file = (File::options().read(true).write(true).create_new(true))
        .open(&path)
        .map_err(Failure::file(&path))?;
    std::fs::remove_file(&path).map_err(Failure::file(&path))?;
    // Neither zeros nor repetition, which some devices store as nothing.
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
    file.sync_all().map_err(Failure::file(&path))?;
    file.rewind().map_err(Failure::file(&path))?;
    bar.finish_and_clear();
    Ok(Target::unnamed(file, dir)?)
}

/// Name of a group of points.
type Group<'a> = (&'a str, Pattern, u64);

fn groups(points: &[Point]) -> Vec<Group<'_>> {
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

fn of<'a>(points: &'a [Point], group: Group<'a>) -> impl Iterator<Item = &'a Point> + Clone {
    let same = move |p: &&Point| (p.engine.as_str(), p.pattern, p.range) == group;
    points.iter().filter(same)
}

fn describe((engine, pattern, range): Group<'_>) -> String {
    match pattern {
        Pattern::Random => format!("{engine}, random over {}", size::show(range)),
        Pattern::Sequential => format!("{engine}, sequential"),
    }
}

fn table(profile: &DeviceProfile) -> String {
    let (machine, file) = (&profile.machine, &profile.file);
    let direct = match file.sector {
        Some(sector) => format!("direct I/O in {sector} B"),
        None => "no direct I/O".into(),
    };
    let mut out = format!(
        "{} on {} ({}), {}, {direct}; kernel {}, {} cores\n",
        file.path.display(),
        file.device,
        file.fs,
        size::show(file.len),
        machine.kernel,
        machine.cores
    );
    for group in groups(&profile.points) {
        let points = of(&profile.points, group);
        let depths: BTreeSet<u32> = points.clone().map(|p| p.depth).collect();
        let sizes: BTreeSet<u32> = points.clone().map(|p| p.size).collect();
        out += &format!("\n{}: MB/s at depth\n{:>10}", describe(group), "");
        for depth in &depths {
            out += &format!("{depth:>7}");
        }
        out += "  |  best    IOPS  cpu µs/read (io thread)   p50 µs   p99 µs\n";
        for &size in &sizes {
            out += &format!("{:>10}", size::show(u64::from(size)));
            for &depth in &depths {
                match points.clone().find(|p| p.size == size && p.depth == depth) {
                    Some(p) => out += &format!("{:>7.0}", p.mb_per_s),
                    None => out += "      -",
                }
            }
            let here = points.clone().filter(|p| p.size == size);
            if let Some(p) = here.max_by(|a, b| a.mb_per_s.total_cmp(&b.mb_per_s)) {
                out += &format!(
                    "  | {:>5} {:>7.0} {:>12.2} {:>11.2} {:>8.0} {:>8.0}\n",
                    p.depth, p.iops, p.cpu_us_per_read, p.io_cpu_us_per_read, p.p50_us, p.p99_us
                );
            }
        }
    }
    if let Some(best) = &profile.best {
        out += &format!(
            "\nbest: {} at depth {}; {:.0} MB/s random, {:.0} MB/s sequential\n",
            best.engine, best.depth, best.random_mb_per_s, best.sequential_mb_per_s
        );
    }
    out
}

/// One panel per engine and range: throughput over depth, a curve for each size.
fn chart(profile: &DeviceProfile) -> String {
    let panels: Vec<svg::Panel> = groups(&profile.points)
        .into_iter()
        .map(|group| {
            let points = of(&profile.points, group);
            let sizes: BTreeSet<u32> = points.clone().map(|p| p.size).collect();
            let curve = |&size: &u32| {
                let mut at: Vec<(f64, f64)> = (points.clone().filter(|p| p.size == size))
                    .map(|p| (f64::from(p.depth), p.mb_per_s))
                    .collect();
                at.sort_by(|a, b| a.0.total_cmp(&b.0));
                (size::show(u64::from(size)), at)
            };
            svg::Panel {
                title: describe(group),
                curves: sizes.iter().map(curve).collect(),
            }
        })
        .collect();
    let file = &profile.file;
    let title = format!("{} ({}), MB/s by reads in flight", file.device, file.fs);
    svg::log_panels(&title, "reads in flight", "MB/s", &panels)
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
    fn the_table_has_every_number_in_its_place() {
        let text = table(&profile());
        let uring = text.find("uring, random over 1.0 GiB").unwrap();
        let pread = text.find("pread, random over 1.0 GiB").unwrap();
        assert!(uring < pread, "{text}");
        let row = |start: &str| {
            text.lines()
                .find(|l| l.trim_start().starts_with(start))
                .unwrap()
        };
        assert!(row("4.0 KiB").contains("88    333  |     8"), "{text}");
        assert!(row("8.0 KiB").contains("-    555  |     8"), "{text}");
        assert!(
            text.contains("best: uring at depth 8; 555 MB/s random"),
            "{text}"
        );
    }

    #[test]
    fn the_chart_has_a_panel_per_engine() {
        let text = chart(&profile());
        assert!(text.contains("uring, random") && text.contains("pread, random"));
        assert!(text.ends_with("</svg>\n"));
    }
}
