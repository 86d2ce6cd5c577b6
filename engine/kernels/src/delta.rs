//! The gated delta rule: a matrix of fixed size that remembers keys and values.
//!
//! Written as `elementwise.rs` is: the columns are independent, and the sums over rows run in order.

/// One token of one head.
#[derive(Debug, Clone, Copy)]
pub struct DeltaToken<'a> {
    /// What is remembered, one number per row of the state.
    pub key: &'a [f32],
    /// What is asked, one number per row.
    pub query: &'a [f32],
    /// What the key is to give from now on, one number per column.
    pub value: &'a [f32],
    /// Factor of the state before the token.
    pub decay: Decay<'a>,
    /// Share of the difference between the value and what the key gives that is written.
    pub beta: f32,
}

/// Factor of the state before a token.
#[derive(Debug, Clone, Copy)]
pub enum Decay<'a> {
    /// Of the whole state.
    One(f32),
    /// Of each row (Kimi Delta Attention).
    ByRow(&'a [f32]),
}

impl Decay<'_> {
    #[inline(always)]
    fn of(self, row: usize) -> f32 {
        match self {
            Self::One(factor) => factor,
            Self::ByRow(factors) => factors[row],
        }
    }
}

/// Columns at once: their sums stay in registers.
const BLOCK: usize = 32;

#[inline(always)]
pub(crate) fn delta_rule(
    before: Option<&[f32]>,
    state: &mut [f32],
    token: DeltaToken<'_>,
    out: &mut [f32],
) {
    let whole = out.len() / BLOCK * BLOCK;
    for at in (0..whole).step_by(BLOCK) {
        columns::<BLOCK>(before, state, token, at, out);
    }
    for at in whole..out.len() {
        columns::<1>(before, state, token, at, out);
    }
}

/// The `N` columns from `at` on.
#[inline(always)]
fn columns<const N: usize>(
    before: Option<&[f32]>,
    state: &mut [f32],
    token: DeltaToken<'_>,
    at: usize,
    out: &mut [f32],
) {
    let width = out.len();
    // keyᵀ · (decay · S)
    let mut found = [0.0f32; N];
    for (row, &key) in token.key.iter().enumerate() {
        let decay = token.decay.of(row);
        let row = row * width + at..row * width + at + N;
        if let Some(before) = before {
            state[row.clone()].copy_from_slice(&before[row.clone()]);
        }
        for (s, found) in state[row].iter_mut().zip(&mut found) {
            *s *= decay;
            *found = key.mul_add(*s, *found);
        }
    }
    for (found, &value) in found.iter_mut().zip(&token.value[at..at + N]) {
        *found = token.beta * (value - *found);
    }
    let written = found;
    let mut answer = [0.0f32; N];
    for (row, (&key, &query)) in token.key.iter().zip(token.query).enumerate() {
        let state = &mut state[row * width + at..][..N];
        for ((s, written), answer) in state.iter_mut().zip(&written).zip(&mut answer) {
            *s = key.mul_add(*written, *s);
            *answer = query.mul_add(*s, *answer);
        }
    }
    out[at..at + N].copy_from_slice(&answer);
}
