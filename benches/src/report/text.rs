//! Formatting of numbers and tables.

/// Three significant digits; from 100 on, no decimals.
pub fn num(x: f64) -> String {
    let digits = match x.abs() {
        x if x < 1.0 => 3,
        x if x < 10.0 => 2,
        x if x < 100.0 => 1,
        _ => 0,
    };
    format!("{x:.digits$}")
}

/// A share in whole percent; below 10 % with one decimal.
pub fn percent(share: f64) -> String {
    let digits = usize::from(share < 0.0995 && share > 0.0);
    format!("{:.digits$} %", 100.0 * share)
}

/// A median with its range; the median alone if the range is a point.
pub fn range(median: f64, low: f64, high: f64) -> String {
    if low == high {
        return num(median);
    }
    format!("{} ({} to {})", num(median), num(low), num(high))
}

/// Bytes in GiB.
pub fn gib(bytes: f64) -> String {
    format!("{:.2}", bytes / f64::from(1 << 30))
}

/// A Markdown table.
pub struct Table(String);

impl Table {
    /// A table with these column titles.
    pub fn new(columns: &[&str]) -> Self {
        let head = columns.join(" | ");
        let rule = "---|".repeat(columns.len());
        Self(format!("| {head} |\n|{rule}\n"))
    }

    /// Adds a row.
    pub fn row<S: AsRef<str>>(&mut self, cells: &[S]) {
        let cells: Vec<&str> = cells.iter().map(AsRef::as_ref).collect();
        self.0 += &format!("| {} |\n", cells.join(" | "));
    }

    /// The finished table.
    pub fn end(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let written = [0.3214, 8.018, 24.98, 404.6].map(num);
        assert_eq!(written, ["0.321", "8.02", "25.0", "405"]);
        assert_eq!(
            [percent(0.0636), percent(0.137), percent(0.0)],
            ["6.4 %", "14 %", "0 %"]
        );
        assert_eq!(range(1.0, 1.0, 1.0), "1.00");
    }
}
