//! From device outcomes to completions.

use super::super::Completion;
use super::super::device::Reaped;
use super::super::error::IoError;
use super::{IoEngine, Queued};

impl IoEngine {
    /// Handles the outcome of one command: complete, resume, retry or fail.
    pub(super) fn finish(&mut self, one: Reaped, out: &mut Vec<Completion>) {
        let slip = &mut self.slips[one.id as usize];
        if let Ok(n @ 1..) = u32::try_from(one.result) {
            if slip.advance(n) {
                self.close(one.id, None, out);
            } else {
                self.launch(one.id);
            }
            return;
        }
        if one.result == 0 {
            let (file, offset) = self.source.name_of(slip.start);
            let error = IoError::Eof {
                file,
                offset,
                len: slip.len,
                end: offset + slip.filled,
            };
            self.close(one.id, Some(error), out);
            return;
        }
        let errno = one.result.saturating_neg();
        if matches!(errno, libc::EINTR | libc::EAGAIN) && slip.retries < self.limits.retries {
            slip.retries += 1;
            self.counters.retries += 1;
            return self.launch(one.id);
        }
        // Aligned as the file system asked, and still refused: fall back instead of failing the
        // run.
        if errno == libc::EINVAL && self.source.refuse_direct() {
            tracing::warn!(
                file = %self.source.label(), offset = slip.start, len = slip.len,
                "direct read refused as invalid; reading through the page cache from now on"
            );
            return self.launch(one.id);
        }
        let (file, offset) = self.source.name_of(slip.start);
        let error = IoError::Os {
            file,
            offset,
            len: slip.len,
            errno,
        };
        self.close(one.id, Some(error), out);
    }

    /// Frees a slip and completes its reads. Reads of a failed merged command are requeued alone,
    /// so only the faulty one fails and its error names its own range.
    fn close(&mut self, index: u32, error: Option<IoError>, out: &mut Vec<Completion>) {
        let slip = &mut self.slips[index as usize];
        self.trace.device(slip.start, slip.len, slip.since);
        self.bytes_in_flight -= slip.len;
        let mut owners = std::mem::take(&mut slip.owners);
        self.free_slips.push(index);
        let merged = owners.len() > 1;
        for owner in owners.drain(..) {
            let place = &mut self.active[owner as usize];
            let Some(active) = place else { continue };
            active.parts -= 1;
            if merged && error.is_some() {
                if let Some(active) = place.take() {
                    self.free_active.push(owner);
                    self.counters.retries += 1;
                    self.queue.push(Queued {
                        read: active.read,
                        at: active.at,
                        batch: active.batch,
                        alone: true,
                    });
                }
                continue;
            }
            if let Some(error) = &error {
                active.failed.get_or_insert_with(|| error.clone());
                self.cutting.retain(|cut| cut.active != owner);
            }
            self.settle(owner, out);
        }
        self.slips[index as usize].owners = owners;
        if merged && error.is_some() {
            self.queue
                .sort_unstable_by_key(|q| std::cmp::Reverse(q.order()));
        }
    }

    /// Completes an active read once its last part is done.
    fn settle(&mut self, index: u32, out: &mut Vec<Completion>) {
        let place = &mut self.active[index as usize];
        let being_cut = self.cutting.iter().any(|c| c.active == index);
        if being_cut || place.as_ref().is_none_or(|a| a.parts > 0) {
            return;
        }
        if let Some(active) = place.take() {
            self.free_active.push(index);
            let result = match active.failed {
                Some(error) => Err(error),
                None => {
                    self.counters.reads += 1;
                    self.counters.bytes += u64::from(active.read.len);
                    Ok(())
                }
            };
            out.push(Completion::of(active.read, result));
        }
    }

    /// Fails a read whose splitting ended early. Its parts on the device are still awaited.
    pub(super) fn stop_cutting(&mut self, index: u32, reason: IoError) {
        if let Some(active) = &mut self.active[index as usize] {
            active.failed.get_or_insert(reason);
        }
        let mut out = std::mem::take(&mut self.ready);
        self.settle(index, &mut out);
        self.ready = out;
    }
}
