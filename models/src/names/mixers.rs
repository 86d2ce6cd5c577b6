//! Tensors of mixers and of hyper-connections.

use crate::config::{
    HyperConnections, KdaShape, LatentShape, Mamba1Shape, MambaShape, Mixing, ModelConfig,
    PooledShape,
};
use crate::role::Role;

/// A tensor of a layer, with its rows and columns.
pub(super) type Sized = (Role, usize, usize);

/// The tensors of hyper-connections before mixers, FFNs and the head; the head's have no share.
pub(super) fn hyper_roles(hyper: HyperConnections, d_model: u32) -> [Vec<Sized>; 3] {
    use Role::*;
    let (count, width) = (hyper.count as usize, hyper.width(d_model));
    match hyper.mixing {
        Mixing::Gated { rank } => {
            let rank = rank as usize;
            let of = |norm, down, up, inject: Option<Role>| {
                let all = [(norm, 1, width), (down, rank, width), (up, width, rank)];
                let inject = inject.map(|role| (role, count, width));
                all.into_iter().chain(inject).collect()
            };
            [
                of(
                    HyperMixerNorm,
                    HyperMixerDown,
                    HyperMixerUp,
                    Some(HyperMixerInject),
                ),
                of(HyperFfnNorm, HyperFfnDown, HyperFfnUp, Some(HyperFfnInject)),
                of(HyperHeadNorm, HyperHeadDown, HyperHeadUp, None),
            ]
        }
        Mixing::Sinkhorn { .. } => {
            let of = |mix, base, scale, rows, scales| {
                vec![(mix, rows, width), (base, 1, rows), (scale, 1, scales)]
            };
            let rows = (2 + count) * count;
            [
                of(HyperMixerMix, HyperMixerBase, HyperMixerScale, rows, 3),
                of(HyperFfnMix, HyperFfnBase, HyperFfnScale, rows, 3),
                of(HyperHeadMix, HyperHeadBase, HyperHeadScale, count, 1),
            ]
        }
    }
}

/// The tensors of Kimi Delta Attention over `d` elements.
pub(super) fn of_kda(kda: KdaShape, d: usize) -> Vec<Sized> {
    let [heads, dim, taps] = [kda.heads, kda.dim, kda.taps].map(|n| n as usize);
    let values = kda.values();
    let mut all = vec![
        (Role::Q, values, d),
        (Role::K, values, d),
        (Role::V, values, d),
        (Role::DeltaConvQ, values, taps),
        (Role::DeltaConvK, values, taps),
        (Role::DeltaConvV, values, taps),
        (Role::DeltaBeta, heads, d),
    ];
    if kda.direct {
        all.push((Role::DeltaDecays, values, d));
    } else {
        all.extend([
            (Role::DeltaDecayIn, dim, d),
            (Role::DeltaDecay, values, dim),
        ]);
    }
    all.extend([(Role::DeltaStep, 1, values), (Role::DeltaRate, 1, heads)]);
    if kda.direct {
        all.push((Role::QGate, values, d));
    } else {
        all.extend([(Role::DeltaGateIn, dim, d), (Role::DeltaGate, values, dim)]);
    }
    all.extend([(Role::DeltaNorm, 1, dim), (Role::O, d, values)]);
    all
}

/// The tensors of Mamba-2 over `d` elements.
pub(super) fn of_mamba(mamba: MambaShape, d: usize) -> Vec<Sized> {
    let [heads, taps] = [mamba.heads, mamba.taps].map(|n| n as usize);
    let mut all = vec![
        (Role::MambaIn, mamba.inputs(), d),
        (Role::MambaConv, mamba.channels(), taps),
        (Role::MambaConvBias, 1, mamba.channels()),
        (Role::MambaStep, 1, heads),
        (Role::MambaRate, 1, heads),
        (Role::MambaSkip, 1, heads),
    ];
    all.extend((!mamba.unnormed).then_some((Role::MambaNorm, 1, mamba.values())));
    all.push((Role::MambaOut, d, mamba.values()));
    all
}

/// The tensors of Mamba-1 over `d` elements.
pub(super) fn of_mamba1(mamba: Mamba1Shape, d: usize) -> Vec<Sized> {
    let [channels, taps, state, rank] =
        [mamba.channels, mamba.taps, mamba.state_dim, mamba.rank].map(|n| n as usize);
    vec![
        (Role::MambaIn, 2 * channels, d),
        (Role::MambaConv, channels, taps),
        (Role::MambaConvBias, 1, channels),
        (Role::MambaMix, mamba.mixed(), channels),
        (Role::MambaStepNorm, 1, rank),
        (Role::MambaWriteNorm, 1, state),
        (Role::MambaReadNorm, 1, state),
        (Role::MambaSteps, channels, rank),
        (Role::MambaStep, 1, channels),
        (Role::MambaRates, channels, state),
        (Role::MambaSkip, 1, channels),
        (Role::MambaOut, d, channels),
    ]
}

/// The tensors of a layer's latent attention.
pub(super) fn of_latent(config: &ModelConfig, latent: LatentShape) -> Vec<Sized> {
    let [d, heads, query, rotated, rank, value] = [
        config.d_model,
        config.heads,
        config.head_dim,
        config.rope.dims,
        latent.rank,
        latent.value_dim,
    ]
    .map(|n| n as usize);
    let input = latent.query_rank.map_or(d, |rank| rank as usize);
    let mut all = Vec::new();
    if latent.query_rank.is_some() {
        all.extend([(Role::LatentQ, input, d), (Role::LatentQNorm, 1, input)]);
    }
    if latent.gated {
        all.push((Role::QGate, heads, d));
    }
    all.extend([
        (Role::Q, heads * query, input),
        (Role::LatentKv, rank + rotated, d),
        (Role::LatentKvNorm, 1, rank),
        (Role::LatentKeys, heads * rank, query - rotated),
        (Role::LatentValues, heads * value, rank),
        (Role::O, d, heads * value),
    ]);
    all
}

/// The tensors of a layer's pooled attention.
pub(super) fn of_pooled(config: &ModelConfig, pooled: PooledShape) -> Vec<Sized> {
    let [d, hd, heads] = [config.d_model, config.head_dim, config.heads].map(|n| n as usize);
    let [rank, groups, low, pool] = [
        pooled.query_rank,
        pooled.groups,
        pooled.group_rank,
        pooled.pool,
    ]
    .map(|n| n as usize);
    let mut all = vec![
        (Role::LatentQ, rank, d),
        (Role::LatentQNorm, 1, rank),
        (Role::Q, heads * hd, rank),
        (Role::LatentKv, hd, d),
        (Role::LatentKvNorm, 1, hd),
        (Role::Sinks, 1, heads),
        (Role::PooledOut, groups * low, heads * hd / groups),
        (Role::O, d, groups * low),
    ];
    if pool > 0 {
        let width = pooled.series() * hd;
        all.extend([
            (Role::PoolKv, width, d),
            (Role::PoolGate, width, d),
            (Role::PoolBias, pool, width),
            (Role::PoolNorm, 1, hd),
        ]);
    }
    all
}
