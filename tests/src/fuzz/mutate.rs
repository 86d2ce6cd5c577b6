//! Mutates bytes, at random and by their structure.

use std::ops::Range;

use fastrand::Rng;
use serde_json::{Map, Value};

use super::{Form, Target};

/// Longest input; longer ones are truncated.
const MOST: usize = 1 << 20;

/// Leading bytes that receive most damage: headers and tables.
const FRONT: usize = 4096;

/// Damages `bytes` in one to eight places, and repairs checksums most of the time.
pub fn mutate(bytes: &mut Vec<u8>, target: &Target, random: &mut Rng) {
    let places = 1 << random.u32(..4);
    let Form { json, seal, .. } = target.form;
    match json(bytes) {
        Some(range) if random.u8(..4) > 0 => {
            let donor = random.choice(&target.seeds);
            let donor = donor.and_then(|d| serde_json::from_slice(d.get(json(d)?)?).ok());
            let donor = donor.unwrap_or_default();
            change_json(bytes, range, places, &donor, random);
        }
        _ => (0..places).for_each(|_| damage(bytes, &target.seeds, random)),
    }
    if random.u8(..8) > 0 {
        seal(bytes);
    }
}

/// A number to try as length, offset or count.
fn number(len: usize, random: &mut Rng) -> u64 {
    let len = len as u64;
    match random.u8(..4) {
        0 => random.u64(..) >> random.u32(..64),
        1 => len.wrapping_add(random.u64(..17)).wrapping_sub(8),
        _ => {
            let power = 1u64 << random.u32(..64);
            [0, 1, power - 1, power, power + 1, u64::MAX][random.usize(..6)]
        }
    }
}

/// Changes one place.
fn damage(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Rng) {
    let len = bytes.len();
    let span = match random.u8(..8) {
        0 => len,
        1 => len.min(64),
        _ => len.min(FRONT),
    };
    let at = random.usize(..span.max(1)).min(len);
    let most = (len - at).min(1 << random.u32(..10));
    let width = random.usize(..=most);
    match random.u8(..12) {
        0 => bytes.truncate(at),
        1 => drop(bytes.drain(at..at + width)),
        2 => insert(bytes, at, &vec![random.u8(..); 1 << random.u32(..14)]),
        3 => {
            let part = bytes[at..at + width].to_vec();
            insert(bytes, random.usize(..=len), &part);
        }
        4 => {
            let to = random.usize(..=len - width);
            bytes.copy_within(at..at + width, to);
        }
        5 => {
            let Some(other) = random.choice(seeds) else {
                return;
            };
            let from = random.usize(..=other.len());
            let end = other.len().min(from + width);
            insert(bytes, at, &other[from..end]);
        }
        6..9 => {
            // aligned like most numbers
            let width = [1, 2, 4, 8][random.usize(..4)];
            let at = at / width * width;
            if let Some(to) = bytes.get_mut(at..at + width) {
                let mut word = [0; 8];
                word[..width].copy_from_slice(to);
                let new = match random.u8(..3) {
                    0 => u64::from_le_bytes(word)
                        .wrapping_add(random.u64(..5))
                        .wrapping_sub(2),
                    _ => number(len, random),
                };
                to.copy_from_slice(&new.to_le_bytes()[..width]);
            }
        }
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                if random.bool() {
                    *byte ^= 1 << random.u32(..8)
                } else {
                    *byte = random.u8(..)
                }
            }
        }
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, part: &[u8]) {
    let part = &part[..part.len().min(MOST.saturating_sub(bytes.len()))];
    bytes.splice(at..at, part.iter().copied());
}

/// Changes values of a document, some to those of another one. A document embedded in other bytes
/// keeps its length, by spaces at its end, or is not changed.
fn change_json(
    bytes: &mut Vec<u8>,
    range: Range<usize>,
    places: usize,
    donor: &Value,
    random: &mut Rng,
) {
    let text = bytes.get(range.clone()).unwrap_or_default();
    let Ok(mut document) = serde_json::from_slice::<Value>(text) else {
        return;
    };
    for _ in 0..places {
        let given = (random.u8(..3) == 0).then(|| pick(donor, random));
        descend(&mut document, given, random);
    }
    let mut text = document.to_string().into_bytes();
    text.truncate(MOST);
    if range == (0..bytes.len()) {
        *bytes = text;
    } else if text.len() <= range.len() {
        text.resize(range.len(), b' ');
        bytes[range].copy_from_slice(&text);
    }
}

/// A value inside `value`, or itself.
fn pick<'a>(value: &'a Value, random: &mut Rng) -> &'a Value {
    let inner = match value {
        _ if random.u8(..4) == 0 => None,
        Value::Object(map) => random.choice(map.values().collect::<Vec<_>>()),
        Value::Array(list) => random.choice(list),
        _ => None,
    };
    inner.map_or(value, |inner| pick(inner, random))
}

/// Changes a value inside `value`, or itself, to the given one if any.
fn descend(value: &mut Value, given: Option<&Value>, random: &mut Rng) {
    if random.u8(..8) > 0 {
        match value {
            Value::Object(map) if !map.is_empty() => {
                let at = random.usize(..map.len());
                if let Some(inner) = map.values_mut().nth(at) {
                    return descend(inner, given, random);
                }
            }
            Value::Array(list) if !list.is_empty() => {
                let at = random.usize(..list.len());
                return descend(&mut list[at], given, random);
            }
            _ => {}
        }
    }
    match given {
        Some(given) => *value = given.clone(),
        None => change(value, random),
    }
}

fn change(value: &mut Value, random: &mut Rng) {
    match (value, random.u8(..4)) {
        (Value::Object(map), 0..3) if !map.is_empty() => {
            let at = random.usize(..map.len());
            let name = map.keys().nth(at).cloned().unwrap_or_default();
            match (map.remove(&name), random.u8(..3)) {
                (Some(old), 0) => drop(map.insert(name + &text(random), old)),
                (Some(old), 1) => {
                    map.insert(name, old.clone());
                    map.insert(text(random), old);
                }
                _ => {}
            }
        }
        (Value::Array(list), 0..3) if !list.is_empty() => {
            let at = random.usize(..list.len());
            let copies = 1 << random.u32(..8);
            match random.u8(..3) {
                0 => drop(list.remove(at)),
                1 => list.swap(0, at),
                _ => (0..copies).for_each(|_| list.push(list[at].clone())),
            }
        }
        (Value::String(old), 0) => *old += &text(random),
        (Value::Number(old), 0..2) => {
            let near = old.as_f64().unwrap_or_default() + f64::from(random.i8(-2..=2));
            *old = serde_json::Number::from_f64(near).unwrap_or_else(|| 0.into());
        }
        (value, _) => *value = anything(random),
    }
}

fn text(random: &mut Rng) -> String {
    const TEXTS: [&str; 16] = [
        "",
        " ",
        "a",
        "▁",
        "é",
        "\u{0}",
        "\u{300}",
        "😀",
        "<0x41>",
        "<s>",
        "Ġ",
        "(?=b)|$",
        "a*",
        "{{",
        "../x",
        "{% for a in messages %}{{ a.content }}{% endfor %}",
    ];
    TEXTS[random.usize(..TEXTS.len())].repeat(1 << (random.u32(..40) / 4))
}

fn anything(random: &mut Rng) -> Value {
    match random.u8(..10) {
        0 => Value::Null,
        1 => random.bool().into(),
        2 => number(64, random).into(),
        3 => (number(64, random) as i64).wrapping_neg().into(),
        4 => [0.0, -1.0, 0.5, 1e-300, 1e300, f64::from(f32::MAX)][random.usize(..6)].into(),
        5 => vec![anything(random); random.usize(..4)].into(),
        6 => Map::from_iter([("type".to_owned(), anything(random))]).into(),
        // as deep as parsers allow, and deeper
        7 => (0..random.u32(..200)).fold(Value::Null, |inner, _| vec![inner].into()),
        _ => text(random).into(),
    }
}
