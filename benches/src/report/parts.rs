//! Tables of parts: kernels, predictors, cache, reads, plans.

use super::results::Results;
use super::text::{Table, num, percent, range};

/// Largest working set of `kernels` in bytes, beyond every cache.
const FAR: &str = "1073741824";

/// Kernels compared with a plain read.
pub fn kernels(r: &Results) -> String {
    let Some(csv) = r.csv("kernels.csv") else {
        return r.left_out("kernels.csv");
    };
    let mut table = Table::new(&[
        "format",
        "sequential rows, GB/s",
        "relative to a read",
        "one neuron in five, scattered, GB/s",
        "relative to a read",
        "products with 128 tokens, GMAC/s",
    ]);
    for format in ["q4", "q8", "f16", "f32"] {
        let at = |kernel: &str, size: &str| {
            csv.find(&[
                ("threads", "2"),
                ("format", format),
                ("kernel", kernel),
                ("size", size),
            ])
        };
        let rate = |kernel: &str, size: &str| {
            at(kernel, size).map_or(String::new(), |row| {
                range(
                    row.or_zero("rate"),
                    row.or_zero("rate_min"),
                    row.or_zero("rate_max"),
                )
            })
        };
        let share = |kernel: &str| {
            at(kernel, FAR).map_or(String::new(), |row| percent(row.or_zero("of_bound")))
        };
        table.row(&[
            format.to_owned(),
            rate("rows", FAR),
            share("rows"),
            rate("neurons", FAR),
            share("neurons"),
            rate("products", "128"),
        ]);
    }
    table.end()
}

/// Predictors, over all layers.
pub fn predictor(r: &Results) -> String {
    let Some(csv) = r.csv("predictor.csv") else {
        return r.left_out("predictor.csv");
    };
    let layers: Vec<_> = (csv.rows())
        .filter(|row| row.text("layer").parse::<u32>().is_ok())
        .collect();
    let mean = |column: &str| {
        layers.iter().map(|row| row.or_zero(column)).sum::<f64>() / layers.len().max(1) as f64
    };
    let mut table = Table::new(&[
        "layers",
        "bytes per layer",
        "µs per layer",
        "relative to a read",
        "recall",
        "precision",
        "predicted",
    ]);
    table.row(&[
        layers.len().to_string(),
        format!("{:.0}", mean("bytes")),
        num(mean("us")),
        num(mean("of_bound")),
        format!("{:.1} %", 100.0 * mean("recall")),
        format!("{:.1} %", 100.0 * mean("precision")),
        format!("{:.1} %", 100.0 * mean("predicted_share")),
    ]);
    format!("Means over the layers.\n\n{}", table.end())
}

/// Bookkeeping of the cache.
pub fn cache(r: &Results) -> String {
    let Some(csv) = r.csv("cache.csv") else {
        return r.left_out("cache.csv");
    };
    let mut table = Table::new(&[
        "neurons cached",
        "tables, MiB",
        "look up, ns",
        "find and pin",
        "release",
        "replace",
        "dependent memory access",
    ]);
    let mut seen: Vec<&str> = Vec::new();
    for row in csv.rows() {
        let slots = row.text("slots");
        if seen.contains(&slots) {
            continue;
        }
        seen.push(slots);
        let step = |step: &str| {
            let row = csv.find(&[("slots", slots), ("step", step)]);
            row.map_or(String::new(), |row| num(row.or_zero("ns")))
        };
        table.row(&[
            slots.to_owned(),
            num(row.or_zero("table_bytes") / f64::from(1 << 20)),
            step("look up"),
            step("find and pin"),
            step("release"),
            step("replace"),
            num(row.or_zero("access_ns")),
        ]);
    }
    table.end()
}

/// Our reads and fio's, each at its best depth.
pub fn fio(r: &Results) -> String {
    let Some(csv) = r.csv("fio.csv") else {
        return r.left_out("fio.csv");
    };
    let mut table = Table::new(&[
        "read",
        "fio, MB/s",
        "uring",
        "relative to fio",
        "pread",
        "relative to fio",
        "CPU per read at depth 32, µs: fio",
        "our I/O thread",
    ]);
    for size in ["4KiB", "8KiB", "24KiB", "64KiB", "512KiB", "seq"] {
        let best = |engine: &str| {
            let all = csv.rows();
            let ours = all.filter(|row| row.text("size") == size && row.text("engine") == engine);
            ours.map(|row| row.or_zero("mb_per_s")).fold(0.0, f64::max)
        };
        let cpu = |engine: &str| {
            let row = csv.find(&[("size", size), ("engine", engine), ("depth", "32")]);
            row.map_or(String::new(), |row| num(row.or_zero("io_cpu_us_per_read")))
        };
        let (fio, uring, pread) = (best("fio"), best("uring"), best("pread"));
        let size = match size {
            "seq" => "1 MiB, sequential",
            size => size,
        };
        table.row(&[
            size.to_owned(),
            format!("{fio:.0}"),
            format!("{uring:.0}"),
            num(uring / fio),
            format!("{pread:.0}"),
            num(pread / fio),
            cpu("fio"),
            cpu("uring"),
        ]);
    }
    table.end()
}

/// Forecasts of plans, and achieved values.
pub fn plan(r: &Results) -> String {
    let Some(csv) = r.csv("plan.csv") else {
        return r.left_out("plan.csv");
    };
    let mut table = Table::new(&[
        "model",
        "budget, MiB",
        "FFN in memory",
        "forecast, tokens/s",
        "achieved",
        "ratio",
        "hits: forecast, achieved",
        "MiB/token: forecast, achieved",
    ]);
    for row in csv.rows() {
        let n = |column: &str| num(row.or_zero(column));
        table.row(&[
            row.text("model").to_owned(),
            row.text("budget_mib").to_owned(),
            percent(row.or_zero("ffn_resident")),
            n("expected"),
            n("achieved"),
            n("ratio"),
            format!(
                "{:.2}, {:.2}",
                row.or_zero("hits_expected"),
                row.or_zero("hits")
            ),
            format!("{}, {}", n("mib_expected"), n("mib")),
        ]);
    }
    let (within, all) = within_a_fifth(&csv);
    format!("{}\n{within} of {all} rows are within 20 %.\n", table.end())
}

/// (Rows of a plan within 20 %, all rows).
pub fn within_a_fifth(csv: &super::csv::Csv) -> (usize, usize) {
    let ratios: Vec<f64> = csv.rows().map(|row| row.or_zero("ratio")).collect();
    let good = |r: &&f64| (1.0 / 1.2..=1.2).contains(*r);
    (ratios.iter().filter(good).count(), ratios.len())
}
