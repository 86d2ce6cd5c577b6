//! `emberflow pack`: converts a checkpoint to a container.
//!
//! Everything streams: rows are read, quantized and written in batches; only one transposed Down matrix and, of GPTQ and AWQ,
//! 256 MiB of decoded rows are held at a time. The output depends on the checkpoint, the options and the sector size alone. Without `--sector` the sector
//! size is what direct I/O needs on the output's file system (`sector.rs`). An interrupted pack can be resumed.

mod by_rows;
mod by_source;
pub mod calibrate;
mod described;
pub(crate) mod layout;
mod mix;
pub(crate) mod options;
mod rounding;
mod sector;
#[cfg(test)]
mod tests;
pub(crate) mod write;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use emberflow_engine::meta::Order;
use emberflow_models::Checkpoint;
use emberflow_storage::container::Prefer;
use emberflow_storage::mem;

pub use self::described::described;
pub use self::options::{BySource, CalibrationText, PackOptions};
pub use self::rounding::RoundingError;
pub use self::write::{CalibratedReport, MixedReport, PackReport, Share};

use self::calibrate::Calibration;
use self::layout::{PackLayout, check_tokenizer};
use self::write::write;
use crate::cli::{OrderArg, PackArgs, PackQuant, QuantArg, ScalesArg};
use crate::windows::Source;
use crate::{Failure, atomic, print_json, progress, size};

/// Runs the command.
pub fn command(args: &PackArgs) -> Result<(), Failure> {
    let reads = [
        Some(args.checkpoint.as_path()),
        args.stats.as_deref(),
        args.calibrate.as_deref(),
    ];
    atomic::may_create(&args.output, args.force, &reads)?;
    let options = options_of(args)?;
    let bar = progress::bytes("packing", 0);
    let report = pack(
        &args.checkpoint,
        &args.output,
        &options,
        &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        },
    );
    bar.finish_and_clear();
    let report = report?;
    if args.json {
        print_json(&report)
    } else {
        tell(&report)
    }
}

impl From<PackQuant> for PackOptions {
    fn from(quant: PackQuant) -> Self {
        match quant {
            PackQuant::AsSource => Self::as_source(),
            PackQuant::Keep => Self::keep(),
            PackQuant::One(quant) => Self::new(quant.into()),
            PackQuant::Size(bytes) => Self {
                size: Some(bytes),
                ..Self::new(QuantArg::Q4.into())
            },
        }
    }
}

/// Converts the arguments to options.
fn options_of(args: &PackArgs) -> Result<PackOptions, Failure> {
    let both = args.attention_quant.or(args.embedding_quant);
    if let (PackQuant::Size(_), Some(_)) = (args.quant, both) {
        return Err(Failure::usage(
            "--quant auto:SIZE chooses the format of every matrix: leave out --attention-quant \
             and --embedding-quant",
        ));
    }
    if args.quant == PackQuant::Keep && (args.stats.is_some() || args.calibrate.is_some()) {
        return Err(Failure::usage(
            "--quant keep copies the checkpoint's formats and stores no neurons in bundles: leave out --stats and --calibrate",
        ));
    }
    let mut options = PackOptions::from(args.quant);
    if let Some(attention) = args.attention_quant {
        options.attention = attention.into();
        options.by_source.attention = false;
    }
    if let Some(embedding) = args.embedding_quant {
        options.embedding = embedding.into();
        options.by_source.embedding = false;
    }
    options.stats = match &args.stats {
        Some(path) => {
            let bytes = std::fs::read(path).map_err(Failure::file(path))?;
            Some((path.clone(), bytes))
        }
        None => None,
    };
    options.coactivation = args.order == OrderArg::Coactivation;
    options.sector = args.sector;
    options.scales = match args.scales {
        ScalesArg::Auto => Prefer::Auto,
        ScalesArg::Inline => Prefer::Inline,
        ScalesArg::Resident => Prefer::Resident,
    };
    options.force = args.force;
    options.threads = args.threads.unwrap_or(0).into();
    if let Some(path) = &args.calibrate {
        options.calibrate = Some(CalibrationText {
            source: Arc::new(Source::open(path)?),
            tokens: args.calibrate_tokens,
        });
    }
    Ok(options)
}

/// If the container has more bits per weight than its source, says how to make it smaller.
fn tell_growth(report: &PackReport, out: &mut impl Write) -> std::io::Result<()> {
    // Scales and padding account for up to a tenth.
    let grows = report.bits_per_weight > 1.1 * report.source_bits_per_weight;
    if grows
        && report
            .mixed
            .as_ref()
            .is_some_and(|mixed| mixed.asked_bytes.is_none())
    {
        writeln!(
            out,
            "no weight lost bits; for a smaller container with some loss use --quant q4k or auto:SIZE"
        )?;
    }
    Ok(())
}

/// Prints how the weights lie in the file.
fn tell_layout(report: &PackReport, out: &mut impl Write) -> std::io::Result<()> {
    let (output, bytes) = (&report.output, size::show(report.bytes));
    let bits = format!(
        "{:.2} bits per weight, {:.2} in the source",
        report.bits_per_weight, report.source_bits_per_weight
    );
    if report.bundle_bytes == 0 {
        writeln!(
            out,
            "{output}: {bytes}, matrices by rows, {:.1} s",
            report.seconds
        )?;
        return writeln!(out, "{bits}");
    }
    writeln!(
        out,
        "{output}: {bytes}, {} neurons in bundles of {} bytes ({:.1} % padding), {} order, {:.1} s",
        report.neurons,
        report.bundle_bytes,
        100.0 * report.padding_share,
        match report.order {
            Order::Original => "original",
            Order::Temperature => "temperature",
            Order::Coactivation => "coactivation",
        },
        report.seconds
    )?;
    writeln!(
        out,
        "{bits}; sectors of {} bytes, {}",
        report.sector, report.sector_why
    )
}

/// Prints the report.
fn tell(report: &PackReport) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    tell_layout(report, &mut out)?;
    if let Some(mixed) = &report.mixed {
        let others = mixed.others.iter();
        let others: Vec<_> = others
            .map(|o| format!("{} {}", o.matrices, o.format))
            .collect();
        let (ffn, others) = (&mixed.ffn, others.join(", "));
        writeln!(out, "FFN in {ffn}; other matrices: {others}")?;
        if mixed.asked_bytes.is_none()
            && mixed.source_is_float
            && mixed.is_below(emberflow_kernels::DType::Q8)
        {
            writeln!(
                out,
                "the source has floats: --quant q8 loses less, --quant auto:SIZE makes a container of any \
                 size in between, --calibrate TEXT loses less at the same size"
            )?;
        }
    }
    rounding::tell(&report.rounding, report.resumed_units == 0, &mut out)?;
    tell_growth(report, &mut out)?;
    let rounds = |of: &RoundingError| of.format == "q4c" && of.relative_squared > 0.0;
    if report.calibrated.is_none() && report.rounding.iter().any(rounds) {
        writeln!(
            out,
            "one scale per row costs much quality at 4 bits: --calibrate TEXT wins most of it back"
        )?;
    }
    if let Some(c) = &report.calibrated {
        writeln!(out, "calibrated on {} tokens", c.tokens)?;
        if let Some(peak) = c.peak_rss_bytes {
            writeln!(out, "peak memory {}", size::show(peak))?;
        }
        if c.resumed_layers > 0 {
            let layers = c.resumed_layers;
            writeln!(
                out,
                "resumed {layers} calibrated layers of an interrupted pack"
            )?;
        }
    }
    if report.resumed_units > 0 {
        writeln!(
            out,
            "resumed {} finished parts of an interrupted pack",
            report.resumed_units
        )?;
    }
    Ok(())
}

/// Packs `checkpoint` into `output`. `progress` receives bytes done and total bytes.
pub fn pack(
    checkpoint: &Path,
    output: &Path,
    options: &PackOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PackReport, Failure> {
    let stats = options.stats.as_ref().map(|(path, _)| path.as_path());
    atomic::may_create(output, options.force, &[Some(checkpoint), stats])?;
    let source = emberflow_models::open(checkpoint)?;
    let source = source.as_ref();
    if by_rows::applies(source, options) {
        if options.sector.is_some() || options.scales != Prefer::Auto {
            return Err(Failure::usage(
                "--sector and --scales are for neurons in bundles, which this model has with --quant q4k or q8",
            ));
        }
        check_tokenizer(source)?;
        return by_rows::write(checkpoint, source, output, options, progress);
    }
    pack_source(source, output, options, progress)
}

/// [`pack`] for an open checkpoint, of neurons in bundles.
fn pack_source(
    source: &dyn Checkpoint,
    output: &Path,
    options: &PackOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PackReport, Failure> {
    check_tokenizer(source)?;
    let (mixed, options) = match options.size {
        Some(size) => {
            let mixed = mix::mixed(source, output, options, size)?;
            (Some(mix::report(source, &mixed, Some(size))), mixed)
        }
        None => {
            let decided = by_source::decided(source, options);
            let chosen = options.by_source != BySource::default();
            let report = chosen.then(|| mix::report(source, &decided, None));
            (report, decided)
        }
    };
    let options = &options;
    let Some(text) = &options.calibrate else {
        let report = write(source, output, options, None, progress)?;
        return Ok(PackReport { mixed, ..report });
    };
    let start = Instant::now();
    // Report invalid options before any work.
    PackLayout::new(source, output, options, None)?;
    let how = Calibration {
        text: &text.source,
        tokens: text.tokens,
        threads: options.threads(),
    };
    let done = calibrate::calibrate(source, output, options, how)?;
    let report = write(source, output, options, Some(&done.rounded), progress)?;
    let folder = calibrate::folder(output);
    std::fs::remove_dir_all(&folder).map_err(Failure::file(&folder))?;
    Ok(PackReport {
        calibrated: Some(CalibratedReport {
            tokens: done.rounded.summary().tokens,
            resumed_layers: done.resumed,
            peak_rss_bytes: mem::peak_rss(),
        }),
        mixed,
        seconds: start.elapsed().as_secs_f64(),
        ..report
    })
}
