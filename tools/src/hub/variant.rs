//! The models among the files of a repository or a folder: GGUF files, whole or split, packed models, and the
//! `.safetensors` files with their texts.

use std::collections::BTreeMap;

/// Label of the model in `.safetensors` files.
const SAFETENSORS: &str = "safetensors";

/// Lists the parts of a model in several `.safetensors` files.
const INDEX: &str = "model.safetensors.index.json";

/// Endings of the texts that belong to `.safetensors` files.
const TEXTS: [&str; 4] = ["json", "jinja", "model", "txt"];

/// Folder of further chat templates, for tools.
const TEMPLATES: &str = "additional_chat_templates/";

/// Words in the names of files that belong to a model but are none: projectors of images, heads of drafts, adapters,
/// statistics.
const COMPANIONS: [&str; 7] = [
    "mmproj", "lora", "adapter", "imatrix", "mtp", "eagle3", "dflash",
];

/// Bits per weight of Q4_K_M, the format that most files have: 4.5 for most matrices and 6.6 for some.
const USUAL_BITS: f64 = 4.85;

/// One model among files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// Its files' path without number and ending, or `safetensors`.
    pub label: String,
    /// Indices of its files, parts in order.
    pub files: Vec<usize>,
    /// Whether all parts are there.
    pub complete: bool,
    /// Whether it is a folder of `.safetensors` files.
    pub folder: bool,
}

impl Variant {
    /// A model in one file.
    pub fn file(label: &str, at: usize) -> Self {
        Self {
            label: label.to_owned(),
            files: vec![at],
            complete: true,
            folder: false,
        }
    }

    /// The label without folders, in small letters.
    fn stem(&self) -> String {
        let stem = self.label.rsplit('/').next().unwrap_or(&self.label);
        stem.to_ascii_lowercase()
    }

    /// The name of its format, such as `Q4_K_M`: the end of the file's name, else a word in it, else a folder's name.
    fn format(&self) -> Option<String> {
        let label = self.label.to_ascii_uppercase();
        label.rsplit('/').find_map(|part| {
            let starts = part.char_indices().map(|(at, _)| &part[at..]);
            // the longest: IQ4_XS, not Q4_XS
            let at_end = starts.into_iter().find(|end| bits_of(end).is_some());
            let word = || {
                part.split(['-', '.'])
                    .rev()
                    .find(|word| bits_of(word).is_some())
            };
            at_end.or_else(word).map(str::to_owned)
        })
    }

    /// Bits per weight as the name says, roughly: they serve to order files, not to compute sizes.
    pub fn bits(&self) -> Option<f64> {
        match self.folder {
            true => Some(16.0),
            false => self.format().and_then(|name| bits_of(&name)),
        }
    }

    /// Whether `wanted`, in small letters, is this model's whole name.
    fn is_called(&self, wanted: &str) -> bool {
        let wanted = [".gguf", ".ember"]
            .iter()
            .find_map(|e| wanted.strip_suffix(e))
            .unwrap_or(wanted);
        let wanted = split_part(wanted).map_or(wanted, |part| part.prefix);
        self.label.to_ascii_lowercase() == wanted || self.stem() == wanted
    }

    /// Whether `wanted`, in small letters, is its format or another last word of its name.
    fn ends_in(&self, wanted: &str) -> bool {
        let is_format = || {
            self.format()
                .is_some_and(|format| format.to_ascii_lowercase() == wanted)
        };
        let stem = self.stem();
        let before = stem.strip_suffix(wanted);
        is_format() || before.is_some_and(|before| before.ends_with(['-', '.', '_']))
    }
}

/// Bits per weight of the formats of llama.cpp's quantizer, by name in capital letters: `Q4_K_M`.
fn bits_of(name: &str) -> Option<f64> {
    match name {
        "F32" => return Some(32.0),
        "F16" | "BF16" | "FP16" => return Some(16.0),
        "MXFP4" | "MXFP4_MOE" => return Some(4.25),
        _ => {}
    }
    let numbered = ["IQ", "TQ", "Q"]
        .iter()
        .find_map(|p| name.strip_prefix(p))?;
    let mut letters = numbered.chars();
    let bits = f64::from(
        letters
            .next()?
            .to_digit(10)
            .filter(|bits| (1..=8).contains(bits))?,
    );
    let more = match letters.as_str() {
        "_1" => 1.0,
        "_K_L" | "_K_XL" => 0.95,
        "_K_M" | "_K" => 0.85,
        "_0" | "_K_S" | "_NL" | "_M" => 0.5,
        "_XS" | "_S" => 0.25,
        "_XXS" => 0.06,
        "" => 0.0,
        _ => return None,
    };
    Some(bits + more)
}

/// The models among files of these names, in the order of their labels.
pub fn variants(names: &[String]) -> Vec<Variant> {
    let found = of_files(names, is_companion);
    // A model whose name has such a word.
    let found = if found.is_empty() {
        of_files(names, |_| false)
    } else {
        found
    };
    found.into_iter().chain(folder(names)).collect()
}

/// The models in GGUF files and packed ones.
fn of_files(names: &[String], left_out: impl Fn(&str) -> bool) -> Vec<Variant> {
    // By label and number of parts.
    let mut files: BTreeMap<(&str, u32), Vec<(u32, usize)>> = BTreeMap::new();
    for (at, name) in names.iter().enumerate() {
        let stem = [".gguf", ".ember"]
            .iter()
            .find_map(|e| name.strip_suffix(e));
        let Some(stem) = stem.filter(|stem| !left_out(stem)) else {
            continue;
        };
        let part = split_part(stem);
        let (label, count, number) =
            part.map_or((stem, 0, 1), |part| (part.prefix, part.count, part.number));
        files.entry((label, count)).or_default().push((number, at));
    }
    let mut all: Vec<Variant> = Vec::new();
    for ((label, count), mut parts) in files {
        parts.sort_unstable();
        let one = Variant {
            label: label.to_owned(),
            complete: parts.iter().map(|part| part.0).eq(1..=count.max(1)),
            files: parts.iter().map(|part| part.1).collect(),
            folder: false,
        };
        match all.last_mut().filter(|other| other.label == one.label) {
            // The same model, also in parts.
            Some(other) if !other.complete => *other = one,
            Some(_) => {}
            None => all.push(one),
        }
    }
    all
}

/// The `.safetensors` files outside of folders, with `config.json` and other texts.
fn folder(names: &[String]) -> Option<Variant> {
    let has = |wanted: &str| names.iter().any(|name| name == wanted);
    if !has("config.json") {
        return None;
    }
    let here = |at: &usize| !names[*at].contains('/');
    let of_weights = |at: &usize| names[*at].strip_suffix(".safetensors");
    // Mistral's repositories have all weights twice.
    let is_model = |stem: &str| !is_companion(stem) && !stem.starts_with("consolidated");
    let all = (0..names.len()).filter(here);
    let weights = all.filter(|at| of_weights(at).is_some_and(is_model));
    let part = |at: usize| of_weights(&at).and_then(split_part);
    let (mut parts, whole): (Vec<usize>, Vec<usize>) = weights.partition(|at| part(*at).is_some());
    parts.sort_by_key(|at| part(*at).map(|part| part.number));
    let in_parts = has(INDEX) || whole.is_empty();
    let numbers: Vec<u32> = parts
        .iter()
        .filter_map(|at| part(*at))
        .map(|part| part.number)
        .collect();
    let count = parts
        .first()
        .and_then(|at| part(*at))
        .map_or(0, |part| part.count);
    // Some count from 0, up to the same number.
    let all_parts = numbers.iter().copied().eq(1..=count) || numbers.iter().copied().eq(0..=count);
    let weights = if in_parts { parts } else { whole };
    let is_text = |name: &str| TEXTS.iter().any(|e| name.ends_with(&format!(".{e}")));
    let is_here = |name: &str| !name.strip_prefix(TEMPLATES).unwrap_or(name).contains('/');
    let texts = (0..names.len()).filter(|at| is_here(&names[*at]) && is_text(&names[*at]));
    (!weights.is_empty()).then(|| Variant {
        label: SAFETENSORS.to_owned(),
        complete: !in_parts || all_parts,
        files: weights.into_iter().chain(texts).collect(),
        folder: true,
    })
}

/// Whether a file belongs to a model but is none.
fn is_companion(path: &str) -> bool {
    let stem = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let mut words = stem.split(|c: char| !c.is_ascii_alphanumeric());
    words.any(|word| COMPANIONS.contains(&word))
}

/// A path that ends in `-00002-of-00003`.
struct SplitPart<'a> {
    prefix: &'a str,
    number: u32,
    count: u32,
}

fn split_part(stem: &str) -> Option<SplitPart<'_>> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| {
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| digits.parse().ok())?
    };
    Some(SplitPart {
        prefix,
        number: parse(number)?,
        count: parse(count)?,
    })
}

/// The models of `all` that `wanted` names: one, none, or several if it is ambiguous.
pub fn named<'a>(all: &'a [Variant], wanted: &str) -> Vec<&'a Variant> {
    let wanted = wanted.to_ascii_lowercase();
    let exact: Vec<&Variant> = all.iter().filter(|one| one.is_called(&wanted)).collect();
    if !exact.is_empty() {
        return exact;
    }
    let found: Vec<&Variant> = all.iter().filter(|one| one.ends_in(&wanted)).collect();
    // Of Q4_K_M and UD-Q4_K_M, the one that was asked for.
    let plain = |one: &&Variant| !one.stem().contains("ud-");
    match found.iter().filter(|one| plain(one)).count() {
        1 if found.len() > 1 => found.into_iter().filter(plain).collect(),
        _ => found,
    }
}

/// As [`named`], or the models in whose names `wanted` occurs.
pub fn about<'a>(all: &'a [Variant], wanted: &str) -> Vec<&'a Variant> {
    let found = named(all, wanted);
    let wanted = wanted.to_ascii_lowercase();
    let has = |one: &&Variant| one.label.to_ascii_lowercase().contains(&wanted);
    match found.is_empty() {
        true => all.iter().filter(has).collect(),
        false => found,
    }
}

/// All in the order in which to try them: the one nearest to the usual format, then those with fewer bits, then those with
/// more.
pub fn by_preference(all: &[Variant]) -> Vec<&Variant> {
    let mut sorted: Vec<(f64, &Variant)> = all
        .iter()
        .map(|one| (one.bits().unwrap_or(0.0), one))
        .collect();
    // stable: of the same bits the shorter name, as Q4_K_M before UD-Q4_K_M
    sorted.sort_by(|a, b| {
        b.0.total_cmp(&a.0)
            .then(a.1.label.len().cmp(&b.1.label.len()))
    });
    let distance = |bits: f64| (bits - USUAL_BITS).abs();
    let usual = sorted
        .iter()
        .map(|(bits, _)| *bits)
        .min_by(|a, b| distance(*a).total_cmp(&distance(*b)));
    let (more, mut rest): (Vec<_>, Vec<_>) = sorted
        .into_iter()
        .partition(|(bits, _)| Some(*bits) > usual);
    rest.extend(more.into_iter().rev());
    rest.into_iter().map(|(_, one)| one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn models_are_found_among_files() {
        let files = names(&[
            ".gitattributes",
            "README.md",
            "config.json",
            "tokenizer.json",
            "model-00002-of-00002.safetensors",
            "model-00001-of-00002.safetensors",
            "consolidated.safetensors",
            "a-Q8_0.gguf",
            "mmproj-a-f16.gguf",
            "UD/a-UD-Q2_K_XL-00002-of-00002.gguf",
            "UD/a-UD-Q2_K_XL-00001-of-00002.gguf",
            "b-00001-of-00003.gguf",
            "original/model.safetensors",
        ]);
        let all = variants(&files);
        let found: Vec<_> = all
            .iter()
            .map(|v| (v.label.as_str(), v.files.clone(), v.complete))
            .collect();
        assert_eq!(
            found,
            [
                ("UD/a-UD-Q2_K_XL", vec![10, 9], true),
                ("a-Q8_0", vec![7], true),
                ("b", vec![11], false),
                ("safetensors", vec![5, 4, 2, 3], true),
            ]
        );
    }

    #[test]
    fn the_usual_format_comes_first_and_fewer_bits_follow() {
        let files = names(&[
            "m-BF16.gguf",
            "m-IQ2_XXS.gguf",
            "m-Q2_K.gguf",
            "m-Q3_K_M.gguf",
            "m-Q4_0.gguf",
            "m-Q4_K_M.gguf",
            "m-UD-Q4_K_M.gguf",
            "m-Q6_K.gguf",
        ]);
        let all = variants(&files);
        let order: Vec<_> = by_preference(&all).iter().map(|v| &v.label[2..]).collect();
        assert_eq!(
            order,
            [
                "Q4_K_M",
                "UD-Q4_K_M",
                "Q4_0",
                "Q3_K_M",
                "Q2_K",
                "IQ2_XXS",
                "Q6_K",
                "BF16"
            ]
        );
        let of = |wanted: &str| match named(&all, wanted)[..] {
            [one] => Some(&one.label[2..]),
            _ => None,
        };
        assert_eq!(of("q4_k_m"), Some("Q4_K_M"));
        assert_eq!(of("UD-Q4_K_M"), Some("UD-Q4_K_M"));
        assert_eq!(of("m-Q6_K.gguf"), Some("Q6_K"));
        assert_eq!(of("Q4_K"), None);
        assert_eq!(of("K_M"), None);
        assert_eq!(of(""), None);
    }

    #[test]
    fn without_the_usual_format_the_nearest_comes_first() {
        let files = names(&[
            "m-f16.gguf",
            "m.Q8_0.gguf",
            "m-q5_k_m.gguf",
            "m-Q3_K_S.gguf",
            "other.gguf",
        ]);
        let all = variants(&files);
        let order: Vec<_> = by_preference(&all)
            .iter()
            .map(|v| v.label.as_str())
            .collect();
        assert_eq!(order, ["m-q5_k_m", "m-Q3_K_S", "other", "m.Q8_0", "m-f16"]);
    }

    /// File names of repositories that people use.
    #[test]
    fn real_repositories_are_understood() {
        let one = |files: &[&str]| -> Vec<(String, Option<String>, bool)> {
            let all = variants(&names(files));
            all.iter()
                .map(|v| (v.label.clone(), v.format(), v.complete))
                .collect()
        };
        let of = |file: &str| one(&[file]).pop().and_then(|found| found.1);
        for (file, format) in [
            ("devstralQ4_K_M.gguf", Some("Q4_K_M")),
            ("x_Q4_K_M.gguf", Some("Q4_K_M")),
            ("Q4_K_M/m-00001-of-00001.gguf", Some("Q4_K_M")),
            ("gpt-oss-20b-mxfp4.gguf", Some("MXFP4")),
            (
                "DeepSeek-V3-0324-UD-IQ1_S-00001-of-00001.gguf",
                Some("IQ1_S"),
            ),
            ("Qwen2.5-7B-Instruct-IQ4_XS.gguf", Some("IQ4_XS")),
            ("gemma-3-4b-it-BF16.gguf", Some("BF16")),
            ("gemma-3-4b-it-q4_0.gguf", Some("Q4_0")),
            ("m.Q5_K_M.imat.gguf", Some("Q5_K_M")),
            ("Meta-Llama-3.1-8B.gguf", None),
        ] {
            assert_eq!(of(file).as_deref(), format, "{file}");
        }
        let complete = |files: &[&str]| one(files).pop().map(|found| found.2);
        let oss = [
            "config.json",
            "tokenizer.json",
            "model.safetensors.index.json",
            "model-00000-of-00002.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        assert_eq!(complete(&oss), Some(true));
        assert_eq!(complete(&oss[..5]), Some(false));
        // both a whole file and parts: without an index, the whole file
        let both = [
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
        ];
        assert_eq!(variants(&names(&both))[0].files, [1, 0]);
        // words in names of models
        let lora = one(&["Llama-70B-lorablated.Q4_K_M.gguf", "adapter-lora.gguf"]);
        assert_eq!(lora.len(), 1);
        assert_eq!(one(&["only-lora.gguf"]).len(), 1);
        let collision = one(&[
            "m-Q8_0.gguf",
            "m-Q8_0-00001-of-00002.gguf",
            "m-Q8_0-00002-of-00002.gguf",
        ]);
        assert_eq!(collision.len(), 1);
        assert!(collision[0].2);
        assert!(!variants(&names(&["safetensors.gguf"]))[0].folder);
        let template = variants(&names(&[
            "config.json",
            "model.safetensors",
            "additional_chat_templates/tool_use.jinja",
            "a/b.json",
        ]));
        assert_eq!(template[0].files, [1, 0, 2]);
        // several models of one format
        let several = variants(&names(&["a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "b-it-F16.gguf"]));
        assert_eq!(named(&several, "q4_k_m").len(), 2);
        assert_eq!(named(&several, "b-Q4_K_M").len(), 1);
        assert_eq!(named(&several, "it").len(), 0);
        assert_eq!(about(&several, "it").len(), 1);
    }
}
