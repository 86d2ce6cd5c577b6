//! Comma-separated values with a header.

use std::path::Path;

/// A table with named columns.
#[derive(Debug, Clone, Default)]
pub struct Csv {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// A row of a table.
#[derive(Debug, Clone, Copy)]
pub struct CsvRow<'a> {
    csv: &'a Csv,
    cells: &'a [String],
}

impl Csv {
    /// Reads a file; `None` if there is none.
    pub fn read(path: &Path) -> Option<Self> {
        std::fs::read_to_string(path).ok().map(|t| Self::parse(&t))
    }

    /// Parses a text. Missing fields at the end of a line are empty.
    pub fn parse(text: &str) -> Self {
        let mut lines = text.lines().filter(|line| !line.is_empty()).map(fields);
        let columns = lines.next().unwrap_or_default();
        Self {
            columns,
            rows: lines.collect(),
        }
    }

    /// All rows in order.
    pub fn rows(&self) -> impl Iterator<Item = CsvRow<'_>> {
        self.rows.iter().map(|cells| CsvRow { csv: self, cells })
    }

    /// The first row with these fields.
    pub fn find(&self, wanted: &[(&str, &str)]) -> Option<CsvRow<'_>> {
        self.rows()
            .find(|row| wanted.iter().all(|(column, is)| row.text(column) == *is))
    }
}

impl<'a> CsvRow<'a> {
    /// A field; empty if there is no such column.
    pub fn text(&self, column: &str) -> &'a str {
        let at = self.csv.columns.iter().position(|c| c == column);
        at.and_then(|at| self.cells.get(at))
            .map_or("", String::as_str)
    }

    /// The field as a number, if it is one.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.text(column).parse().ok()
    }

    /// The field as a number; 0 if it is none.
    pub fn or_zero(&self, column: &str) -> f64 {
        self.number(column).unwrap_or(0.0)
    }
}

/// Splits a line into fields.
fn fields(line: &str) -> Vec<String> {
    let (mut out, mut quoted) = (vec![String::new()], false);
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => out.push(String::new()),
            _ => out.last_mut().into_iter().for_each(|field| field.push(c)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_name() {
        let csv = Csv::parse("name,n\n\"a, b\",1.5\nc\n");
        let row = csv.find(&[("name", "a, b")]).unwrap();
        assert_eq!(row.number("n"), Some(1.5));
        let short = csv.find(&[("name", "c")]).unwrap();
        assert_eq!((short.number("n"), short.text("x")), (None, ""));
        assert!(csv.find(&[("name", "d")]).is_none());
    }
}
