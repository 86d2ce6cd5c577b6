//! Keys of mixers other than plain attention.

use serde_json::{Value, json};

use super::expert_keys;
use crate::config::{MambaShape, MixerKind, ModelConfig, RopeScaling, yarn_attention};
use crate::hf::mamba1::ATTENTION;

/// The kind of each layer: `own` for those of the list, `others` for the rest.
fn kinds(c: &ModelConfig, with: Option<&Vec<u32>>, [own, others]: [&str; 2]) -> Value {
    let kind = |layer| {
        if with.is_some_and(|with| with.contains(&layer)) {
            own
        } else {
            others
        }
    };
    (0..c.layers).map(kind).collect()
}

/// Names of layers with a recurrent mixer and of those with attention.
const LINEAR: [&str; 2] = ["linear_attention", "full_attention"];

/// Gated DeltaNets.
pub(super) fn delta_nets(c: &ModelConfig, config: &mut Value) {
    let nets = c.form.delta_net.as_ref();
    config["layer_types"] = kinds(c, nets.map(|nets| &nets.layers), LINEAR);
    let Some(shape) = nets.map(|nets| nets.shape) else {
        return;
    };
    config["linear_conv_kernel_dim"] = json!(shape.taps);
    config["linear_num_key_heads"] = json!(shape.key_heads);
    config["linear_num_value_heads"] = json!(shape.value_heads);
    config["linear_key_head_dim"] = json!(shape.key_dim);
    config["linear_value_head_dim"] = json!(shape.value_dim);
    let gate = if shape.sigmoid_gate {
        "sigmoid"
    } else {
        "silu"
    };
    config["output_gate_type"] = json!(gate);
}

/// The DeltaNets of OLMo Hybrid, and whether attention has rotary positions.
pub(super) fn olmo_hybrid(c: &ModelConfig, config: &mut Value) {
    delta_nets(c, config);
    let signed = c
        .form
        .delta_net
        .as_ref()
        .is_none_or(|nets| nets.shape.signed);
    config["linear_allow_neg_eigval"] = json!(signed);
    if !c.form.nope_layers.is_empty() {
        config["rope_theta"] = Value::Null;
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": null});
    }
}

/// Short convolutions.
pub(super) fn short_convs(c: &ModelConfig, config: &mut Value) {
    let convs = c.form.short_conv.as_ref();
    let layers = convs.map(|convs| &convs.layers);
    config["layer_types"] = kinds(c, layers, ["conv", LINEAR[1]]);
    if let Some(convs) = convs {
        config["conv_L_cache"] = json!(convs.taps);
    }
}

/// Latent attention, and the scale of its scores next to the rotary scaling.
pub(super) fn latent(c: &ModelConfig, config: &mut Value) {
    let Some(latent) = c.form.latent else { return };
    config["q_lora_rank"] = json!(latent.query_rank);
    config["kv_lora_rank"] = json!(latent.rank);
    config["v_head_dim"] = json!(latent.value_dim);
    config["qk_rope_head_dim"] = json!(c.rope.dims);
    config["qk_nope_head_dim"] = json!(c.head_dim - c.rope.dims);
    // classes use it as the width of the rotated part
    config["head_dim"] = json!(c.rope.dims);
    if let (RopeScaling::Yarn { factor, .. }, Some(scale)) =
        (&c.rope.scaling, c.form.attention_scale)
    {
        let weight = weight_of(*factor, scale, c.head_dim);
        config["rope_scaling"]["mscale_all_dim"] = json!(weight);
    }
}

/// The weight of YaRN's logarithm that gives scores of heads of `head_dim` elements the factor `scale`,
/// exact if there is one.
fn weight_of(factor: f32, scale: f32, head_dim: u32) -> f32 {
    let root = (head_dim as f32).sqrt();
    let gives = |weight: f32| {
        let one = yarn_attention(factor, weight);
        one * one / root
    };
    let one = (f64::from(scale) * f64::from(root)).sqrt();
    let about = ((one - 1.0) / (0.1 * f64::from(factor).ln())) as f32;
    // as releases write it
    let rounded = (f64::from(about) * 1e4).round() / 1e4;
    let near = (0..512i32).flat_map(|step| [step, -step]);
    let near = near.map(|step| f32::from_bits(about.to_bits().wrapping_add_signed(step)));
    let mut all = std::iter::once(rounded as f32).chain(near);
    all.find(|&weight| gives(weight) == scale).unwrap_or(about)
}

/// Kimi Delta Attention; if its decays are `bounded`, heads have the width of attention's key.
pub(super) fn kda(c: &ModelConfig, bounded: bool, config: &mut Value) {
    let of = c.form.kda.as_ref();
    let layers = of.map(|of| &of.layers);
    config["layer_types"] = kinds(c, layers, LINEAR);
    let Some(shape) = of.map(|of| of.shape) else {
        return;
    };
    if bounded {
        config["head_dim"] = json!(shape.dim);
        config["linear_num_heads"] = json!(shape.heads);
        config["short_conv_kernel_size"] = json!(shape.taps);
        config["kda_safe_gate"] = json!(shape.bound.is_some());
        if let Some(bound) = shape.bound {
            config["kda_lower_bound"] = json!(bound);
        }
        return;
    }
    let is_kda = |layer: &u32| matches!(c.mixer_of(*layer), MixerKind::Kda(_));
    let (with, without): (Vec<u32>, Vec<u32>) = (0..c.layers).partition(is_kda);
    // counts from 1
    let [with, without] = [with, without].map(|of| of.iter().map(|n| n + 1).collect::<Value>());
    config["linear_attn_config"] = json!({
        "kda_layers": with,
        "full_attn_layers": without,
        "num_heads": shape.heads,
        "head_dim": shape.dim,
        "short_conv_kernel_size": shape.taps,
    });
}

/// Mamba-2 in addition to attention, whose layers are listed under `but`. Without layers with Mamba-2 the sizes are
/// values that classes accept.
pub(super) fn mamba(c: &ModelConfig, but: Option<&str>, config: &mut Value) {
    let of = c.form.mamba.as_ref();
    let layers = of.map(|of| &of.layers);
    match but {
        Some(key) => {
            let has = |layer: &u32| !layers.is_some_and(|with| with.contains(layer));
            config[key] = (0..c.layers).filter(has).collect();
        }
        None => config["layer_types"] = kinds(c, layers, ["mamba", "attention"]),
    }
    let Some(shape) = of.map(|of| of.shape) else {
        config["mamba_n_heads"] = json!(1);
        return;
    };
    mamba_sizes(shape, config);
    config["mamba_expand"] = json!(shape.values() / c.d_model as usize);
}

/// Mamba-2 beside attention. The factors of matrices are in the matrices.
pub(super) fn beside(c: &ModelConfig, config: &mut Value) {
    let Some(shape) = c.form.mamba.as_ref().map(|of| of.shape) else {
        return;
    };
    mamba_sizes(shape, config);
    config["mamba_d_ssm"] = json!(shape.values());
    config["mamba_rms_norm"] = json!(!shape.unnormed);
    config["mamba_norm_before_gate"] = json!(false);
}

/// Mamba-1, and the layers with attention.
pub(super) fn mamba1(c: &ModelConfig, config: &mut Value) {
    let of = c.form.mamba1.as_ref();
    let has = |layer: &u32| !of.is_some_and(|of| of.layers.contains(layer));
    let attention: Vec<u32> = (0..c.layers).filter(has).collect();
    expert_keys::periodic(&attention, ATTENTION, c, config);
    let Some(shape) = of.map(|of| of.shape) else {
        return;
    };
    config["mamba_d_conv"] = json!(shape.taps);
    config["mamba_d_state"] = json!(shape.state_dim);
    config["mamba_dt_rank"] = json!(shape.rank);
    config["mamba_expand"] = json!(shape.channels / c.d_model);
}

fn mamba_sizes(shape: MambaShape, config: &mut Value) {
    config["mamba_d_conv"] = json!(shape.taps);
    config["mamba_n_heads"] = json!(shape.heads);
    config["mamba_d_head"] = json!(shape.head_dim);
    config["mamba_n_groups"] = json!(shape.groups);
    config["mamba_d_state"] = json!(shape.state_dim);
}

/// Layers of a single sublayer each, and the sizes of their Mamba-2.
pub(super) fn sublayers(c: &ModelConfig, config: &mut Value) {
    let letter = |layer| match c.mixer_of(layer) {
        MixerKind::Mamba(_) => 'M',
        MixerKind::None if c.mixture_of(layer).is_some() => 'E',
        MixerKind::None => '-',
        _ => '*',
    };
    config["hybrid_override_pattern"] = json!((0..c.layers).map(letter).collect::<String>());
    if let Some(shape) = c.form.mamba.as_ref().map(|of| of.shape) {
        config["conv_kernel"] = json!(shape.taps);
        config["mamba_num_heads"] = json!(shape.heads);
        config["mamba_head_dim"] = json!(shape.head_dim);
        config["n_groups"] = json!(shape.groups);
        config["ssm_state_size"] = json!(shape.state_dim);
    }
}
