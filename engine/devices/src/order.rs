//! How neurons lie in a part of an OpenCL device: matrix by matrix, or cluster by cluster with rows in tiles.

use arrayvec::ArrayVec;
use emberflow_kernels::{DType, Row};
use emberflow_opencl::{TILE_ROWS, Tiles};

use super::{DenseShape, NeuronRows};
use emberflow_engine::lane::CLUSTER;

/// Bytes of a row's scales that lie together in tiles: a scale, or all super-blocks.
pub(super) fn scale_bytes(dtype: DType, d: usize) -> usize {
    match dtype {
        DType::Q4k => dtype.scales_bytes(d),
        _ => 2,
    }
}

/// A part in which rows lie matrix by matrix, each with its scales behind it.
pub(super) struct InRows {
    pub shape: DenseShape,
    /// The first neuron that is uploaded, and how many there are.
    pub first: usize,
    pub all: usize,
}

impl InRows {
    /// Puts neurons into a piece for each matrix.
    pub fn fill(
        &self,
        pieces: &mut Vec<Vec<u8>>,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) {
        pieces.resize_with(self.shape.matrices(), Vec::new);
        pieces.iter_mut().for_each(Vec::clear);
        for neuron in neurons {
            for (piece, row) in pieces.iter_mut().zip(neuron.matrices()) {
                piece.extend_from_slice(row.quants());
                piece.extend_from_slice(row.scales());
            }
        }
    }

    /// Where the piece of a matrix goes.
    pub fn place(&self, matrix: usize) -> usize {
        (matrix * self.all + self.first) * self.shape.dtype.row_bytes(self.shape.d)
    }
}

/// A part in which clusters lie one after the other.
///
/// ```text
/// a cluster   │ Gate in tiles │ Up in tiles │ Down: quants of all rows │ scales of all rows │
/// ```
pub(super) struct InTiles {
    pub shape: DenseShape,
}

impl InTiles {
    /// Has `then` take cluster after cluster, by number.
    pub fn each<E>(
        &self,
        pieces: &mut Vec<Vec<u8>>,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
        mut then: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        pieces.resize_with(1, Vec::new);
        pieces[0].resize(CLUSTER * self.shape.neuron_bytes() as usize, 0);
        let mut neurons = neurons.peekable();
        for i in 0.. {
            if neurons.peek().is_none() {
                break;
            }
            self.cluster(&mut pieces[0], &mut neurons);
            then(i, &pieces[0])?;
        }
        Ok(())
    }

    /// Fills a cluster with the next neurons. Bytes of neurons that are not there stay as they are.
    fn cluster<'a>(&self, to: &mut [u8], neurons: &mut impl Iterator<Item = NeuronRows<'a>>) {
        let DenseShape { dtype, d, .. } = self.shape;
        let (quants, len) = (dtype.quants_bytes(d), CLUSTER * dtype.row_bytes(d));
        let scales = dtype.scales_bytes(d);
        let tiles = Tiles {
            quants,
            scales,
            scale: scale_bytes(dtype, d),
        };
        let (in_tiles, down) = to.split_at_mut((self.shape.matrices() - 1) * len);
        let (down_quants, down_scales) = down.split_at_mut(CLUSTER * quants);
        for tile in 0..CLUSTER / TILE_ROWS {
            let some: ArrayVec<NeuronRows<'a>, TILE_ROWS> =
                neurons.by_ref().take(TILE_ROWS).collect();
            let both = |row: Row<'a>| [row.quants(), row.scales()];
            for (m, matrix) in in_tiles.chunks_exact_mut(len).enumerate() {
                let row = |neuron: &NeuronRows<'a>| neuron.matrices().nth(m).map(both);
                let rows: ArrayVec<[&[u8]; 2], TILE_ROWS> = some.iter().filter_map(row).collect();
                tiles.fill(&rows, &mut matrix[tile * tiles.len()..][..tiles.len()]);
            }
            for (n, neuron) in (tile * TILE_ROWS..).zip(&some) {
                let [its_quants, its_scales] = both(neuron.down);
                down_quants[n * quants..][..quants].copy_from_slice(its_quants);
                down_scales[n * scales..][..scales].copy_from_slice(its_scales);
            }
        }
    }
}
