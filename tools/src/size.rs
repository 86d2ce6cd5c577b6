//! Sizes as people type them: `2GiB`, `512MiB`, `700MB`, `1073741824`.

/// Parses a size in bytes: a number, which may have a fraction, and an optional binary (`KiB`, `MiB`, `GiB`) or
/// decimal (`KB`, `MB`, `GB`) unit.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        other => {
            return Err(format!(
                "unknown unit {other:?} in {text:?}; use KiB, MiB or GiB, for example 2GiB"
            ));
        }
    };
    let value: f64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a size; for example 512MiB or 2GiB"))?;
    let bytes = value * factor as f64;
    if bytes >= u64::MAX as f64 {
        return Err(format!("{text:?} is too large"));
    }
    Ok(bytes as u64)
}

/// Formats bytes in binary units.
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_fractions() {
        assert_eq!(parse("2GiB"), Ok(2 << 30));
        assert_eq!(parse("1.5 MiB"), Ok(3 << 19));
        assert_eq!(parse("700MB"), Ok(700_000_000));
        assert_eq!(parse("12345"), Ok(12345));
        assert_eq!(parse("64k"), Ok(64 << 10));
    }

    #[test]
    fn nonsense_is_refused_with_an_example() {
        for bad in ["", "GiB", "2 cats", "1.2.3MiB", "99999999TiB", "-1MiB"] {
            let e = parse(bad).unwrap_err();
            assert!(!e.is_empty(), "{bad}");
        }
    }

    #[test]
    fn shown_sizes_read_well() {
        assert_eq!(show(17), "17 B");
        assert_eq!(show(3 << 19), "1.5 MiB");
    }
}
