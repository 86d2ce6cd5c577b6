//! A back end from outside the crate: a second CPU, whose thread computes the clusters that it is given, one pair of neuron and
//! row after the other. Its memory and its products of matrices are those of [`CpuDevice`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use emberflow_devices::{
    Backend, Clusters, CpuDevice, DenseShape, Device, DeviceError, Facts, HostBytes, NeuronRows,
    OnDevices, Part, PartKind, Program, Sums, Taken, Ticket, Work,
};
use emberflow_engine::lane::{CLUSTER, Gating, of_up};
use emberflow_kernels::{Activations, Cpu, Row};

use crate::dense;

/// Sums, and the number of pairs that fired.
type Answer = (Vec<f32>, u64);

struct SecondCpu {
    inner: CpuDevice,
    facts: Facts,
    shape: Option<DenseShape>,
    /// The piece of work on clusters under way: kind and length of its sums.
    underway: Option<(Sums, usize, JoinHandle<Answer>)>,
    total: Vec<f32>,
    /// Clusters so far.
    computed: Arc<AtomicU64>,
}

impl SecondCpu {
    fn device(computed: &Arc<AtomicU64>) -> Device {
        let inner = CpuDevice::new();
        let facts = Facts {
            name: "second-cpu".into(),
            groups: false,
            ..inner.facts().clone()
        };
        Device::new(Box::new(Self {
            inner,
            facts,
            shape: None,
            underway: None,
            total: Vec::new(),
            computed: Arc::clone(computed),
        }))
    }
}

/// The sum of each cluster and row. `bytes` holds the neurons of a part, matrix by matrix.
fn sums(shape: DenseShape, bytes: &[u8], work: &Clusters<'_>) -> Answer {
    let (cpu, kind, d, rows) = (Cpu::detect(), shape.kind, shape.d, work.rows());
    let len = shape.dtype.row_bytes(d);
    let all = bytes.len() / shape.neuron_bytes() as usize;
    let matrix_row = |matrix: usize, neuron: usize| {
        Row::inline(
            shape.dtype,
            d,
            &bytes[(matrix * all + neuron) * len..][..len],
        )
    };
    let product = |of: Row<'_>, row: usize| match shape.dtype.is_grouped() {
        true => cpu.dot_q(of, work.quantized.range(row, 1)),
        false => cpu.dot(of, &work.x[row * d..][..d]),
    };
    let gating = Gating {
        activation: kind.activation,
        cut: work.cut,
        top: None,
    };
    let (mut sums, mut fired) = (vec![0.0; work.clusters.len() * rows * d], 0);
    let first = work.clusters.start * CLUSTER;
    let end = all.min(work.end).min(work.clusters.end * CLUSTER);
    for (neuron, row) in (first..end).flat_map(|neuron| (0..rows).map(move |row| (neuron, row))) {
        let (n, pair) = (neuron - first, (neuron - first) * rows + row);
        if work
            .mask
            .is_some_and(|mask| mask[pair / 64] >> (pair % 64) & 1 == 0)
        {
            continue;
        }
        let bias = |of: &[f32]| of.get(n).copied().unwrap_or(0.0);
        let mut value = [product(matrix_row(0, neuron), row) + bias(work.gate_bias)];
        gating.apply(cpu, &[], &mut value);
        fired += u64::from(value[0] != 0.0);
        if value[0] != 0.0 && !kind.ungated {
            let up = product(matrix_row(1, neuron), row) + bias(work.up_bias);
            value[0] *= of_up(kind, up);
        }
        if value[0] != 0.0 {
            let down = matrix_row(shape.matrices() - 1, neuron);
            let sum = &mut sums[(n / CLUSTER * rows + row) * d..][..d];
            cpu.axpy_rows(&value, &[down], sum);
        }
    }
    (sums, fired)
}

impl Backend for SecondCpu {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, program: &Program) -> Result<(), DeviceError> {
        if let Program::Ffn(shape) = program {
            self.shape = Some(*shape);
        }
        self.inner.prepare(program)
    }

    fn memory(&mut self, of: PartKind) -> Result<Part, DeviceError> {
        self.inner.memory(of)
    }

    fn host(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        self.inner.host(part)
    }

    fn release(&mut self, part: Part) {
        self.inner.release(part);
    }

    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<Ticket, DeviceError> {
        self.inner.upload(part, first, neurons)
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        let Work::Clusters(work) = *work else {
            return self.inner.submit(work);
        };
        let bytes = self.inner.host(work.part)?;
        let (Some(bytes), Some(shape)) = (bytes, self.shape) else {
            unreachable!("it is prepared, and its memory is the machine's");
        };
        // The work refers to memory that is the engine's again at once.
        let [x, gate_bias, up_bias] = [work.x, work.gate_bias, work.up_bias].map(<[f32]>::to_vec);
        let (clusters, mask) = (work.clusters.clone(), work.mask.map(<[u64]>::to_vec));
        let mut quantized = Activations::with_capacity(shape.d, work.rows());
        quantized.clear(shape.d);
        (0..work.rows()).for_each(|row| quantized.push(work.quantized, row));
        let (part, cut, end, kind) = (work.part, work.cut, work.end, work.sums);
        self.computed
            .fetch_add(clusters.len() as u64, Ordering::Relaxed);
        let thread = spawn(move || {
            let copy = Clusters {
                part,
                clusters: &clusters,
                x: &x,
                quantized: quantized.all(),
                mask: mask.as_deref(),
                cut,
                gate_bias: &gate_bias,
                up_bias: &up_bias,
                end,
                sums: kind,
            };
            sums(shape, (*bytes).as_ref(), &copy)
        });
        self.underway = Some((kind, work.rows() * shape.d, thread));
        Ok(Ticket::Work)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError> {
        match &self.underway {
            Some((_, _, thread)) if ticket == Ticket::Work => Ok(thread.is_finished()),
            _ => self.inner.poll(ticket),
        }
    }

    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        // So fast that it gets all that it can hold.
        let took = Duration::from_nanos(1);
        let underway = self.underway.take_if(|_| ticket == Ticket::Work);
        let Some((kind, len, thread)) = underway else {
            let taken = self.inner.take(ticket, out)?;
            return Ok(Taken { took, ..taken });
        };
        let (sums, fired) = thread.join().unwrap();
        let Sums::Total { begins, ends } = kind else {
            out.copy_from_slice(&sums);
            return Ok(Taken {
                fired,
                took,
                ..Taken::default()
            });
        };
        if begins {
            self.total = vec![0.0; len];
        }
        for of_cluster in sums.chunks_exact(len) {
            let both = self.total.iter_mut().zip(of_cluster);
            both.for_each(|(total, sum)| *total += *sum);
        }
        if ends {
            out.copy_from_slice(&self.total);
        }
        Ok(Taken {
            fired,
            took,
            ..Taken::default()
        })
    }

    fn clear(&mut self) {
        self.underway = None;
        self.inner.clear();
    }
}

#[test]
fn a_second_cpu_computes_clusters_and_changes_no_bit() {
    for (share, chunk) in [(0.5, 5), (0.5, 64), (1.0, 64)] {
        let case = dense(share, chunk);
        let computed = Arc::default();
        let devices = OnDevices::new(vec![SecondCpu::device(&computed)]).holding(1 << 20);
        // At each start the check has it compute some.
        drop(case.open(devices.clone()));
        let of_check = computed.load(Ordering::Relaxed);
        let report = case.same(devices);
        let of_run = computed.load(Ordering::Relaxed) - 2 * of_check;
        assert!(of_run > 0 && report.clusters > 0, "{of_run}: {report:?}");
        assert_eq!(report.devices[0].clusters, of_run, "{report:?}");
        assert!(report.lost.is_none(), "{report:?}");
    }
}
