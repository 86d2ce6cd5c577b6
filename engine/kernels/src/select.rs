//! The largest of many values, such as the logits of a token.
//!
//! Written without intrinsics and inlined into an entry point per instruction set, like the
//! functions of `elementwise.rs`.

use std::cmp::Ordering;

/// Values tested together.
const CHUNK: usize = 64;

/// Whether any value satisfies the test. No early exit, so that the loop vectorises.
#[inline(always)]
fn any(x: &[f32], test: impl Fn(f32) -> bool) -> bool {
    x.iter().fold(false, |any, &value| any | test(value))
}

#[inline(always)]
pub(crate) fn argmax(x: &[f32]) -> Option<usize> {
    let mut lanes = [f32::NEG_INFINITY; CHUNK];
    let mut chunks = x.chunks_exact(CHUNK);
    for chunk in chunks.by_ref() {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    let rest = lanes.iter().chain(chunks.remainder());
    let max = rest.fold(f32::NEG_INFINITY, |max, &v| if v > max { v } else { max });
    let (index, chunk) = x
        .chunks(CHUNK)
        .enumerate()
        .find(|(_, chunk)| any(chunk, |value| value == max))?;
    let within = chunk.iter().position(|&value| value == max)?;
    Some(index * CHUNK + within)
}

/// Falling values, equal ones by rising index.
#[inline]
fn order() -> impl Fn(&(f32, u32), &(f32, u32)) -> Ordering {
    |(a, a_index), (b, b_index)| {
        let by_value = b.partial_cmp(a).unwrap_or(Ordering::Equal);
        by_value.then(a_index.cmp(b_index))
    }
}

/// Truncates to the `k` best and returns the smallest of them.
fn keep(k: usize, best: &mut Vec<(f32, u32)>) -> f32 {
    let (_, last, _) = best.select_nth_unstable_by(k - 1, order());
    let least = last.0;
    best.truncate(k);
    least
}

#[inline(always)]
pub(crate) fn top_k(x: &[f32], k: usize, best: &mut Vec<(f32, u32)>) {
    best.clear();
    if k == 0 {
        return;
    }
    // Once `k` values are known, only values above the smallest of them matter; a later equal one
    // loses by its index.
    let mut least = None;
    for (chunk, first) in x.chunks(CHUNK).zip((0u32..).step_by(CHUNK)) {
        match least {
            Some(least) if !any(chunk, |value| value > least) => continue,
            Some(least) => {
                let larger = chunk.iter().zip(first..).filter(|(v, _)| **v > least);
                best.extend(larger.map(|(&v, i)| (v, i)));
            }
            None => {
                let numbers = chunk.iter().zip(first..).filter(|(v, _)| !v.is_nan());
                best.extend(numbers.map(|(&v, i)| (v, i)));
            }
        }
        if best.len() >= k.saturating_mul(2) {
            least = Some(keep(k, best));
        }
    }
    if best.len() > k {
        keep(k, best);
    }
    best.sort_unstable_by(order());
}
