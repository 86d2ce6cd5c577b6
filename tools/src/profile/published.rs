//! Published activation skew.

/// Share of neurons that accounts for 80 % of activations. The first three: PowerInfer, figure 4, per layer.
/// `bamboo`: the independent-activation model with 15 % active neurons in which 99.99 % of neurons are active within
/// 128 tokens (PowerInfer-2, Bamboo-7B).
pub const CURVES: [(&str, f64); 5] = [
    ("opt-30b", 0.26),
    ("llama2-reglu-70b", 0.43),
    ("swiglu", 0.69),
    ("bamboo", 0.67),
    ("flat", 0.80),
];
