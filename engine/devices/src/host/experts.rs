//! Groups of experts on a device whose memory is the process's.

use std::sync::Arc;
use std::time::Instant;

use super::{Answer, Arithmetic, HostDevice, Task, Tokens, taken};
use crate::{DeviceError, ExpertGroup, ExpertRows, Input, Sums, Taken, Ticket};
use emberflow_engine::lane::CLUSTER;

impl<A: Arithmetic> HostDevice<A> {
    /// Begins a group, with copies of its experts' tokens.
    pub(super) fn begin_experts(
        &mut self,
        group: ExpertGroup<'_>,
        input: Input<'_>,
    ) -> Result<Ticket, DeviceError> {
        let task = |expert: &ExpertRows<'_>| {
            let part = Arc::clone(self.neurons(expert.part)?);
            let grouped = part.shape.dtype.is_grouped();
            let [gate_bias, up_bias] = expert.bias.map(<[f32]>::to_vec);
            Ok(Task {
                part,
                first: 0,
                clusters: expert.neurons.div_ceil(CLUSTER),
                tokens: Tokens::picked(grouped, input, expert.tokens),
                mask: None,
                cut: 0.0,
                gate_bias,
                up_bias,
                end: expert.neurons,
                sums: Sums::Each,
                total: Vec::new(),
            })
        };
        let tasks = group.experts.iter().map(task);
        let tasks = tasks.collect::<Result<Vec<Task>, DeviceError>>()?;
        let (capacity, values) = (group.capacity, group.values());
        self.begin(move |by| {
            let submitted = Instant::now();
            let mut hidden = Vec::with_capacity(values);
            let (fired, graphs) = by.experts(&tasks, capacity, &mut hidden)?;
            let taken = Taken {
                graphs,
                ..taken(fired, submitted.elapsed())
            };
            Ok(Answer::plain(hidden, taken))
        })
    }
}
