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

/// Adds to an error of the argument parser what it could not suggest: a command that was meant, be
/// it that the word was taken for a model (`profile shw`), and what to do with a model.
pub fn enrich(mut error: clap::Error, program: &clap::Command) -> clap::Error {
    let usage = [
        ErrorKind::InvalidSubcommand,
        ErrorKind::ArgumentConflict,
        ErrorKind::MissingRequiredArgument,
        ErrorKind::UnknownArgument,
    ];
    let known = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg];
    if !usage.contains(&error.kind()) || known.iter().any(|&k| error.get(k).is_some()) {
        return error;
    }
    let mut command = program;
    let mut words = std::env::args().skip(1).filter(|w| !w.starts_with('-'));
    let unknown = words.find(|word| match command.find_subcommand(word) {
        Some(sub) => {
            command = sub;
            false
        }
        None => true,
    });
    let Some(unknown) = unknown else {
        return error;
    };
    let names = command.get_subcommands().map(|c| c.get_name().to_owned());
    if let Some(name) = nearest(&unknown, names) {
        let tip = ContextValue::Strings(vec![name]);
        error.insert(ContextKind::SuggestedSubcommand, tip);
    } else if error.kind() == ErrorKind::InvalidSubcommand && Path::new(&unknown).exists() {
        let tip = format!("a model is run by 'emberflow run {unknown}'");
        let tip = ContextValue::StyledStrs(vec![tip.into()]);
        error.insert(ContextKind::Suggested, tip);
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
