//! The 64-bit tag of a read, returned with its completion.
//!
//! ```text
//! bits  63..61 kind   60 half   59..32 item, bank or table   31..0 place, cluster, neuron, row or tile
//! ```

/// The purpose of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tag {
    /// A neuron of the current layer: its place, and its cluster's item.
    Neuron { item: u32, place: u32, half: Half },
    /// A whole cluster of a bank.
    Cluster { bank: u32, cluster: u32 },
    /// A prefetched neuron of a later layer.
    Ahead { bank: u32, neuron: u32 },
    /// A row of a table.
    Row { table: u32, row: u32 },
    /// A tile of a bank.
    Tile { bank: u32, tile: u32 },
}

/// Whether one read covers a neuron, or is the first of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Whole,
    First,
}

/// Largest value of the field above bit 32.
const HIGH: u32 = (1 << 28) - 1;
const HALF: u64 = 1 << 60;

impl Tag {
    /// Encodes a tag. Items and banks stay far below 2^28 in every container with a
    /// 32-bit neuron count.
    pub fn bits(self) -> u64 {
        let (kind, high, low, half) = match self {
            Self::Neuron { item, place, half } => (0, item, place, half == Half::First),
            Self::Cluster { bank, cluster } => (1, bank, cluster, false),
            Self::Ahead { bank, neuron } => (2, bank, neuron, false),
            Self::Row { table, row } => (3, table, row, false),
            Self::Tile { bank, tile } => (4, bank, tile, false),
        };
        debug_assert!(high <= HIGH);
        kind << 61 | if half { HALF } else { 0 } | u64::from(high & HIGH) << 32 | u64::from(low)
    }

    /// Decodes a tag.
    pub fn from_bits(bits: u64) -> Self {
        let (high, low) = ((bits >> 32) as u32 & HIGH, bits as u32);
        match bits >> 61 {
            0 => Self::Neuron {
                item: high,
                place: low,
                half: if bits & HALF == 0 {
                    Half::Whole
                } else {
                    Half::First
                },
            },
            1 => Self::Cluster {
                bank: high,
                cluster: low,
            },
            2 => Self::Ahead {
                bank: high,
                neuron: low,
            },
            3 => Self::Row {
                table: high,
                row: low,
            },
            _ => Self::Tile {
                bank: high,
                tile: low,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_round_trip() {
        for (high, low) in [(0, 0), (1, u32::MAX), (HIGH, 7), (12345, 1 << 31)] {
            for tag in [
                Tag::Neuron {
                    item: high,
                    place: low,
                    half: Half::Whole,
                },
                Tag::Neuron {
                    item: high,
                    place: low,
                    half: Half::First,
                },
                Tag::Cluster {
                    bank: high,
                    cluster: low,
                },
                Tag::Ahead {
                    bank: high,
                    neuron: low,
                },
                Tag::Row {
                    table: high,
                    row: low,
                },
                Tag::Tile {
                    bank: high,
                    tile: low,
                },
            ] {
                assert_eq!(Tag::from_bits(tag.bits()), tag);
            }
        }
    }
}
