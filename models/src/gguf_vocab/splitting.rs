//! Splitting of a text into the pieces within which merges apply, by the names in GGUF files
//! (`tokenizer.ggml.pre`).
//!
//! The names are llama.cpp's. Patterns are those of the models' own `tokenizer.json` if known:
//! llama.cpp rewrites some for its own engine.

use serde_json::{Value, json};

use crate::Error;

/// A splitting method.
pub(super) struct Splitting {
    /// Names; the first one is used for writing.
    pub(super) names: &'static [&'static str],
    /// Applied in order, each to the pieces of the previous ones.
    pub(super) steps: &'static [Step],
    pub(super) nfc: bool,
    /// A whole piece that is a token is used without merges.
    pub(super) whole: bool,
    /// A text starts with `bos` unless the file says otherwise.
    pub(super) starts: bool,
    pub(super) bytes: Bytes,
}

/// A step of a [`Splitting`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Each match of the pattern becomes a separate piece.
    Split(&'static str),
    /// Bytes become the letters that represent them.
    Bytes,
    /// Runs of punctuation are pieces.
    Punctuation,
    /// Runs of digits are pieces.
    Digits,
}

/// Spelling of characters other than plain letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bytes {
    /// Every byte has a letter.
    Letters,
    /// A space is `▁`, a byte without a token `<0xHH>`.
    Pieces,
    /// Every character represents itself.
    Themselves,
}

use Step::Split;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const UFAKZEKA: &str =
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU_ASIA: &str = "[\u{ac00}-\u{d7a3}\u{3131}-\u{318e}]+|[\u{ff01}\u{2026}\u{201c}\u{201d}\u{2018}\u{2019}\u{2014}\u{ff1a}\u{ff1b}\u{ff0c}\u{3001}-\u{303f}\u{fe30}-\u{fe4f}]+|[\u{3105}-\u{312f}]+|[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const THREE_DIGITS: &str = r"\p{N}{1,3}";
const EAST_ASIA: &str = "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const ALPHABETS: &str = "\\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+";
const SIGNS: &str =
    "\\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+";
const CJK: &str = "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+";
const BLOOM: &str = " ?[^(\\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+";
const AFMOE_ASIA: &str = "[\u{4e00}-\u{9fff}\u{3400}-\u{4dbf}\u{f900}-\u{faff}\u{3040}-\u{309f}\u{30a0}-\u{30ff}\u{ff65}-\u{ff9f}\u{2f00}-\u{2fdf}\u{e40}-\u{e7f}\u{e80}-\u{eff}\u{1780}-\u{17ff}\u{1000}-\u{109f}\u{aa60}-\u{aa7f}\u{a9e0}-\u{a9ff}\u{ac00}-\u{d7af}\u{1100}-\u{11ff}]+";

/// Splits, then the letters of bytes.
const fn plain(names: &'static [&'static str], steps: &'static [Step]) -> Splitting {
    Splitting {
        names,
        steps,
        nfc: false,
        whole: false,
        starts: false,
        bytes: Bytes::Letters,
    }
}

impl Splitting {
    const fn nfc(self) -> Self {
        Self { nfc: true, ..self }
    }

    const fn whole(self) -> Self {
        Self {
            whole: true,
            ..self
        }
    }

    const fn starts(self) -> Self {
        Self {
            starts: true,
            ..self
        }
    }

    const fn of(self, bytes: Bytes) -> Self {
        Self { bytes, ..self }
    }

    /// The steps as those of a `tokenizer.json`, with the letters of bytes at the end unless they
    /// occur earlier.
    pub(super) fn pre_tokenizers(&self) -> Vec<Value> {
        let last = [Step::Bytes];
        let done = self.bytes != Bytes::Letters || self.steps.contains(&Step::Bytes);
        let last = if done { &last[..0] } else { &last[..] };
        self.steps
            .iter()
            .chain(last)
            .map(|step| step.json())
            .collect()
    }
}

impl Step {
    pub(super) fn json(self) -> Value {
        match self {
            Self::Split(regex) => split(regex),
            Self::Bytes => level(),
            Self::Punctuation => json!({"type": "Punctuation", "behavior": "Contiguous"}),
            Self::Digits => json!({"type": "Digits", "individual_digits": false}),
        }
    }
}

/// A step that makes each match of the pattern a separate piece.
pub(super) fn split(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

/// The step that maps bytes to their letters and back.
pub(super) fn level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
}

/// The same steps in one canonical form: a byte-level step's own pattern is GPT-2's, and single
/// digits are a pattern.
pub(super) fn in_one_spelling(steps: &[Value]) -> Vec<Value> {
    let mut spelled = Vec::new();
    for step in steps {
        let flag = |key: &str, usual| step[key].as_bool().unwrap_or(usual);
        match step["type"].as_str() {
            Some("ByteLevel") if !flag("add_prefix_space", false) => {
                if flag("use_regex", true) {
                    spelled.push(split(GPT2));
                }
                spelled.push(level());
            }
            Some("Digits") if flag("individual_digits", false) => spelled.push(split(r"\p{N}")),
            _ => spelled.push(step.clone()),
        }
    }
    spelled
}

/// All methods. Of several with the same steps, the first is written.
pub(super) const SPLITTINGS: &[Splitting] = &[
    plain(
        &["default"],
        &[
            Split(r"[\p{P}\$\+<=>\^~\|]+"),
            Split(GPT2),
            Split(r"\p{N}+"),
            Split("[0-9][0-9][0-9]"),
        ],
    ),
    plain(
        &[
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
            "exaone4",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[Split(GPT2)],
    ),
    plain(&["mpt", "olmo"], &[Split(GPT2)]).nfc(),
    plain(
        &[
            "smollm",
            "starcoder",
            "refact",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        &[Split(r"\p{N}"), Split(GPT2)],
    ),
    plain(&["command-r"], &[Split(r"\p{N}"), Split(GPT2)]).nfc(),
    plain(
        &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        &[Split(LLAMA3)],
    )
    .whole()
    .starts(),
    plain(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[Split(LLAMA3)]),
    plain(&["glm4", "glm5"], &[Split(LLAMA3)]).whole(),
    plain(
        &["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"],
        &[Split(QWEN2)],
    )
    .nfc(),
    plain(
        &["stablelm2", "hunyuan", "solar-open", "grok-2"],
        &[Split(QWEN2)],
    ),
    plain(&["qwen35"], &[Split(QWEN35)]).nfc(),
    plain(&["ufakzeka"], &[Split(UFAKZEKA)]),
    plain(&["laguna"], &[Split(r"[^\n]+|[\n]+"), Split(QWEN2)]),
    plain(&["minicpm5"], &[Split(THREE_DIGITS), Split(MINICPM5)]).whole(),
    plain(&["seed-coder"], &[Split(SEED_CODER)]),
    plain(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[Split(BAILING)],
    ),
    plain(&["exaone-moe"], &[Split(EXAONE_MOE)]),
    plain(&["jais-2"], &[Split(JAIS2)]),
    plain(&["tekken"], &[Split(TEKKEN)]).whole().starts(),
    plain(
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        &[Split(GPT4O)],
    ),
    plain(&["granite-embed-multi-97m"], &[Split(GPT4O)]).whole(),
    plain(
        &["tiny_aya", "cohere2moe"],
        &[Split(r"\d{1,3}(?=(?:\d{3})*\b)"), Split(GPT4O)],
    ),
    plain(&["youtu"], &[Split(YOUTU_ASIA), Split(YOUTU)]).whole(),
    plain(&["kimi-k2"], &[Split(KIMI)]),
    plain(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[Split(THREE_DIGITS), Split(EAST_ASIA), Split(DEEPSEEK3)],
    ),
    plain(
        &["spark2_5"],
        &[
            Split(THREE_DIGITS),
            Split(EAST_ASIA),
            Split(SPARK),
            Split(r"\p{N}"),
        ],
    ),
    plain(
        &["deepseek-llm"],
        &[
            Split(r"[\r\n]"),
            Split(ALPHABETS),
            Split(SIGNS),
            Split(r"\s+$"),
            Split(CJK),
            Split(r"\p{N}+"),
        ],
    ),
    plain(
        &["deepseek-coder"],
        &[
            Split(r"[\r\n]"),
            Split(r"\s?\p{L}+"),
            Split(r"\s?\p{P}+"),
            Split(CJK),
            Split(r"\p{N}"),
        ],
    ),
    plain(
        &["falcon"],
        &[
            Step::Punctuation,
            Split(GPT2),
            Step::Bytes,
            Step::Digits,
            Split("[0-9][0-9][0-9]"),
        ],
    ),
    plain(&["bloom", "poro-chat", "gpt3-finnish"], &[Split(BLOOM)]),
    plain(&["viking"], &[Split(BLOOM), Split(r"\p{N}")]),
    plain(
        &["chameleon"],
        &[
            Split("<sentinel:[0-9]+>"),
            Split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
            Split("([\\t\\n]|    |  )"),
            Split(r"\p{N}"),
            Split(r"[\p{P}!-/:-@\[-`{-~]"),
            Split(GPT2),
        ],
    )
    .starts(),
    plain(
        &["superbpe"],
        &[Split(r"\p{N}+"), Split(r"(?=(\d{3})+(?!\d))")],
    ),
    plain(
        &["afmoe"],
        &[
            Split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"),
            Split(AFMOE_ASIA),
            Split(DEEPSEEK3),
        ],
    ),
    plain(&["gemma4", "granite-embed-multi-311m"], &[])
        .of(Bytes::Pieces)
        .starts(),
    plain(&["sarvam-moe"], &[]).of(Bytes::Pieces),
    plain(&["whitespace"], &[Split(r"\S+")]).of(Bytes::Themselves),
];

/// The method of a name. Files older than the key have no name and use `default`.
pub(super) fn splitting(name: Option<&str>) -> Result<&'static Splitting, Error> {
    let name = name.unwrap_or("default");
    let named = SPLITTINGS.iter().find(|split| split.names.contains(&name));
    named.ok_or_else(|| {
        let known = SPLITTINGS.iter().flat_map(|split| split.names);
        let known: Vec<&str> = known.copied().collect();
        Error::Tokenizer {
            what: "tokenizer.ggml.pre".to_owned(),
            found: format!("{name:?}"),
            expected: format!("one of {}", known.join(", ")),
        }
    })
}
