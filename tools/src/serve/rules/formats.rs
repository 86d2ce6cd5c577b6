//! Formats of strings as regular expressions, for strings that are not JSON.

/// The regular expression of a format that llguidance supports in JSON. Not every valid text matches it: February has
/// 28 days, and minutes 60 seconds.
pub fn format_pattern(name: &str) -> Option<String> {
    let date = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)\
                |02-(0[1-9]|1[0-9]|2[0-8]))";
    let clock = "([01][0-9]|2[0-3]):[0-5][0-9]";
    let time = format!("{clock}:[0-5][0-9](\\.[0-9]+)?(Z|[+-]{clock})");
    let pattern = match name {
        "date" => date.to_owned(),
        "time" => time,
        "date-time" => format!("{date}T{time}"),
        "duration" => {
            let [days, months] = ["[0-9]+D", "[0-9]+M([0-9]+D)?"];
            let [seconds, minutes] = ["[0-9]+S", "[0-9]+M([0-9]+S)?"];
            let time = format!("T([0-9]+H({minutes})?|{minutes}|{seconds})");
            format!("P([0-9]+W|([0-9]+Y({months})?|{months}|{days})({time})?|{time})")
        }
        "email" => {
            let local = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+";
            format!("{local}(\\.{local})*@{}", host("*"))
        }
        "hostname" => host("{0,61}"),
        "ipv4" => {
            let byte = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
            format!("({byte}\\.){{3}}{byte}")
        }
        "ipv6" => {
            let part = "[0-9a-fA-F]{1,4}";
            // `::` stands for one part or more.
            let short = (1..7).map(|before| {
                let after = 7 - before;
                format!("({part}:){{1,{before}}}(:{part}){{1,{after}}}")
            });
            let short: Vec<String> = short.collect();
            format!(
                "({part}:){{7}}{part}|({part}:){{1,7}}:|:(:{part}){{1,7}}|::|{}",
                short.join("|")
            )
        }
        "uuid" => "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".to_owned(),
        "uri" => {
            let name = "([a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2})";
            let sign = format!("([:@]|{name})");
            let rest = format!("([:@/?]|{name})*");
            let path = format!("{sign}({sign}|/)*");
            let all = format!("(//{name}*(:[0-9]*)?(/({sign}|/)*)?|/({path})?|({path})?)");
            format!("[a-zA-Z][a-zA-Z0-9+.-]*:{all}(\\?{rest})?(#{rest})?")
        }
        _ => return None,
    };
    Some(pattern)
}

/// Names of a host whose inner signs are repeated so.
fn host(repeated: &str) -> String {
    let label = format!("[a-zA-Z0-9]([a-zA-Z0-9-]{repeated}[a-zA-Z0-9])?");
    format!("{label}(\\.{label})*")
}
