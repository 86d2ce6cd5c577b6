//! The scan of a state-space model (Mamba-2): a matrix of fixed size that decays and takes up tokens.
//!
//! Written as `delta.rs` is: the columns are independent, and the sum over rows runs in order.

/// One token of one head.
#[derive(Debug, Clone, Copy)]
pub struct ScanToken<'a> {
    /// What the head takes in, one number per column.
    pub input: &'a [f32],
    /// Share of it that each row of the state takes up (`B` in the literature).
    pub write: &'a [f32],
    /// Factor of each row in the output (`C`).
    pub read: &'a [f32],
    /// Factor of the state before the token.
    pub decay: f32,
    /// Factor of what is written (`Δ`).
    pub step: f32,
    /// Factor of the input in the output (`D`).
    pub skip: f32,
}

/// Columns at once: their sums stay in registers.
const BLOCK: usize = 32;

#[inline(always)]
pub(crate) fn selective_scan(
    before: Option<&[f32]>,
    state: &mut [f32],
    token: ScanToken<'_>,
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
    token: ScanToken<'_>,
    at: usize,
    out: &mut [f32],
) {
    let width = out.len();
    let input = &token.input[at..at + N];
    let mut written = [0.0f32; N];
    for (written, &input) in written.iter_mut().zip(input) {
        *written = token.step * input;
    }
    // readᵀ · S
    let mut answer = [0.0f32; N];
    for (row, (&write, &read)) in token.write.iter().zip(token.read).enumerate() {
        let row = row * width + at..row * width + at + N;
        if let Some(before) = before {
            state[row.clone()].copy_from_slice(&before[row.clone()]);
        }
        for ((s, written), answer) in state[row].iter_mut().zip(&written).zip(&mut answer) {
            *s = write.mul_add(*written, token.decay * *s);
            *answer = read.mul_add(*s, *answer);
        }
    }
    for ((out, answer), &input) in out[at..at + N].iter_mut().zip(answer).zip(input) {
        *out = token.skip.mul_add(input, answer);
    }
}
