//! Run-time limits of the storage layer, each with its reason. Nothing grows beyond these after
//! start. Tests use [`Limits::TINY`], so that full queues and wrap-around happen in every run.

/// Limits of the I/O thread and its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Queue depth: commands in flight on the device. Random reads of 8 KiB from a virtual disk:
    /// 359, 441, 500 and 455 MB/s at 32, 64, 128 and 256; UFS saturates far earlier.
    pub depth: u32,
    /// Queue depth from which no prefetch starts, because an urgent read queues behind everything
    /// in flight. At 64, 40 and 24 instead of 128, a synthetic 7B model with 4 % misses waits 4 to
    /// 7 ms per token instead of 7 to 10. One with 7 % misses is disk-bound: as fast at 64, and a
    /// tenth slower below.
    pub ahead: u32,
    /// Bytes in flight from which no further command starts. A device serves concurrent long reads at
    /// the same time, so that all of them end late, and a caller that waits for the first waits for
    /// all. A few are enough: a virtual disk reads 448 KiB at random at 72, 88, 93, 97 and 94 % of its
    /// highest rate with 1, 2, 3, 4 and 6 in flight. Short reads never reach this limit.
    pub bytes: u64,
    /// Threads of the `pread` device. Each runs one command, so this is its queue depth; as many
    /// again are queued, so that threads do not sleep between reads. UFS has a single command queue
    /// that two submitters fill and more slow down; disks with several queues need many.
    pub lanes: u32,
    /// Batches that may wait in the request channel before `submit` blocks. A layer submits up to
    /// ten small ones; a channel for several layers keeps the computation going while the I/O thread waits
    /// for a core.
    pub batches: usize,
    /// Reads the I/O thread accepts beyond those in flight. At the limit it stops taking batches,
    /// so memory stays bounded and the submitter blocks.
    pub queued: usize,
    /// Bytes of one device command; longer reads are split. Flash reaches full throughput at 256
    /// KiB to 512 KiB, and splitting lets one large read use the device's parallelism.
    pub block: u32,
    /// Memory pieces of one command, which limits how many reads merge. 16 neighbours of 4 KiB make
    /// 64 KiB, where bandwidth is the bottleneck instead of the command rate; with a gap after each
    /// they need twice as many pieces.
    pub pieces: usize,
    /// Unwanted bytes between two reads that may be read to save a command. On NVMe and UFS a 4 KiB
    /// command costs more than transferring 4 KiB: measured 10 % to 15 % less time per read with 30
    /// % to 50 % of 4 KiB units wanted, and no loss at 10 %.
    pub gap: u32,
    /// Consecutive interrupted attempts (EINTR, EAGAIN) of one command before it fails.
    pub retries: u32,
}

impl Limits {
    /// The values used outside tests.
    pub const PRODUCTION: Self = Self {
        depth: 128,
        ahead: 64,
        bytes: 3 << 19,
        lanes: if cfg!(target_os = "android") { 2 } else { 16 },
        batches: 64,
        queued: 4096,
        block: 512 << 10,
        pieces: 32,
        gap: 4096,
        retries: 100,
    };

    /// Small enough to reach every limit within a few operations.
    pub const TINY: Self = Self {
        depth: 3,
        ahead: 2,
        bytes: 12 << 10,
        lanes: 2,
        batches: 1,
        queued: 4,
        block: 8 << 10,
        pieces: 3,
        gap: 0,
        retries: 3,
    };
}

const _: () = {
    let (p, t) = (Limits::PRODUCTION, Limits::TINY);
    // A command needs at least one piece, and the queue must be able to fill the device.
    assert!(p.pieces >= 1 && t.pieces >= 1);
    assert!(p.queued >= p.depth as usize && t.queued >= t.depth as usize);
    assert!(p.lanes <= p.depth && t.lanes <= t.depth);
    // Splits must respect every direct-I/O alignment in use.
    assert!(p.block.is_multiple_of(4096) && t.block.is_multiple_of(4096));
};

impl Default for Limits {
    fn default() -> Self {
        Self::PRODUCTION
    }
}
