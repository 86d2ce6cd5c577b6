//! Experts on a device in groups of one capacity (NPUMoE, §4): their Gate and Up come from the device, group after group,
//! while the CPU computes the units before them, and Down of all of them in the order of units.
//!
//! ```text
//! expected load ─ place ─▶ groups of experts that the device holds whole; the rest are computed by the CPU
//! a layer       ─ begin ─▶ the first tokens of each, as many as its capacity holds; the CPU's units have the rest
//! hidden values ◀─ take ── group after group, in the order of their first units
//! ```

use arrayvec::ArrayVec;
use emberflow_engine::lane::{CLUSTER, HiddenRows, Room};

use crate::experts::{GraphRuns, MOST_EXPERTS};
use crate::loads::ExpertSetup;
use crate::tiers::{CapacityGroup, Placement, RouteCounts};

/// A group of experts to compute.
#[derive(Debug, Clone)]
pub(crate) struct Queued {
    /// Most tokens of each.
    pub capacity: usize,
    /// The experts.
    pub experts: ArrayVec<usize, MOST_EXPERTS>,
    /// One past the last of its hidden values.
    pub end: usize,
}

/// Counters of groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GroupCounts {
    /// Pieces of work.
    pub groups: u64,
    /// What the device ran for them.
    pub graphs: GraphRuns,
    /// Tokens of experts, by who computed them.
    pub routes: RouteCounts,
}

/// The groups of a device.
#[derive(Debug)]
pub(crate) struct GroupLane {
    pub(super) setup: ExpertSetup,
    /// By bank: clusters that the device holds.
    held: Vec<u32>,
    /// By layer, for passes of `rows` rows.
    placed: Vec<Vec<CapacityGroup>>,
    rows: usize,
    /// By expert of the layer under way: its tokens, and which of them are computed in a group.
    tokens: Vec<usize>,
    parts: Vec<Option<HiddenRows>>,
    /// Hidden values of the layer's groups, of which those before `known` are there.
    hidden: Vec<f32>,
    known: usize,
    counts: GroupCounts,
}

impl GroupLane {
    /// Of banks of which the device holds the first `held` clusters, for passes within a room.
    pub fn new(setup: ExpertSetup, held: &[u32], room: &Room) -> Self {
        let mut groups = Self {
            held: held.to_vec(),
            placed: Vec::new(),
            rows: 0,
            tokens: Vec::new(),
            parts: Vec::new(),
            hidden: Vec::new(),
            known: 0,
            counts: GroupCounts::default(),
            setup,
        };
        groups.set_room(room);
        groups
    }

    /// Room for the hidden values of a pass.
    pub fn set_room(&mut self, room: &Room) {
        self.hidden = Vec::new();
        self.hidden = vec![0.0; hidden_values(room)];
    }

    /// Whether it computes experts of a layer.
    pub fn has(&self, layer: usize) -> bool {
        self.setup.experts(layer) > 0
    }

    /// Where experts are computed in passes of `rows` rows, layer by layer.
    fn placed(&self, rows: usize) -> Vec<Placement> {
        let layers = 0..self.setup.visits.len();
        let of = |layer| self.setup.place(layer, rows, &self.held);
        layers.map(of).collect()
    }

    /// Clusters of all experts that it computes in passes of `rows` rows.
    pub fn clusters_for(&self, rows: usize) -> u64 {
        let groups = self.placed(rows);
        let groups = groups.iter().flat_map(|layer| &layer.groups);
        let experts: usize = groups.map(|group| group.experts.len()).sum();
        (experts * self.setup.times.neurons.div_ceil(CLUSTER)) as u64
    }

    /// Begins a layer of a pass of `rows` rows in which experts, ascending, have tokens: `(expert, tokens)`. Returns the groups
    /// to be computed.
    pub fn begin(
        &mut self,
        [layer, rows]: [usize; 2],
        visited: impl Iterator<Item = (usize, usize)>,
    ) -> Vec<Queued> {
        if rows != self.rows {
            let placed = self.placed(rows).into_iter();
            self.placed = placed.map(|of| of.groups).collect();
            self.rows = rows;
        }
        let experts = self.setup.experts(layer);
        self.tokens.resize(experts, 0);
        for (expert, count) in visited {
            if let Some(tokens) = self.tokens.get_mut(expert) {
                *tokens = count;
            }
        }
        let mut queue = Vec::new();
        for group in self.placed.get(layer).into_iter().flatten() {
            let visited = |expert: &usize| self.tokens[*expert] > 0;
            let some = group.experts.iter().copied().filter(visited);
            let mut experts: ArrayVec<usize, MOST_EXPERTS> = some.take(MOST_EXPERTS).collect();
            experts.sort_unstable();
            if !experts.is_empty() {
                queue.push(Queued {
                    capacity: group.capacity,
                    experts,
                    end: 0,
                });
            }
        }
        self.assign(experts, &mut queue);
        queue
    }

    /// Assigns the hidden values of the queued groups, in the order of their first experts, as far as there is room.
    fn assign(&mut self, experts: usize, queue: &mut Vec<Queued>) {
        queue.sort_unstable_by_key(|group| group.experts[0]);
        self.parts.resize(experts, None);
        let (tokens, part, routes) = (&self.tokens, &mut self.parts, &mut self.counts.routes);
        let (neurons, room, mut end) = (self.setup.times.neurons, self.hidden.len(), 0);
        queue.retain_mut(|group| {
            let taken = |expert: usize| tokens[expert].min(group.capacity);
            let all: usize = group.experts.iter().map(|&expert| taken(expert)).sum();
            if end + all * neurons > room {
                return false;
            }
            for &expert in &group.experts {
                let count = taken(expert);
                part[expert] = Some(HiddenRows {
                    tokens: count,
                    first: end,
                });
                end += count * neurons;
                routes.npu += count as u64;
                routes.overflow += (tokens[expert] - count) as u64;
            }
            group.end = end;
            true
        });
        let cold = tokens.iter().zip(part).filter(|(_, part)| part.is_none());
        routes.cold += cold.map(|(&tokens, _)| tokens as u64).sum::<u64>();
    }

    /// By expert: its rows of the layer under way that are computed in a group.
    pub fn parts(&self) -> &[Option<HiddenRows>] {
        &self.parts
    }

    /// Hidden values of the layer's groups.
    pub fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    /// Whether the first `end` hidden values are there.
    pub fn knows(&self, end: usize) -> bool {
        self.known >= end
    }

    /// Where the values of the group under way lie.
    pub(super) fn values(&mut self, group: &Queued) -> &mut [f32] {
        &mut self.hidden[self.known..group.end]
    }

    /// The values of a group have come.
    pub(super) fn taken(&mut self, group: &Queued, graphs: GraphRuns) {
        self.known = group.end;
        let parts = group
            .experts
            .iter()
            .filter_map(|&expert| self.parts[expert]);
        let tokens: u64 = parts.map(|part| part.tokens as u64).sum();
        let counts = &mut self.counts;
        counts.groups += 1;
        counts.graphs.runs += graphs.runs;
        counts.graphs.places += graphs.places;
        counts.routes.padding += graphs.places.saturating_sub(tokens);
    }

    /// Counts since the device was opened.
    pub fn counts(&self) -> GroupCounts {
        self.counts
    }

    /// Forgets the layer under way.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.parts.clear();
        self.known = 0;
    }
}

/// Hidden values of all experts that the rows of a pass visit.
pub(crate) fn hidden_values(room: &Room) -> usize {
    room.clusters * CLUSTER * room.rows
}
