//! Parsers of option values.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use emberflow_engine::{Ablation, Budget, MOST_DRAFTS, Speculation};
use emberflow_kernels::DType;
use emberflow_storage::io::IoChoice;

use crate::size;
use crate::suggest::did_you_mean;

/// Size and order of reads.
#[derive(Debug, Clone, Copy)]
pub enum ReadSize {
    /// Random reads of this many bytes.
    Random(u32),
    /// Sequential reads of 1 MiB.
    Sequential,
}

/// I/O engines by name; a test checks that the storage crate knows all of them.
const IO: [(&str, &str); 7] = [
    ("auto", "the best one available"),
    ("uring", "io_uring"),
    ("pread", "threads with blocking reads"),
    ("sim:ufs4", "a phone's UFS 4.0, from published numbers"),
    ("sim:ufs31", "UFS 3.1, half as fast"),
    ("sim:nvme", "the NVMe disk of a small cloud VM"),
    ("sim:emmc", "eMMC 5.1"),
];

/// Parser for the names in `IO`.
pub fn io_names() -> PossibleValuesParser {
    PossibleValuesParser::new(IO.map(|(name, what)| PossibleValue::new(name).help(what)))
}

/// Parser for an I/O engine.
pub fn parse_io() -> impl TypedValueParser<Value = IoChoice> {
    io_names().try_map(|name| name.parse::<IoChoice>())
}

/// Parser for `--policy`.
pub(crate) fn policy_names() -> impl TypedValueParser<Value = Ablation> {
    named(&[Ablation::Full, Ablation::LlmFlash, Ablation::Mmap])
}

/// Parser for all ablations.
pub fn ablation_names() -> impl TypedValueParser<Value = Ablation> {
    named(&Ablation::ALL)
}

fn named(ablations: &[Ablation]) -> impl TypedValueParser<Value = Ablation> + use<> {
    let names = PossibleValuesParser::new(ablations.iter().map(|a| a.name()));
    names.try_map(|name| name.parse::<Ablation>())
}

pub(crate) fn parse_format(name: &str) -> Result<DType, String> {
    DType::parse(name).ok_or_else(|| format!("unknown format \"{name}\""))
}

pub(crate) fn parse_read_size(text: &str) -> Result<ReadSize, String> {
    if text == "seq" {
        return Ok(ReadSize::Sequential);
    }
    match size::parse(text)? {
        n if (4096..=16 << 20).contains(&n) && n.is_multiple_of(4096) => {
            Ok(ReadSize::Random(n as u32))
        }
        n => Err(format!(
            "read size of {n} bytes; expected a multiple of 4KiB up to 16MiB"
        )),
    }
}

pub(crate) fn parse_speculation(text: &str) -> Result<Speculation, String> {
    let auto = Speculation::AUTO;
    match text {
        "auto" => Ok(auto),
        "off" => Ok(Speculation::OFF),
        "ngram" => Ok(Speculation {
            lookup: true,
            ..Speculation::OFF
        }),
        "memory" => Ok(Speculation {
            memory: true,
            ..Speculation::OFF
        }),
        "heads" => Ok(Speculation {
            heads: true,
            ..Speculation::OFF
        }),
        "model" => Ok(Speculation {
            model: true,
            ..Speculation::OFF
        }),
        _ => match text.parse() {
            Ok(depth) if (1..=MOST_DRAFTS).contains(&depth) => Ok(Speculation {
                depth: Some(depth),
                ..auto
            }),
            _ => Err(format!(
                "expected auto, off, ngram, memory, heads, model or a number from 1 to {MOST_DRAFTS}"
            )),
        },
    }
}

/// Bytes below which memory without a unit is a mistake.
const LEAST: u64 = 1 << 20;

pub(crate) fn parse_budget(text: &str) -> Result<Budget, String> {
    if text == "auto" {
        Ok(Budget::Auto)
    } else {
        let hint = |e| format!("{e}{}", did_you_mean(text, ["auto"]));
        let bytes = size::parse(text).map_err(hint)?;
        with_unit(text, bytes).map(Budget::Bytes)
    }
}

/// A budget as `--memory` takes it.
pub fn budget_text(budget: Budget) -> String {
    match budget {
        Budget::Bytes(bytes) => format!("{bytes}B"),
        _ => "auto".to_owned(),
    }
}

/// The bytes that a text stands for, unless they are a few without a unit: no program and no device's part is that small.
pub(crate) fn with_unit(text: &str, bytes: u64) -> Result<u64, String> {
    let unit = text.contains(|c: char| c.is_ascii_alphabetic());
    match bytes {
        0 if !unit => Err("0 bytes: sizes have a unit, KiB, MiB or GiB".into()),
        ..LEAST if !unit => Err(format!(
            "{text} is {bytes} bytes: did you mean {text}GiB? Sizes have a unit, KiB, MiB or GiB"
        )),
        _ => Ok(bytes),
    }
}

/// A share between 0 and 1.
pub fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if (0.0..=1.0).contains(&v) => Ok(v),
        _ => Err(format!("{text:?} is not a number between 0 and 1")),
    }
}

/// A share given in percent, with or without `%`.
pub fn parse_share_percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(v) if v > 0.0 && v <= 100.0 => Ok(v / 100.0),
        _ => Err(format!(
            "{text:?} is not a percentage above 0 and at most 100"
        )),
    }
}

pub(crate) fn parse_sector(text: &str) -> Result<u32, String> {
    match size::parse(text)? {
        n @ (512 | 1024 | 2048 | 4096) => Ok(n as u32),
        n => Err(format!(
            "sector size of {n} bytes; expected 512, 1024, 2048 or 4096"
        )),
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use super::*;

    #[test]
    fn the_listed_ways_to_read_are_those_that_exist() {
        for (name, _) in IO {
            assert!(name.parse::<IoChoice>().is_ok(), "{name}");
        }
        for profile in Profile::ALL {
            let name = format!("sim:{profile}");
            assert!(IO.iter().any(|(listed, _)| *listed == name), "{name}");
        }
    }
}
