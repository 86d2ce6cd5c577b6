//! The FFN of a part of a bank: its kernels, and a piece of work.

use crate::buffers::Scratch;
use crate::forms::{Form, Kernels, Made, Maker, Order, Variant, made_as};
use crate::handles::{Arg, Kernel, Queue};
use crate::library::Code;
use crate::work::{HIDDEN, INVALID, SUMS, TILE, Underway, driver};
use crate::{Error, Spec, Sums, Work};

/// Flags of the kernel `hidden_values`.
const MASKED: i32 = 1;
const GATE_BIAS: i32 = 2;
const UP_BIAS: i32 = 4;

/// Items that fill a compute unit, so that some work while others wait for memory.
const UNIT: usize = 1024;

/// Kernels of sums, for an order.
struct SumsMade {
    order: Order,
    sums: Kernel,
    totals: Kernel,
    added: Kernel,
}

/// The kernels for an FFN, and buffers for pieces of work.
pub(super) struct Prepared {
    pub spec: Spec,
    hidden: Vec<Made>,
    sums: Vec<SumsMade>,
    /// Those that run.
    kernels: Kernels,
    /// Items that the device computes at once.
    items: usize,
    pub scratch: Option<Scratch>,
}

impl Prepared {
    /// For an FFN on a device of so many units; without kernels and buffers yet.
    pub fn new(spec: &Spec, units: u32) -> Self {
        Self {
            spec: spec.clone(),
            hidden: Vec::new(),
            sums: Vec::new(),
            kernels: Kernels::default(),
            items: units as usize * UNIT,
            scratch: None,
        }
    }

    /// Makes what is missing of some kernels.
    pub fn make(&mut self, maker: &Maker<'_>, kernels: &Kernels) -> Result<(), Error> {
        let (order, options) = (kernels.order, &self.spec.options);
        for form in [kernels.hidden.one.form, kernels.hidden.several.form] {
            if !self
                .hidden
                .iter()
                .any(|made| made.is(Variant { order, form }))
            {
                let source = [HIDDEN, "hidden_values"];
                self.hidden
                    .push(maker.kernel(source, options, Variant { order, form })?);
            }
        }
        if !self.sums.iter().any(|made| made.order == order) {
            let program = maker.program(
                SUMS,
                options,
                Variant {
                    order,
                    form: Form::default(),
                },
            )?;
            let make = || -> Result<SumsMade, Code> {
                Ok(SumsMade {
                    order,
                    sums: program.kernel("cluster_sums")?,
                    totals: program.kernel("row_totals")?,
                    added: program.kernel("added_sums")?,
                })
            };
            self.sums.push(driver("make kernels", make())?);
        }
        self.kernels = *kernels;
        Ok(())
    }

    /// Gives back kernels that do not run.
    pub fn trim(&mut self) {
        let Kernels { order, hidden, .. } = self.kernels;
        let forms = [hidden.one.form, hidden.several.form];
        self.hidden
            .retain(|made| forms.iter().any(|&form| made.is(Variant { order, form })));
        self.sums.retain(|made| made.order == order);
    }
}

/// What `hidden_values` is told of a piece of work.
fn flags(work: &Work<'_>) -> i32 {
    let flags = [
        (work.mask.is_some(), MASKED),
        (!work.gate_bias.is_empty(), GATE_BIAS),
        (!work.up_bias.is_empty(), UP_BIAS),
    ];
    flags.iter().filter(|f| f.0).map(|f| f.1).sum()
}

/// Copies inputs to the device and starts the kernels.
pub(super) fn start(
    queue: &Queue,
    prepared: &mut Prepared,
    part: Arg<'_>,
    work: &Work<'_>,
) -> Result<Underway, Code> {
    let spec = &prepared.spec;
    let vectors = work.sums.vectors(work.clusters, work.rows);
    let scratch = prepared.scratch.as_mut().ok_or(INVALID)?;
    let end = work.end.min(work.neurons);
    let numbers = [work.first, work.neurons, end, work.rows, work.clusters];
    let [first, neurons, end, rows, clusters] = numbers.map(|n| Arg::Int(n as i32));
    scratch.fill(queue, work)?;
    let of_hidden = [
        part,
        scratch.x.arg(),
        scratch.mask.arg(),
        scratch.gate_bias.arg(),
        scratch.up_bias.arg(),
        scratch.hidden.arg(),
        scratch.fired.arg(),
        first,
        neurons,
        end,
        rows,
        Arg::Int(flags(work)),
        Arg::Float(work.cut),
    ];
    let goes_on = matches!(work.sums, Sums::Total { begins: false, .. });
    let goes_on = Arg::Int(goes_on.into());
    let (hidden, fired) = (scratch.hidden.arg(), scratch.fired.arg());
    let (sums, totals) = (scratch.sums.arg(), scratch.totals.arg());
    let counts = Arg::Int((work.sums == Sums::Each).into());
    let of_clusters = [part, hidden, sums, first, neurons, end, rows, fired, counts];
    let of_rows = [
        part, hidden, totals, first, neurons, end, rows, clusters, fired, goes_on,
    ];
    let of_added = [sums, totals, rows, clusters, fired, goes_on];
    let kernels = prepared.kernels;
    let (order, way) = (kernels.order, kernels.hidden.of(work.rows));
    let of_way = made_as(&mut prepared.hidden, order, way.form)?;
    let mut of_order = prepared.sums.iter_mut();
    let of_order = of_order.find(|made| made.order == order).ok_or(INVALID)?;
    let tiles = work.rows.div_ceil(TILE);
    let items = [work.clusters * spec.cluster, tiles, way.group];
    let group = kernels.sums;
    let width = spec.d.next_multiple_of(group);
    let both = [&[width, tiles, work.clusters], &[group, 1, 1][..]];
    // Cluster after cluster only where rows are enough for the whole device.
    let at_once = width * tiles >= prepared.items || work.clusters == 1;
    // SAFETY: arguments in number, order and type as in hidden.cl and sums.cl. The buffers hold what its
    // indices reach: `fill` refuses inputs and clusters beyond what they were made for, and the
    // kernels compare neurons with the part's number.
    let begun = unsafe {
        let begun = of_way.run(queue, &of_hidden, items)?;
        match work.sums {
            Sums::Each => _ = of_order.sums.run(queue, &of_clusters, both)?,
            Sums::Total { .. } if at_once => {
                let items: [&[usize]; 2] = [&[width, tiles], &[group, 1]];
                of_order.totals.run(queue, &of_rows, items)?;
            }
            Sums::Total { .. } => {
                of_order.sums.run(queue, &of_clusters, both)?;
                let items: [&[usize]; 2] = [&[width, work.rows], &[group, 1]];
                of_order.added.run(queue, &of_added, items)?;
            }
        }
        begun
    };
    let sums = vectors * spec.d;
    let done = scratch.read(queue, work.sums, work.rows, sums)?;
    queue.flush()?;
    Ok(Underway { sums, begun, done })
}
