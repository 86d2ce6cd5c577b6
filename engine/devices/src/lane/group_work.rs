//! Work on groups of experts: its beginning and its end.

use std::time::Instant;

use arrayvec::ArrayVec;
use emberflow_engine::Error;
use emberflow_engine::lane::Experts;

use super::DeviceLane;
use super::groups::Queued;
use crate::experts::{ExpertGroup, ExpertRows, MOST_EXPERTS};

impl DeviceLane {
    /// Begins a group with its experts' places and tokens.
    pub(super) fn submit_group(
        &mut self,
        group: &Queued,
        experts: Experts<'_>,
    ) -> Result<(), Error> {
        let rows = |expert: &usize| {
            let place = experts.each.binary_search_by_key(expert, |of| of.expert);
            let of = experts.each[place.ok()?];
            Some(ExpertRows {
                part: self.parts[of.bank as usize]?,
                neurons: self.banks.neurons(of.bank),
                tokens: of.tokens,
                bias: of.bias,
            })
        };
        let rows: Option<ArrayVec<_, MOST_EXPERTS>> = group.experts.iter().map(rows).collect();
        let Some(rows) = rows.filter(|_| self.set.lost().is_none()) else {
            self.lost = true;
            return Ok(());
        };
        let work = ExpertGroup {
            capacity: group.capacity,
            experts: &rows,
        };
        let submitted = self.set.submit_group(work, experts.input, self.layer)?;
        self.lost |= submitted.is_none();
        Ok(())
    }

    /// Waits for a group.
    pub(super) fn take_group(&mut self, group: &Queued) -> Result<(), Error> {
        let Some(groups) = &mut self.groups else {
            return Ok(());
        };
        let start = Instant::now();
        let taken = self.set.take_group(groups.values(group))?;
        self.waited += start.elapsed();
        match taken {
            Some(taken) => {
                groups.taken(group, taken.graphs);
                self.fired += taken.fired;
                let neurons = group.experts.len() * groups.setup.times.neurons;
                self.bytes += (neurons * self.banks.format.gate_len()) as u64;
            }
            None => self.lost = true,
        }
        Ok(())
    }
}
