//! "Did you mean": the nearest of the names that exist.
//!
//! The argument parser suggests options and values itself; here is what it does not: commands of
//! few letters, values that it does not list, and files.

use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use strsim::damerau_levenshtein;

/// The nearest of `names` to `word`, where it is as near as a slip of the hand: one letter of
/// four, or the rest left out.
pub fn nearest<S: AsRef<str>>(word: &str, names: impl IntoIterator<Item = S>) -> Option<S> {
    let word = word.to_lowercase();
    let letters = word.chars().count();
    let slips = |name: &str| {
        let name = name.to_lowercase();
        let distance = damerau_levenshtein(&word, &name);
        let near = distance <= (letters / 4).max(1) && distance < letters;
        (near || (letters >= 3 && name.starts_with(&word))).then_some(distance)
    };
    let near = names
        .into_iter()
        .filter_map(|name| Some((slips(name.as_ref())?, name)));
    near.min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// What to add to a message that `word` is unknown; empty where no name is near.
pub fn did_you_mean<S: AsRef<str>>(word: &str, names: impl IntoIterator<Item = S>) -> String {
    match nearest(word, names) {
        Some(name) => format!("; did you mean {}?", name.as_ref()),
        None => String::new(),
    }
}

/// What to add to a message that the file `path` does not exist.
pub fn near_file(path: &Path) -> String {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // `run "A text"`
    if let Some(text) = path.to_str().filter(|t| t.contains(' ')) {
        return format!("; a text to continue is given by -p {}", quoted(text));
    }
    if !folder.exists() {
        return format!("; the folder {} does not exist", folder.display());
    }
    let (Some(word), Ok(entries)) = (path.file_name(), std::fs::read_dir(folder)) else {
        return String::new();
    };
    let names = entries
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok());
    match nearest(&word.to_string_lossy(), names) {
        Some(name) => format!("; did you mean {}?", path.with_file_name(name).display()),
        None => String::new(),
    }
}

/// Options of other programs (llama.cpp, Ollama, vLLM), and what says the same here.
const ELSEWHERE: [(&[&str], &str); 19] = [
    (
        &["-m", "--model"],
        "the model stands by itself: 'emberflow run MODEL'",
    ),
    (
        &[
            "-c",
            "--ctx-size",
            "--num-ctx",
            "--n-ctx",
            "--max-model-len",
        ],
        "'--context N' sets the positions to make room for",
    ),
    (&["-t"], "'--threads N' sets the number of compute threads"),
    (
        &["-i", "-cnv", "--interactive", "--conversation"],
        "'--chat' talks to the model",
    ),
    (
        &["-sys", "--system-prompt"],
        "'--chat --system TEXT' sets a system message",
    ),
    (
        &["-ngl", "--n-gpu-layers", "--gpu-layers"],
        "'--device opencl' uses a graphics processor (see 'emberflow doctor')",
    ),
    (
        &["--n-predict", "--predict", "--max-tokens", "--num-predict"],
        "'-n N' sets the most tokens to generate; -1 goes on to the end",
    ),
    (&["-s"], "'--seed S' sets the seed"),
    (&["--temperature"], "'--temp T' sets the temperature"),
    (
        &["--repetition-penalty", "--repeat-last-n"],
        "'--repeat-penalty R' weakens tokens that were used recently",
    ),
    (
        &["-b", "-ub", "--batch-size", "--ubatch-size", "--chunk"],
        "the prompt tokens computed at once follow the memory",
    ),
    (
        &["--device-memory"],
        "'--device NAME=SIZE' bounds what the device holds",
    ),
    (
        &[
            "--io",
            "--io-core",
            "--read-ahead",
            "--trace",
            "--details",
            "--oracle",
            "--judge",
            "--scheduling",
        ],
        "it is the laboratory's: 'cargo run --release -p emberflow-benches -- --help' in the sources",
    ),
    (&["-np"], "'serve --parallel N' sets the texts at once"),
    (
        &["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"],
        "'--kv f16' or '--kv f32' sets the format of keys and values",
    ),
    (
        &["--mlock"],
        "'--lock' keeps neurons from being swapped out",
    ),
    (
        &["--no-mmap", "--mmap"],
        "'--memory SIZE' bounds what is held in memory",
    ),
    (
        &["-hf", "-hfr", "--hf-repo"],
        "nothing is downloaded here; 'emberflow pack FILE -o model.ember' takes a file that you have",
    ),
    (
        &["--chat-template", "--jinja"],
        "the chat template is the checkpoint's own",
    ),
];

/// Commands of other programs, and what does the same here.
const VERBS: [(&[&str], &str); 6] = [
    (
        &["pull"],
        "nothing is downloaded here; 'emberflow pack FILE -o model.ember' takes a file that you have",
    ),
    (
        &["list", "ls", "ps"],
        "models are files; a server tells its own at /v1/models",
    ),
    (&["show"], "'emberflow inspect MODEL' shows a model"),
    (
        &["chat", "generate"],
        "'emberflow run MODEL --chat' talks, 'emberflow run MODEL -p TEXT' goes on with a text",
    ),
    (
        &["quantize", "convert", "create"],
        "'emberflow pack MODEL -o model.ember --quant FORMAT' does it",
    ),
    (&["version"], "'emberflow --version' tells it"),
];

/// Commands of other programs, of the laboratory, and those that are a part of another one now.
fn moved(command: &clap::Command, word: &str) -> Option<String> {
    const LAB: [&str; 12] = [
        "synth",
        "trace",
        "kernels",
        "cache",
        "predictor",
        "timeline",
        "ablation",
        "latency",
        "prefill",
        "batch",
        "serve",
        "split",
    ];
    let verb = VERBS.iter().find(|(verbs, _)| verbs.contains(&word));
    match (command.get_name(), word) {
        ("emberflow", _) if verb.is_some() => verb.map(|(_, tip)| (*tip).to_owned()),
        ("bench", "device") => Some("'emberflow bench io' measures the machine too".to_owned()),
        ("emberflow" | "bench", word) if LAB.contains(&word) => Some(format!(
            "it is the laboratory's: 'cargo run --release -p emberflow-benches -- {word}' in the sources"
        )),
        _ => None,
    }
}

/// What to write instead of an option of another program, if one of `words` is such.
fn from_elsewhere(words: &[String], command: &clap::Command) -> Option<&'static str> {
    let ours = |flag: &str| {
        command.get_arguments().any(|a| {
            let short = a.get_short().map(|c| format!("-{c}"));
            let long = a.get_long().map(|name| format!("--{name}"));
            short.as_deref() == Some(flag) || long.as_deref() == Some(flag)
        })
    };
    let told = |word: &String| {
        let flag = word.split('=').next().unwrap_or_default();
        // `-c2048`
        let flag = flag.trim_end_matches(|c: char| c.is_ascii_digit());
        let known = ELSEWHERE.iter().find(|(flags, _)| flags.contains(&flag));
        known.filter(|_| !ours(flag)).map(|(_, told)| *told)
    };
    words.iter().filter(|w| w.starts_with('-')).find_map(told)
}

/// A text in quotation marks for a shell, shortened where it is long.
fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("\"{}\"", short.replace(['\n', '\r'], " "))
}

/// Adds to an error of the argument parser what it could not suggest: a command that was meant, be
/// it that the word was taken for a model (`profile shw`), and what to do with a model.
pub fn enrich(mut error: clap::Error, program: &clap::Command) -> clap::Error {
    let usage = [
        ErrorKind::InvalidSubcommand,
        ErrorKind::ArgumentConflict,
        ErrorKind::MissingRequiredArgument,
        ErrorKind::UnknownArgument,
        ErrorKind::ValueValidation,
    ];
    if !usage.contains(&error.kind()) {
        return error;
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut command = program;
    let mut plain = words.iter().filter(|w| !w.starts_with('-'));
    let unknown = plain.find(|word| match command.find_subcommand(word) {
        Some(sub) => {
            command = sub;
            false
        }
        None => true,
    });
    let tip = |text: String| ContextValue::StyledStrs(vec![text.into()]);
    if let Some(told) = from_elsewhere(&words, command) {
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, tip(told.to_owned()));
        return error;
    }
    if let Some(told) = unknown.and_then(|word| moved(command, word)) {
        error.remove(ContextKind::SuggestedSubcommand);
        error.insert(ContextKind::Suggested, tip(told));
        return error;
    }
    let known = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg];
    if known.iter().any(|&k| error.get(k).is_some()) {
        return error;
    }
    // `run MODEL "text"`
    if let Some(ContextValue::String(text)) = error.get(ContextKind::InvalidArg)
        && error.kind() == ErrorKind::UnknownArgument
        && command.get_name() == "run"
        && !text.starts_with('-')
    {
        let told = format!("a text to continue is given by '-p {}'", quoted(text));
        error.insert(ContextKind::Suggested, tip(told));
        return error;
    }
    let Some(unknown) = unknown else {
        return error;
    };
    let names = command.get_subcommands().map(|c| c.get_name().to_owned());
    if let Some(name) = nearest(unknown, names) {
        let value = ContextValue::Strings(vec![name]);
        error.insert(ContextKind::SuggestedSubcommand, value);
    } else if error.kind() == ErrorKind::InvalidSubcommand {
        let told = match Path::new(unknown).exists() {
            true => format!("a model is run by 'emberflow run {unknown}'"),
            false => format!(
                "a text is continued by 'emberflow run -p {}'",
                quoted(unknown)
            ),
        };
        if Path::new(unknown).exists() || unknown.contains(' ') {
            error.insert(ContextKind::Suggested, tip(told));
        }
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_understood_and_another_word_is_not() {
        let names = ["run", "pack", "train-predictor", "demo-q4.ember"];
        for (word, wanted) in [
            ("rnu", Some("run")),
            ("Run", Some("run")),
            ("packk", Some("pack")),
            ("train-perdicter", Some("train-predictor")),
            ("demo-q4", Some("demo-q4.ember")),
            ("demo_q4.ember", Some("demo-q4.ember")),
            ("serve", None),
            ("r", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, names), wanted, "{word}");
        }
    }
}
