//! Bounded fuzzing of everything that reads external bytes: targets and mutations. `tests/fuzz.rs`
//! runs it with the ordinary tests.

mod files;
mod formats;
mod mutate;

use std::ops::Range;

use fastrand::Rng;

/// A reader of untrusted bytes.
pub struct Target {
    /// Valid inputs.
    pub seeds: Vec<Vec<u8>>,
    /// Structure of the bytes, for damage that passes the first checks.
    pub form: Form,
    /// Uses the bytes as a caller would. Returns whether they were accepted.
    pub run: Box<Reader>,
}

/// Reads bytes. Returns whether they were accepted.
pub type Reader = dyn Fn(&[u8]) -> bool + Sync;

/// A target's name and constructor.
pub type Named = (&'static str, fn() -> Target);

/// Structure of a format's bytes.
#[derive(Clone, Copy)]
pub struct Form {
    /// Location of JSON in them, if any.
    pub json: fn(&[u8]) -> Option<Range<usize>>,
    /// Repairs checksums.
    pub seal: fn(&mut [u8]),
    /// Bytes that any input may allocate, in addition to those in proportion to its length.
    pub room: usize,
}

impl Form {
    /// JSON from the first byte to the last.
    pub const JSON: Self = Self {
        json: |bytes| Some(0..bytes.len()),
        seal: |_| (),
        room: 4 << 20,
    };
    /// JSON with up to eight regular expressions, of which a short one may need 12 MiB.
    pub const PATTERNS: Self = Self {
        room: 100 << 20,
        ..Self::JSON
    };
    /// Numbers and tables, the most important ones first.
    pub const BINARY: Self = Self {
        json: |_| None,
        seal: |_| (),
        room: 4 << 20,
    };
}

impl Target {
    /// The input of case `seed`; deterministic.
    pub fn case(&self, seed: u64) -> Vec<u8> {
        let mut random = Rng::with_seed(seed);
        let mut bytes = random.choice(&self.seeds).cloned().unwrap_or_default();
        mutate::mutate(&mut bytes, self, &mut random);
        bytes
    }
}

/// Every target by its name, which is also that of the folder with its past findings.
pub const TARGETS: &[Named] = &[
    ("container", formats::container),
    ("model", formats::model),
    ("stats", formats::stats),
    ("stats_json", formats::stats_json),
    ("predictor", formats::predictor),
    ("trace", formats::trace),
    ("gguf", files::gguf),
    ("unpacked", files::unpacked),
    ("safetensors", files::safetensors),
    ("blocks", files::blocks),
    ("quantized", files::quantized),
    ("config", files::config),
    ("tokenizer", files::tokenizer),
    ("tokenizer_config", files::tokenizer_config),
    ("generation_config", files::generation_config),
    ("index", files::index),
];
