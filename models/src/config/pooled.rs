//! Attention over pools of positions.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_HEAD_DIM, MAX_WIDTH, ModelConfig};

/// Most tokens of a pool.
const MAX_POOL: u32 = 256;

/// Attention that stores one vector for each position, key and value of all heads, and one for each pool
/// of positions (DeepSeek-V4). [`ModelConfig::head_dim`] is the width of these vectors, whose last
/// [`Rope::dims`](super::Rope::dims) elements are rotated, in adjacent pairs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledAttention {
    /// Elements of the latent vector from which queries are projected.
    pub query_rank: u32,
    /// Groups of heads; each has its own output projection.
    pub groups: u32,
    /// Elements of a group's projected output.
    pub group_rank: u32,
    /// Positions of a pool, by layer; 0 for layers without pools.
    pub pools: Vec<u32>,
    /// Pools of this size overlap: each also covers the positions of the previous one. 0 if none
    /// overlap.
    pub overlapping: u32,
}

/// The same for one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PooledShape {
    /// Elements of the latent vector from which queries are projected.
    pub query_rank: u32,
    /// Groups of heads.
    pub groups: u32,
    /// Elements of a group's projected output.
    pub group_rank: u32,
    /// Positions of a pool; 0 without pools.
    pub pool: u32,
    /// Pools overlap.
    pub overlaps: bool,
}

impl PooledShape {
    /// Pool vectors per position: for its own pool, and for the next if pools overlap.
    pub fn series(self) -> usize {
        match self.pool {
            0 => 0,
            _ => 1 + usize::from(self.overlaps),
        }
    }
}

impl PooledAttention {
    /// The sizes for layer `layer`.
    pub(super) fn of(&self, layer: u32) -> PooledShape {
        let pool = self.pool(layer);
        PooledShape {
            query_rank: self.query_rank,
            groups: self.groups,
            group_rank: self.group_rank,
            pool,
            overlaps: pool != 0 && pool == self.overlapping,
        }
    }

    /// The positions within which an indexer that chooses this many pools chooses all of them; `None` if
    /// there are no pools to choose from.
    pub(crate) fn most_positions(&self, chosen: u32) -> Option<u32> {
        let pool = self.overlapping;
        let most = chosen
            .saturating_mul(pool)
            .saturating_add(pool.saturating_sub(1));
        (pool > 0).then_some(most)
    }

    /// The first invalid or unsupported field.
    pub(super) fn bad(&self, config: &ModelConfig) -> Option<BadField> {
        let (pooled, form) = (self, &config.form);
        for (key, value, most) in [
            ("rank of queries", pooled.query_rank, MAX_WIDTH),
            ("groups of heads", pooled.groups, config.heads),
            ("rank of a group's output", pooled.group_rank, MAX_HEAD_DIM),
        ] {
            if !(1..=most).contains(&value) {
                return BadField::some(key, &value, format!("1 to {most}"));
            }
        }
        if !config.heads.is_multiple_of(pooled.groups) {
            let expected = format!("a divisor of heads = {}", config.heads);
            return BadField::some("groups of heads", &pooled.groups, expected);
        }
        if config.kv_heads != 1 {
            return BadField::some("kv_heads", &config.kv_heads, "1");
        }
        if config.heads > MAX_WIDTH / config.head_dim {
            let expected = format!("at most {MAX_WIDTH} for all heads");
            return BadField::some("head_dim", &config.head_dim, expected);
        }
        let known = pooled.sizes().map(|(size, _)| size);
        let sound = |&pool: &u32| pool <= MAX_POOL && (pool == 0 || known.contains(&pool));
        if pooled.pools.len() != config.layers as usize || !pooled.pools.iter().all(sound) {
            let expected = format!(
                "one for each of {} layers, of two sizes at most, up to {MAX_POOL}",
                config.layers
            );
            return BadField::some("positions of pools", &pooled.pools, expected);
        }
        if !(0..config.layers).all(|layer| config.windowed(layer)) || form.chunked {
            return BadField::some("window", &config.window, "above 0, in layers with pools");
        }
        let biases = config.qkv_bias || config.o_bias || config.clip_qkv.is_some();
        let norms = config.qk_norm || form.value_norm || form.plain_qk_norm;
        let others = form.latent.is_some()
            || form.short_conv.is_some()
            || form.delta_net.is_some()
            || form.kda.is_some()
            || form.mamba.is_some()
            || form.global_heads.is_some();
        let more = form.attention_cap.is_some()
            || form.output_gate
            || form.shared_kv > 0
            || form.query_scale.is_some()
            || !form.nope_layers.is_empty();
        if biases || norms || others || more || !form.sinks {
            let expected = "absent, as attention has what it is not implemented with";
            return BadField::some("pooled", pooled, expected);
        }
        None
    }

    fn pool(&self, layer: u32) -> u32 {
        self.pools.get(layer as usize).copied().unwrap_or(0)
    }

    /// The pool sizes of the layers, ascending, and the number of layers of each; 0 if there are fewer
    /// than two sizes.
    pub fn sizes(&self) -> [(u32, usize); 2] {
        let mut found = [(0, 0); 2];
        let least = self.pools.iter().copied().filter(|&pool| pool != 0).min();
        let most = self.pools.iter().copied().max();
        let count = |size| self.pools.iter().filter(|&&pool| pool == size).count();
        if let Some(least) = least {
            found[0] = (least, count(least));
        }
        if let (Some(least), Some(most)) = (least, most)
            && most != least
        {
            found[1] = (most, count(most));
        }
        found
    }

    /// Indices of layer `layer`'s pools: of their size among the sizes, and of the layer among those
    /// with this size. `None` without pools.
    pub fn place(&self, layer: u32) -> Option<(usize, usize)> {
        let pool = self.pool(layer);
        let size = (self.sizes().iter()).position(|&(size, _)| pool != 0 && size == pool)?;
        let before = &self.pools[..layer as usize];
        Some((size, before.iter().filter(|&&other| other == pool).count()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_have_places_among_those_with_pools_of_their_size() {
        let pooled = PooledAttention {
            query_rank: 1,
            groups: 1,
            group_rank: 1,
            pools: vec![128, 4, 0, 128, 4, 4],
            overlapping: 4,
        };
        assert_eq!(pooled.sizes(), [(4, 3), (128, 2)]);
        let places: Vec<_> = (0..6).map(|layer| pooled.place(layer)).collect();
        let expected = [
            Some((1, 0)),
            Some((0, 0)),
            None,
            Some((1, 1)),
            Some((0, 1)),
            Some((0, 2)),
        ];
        assert_eq!(places, expected);
        assert_eq!([0, 1, 2].map(|layer| pooled.of(layer).series()), [1, 2, 0]);
        assert_eq!(pooled.most_positions(512), Some(2051));
        let apart = PooledAttention {
            overlapping: 0,
            ..pooled
        };
        assert_eq!(apart.most_positions(512), None);
    }
}
