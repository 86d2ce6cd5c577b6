//! The matrices that can be read for every pass: projections and the output head of a model without neurons in bundles.

use std::sync::Arc;

use emberflow_models::config::ModelConfig;
use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::io::IoChoice;

use super::weights::head_role;
use crate::error::Error;
use crate::loader::name_of;
use crate::matrix::{FileRange, MatrixStream, StreamFile, TiledMatrix};
use crate::mixer::needs;
use crate::store::Layout;

/// These matrices, layer by layer as the mixers declare them, then the head.
pub(crate) struct Streamed(Vec<(String, TiledMatrix)>);

impl Streamed {
    /// Those of a model, in tiles of at most `largest` bytes. Matrices that are converted or reordered when they are loaded are
    /// not among them.
    pub fn of(layout: &Layout, c: &ModelConfig, largest: usize) -> Self {
        let container = &layout.container;
        let projections = (0..c.layers).flat_map(|layer| {
            let specs = needs(c, layer).matrices.into_iter();
            let whole = specs.filter(|spec| !spec.is_in_blocks());
            whole.map(move |spec| name_of(spec.role, layer))
        });
        let names = projections.chain([name_of(head_role(c), 0)]);
        // A tile may begin and end within a sector.
        let (slack, _) = layout.piece(0);
        let (largest, mut first) = (largest.saturating_sub(slack), 0);
        let found = names.filter_map(|name| {
            let of = TiledMatrix::of(container, container.tensor(&name)?)?;
            let of = of.cut(largest, first);
            first += of.tiles();
            Some((name, of))
        });
        Self(found.collect())
    }

    /// Whether the output head is among them.
    pub fn has_head(&self, c: &ModelConfig) -> bool {
        let head = name_of(head_role(c), 0);
        self.0.iter().any(|(name, _)| *name == head)
    }

    /// Bytes that a pass reads.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, of)| of.bytes()).sum()
    }

    /// Bytes that they take in memory.
    pub fn resident(&self) -> u64 {
        let of = |(_, of): &(_, TiledMatrix)| Arena::charge(1, of.bytes() as usize);
        self.0.iter().map(of).sum()
    }

    /// Bytes that [`Streamed::open`] allocates.
    pub fn bytes_for(&self, layout: &Layout) -> u64 {
        MatrixStream::bytes_for(&self.0, |len| layout.piece(len))
    }

    /// Reads them.
    ///
    /// # Errors
    /// No memory, or no thread to read with.
    pub fn open(
        self,
        layout: &Layout,
        io: IoChoice,
        core: Option<usize>,
        memory: ArenaOptions,
    ) -> Result<Arc<MatrixStream>, Error> {
        let container = &layout.container;
        let cover = |place: FileRange| {
            let cover = layout.cover_of(place.offset, place.len);
            FileRange {
                offset: cover.offset,
                len: cover.len as usize,
            }
        };
        let file = StreamFile {
            source: layout.source()?,
            io,
            core,
            cover: &cover,
            slot: &|len| layout.piece(len),
            memory,
            checksums: container.stripe_checksums(),
            path: container.path().to_path_buf(),
        };
        MatrixStream::open(self.0, file)
    }
}
