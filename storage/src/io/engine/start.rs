//! From the queue to the device: splitting, merging, submitting.
#![allow(unsafe_code)]

use super::super::Priority;
use super::super::merge::Merge;
use super::super::sys::Command;
use super::{Active, Cutting, IoEngine, Queued};
use crate::trace::START;

impl IoEngine {
    /// Submits queued reads until the device is full.
    pub(super) fn pump(&mut self) {
        let (start, old) = (self.trace.now(), self.counters.commands);
        self.fill_device();
        if self.counters.commands > old {
            let commands = (self.counters.commands - old) as usize;
            self.trace.io(&START, commands, start);
        }
    }

    fn fill_device(&mut self) {
        while !self.free_slips.is_empty() && self.bytes_in_flight < self.limits.bytes {
            // Continue splitting a read, unless a more urgent one is queued.
            if let Some(cut) = self.cutting.last()
                && self
                    .queue
                    .last()
                    .is_none_or(|q| q.read.priority >= cut.priority)
            {
                self.cut_next();
                continue;
            }
            let full = self.in_flight() >= self.limits.ahead as usize;
            let waits = |q: &Queued| full && q.read.priority == Priority::Prefetch;
            if self.queue.last().is_some_and(waits) {
                return;
            }
            let Some(next) = self.queue.pop() else {
                return;
            };
            if next.read.len > self.limits.block {
                let priority = next.read.priority;
                let active = self.activate(next);
                self.cutting.push(Cutting {
                    active,
                    priority,
                    done: 0,
                });
            } else {
                self.start_whole(next);
            }
        }
    }

    /// Submits the next part of the read being split.
    fn cut_next(&mut self) {
        let Some(cut) = self.cutting.last_mut() else {
            return;
        };
        let index = cut.active;
        let Some(active) = &mut self.active[index as usize] else {
            self.cutting.pop();
            return;
        };
        let len = (active.read.len - cut.done).min(self.limits.block);
        let slot_offset = active.read.slot_offset + cut.done;
        let at = active.at + u64::from(cut.done);
        cut.done += len;
        if cut.done == active.read.len {
            self.cutting.pop();
        }
        active.parts += 1;
        let Some(to) = active.read.slot.range(slot_offset, len) else {
            return; // unreachable: checked when accepted
        };
        let slip = self.open_slip(at);
        let s = &mut self.slips[slip as usize];
        s.add(to, len);
        s.owners.push(index);
        self.bytes_in_flight += u64::from(len);
        self.launch(slip);
    }

    /// Submits a read that fits into one command, merged with adjacent queued reads.
    fn start_whole(&mut self, first: Queued) {
        let slip = self.open_slip(first.at);
        let alone = first.alone;
        self.add_whole(slip, first);
        if !alone {
            while let Some(next) = self.take_neighbour(slip) {
                self.add_whole(slip, next);
            }
        }
        self.bytes_in_flight += self.slips[slip as usize].len;
        self.launch(slip);
    }

    /// The next queued read, if it starts at or shortly after the end of the slip and fits into it.
    /// The bytes of the gap go to the sink.
    fn take_neighbour(&mut self, slip: u32) -> Option<Queued> {
        let s = &mut self.slips[slip as usize];
        let next = self.queue.last().filter(|q| !q.alone)?;
        let unit = self.source.dio_align().map_or(1, |a| u64::from(a.offset));
        let command = Merge {
            end: s.end(),
            len: s.len,
            pieces: s.pieces(),
        };
        let gap = command.gap(next.at, u64::from(next.read.len), unit, &self.limits)?;
        if gap > 0 {
            // At most `limits.gap` bytes, the size of the sink.
            s.add(self.waste.as_mut()?.range(0, gap as u32)?, gap as u32);
            self.counters.gap_bytes += gap;
        }
        self.queue.pop()
    }

    fn add_whole(&mut self, slip: u32, q: Queued) {
        let (len, slot_offset) = (q.read.len, q.read.slot_offset);
        let index = self.activate(q);
        if let Some(active) = &mut self.active[index as usize] {
            active.parts += 1;
            if let Some(to) = active.read.slot.range(slot_offset, len) {
                let s = &mut self.slips[slip as usize];
                s.add(to, len);
                s.owners.push(index);
            }
        }
    }

    fn activate(&mut self, q: Queued) -> u32 {
        let active = Some(Active {
            read: q.read,
            at: q.at,
            batch: q.batch,
            parts: 0,
            failed: None,
        });
        // A free place always exists: every active read holds a piece of a slip or is being split.
        match self.free_active.pop() {
            Some(index) => {
                self.active[index as usize] = active;
                index
            }
            None => {
                self.active.push(active);
                self.active.len() as u32 - 1
            }
        }
    }

    /// An empty slip for a command at file offset `at`. The caller checks that one is free.
    fn open_slip(&mut self, at: u64) -> u32 {
        let index = self.free_slips.pop().unwrap_or(0);
        self.slips[index as usize].reset(at, self.trace.now());
        index
    }

    /// Submits the rest of a slip.
    pub(super) fn launch(&mut self, index: u32) {
        let (offset, pieces) = self.slips[index as usize].rest();
        let file = self.source.pick(offset, pieces);
        self.counters.commands += 1;
        if !file.direct {
            self.counters.buffered += 1;
        }
        let command = Command {
            id: index,
            fd: file.fd,
            file: file.number,
            offset: file.offset,
            pieces: pieces.as_ptr(),
            count: pieces.len() as u32,
        };
        // SAFETY: the pieces are boxed and not touched while the slip is in flight. They name
        // ranges of slots that this engine owns until the outcome; no one else accesses those
        // slots. `drop` drains the device, or leaks both.
        unsafe { self.device.start(command) };
    }
}
