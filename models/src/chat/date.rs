//! Dates as `strftime` writes them.

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a UTC time in seconds since 1970.
///
/// # Errors
/// The name of an unsupported conversion.
pub fn strftime(format: &str, unix_seconds: i64) -> Result<String, String> {
    let (days, second) = (
        unix_seconds.div_euclid(86_400),
        unix_seconds.rem_euclid(86_400),
    );
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (year, month, day) = civil(days);
    let name = |names: &[&'static str], index: i64| -> &'static str {
        usize::try_from(index)
            .ok()
            .and_then(|i| names.get(i).copied())
            .unwrap_or("")
    };
    let weekday = name(&DAYS, (days + 4).rem_euclid(7));
    let month_name = name(&MONTHS, month - 1);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year.rem_euclid(100))),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{:02}", (hour + 11) % 12 + 1)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(month_name.get(..3).unwrap_or("")),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(weekday.get(..3).unwrap_or("")),
            Some('j') => out.push_str(&format!("{:03}", days - days_before(year) + 1)),
            Some('%') => out.push('%'),
            Some(other) => return Err(format!("strftime_now: %{other} is not supported")),
            None => return Err("strftime_now: the format ends in %".into()),
        }
    }
    Ok(out)
}

/// Days from 1970-01-01 to the first day of `year`.
fn days_before(year: i64) -> i64 {
    let y = year - 1;
    y * 365 + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) - 719_162
}

/// Year, month (1 to 12) and day (1 to 31) in the Gregorian calendar.
fn civil(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days.div_euclid(366);
    while days_before(year + 1) <= days {
        year += 1;
    }
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let lengths = [
        31,
        if leap { 29 } else { 28 },
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut day = days - days_before(year);
    let mut month = 1;
    for length in lengths {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_around_leap_days_and_year_ends() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 Thursday 001"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday 060"),
            (951_868_799, "2000-02-29 23:59:59 Tuesday 060"),
            (1_735_689_599, "2024-12-31 23:59:59 Tuesday 366"),
            (1_735_689_600, "2025-01-01 00:00:00 Wednesday 001"),
            (4_107_542_400, "2100-03-01 00:00:00 Monday 060"),
            (-1, "1969-12-31 23:59:59 Wednesday 365"),
        ] {
            assert_eq!(
                strftime("%Y-%m-%d %H:%M:%S %A %j", seconds).unwrap(),
                expected
            );
        }
        assert_eq!(
            strftime("%d %b %y, %I %p, %a %B 100%%", 1_721_995_200).unwrap(),
            "26 Jul 24, 12 PM, Fri July 100%"
        );
    }

    #[test]
    fn unknown_conversions_are_named() {
        assert!(strftime("%Q", 0).unwrap_err().contains("%Q"));
        assert!(strftime("%", 0).is_err());
    }
}
