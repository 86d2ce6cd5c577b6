//! Every bound of the run-time storage part, with its reason. Nothing grows beyond these after
//! start; tests use [`Limits::TINY`] so that full queues and wrap-around happen in every run.

/// Bounds of the I/O thread and its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Commands in flight on the device. Random reads of 8 KiB from a virtual disk: 359, 441, 500 and
    /// 455 MB/s with 32, 64, 128 and 256; UFS saturates far earlier.
    pub depth: u32,
    /// Commands in flight from which on no prefetch is started: what somebody waits for has to pass all
    /// that is in flight. With 64, 40 and 24 instead of 128 a synthetic 7B model that misses 4 % waits for 4 to 7 ms a
    /// token instead of 7 to 10; one that misses 7 % and has the disk as its bound is as fast with 64,
    /// and slower by a tenth with fewer.
    pub ahead: u32,
    /// Threads of the `pread` engine. Each carries one command, so this is its depth; as many
    /// again wait at hand, so that threads do not sleep between reads. UFS has a
    /// single command queue that two submitters fill and more slow down; disks with several
    /// queues want many.
    pub lanes: u32,
    /// Batches that may wait in the request channel before `submit` blocks. A layer makes up to ten
    /// small ones; several layers' worth keep the computation going while the I/O thread waits for
    /// a core.
    pub batches: usize,
    /// Reads the I/O thread accepts beyond those in flight. When it is reached the thread stops
    /// taking batches, so memory stays bounded and the submitter feels it.
    pub queued: usize,
    /// Bytes of one device command; longer reads are cut. Flash is at full speed from 256 KiB to
    /// 512 KiB, and cutting lets one large read use the device's parallelism.
    pub block: u32,
    /// Memory pieces of one command, hence reads that can be merged. 16 neighbours of 4 KiB make
    /// 64 KiB, where bandwidth instead of the command rate limits; with a gap behind each they
    /// need twice as many pieces.
    pub pieces: usize,
    /// Unwanted bytes between two reads that may be read along to save a command. On NVMe and UFS
    /// a 4 KiB command costs more than the transfer of 4 KiB: with 30 % to 50 % of 4 KiB units
    /// wanted, 10 % to 15 % less time per read was measured, and no loss at 10 %.
    pub gap: u32,
    /// Interrupted or refused (EINTR, EAGAIN) attempts of one command in a row before it fails.
    pub retries: u32,
}

impl Limits {
    /// The values used outside tests.
    pub const PRODUCTION: Self = Self {
        depth: 128,
        ahead: 64,
        lanes: if cfg!(target_os = "android") { 2 } else { 16 },
        batches: 64,
        queued: 4096,
        block: 512 << 10,
        pieces: 32,
        gap: 4096,
        retries: 100,
    };

    /// Small enough that every bound is hit within a few operations.
    pub const TINY: Self = Self {
        depth: 3,
        ahead: 2,
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
    // A command must hold at least one piece, and the queue a full device, or the device idles.
    assert!(p.pieces >= 1 && t.pieces >= 1);
    assert!(p.queued >= p.depth as usize && t.queued >= t.depth as usize);
    assert!(p.lanes <= p.depth && t.lanes <= t.depth);
    // Cuts must fall on every direct-I/O alignment in use.
    assert!(p.block.is_multiple_of(4096) && t.block.is_multiple_of(4096));
};

impl Default for Limits {
    fn default() -> Self {
        Self::PRODUCTION
    }
}
