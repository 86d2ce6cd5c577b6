//! Matrices that are read for every pass, because the budget has no room for them.
//!
//! ```text
//! tiles in order of use    … Q │ K │ V │ O │ Q │ K │ …            layer by layer, pass after pass
//! slots                    [ multiplied │ read ahead ··········· ]
//! ```
//!
//! Read-ahead assumes that each matrix is followed by the one that followed it last time. If another one is needed, the tiles
//! read ahead are discarded. Whole rows are multiplied, so results do not depend on how a matrix is cut.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::container::StripeChecksums;
use emberflow_storage::io::{
    Completion, FileSource, IoChoice, IoError, IoOptions, IoStats, IoThread, Read,
};
use emberflow_storage::limits::Limits;

use super::cut::{FileRange, TiledMatrix};
use crate::error::Error;

/// Slots: 8 MiB of the largest tiles, which storage at 3 GB/s reads in 3 ms, longer than a layer's other work.
const SLOTS: u32 = 16;

/// Limits of the thread that reads: no more reads than slots.
const LIMITS: Limits = Limits {
    depth: 2 * SLOTS,
    lanes: if cfg!(target_os = "android") { 2 } else { 4 },
    batches: SLOTS as usize,
    queued: 2 * SLOTS as usize,
    ..Limits::PRODUCTION
};

/// A file, and how to read it.
pub(crate) struct StreamFile<'a> {
    pub source: FileSource,
    pub io: IoChoice,
    /// Core of the thread that reads.
    pub core: Option<usize>,
    /// The aligned range that is read for one.
    pub cover: &'a dyn Fn(FileRange) -> FileRange,
    /// (Length, alignment) of a slot for a number of bytes at any offset.
    pub slot: &'a dyn Fn(usize) -> (usize, usize),
    pub memory: ArenaOptions,
    /// Of the container at `path`.
    pub checksums: StripeChecksums,
    pub path: PathBuf,
}

/// An aligned read that covers a tile, which begins `shift` bytes after it.
#[derive(Debug, Clone, Copy)]
struct Cover {
    offset: u64,
    len: u32,
    shift: u32,
}

/// A tile of one of the matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TileOf {
    matrix: u32,
    tile: u32,
}

/// A tile that is read ahead.
#[derive(Debug)]
struct Ahead {
    of: TileOf,
    tag: u64,
    /// Once it has arrived.
    slot: Option<Slot>,
}

/// Reads matrices in the order in which they are multiplied.
#[derive(Debug)]
pub(crate) struct MatrixStream {
    matrices: Vec<TiledMatrix>,
    /// Their numbers.
    names: BTreeMap<String, u32>,
    /// An offset in each of their files.
    files: Vec<u64>,
    window: Mutex<Window>,
    checksums: StripeChecksums,
    path: PathBuf,
}

/// What is in memory.
struct Window {
    io: IoThread,
    /// The reads of all tiles, matrix after matrix.
    covers: Vec<Cover>,
    /// In order of use.
    ahead: VecDeque<Ahead>,
    /// The tile to be read next.
    next: TileOf,
    /// The matrix that followed each one last time, and the one that is multiplied.
    after: Vec<u32>,
    current: u32,
    free: Vec<Slot>,
    tag: u64,
    /// For reuse.
    batch: Vec<Read>,
    done: Vec<Completion>,
    failed: Option<Error>,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("next", &self.next).finish()
    }
}

impl MatrixStream {
    /// Reads these matrices, whose tiles are numbered, in the order in which they are multiplied.
    ///
    /// # Errors
    /// No memory, or no thread to read with.
    pub fn open(
        matrices: Vec<(String, TiledMatrix)>,
        file: StreamFile<'_>,
    ) -> Result<Arc<Self>, Error> {
        let (slot_len, align) = (file.slot)(longest(&matrices));
        let (names, matrices): (Vec<_>, Vec<_>) = matrices.into_iter().unzip();
        let mut arena = Arena::new(SLOTS, slot_len, align, file.memory)
            .map_err(emberflow_storage::Error::from)?;
        let options = IoOptions {
            core: file.core,
            limits: LIMITS,
            ..IoOptions::default()
        };
        let tiles = |&of: &TiledMatrix| (0..of.tiles()).map(move |tile| of.place_of(tile));
        let covers = matrices.iter().flat_map(tiles).map(|place| {
            let FileRange { offset, len } = (file.cover)(place);
            Cover {
                offset,
                len: len as u32,
                shift: (place.offset - offset) as u32,
            }
        });
        let window = Window {
            covers: covers.collect(),
            io: IoThread::spawn(file.source, file.io, options).map_err(error)?,
            ahead: VecDeque::with_capacity(SLOTS as usize),
            next: TileOf { matrix: 0, tile: 0 },
            after: (1..matrices.len() as u32).chain([0]).collect(),
            current: 0,
            free: std::iter::from_fn(|| arena.take()).collect(),
            tag: 0,
            batch: Vec::with_capacity(SLOTS as usize),
            done: Vec::with_capacity(SLOTS as usize),
            failed: None,
        };
        let mut files: Vec<u64> = matrices.iter().map(|of| of.place_of(0).offset).collect();
        files.sort_unstable();
        files.dedup_by_key(|offset| FileSource::place_of(*offset).0);
        Ok(Arc::new(Self {
            matrices,
            files,
            names: names.into_iter().zip(0..).collect(),
            window: Mutex::new(window),
            checksums: file.checksums,
            path: file.path,
        }))
    }

    /// Bytes that [`MatrixStream::open`] allocates. `slot`: see [`StreamFile::slot`].
    pub fn bytes_for(
        matrices: &[(String, TiledMatrix)],
        slot: impl Fn(usize) -> (usize, usize),
    ) -> u64 {
        let (slot_len, _) = slot(longest(matrices));
        let tiles: u64 = matrices.iter().map(|(_, of)| u64::from(of.tiles())).sum();
        Arena::charge(SLOTS, slot_len)
            + IoThread::overhead(LIMITS)
            + tiles * size_of::<Cover>() as u64
            + (matrices.len() * size_of::<(TiledMatrix, String, [u64; 8])>()) as u64
    }

    /// The rows of the matrix of that name, if it is one of these.
    pub(super) fn rows(self: &Arc<Self>, name: &str) -> Option<StreamedRows> {
        Some(StreamedRows {
            stream: Arc::clone(self),
            number: *self.names.get(name)?,
        })
    }

    /// An offset in each of their files.
    pub fn files(&self) -> &[u64] {
        &self.files
    }

    /// Takes the first error.
    ///
    /// # Errors
    /// A failed read. Products after it are arbitrary.
    pub fn check(&self) -> Result<(), Error> {
        let mut window = self.lock();
        match window.failed.take() {
            None => Ok(()),
            Some(error) => {
                let first = error.to_string();
                window.failed = Some(Error::Failed { first });
                Err(error)
            }
        }
    }

    /// Counts of its reads.
    pub fn stats(&self) -> IoStats {
        self.lock().io.stats()
    }

    /// Checks a tile of a matrix.
    fn check_tile(&self, of: TileOf, bytes: &[u8]) -> Result<(), Error> {
        let matrix = &self.matrices[of.matrix as usize];
        let Some((stripes, first)) = matrix.stripes_of(of.tile) else {
            return Ok(());
        };
        let checked = self.checksums.check(stripes, first, bytes);
        checked.map_err(|damaged| {
            let name = self.names.iter().find(|(_, n)| **n == of.matrix);
            let name = name.map_or("", |(name, _)| name);
            let begin = matrix.place_of(0).offset;
            damaged.of(&self.path, name, begin).into()
        })
    }

    fn lock(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Window {
    /// Waits for a tile.
    fn take(&mut self, of: TileOf, matrices: &[TiledMatrix]) -> Result<Slot, Error> {
        if of.matrix != self.current {
            self.after[self.current as usize] = of.matrix;
            self.current = of.matrix;
        }
        match self.ahead.iter().position(|ahead| ahead.of == of) {
            Some(at) => self.drop_ahead(at),
            None => {
                self.drop_ahead(self.ahead.len());
                self.next = of;
            }
        }
        self.fill(matrices)?;
        loop {
            if let Some(slot) = self.ahead.front_mut().and_then(|first| first.slot.take()) {
                self.ahead.pop_front();
                return Ok(slot);
            }
            self.arrive()?;
            self.fill(matrices)?;
        }
    }

    /// Forgets the first tiles that are read ahead.
    fn drop_ahead(&mut self, count: usize) {
        let slots = self.ahead.drain(..count).filter_map(|ahead| ahead.slot);
        self.free.extend(slots);
    }

    /// Reads ahead while slots are free.
    fn fill(&mut self, matrices: &[TiledMatrix]) -> Result<(), Error> {
        while let Some(slot) = self.free.pop() {
            let of = self.next;
            let matrix = &matrices[of.matrix as usize];
            let Cover { offset, len, .. } = self.covers[(matrix.first + of.tile) as usize];
            self.tag += 1;
            self.batch.push(Read::new(self.tag, offset, len, slot));
            self.ahead.push_back(Ahead {
                of,
                tag: self.tag,
                slot: None,
            });
            self.next = match of.tile + 1 < matrix.tiles() {
                true => TileOf {
                    tile: of.tile + 1,
                    ..of
                },
                false => TileOf {
                    matrix: self.after[of.matrix as usize],
                    tile: 0,
                },
            };
        }
        self.io.submit(&mut self.batch).map_err(error)
    }

    /// Waits until a read is complete.
    fn arrive(&mut self) -> Result<(), Error> {
        self.io.wait(&mut self.done, 1).map_err(error)?;
        let mut outcome = Ok(());
        for Completion { tag, slot, result } in self.done.drain(..) {
            outcome = outcome.and(result);
            match self.ahead.iter_mut().find(|ahead| ahead.tag == tag) {
                Some(ahead) => ahead.slot = Some(slot),
                // It was dropped.
                None => self.free.push(slot),
            }
        }
        outcome.map_err(error)
    }
}

/// The rows of one of the matrices of a stream.
#[derive(Debug, Clone)]
pub(super) struct StreamedRows {
    stream: Arc<MatrixStream>,
    number: u32,
}

impl StreamedRows {
    /// Their matrix.
    pub fn of(&self) -> TiledMatrix {
        self.stream.matrices[self.number as usize]
    }

    /// Calls `multiply` with all rows, tile by tile; after a failed read or a damaged tile, not with all of them ([`MatrixStream::check`]).
    pub fn each(&self, multiply: &mut dyn FnMut(Range<usize>, &[u8])) {
        let (all, matrix) = (&self.stream.matrices, self.number);
        let of = &all[matrix as usize];
        for tile in 0..of.tiles() {
            let taken = {
                let mut window = self.stream.lock();
                if window.failed.is_some() {
                    return;
                }
                match window.take(TileOf { matrix, tile }, all) {
                    Ok(slot) => (slot, window.covers[(of.first + tile) as usize].shift),
                    Err(error) => {
                        window.failed = Some(error);
                        return;
                    }
                }
            };
            let (slot, shift) = taken;
            let bytes = &slot.as_slice()[shift as usize..][..of.place_of(tile).len];
            let checked = self.stream.check_tile(TileOf { matrix, tile }, bytes);
            if checked.is_ok() {
                multiply(of.rows_of(tile), bytes);
            }
            let mut window = self.stream.lock();
            window.free.push(slot);
            if let Err(error) = checked.and(window.fill(all)) {
                window.failed.get_or_insert(error);
            }
        }
    }
}

/// Bytes of the longest tile.
fn longest(matrices: &[(String, TiledMatrix)]) -> usize {
    let lens = matrices.iter().map(|(_, of)| of.place_of(0).len);
    lens.max().unwrap_or(0)
}

fn error(e: IoError) -> Error {
    emberflow_storage::Error::from(e).into()
}
