//! Checks the files written by benchmarks.

use std::path::Path;

use serde_json::Value;

/// The written files: a chart, and points under their header.
pub fn files(dir: &Path, report: &Value, columns: &str) -> String {
    files_of(dir, report, "rows", columns)
}

/// As [`files`], if JSON has the points under another name.
pub fn files_of(dir: &Path, report: &Value, points: &str, columns: &str) -> String {
    let rows = report[points].as_array().unwrap().len();
    let written = report["written"].as_array().unwrap();
    assert_eq!(written.len(), 3, "{written:?}");
    let text = |ext: &str| {
        let mut of = written.iter().map(|p| Path::new(p.as_str().unwrap()));
        let path = of
            .find(|p| p.extension().is_some_and(|e| e == ext))
            .unwrap();
        assert!(path.starts_with(dir));
        std::fs::read_to_string(path).unwrap()
    };
    let csv = text("csv");
    assert!(csv.starts_with(columns), "{csv}");
    assert_eq!(csv.lines().count(), 1 + rows, "{csv}");
    let saved: Value = serde_json::from_str(&text("json")).unwrap();
    assert_eq!(saved[points], report[points]);
    let svg = text("svg");
    well_formed(&svg);
    svg
}

/// Every element is closed in the order in which it was opened, and no number is missing.
pub fn well_formed(svg: &str) {
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"));
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    let mut open: Vec<&str> = Vec::new();
    for part in svg.split('<').skip(1) {
        let (tag, _) = part.split_once('>').expect("a tag ends");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split(' ').next().unwrap());
        }
    }
    assert!(open.is_empty(), "{open:?} are not closed");
}

pub fn number(row: &Value, key: &str) -> f64 {
    let value = &row[key];
    let value = value.as_f64().or_else(|| value["median"].as_f64());
    value.unwrap_or_else(|| panic!("no number {key} in {row}"))
}
