//! Tensors of hyper-connections.

use crate::config::{HyperConnections, Mixing};
use crate::mixers::RoleShape;
use crate::role::Role;

/// The tensors of hyper-connections before mixers, FFNs and the head; the head's have no share.
pub(super) fn hyper_roles(hyper: HyperConnections, d_model: u32) -> [Vec<RoleShape>; 3] {
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
