//! `emberflow list` and `emberflow remove`: the models on this machine.

use std::io::Write;

use super::name::ModelName;
use super::pull::no_folder;
use super::stores::{self, OwnStore};
use crate::cli::{ListArgs, RemoveArgs};
use crate::tell::tell;
use crate::{Failure, print_json, size};

/// Runs `list`.
///
/// # Errors
/// Of the output.
pub fn list(args: &ListArgs) -> Result<(), Failure> {
    let all = stores::all();
    if args.json {
        return print_json(&all);
    }
    if all.is_empty() {
        tell("emberflow: no models on this machine; 'emberflow pull OWNER/NAME' downloads one");
    }
    let names: Vec<String> = all
        .iter()
        .map(|model| format!("{}:{}", model.name, model.file))
        .collect();
    let width = names
        .iter()
        .map(|name| name.chars().count())
        .max()
        .unwrap_or(0);
    let mut out = std::io::stdout().lock();
    for (model, name) in all.iter().zip(names) {
        let bytes = size::show(model.bytes);
        writeln!(
            out,
            "{name:<width$}  {bytes:>10}  {:<11}  {}",
            model.store,
            model.path.display()
        )?;
    }
    Ok(())
}

/// Runs `remove`.
///
/// # Errors
/// No such model of this program, or an I/O error.
pub fn remove(args: &RemoveArgs) -> Result<(), Failure> {
    let not_ours = |why: String| {
        Failure::usage(format!(
            "{}: {why}; nothing was removed",
            args.model.display()
        ))
    };
    let name = ModelName::parse(&args.model);
    let name = name.ok_or_else(|| {
        not_ours("only models that 'emberflow pull' downloaded are removed, by their names".into())
    })?;
    let removed = OwnStore::open().ok_or_else(no_folder)?.remove(&name)?;
    if removed.files.is_empty() && removed.changed.is_empty() {
        return Err(not_ours(match stores::find(&name).first() {
            Some(other) => format!(
                "{} was not downloaded by 'emberflow pull'",
                other.path.display()
            ),
            None => "no such model; 'emberflow list' shows those on this machine".to_owned(),
        }));
    }
    for path in &removed.changed {
        tell(format_args!(
            "emberflow: {} has changed since it was downloaded: it stays",
            path.display()
        ));
    }
    if args.json {
        return print_json(&removed);
    }
    let mut out = std::io::stdout().lock();
    for path in &removed.files {
        writeln!(out, "{}", path.display())?;
    }
    writeln!(out, "{} freed", size::show(removed.bytes))?;
    Ok(())
}
