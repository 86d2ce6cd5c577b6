//! Norms, softmax, activations and rotary embedding on f32 slices.
//!
//! Written once in safe code without intrinsics. Each function is inlined into an entry point per
//! instruction set and vectorised there. The compiler neither reorders nor fuses floating-point
//! operations, so all of them return the same bits as the scalar one.

use crate::{LANES, math};

/// Folds `x` into 64 lanes: lane `i % 64` takes `add(lane, x[i])`.
#[inline(always)]
fn lane_sum(x: &[f32], squares: bool) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in chunks.by_ref() {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if squares {
                value.mul_add(value, *lane)
            } else {
                *lane + value
            };
        }
    }
    // Padding adds +0.0, which changes no lane: sums that start at +0.0 and take
    // squares or exponentials are never -0.0.
    for (lane, &value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = if squares {
            value.mul_add(value, *lane)
        } else {
            *lane + value
        };
    }
    reduce(lanes)
}

/// The fixed binary tree that folds the lanes.
#[inline(always)]
fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            lanes[j] += lanes[j + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean = lane_sum(x, true) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

#[inline(always)]
pub(crate) fn rmsnorm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = inverse_rms(x, eps);
    for ((out, &x), &w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

#[inline(always)]
pub(crate) fn rmsnorm_inplace(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms(x, eps);
    for (x, &w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

#[inline(always)]
pub(crate) fn layernorm_inplace(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let mean = lane_sum(x, false) / x.len() as f32;
    for x in x.iter_mut() {
        *x -= mean;
    }
    let scale = inverse_rms(x, eps);
    for ((x, &w), &b) in x.iter_mut().zip(weight).zip(bias) {
        *x = (*x * scale).mul_add(w, b);
    }
}

/// The largest value, ignoring NaN; −∞ if there is none. The order affects only the sign of zero,
/// which a later subtraction does not see.
#[inline(always)]
fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in chunks.by_ref() {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    let mut max = f32::NEG_INFINITY;
    for &value in lanes.iter().chain(chunks.remainder()) {
        max = if value > max { value } else { max };
    }
    max
}

#[inline(always)]
pub(crate) fn exp_block(x: &mut [f32]) -> (f32, f32) {
    let max = max(x);
    for value in x.iter_mut() {
        *value = math::exp(*value - max);
    }
    (max, lane_sum(x, false))
}

#[inline(always)]
pub(crate) fn softmax(x: &mut [f32]) {
    let (_, sum) = exp_block(x);
    let scale = 1.0 / sum;
    for value in x.iter_mut() {
        *value *= scale;
    }
}

#[inline(always)]
pub(crate) fn blend(a: f32, y: &mut [f32], b: f32, x: &[f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = b.mul_add(x, a * *y);
    }
}

#[inline(always)]
pub(crate) fn scale_by_sigmoid(x: &mut [f32], gate: &[f32]) {
    for (x, &gate) in x.iter_mut().zip(gate) {
        *x /= 1.0 + math::exp(-gate);
    }
}

#[inline(always)]
pub(crate) fn silu(x: &mut [f32]) {
    for value in x {
        *value = math::silu(*value);
    }
}

#[inline(always)]
pub(crate) fn gelu(x: &mut [f32]) {
    for value in x {
        *value = math::gelu(*value);
    }
}

#[inline(always)]
pub(crate) fn xielu(x: &mut [f32], of: math::Xielu) {
    for value in x.iter_mut() {
        *value = math::xielu(*value, of);
    }
}

#[inline(always)]
pub(crate) fn gelu_tanh(x: &mut [f32]) {
    for value in x {
        *value = math::gelu_tanh(*value);
    }
}

#[inline(always)]
pub(crate) fn soft_cap(x: &mut [f32], cap: f32) {
    for value in x {
        *value = cap * math::tanh(*value / cap);
    }
}

#[inline(always)]
pub(crate) fn rope_rotate_half(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), &c), &s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = x.mul_add(c, -(y * s));
        *b = y.mul_add(c, x * s);
    }
}
