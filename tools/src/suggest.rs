//! "Did you mean": suggestions for mistyped or foreign commands, options and files.
//!
//! clap suggests options and listed values itself. This module adds short commands, unlisted values, files, and the
//! options of other programs.

use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use strsim::damerau_levenshtein;

/// The name nearest to `word`, if it is at most one edit per four letters (at least one) away, or `word` is a prefix
/// of it.
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

/// A suggestion to append to the message that `word` is unknown; empty if no name is near.
pub fn did_you_mean<S: AsRef<str>>(word: &str, names: impl IntoIterator<Item = S>) -> String {
    match nearest(word, names) {
        Some(name) => format!("; did you mean {}?", name.as_ref()),
        None => String::new(),
    }
}

/// A suggestion to append to the message that the file `path` does not exist.
pub fn near_file(path: &Path) -> String {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // `run "A text"`
    if let Some(text) = path.to_str().filter(|t| t.contains(' ')) {
        return format!("; to pass a prompt, use -p {}", quoted(text));
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

/// Options of other programs (llama.cpp, Ollama, vLLM) and their equivalents.
const FOREIGN_OPTIONS: [(&[&str], &str); 19] = [
    (
        &["-m", "--model"],
        "the model is a positional argument: 'emberflow run MODEL'",
    ),
    (
        &[
            "-c",
            "--ctx-size",
            "--num-ctx",
            "--n-ctx",
            "--max-model-len",
        ],
        "'--context N' sets the context length",
    ),
    (&["-t"], "'--threads N' sets the number of compute threads"),
    (
        &["-i", "-cnv", "--interactive", "--conversation"],
        "'--chat' starts a chat",
    ),
    (
        &["-sys", "--system-prompt"],
        "'--chat --system TEXT' sets a system message",
    ),
    (
        &["-ngl", "--n-gpu-layers", "--gpu-layers"],
        "'--device opencl' uses a GPU (see 'emberflow doctor')",
    ),
    (
        &["--n-predict", "--predict", "--max-tokens", "--num-predict"],
        "'-n N' sets the maximum number of tokens to generate; -1 for no limit",
    ),
    (&["-s"], "'--seed S' sets the seed"),
    (&["--temperature"], "'--temp T' sets the temperature"),
    (
        &["--repetition-penalty", "--repeat-last-n"],
        "'--repeat-penalty R' penalizes recent tokens",
    ),
    (
        &["-b", "-ub", "--batch-size", "--ubatch-size", "--chunk"],
        "the prefill batch size is chosen from the memory budget",
    ),
    (
        &["--device-memory"],
        "'--device NAME=SIZE' limits device memory",
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
        "moved to the laboratory: 'cargo run --release -p emberflow-benches -- --help' in the source tree",
    ),
    (
        &["-np"],
        "'serve --parallel N' sets the number of concurrent requests",
    ),
    (
        &["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"],
        "'--kv f16' or '--kv f32' sets the type of the KV cache",
    ),
    (&["--mlock"], "'--lock' locks the weights in memory"),
    (&["--no-mmap", "--mmap"], "'--memory SIZE' limits memory"),
    (
        &["-hf", "-hfr", "--hf-repo"],
        "the model's name is a positional argument: 'emberflow run OWNER/NAME' downloads it",
    ),
    (
        &["--chat-template", "--jinja"],
        "the chat template always comes from the model",
    ),
];

/// Commands of other programs and their equivalents.
const FOREIGN_COMMANDS: [(&[&str], &str); 7] = [
    (
        &["ls", "ps"],
        "'emberflow list' shows the models on this machine; a server lists its model at /v1/models",
    ),
    (
        &["rm", "delete"],
        "'emberflow remove MODEL' deletes a model that pull downloaded",
    ),
    (
        &["download", "get"],
        "'emberflow pull MODEL' downloads a model",
    ),
    (&["show"], "'emberflow inspect MODEL' shows a model"),
    (
        &["chat", "generate"],
        "use 'emberflow run MODEL --chat' or 'emberflow run MODEL -p TEXT'",
    ),
    (
        &["quantize", "convert", "create"],
        "use 'emberflow pack MODEL -o model.ember --quant FORMAT'",
    ),
    (&["version"], "use 'emberflow --version'"),
];

/// The equivalent of a command of another program, of the laboratory, or of one merged into another.
fn foreign_command(command: &clap::Command, word: &str) -> Option<String> {
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
    let verb = FOREIGN_COMMANDS
        .iter()
        .find(|(verbs, _)| verbs.contains(&word));
    match (command.get_name(), word) {
        ("emberflow", _) if verb.is_some() => verb.map(|(_, tip)| (*tip).to_owned()),
        ("bench", "device") => Some("use 'emberflow bench io'".to_owned()),
        ("emberflow" | "bench", word) if LAB.contains(&word) => Some(format!(
            "moved to the laboratory: 'cargo run --release -p emberflow-benches -- {word}' in the source tree"
        )),
        _ => None,
    }
}

/// The equivalent of the first of `words` that is an option of another program.
fn foreign_option(words: &[String], command: &clap::Command) -> Option<&'static str> {
    let ours = |flag: &str| {
        command.get_arguments().any(|a| {
            let short = a.get_short().map(|c| format!("-{c}"));
            let long = a.get_long().map(|name| format!("--{name}"));
            short.as_deref() == Some(flag) || long.as_deref() == Some(flag)
        })
    };
    let hint = |word: &String| {
        let flag = word.split('=').next().unwrap_or_default();
        // `-c2048`
        let flag = flag.trim_end_matches(|c: char| c.is_ascii_digit());
        let known = FOREIGN_OPTIONS
            .iter()
            .find(|(flags, _)| flags.contains(&flag));
        known.filter(|_| !ours(flag)).map(|(_, hint)| *hint)
    };
    words.iter().filter(|w| w.starts_with('-')).find_map(hint)
}

/// A text in double quotes for a shell, shortened to 40 characters.
fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("\"{}\"", short.replace(['\n', '\r'], " "))
}

/// Adds to an error of clap the suggestions it could not make: a mistyped command, even where clap took the word for
/// a model (`profile shw`), an equivalent of a foreign command or option, and what to do with a model or a prompt.
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
    if let Some(hint) = foreign_option(&words, command) {
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, tip(hint.to_owned()));
        return error;
    }
    if let Some(hint) = unknown.and_then(|word| foreign_command(command, word)) {
        error.remove(ContextKind::SuggestedSubcommand);
        error.insert(ContextKind::Suggested, tip(hint));
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
        let hint = format!("to pass a prompt, use '-p {}'", quoted(text));
        error.insert(ContextKind::Suggested, tip(hint));
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
        let hint = if Path::new(unknown).exists() {
            format!("to run a model, use 'emberflow run {unknown}'")
        } else {
            format!(
                "to pass a prompt, use 'emberflow run -p {}'",
                quoted(unknown)
            )
        };
        if Path::new(unknown).exists() || unknown.contains(' ') {
            error.insert(ContextKind::Suggested, tip(hint));
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
