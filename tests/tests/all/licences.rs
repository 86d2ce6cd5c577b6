//! Every dependency has a licence that `deny.toml` allows.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The identifiers in the list `allow` of `deny.toml`.
fn allowed(deny: &str) -> BTreeSet<&str> {
    let (_, list) = deny.split_once("allow = [").expect("a list");
    let (list, _) = list.split_once(']').expect("its end");
    list.split('"').skip(1).step_by(2).collect()
}

/// Whether an SPDX expression without parentheses inside of alternatives can be met: all parts of AND, one of OR.
fn is_met(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    let expression = expression.replace(['(', ')'], "").replace('/', " OR ");
    expression.split(" AND ").all(|part| {
        let mut alternatives = part.split(" OR ").map(str::trim);
        alternatives.any(|one| allowed.contains(one))
    })
}

#[test]
fn dependencies_have_allowed_licences() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let deny = std::fs::read_to_string(root.join("deny.toml")).unwrap();
    let allowed = allowed(&deny);
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--locked"]);
    let output = cargo.current_dir(root).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100, "{}", packages.len());
    for package in packages {
        let licence = package["license"].as_str().unwrap_or_default();
        assert!(
            is_met(licence, &allowed),
            "{}: its licence is `{licence}`; deny.toml allows {allowed:?}",
            package["name"]
        );
    }
}

#[test]
fn expressions_are_read() {
    let allowed = BTreeSet::from(["MIT", "Unicode-3.0"]);
    for met in ["MIT", "MIT/Apache-2.0", "(MIT OR Zlib) AND Unicode-3.0"] {
        assert!(is_met(met, &allowed), "{met}");
    }
    for other in ["", "GPL-3.0", "MIT AND GPL-3.0", "Apache-2.0 OR Zlib"] {
        assert!(!is_met(other, &allowed), "{other}");
    }
}
