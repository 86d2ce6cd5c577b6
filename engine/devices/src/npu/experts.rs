//! Gate and Up of several experts by graphs of groups (NPUMoE, §4.2).

use emberflow_kernels::DType;
use emberflow_npu::{GroupForm, Operands, Wanted};

use super::{Graphs, Multiplied, TOGETHER, add_biases, form, token_len};
use crate::host::{Arithmetic, Task};
use crate::{GraphRuns, GroupShape};
use emberflow_engine::lane::{Gating, of_up};

impl Graphs {
    /// The graphs of experts of a size.
    fn group_form(&self, shape: GroupShape) -> Result<GroupForm, String> {
        let (dtype, d) = self.ffn.ok_or("has no FFN")?;
        Ok(GroupForm {
            form: form(dtype, d)?,
            rows: shape.neurons,
            capacity: shape.capacity,
        })
    }

    /// Has another process try the graphs of experts of a size, unless that failed before: a driver that hangs would take its
    /// time at each start.
    pub(super) fn try_groups(&mut self, shape: GroupShape) -> Result<(), String> {
        let wanted = Wanted::Groups(self.group_form(shape)?);
        if !self.npu.is_given_up(wanted)
            && let Err(error) = self.first_elsewhere(wanted)
        {
            self.npu.give_up(wanted);
            tracing::warn!(
                error,
                "no graphs of {} tokens for groups of experts, which are computed one by one; \
                 `emberflow doctor --retry-devices` has them tried again",
                shape.capacity
            );
        }
        Ok(())
    }

    /// Makes the graphs of experts of a size, unless another process failed to. Where the provider does not take them, as they
    /// are too large, it computes these experts one after the other.
    pub(super) fn prepare_groups(&mut self, shape: GroupShape) -> Result<(), String> {
        let group = self.group_form(shape)?;
        if self.npu.is_given_up(Wanted::Groups(group)) {
            return Ok(());
        }
        if let Err(e) = self.npu.prepare_groups(group) {
            tracing::warn!(error = %e, "no graphs of {} tokens for groups of experts", shape.capacity);
        }
        Ok(())
    }

    /// Adds the hidden values of experts of the same size, `[neurons × rows]` each: in graphs of groups, or one after the
    /// other where there are none.
    pub(super) fn hidden_of_experts(
        &mut self,
        experts: &[Task],
        capacity: usize,
        hidden: &mut Vec<f32>,
    ) -> Result<(u64, GraphRuns), String> {
        let Some(first) = experts.first() else {
            return Ok(Default::default());
        };
        let shape = first.part.shape;
        let of = GroupForm {
            form: form(shape.dtype, shape.d)?,
            rows: first.neurons(),
            capacity,
        };
        if !self.npu.has_groups(of) {
            return self.one_by_one(experts, hidden);
        }
        self.tokens.clear();
        for expert in experts {
            self.quantize_more(expert.tokens.quantized.all());
        }
        let mut graphs = GraphRuns::default();
        let mut places = vec![hidden.len()];
        for expert in experts {
            places.push(places[places.len() - 1] + expert.neurons() * expert.rows());
        }
        hidden.resize(places[experts.len()], 0.0);
        self.multiply_experts(of, experts, 0, &mut graphs, |expert, n, row, gate| {
            hidden[places[expert] + n * experts[expert].rows() + row] = gate;
        })?;
        let gating = Gating {
            activation: shape.kind.activation,
            cut: 0.0,
            top: None,
        };
        for (expert, place) in experts.iter().zip(places.windows(2)) {
            let gates = &mut hidden[place[0]..place[1]];
            add_biases(gates, &expert.gate_bias, expert.rows().max(1));
            gating.apply(self.cpu, &[], gates);
        }
        let gates = &hidden[places[0]..];
        let fired = gates.iter().filter(|&&gate| gate != 0.0).count() as u64;
        if !shape.kind.ungated {
            let mut of_ups = GraphRuns::default();
            self.multiply_experts(of, experts, 1, &mut of_ups, |expert, n, row, up| {
                let task = &experts[expert];
                let value = &mut hidden[places[expert] + n * task.rows() + row];
                if *value != 0.0 {
                    let bias = task.up_bias.get(n).unwrap_or(&0.0);
                    *value *= of_up(shape.kind, up + bias);
                }
            })?;
            graphs.runs += of_ups.runs;
        }
        Ok((fired, graphs))
    }

    /// The same without graphs of groups.
    fn one_by_one(
        &mut self,
        experts: &[Task],
        hidden: &mut Vec<f32>,
    ) -> Result<(u64, GraphRuns), String> {
        let (before, mut fired, mut places) = (self.npu.runs(), 0, 0);
        for expert in experts {
            fired += self.hidden(expert, hidden)?;
            places += expert.rows() as u64;
        }
        let runs = self.npu.runs() - before;
        Ok((fired, GraphRuns { runs, places }))
    }

    /// The products of a matrix of each expert with its tokens, which are quantised one after the other: calls `then` with
    /// expert, neuron, row and product.
    fn multiply_experts(
        &mut self,
        of: GroupForm,
        experts: &[Task],
        matrix: usize,
        graphs: &mut GraphRuns,
        mut then: impl FnMut(usize, usize, usize, f32),
    ) -> Result<(), String> {
        let len = token_len(experts[0].part.shape.d);
        let mut starts = vec![0];
        for expert in experts {
            starts.push(starts[starts.len() - 1] + expert.rows() * len);
        }
        let multiplied = experts.iter().map(|task| Multiplied {
            dtype: task.part.shape.dtype,
            bytes: task.part.some(0..task.neurons(), matrix),
            x: task.tokens.quantized.all(),
        });
        let multiplied: Vec<Multiplied<'_>> = multiplied.collect();
        let picked: Vec<[Vec<i8>; 2]> = (multiplied.iter().zip(starts.windows(2)))
            .map(|(of, at)| match of.dtype {
                DType::Q4c => of.picked(&self.tokens[at[0]..at[1]]),
                _ => Default::default(),
            })
            .collect();
        let tokens = &self.tokens;
        let operands: Vec<Operands<'_>> = (multiplied.iter().zip(&picked).zip(starts.windows(2)))
            .map(|((of, picked), at)| Operands {
                rows: of.bytes,
                tokens: &tokens[at[0]..at[1]],
                outliers: picked.each_ref().map(Vec::as_slice),
            })
            .collect();
        let (cpu, gathered) = (self.cpu, &mut self.gathered);
        gathered.clear();
        gathered.resize(TOGETHER * of.form.sums(), 0);
        let ran = self.npu.multiply_group(of, &operands, |expert, tile| {
            let tokens = &tokens[starts[expert]..starts[expert + 1]];
            multiplied[expert].fold(cpu, &tile, tokens, gathered, |n, row, product| {
                then(expert, n, row, product)
            });
        });
        let ran = ran.map_err(|e| e.to_string())?;
        graphs.runs += ran.runs;
        graphs.places += ran.rows;
        Ok(())
    }
}
