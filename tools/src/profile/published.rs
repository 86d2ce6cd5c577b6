//! Published hot/cold curves.

/// PowerInfer, figure 4, per layer (the first three): the share of a layer's neurons that gives 80 % of
/// its activations. `bamboo` is what makes 99.99 % of neurons fire within 128 tokens at 15 % active
/// (PowerInfer-2's Bamboo-7B), for neurons that fire independently.
pub const CURVES: [(&str, f64); 5] = [
    ("opt-30b", 0.26),
    ("llama2-reglu-70b", 0.43),
    ("swiglu", 0.69),
    ("bamboo", 0.67),
    ("flat", 0.80),
];
