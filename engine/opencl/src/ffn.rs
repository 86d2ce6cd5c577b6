//! FFN kernels for the neurons of one buffer, and how a piece of work runs them.

use crate::buffers::Scratch;
use crate::forms::{Form, Format, Kernels, Made, Maker, Order, Variant, WORK_GROUP, made_as};
use crate::handles::{Arg, Event, Kernel, Queue};
use crate::library::Code;
use crate::work::{HIDDEN, INVALID, Kind, SUMS, TILE, Underway, driver};
use crate::{Error, Spec, Sums, Work};

/// Flags of `hidden_values`, as in hidden.cl.
const MASKED: i32 = 1;
const GATE_BIAS: i32 = 2;
const UP_BIAS: i32 = 4;

/// Elements per group.
const GROUP: usize = 32;
/// Work items per group in wide sums.
const WIDE: usize = 4;
/// Rows per work item in wide sums.
const WIDE_ROWS: usize = 8;

/// Flag of the kernels of sums: continue the total in the buffer.
const GOES_ON: i32 = 1;

/// Work items per compute unit that hide memory latency.
const UNIT: usize = 1024;

/// Kernels that sum Down rows.
struct SumsMade {
    sums: Kernel,
    totals: Kernel,
    added: Kernel,
    /// For grouped formats in tiles.
    wide: Option<Wide>,
}

/// Kernels whose work items sum 8 elements each.
struct Wide {
    sums: Kernel,
    /// For several rows.
    totals: Kernel,
}

/// Compiled kernels of an FFN, and its work buffers.
pub(super) struct Prepared {
    pub spec: Spec,
    kernels: Kernels,
    hidden: Vec<Made>,
    sums: SumsMade,
    /// Work items that fill the device.
    items: usize,
    pub scratch: Option<Scratch>,
}

impl Prepared {
    /// Compiles the kernels for a device with `units` compute units; allocates no buffers.
    pub fn new(
        maker: &Maker<'_>,
        spec: &Spec,
        kernels: &Kernels,
        units: u32,
    ) -> Result<Self, Error> {
        let (order, options, grouped) = (kernels.order, &spec.options, spec.grouped);
        let mut hidden: Vec<Made> = Vec::new();
        for variant in kernels.variants() {
            if !hidden.iter().any(|made| made.is(variant)) {
                let (source, format) = ([HIDDEN, "hidden_values"], Format { options, grouped });
                hidden.push(maker.kernel(source, format, variant)?);
            }
        }
        let form = Form::default();
        let program = maker.program(SUMS, options, Variant { order, form })?;
        let make = || -> Result<SumsMade, Code> {
            Ok(SumsMade {
                sums: program.kernel("cluster_sums")?,
                totals: program.kernel("row_totals")?,
                added: program.kernel("added_sums")?,
                wide: match order == Order::Tiles && grouped {
                    true => Some(Wide {
                        sums: program.kernel("wide_sums")?,
                        totals: program.kernel("wide_totals")?,
                    }),
                    false => None,
                },
            })
        };
        Ok(Self {
            spec: spec.clone(),
            kernels: *kernels,
            hidden,
            sums: driver("make kernels", make())?,
            items: units as usize * UNIT,
            scratch: None,
        })
    }
}

/// Argument `flags` of `hidden_values`.
fn flags(work: &Work<'_>) -> i32 {
    let flags = [
        (work.mask.is_some(), MASKED),
        (!work.gate_bias.is_empty(), GATE_BIAS),
        (!work.up_bias.is_empty(), UP_BIAS),
    ];
    flags.iter().filter(|f| f.0).map(|f| f.1).sum()
}

/// Argument `how` of the kernels of sums.
fn how(work: &Work<'_>) -> i32 {
    match work.sums {
        Sums::Total { begins: false, .. } => GOES_ON,
        Sums::Total { begins: true, .. } | Sums::Each => 0,
    }
}

/// Starts a piece of work: copies of the inputs, kernels, copy of the results.
pub(super) fn start(
    queue: &Queue,
    prepared: &mut Prepared,
    part: Arg<'_>,
    work: &Work<'_>,
) -> Result<Underway, Code> {
    let mut scratch = prepared.scratch.take().ok_or(INVALID)?;
    let sums = work.sums.vectors(work.clusters, work.rows) * prepared.spec.d;
    let mut begin = || -> Result<Underway, Code> {
        scratch.fill(queue, work)?;
        let x = scratch.x.arg();
        let begun = enqueue(queue, prepared, &scratch, [part, x], work)?;
        let done = scratch.read(queue, work.sums, work.rows, sums)?;
        queue.flush()?;
        Ok(Underway {
            kind: Kind::Sums,
            results: sums,
            begun,
            done,
        })
    };
    let begun = begin();
    prepared.scratch = Some(scratch);
    begun
}

/// Starts the kernels of `work` on a buffer of neurons and the tokens `x`. Returns the event of the first kernel.
fn enqueue(
    queue: &Queue,
    prepared: &mut Prepared,
    scratch: &Scratch,
    [part, x]: [Arg<'_>; 2],
    work: &Work<'_>,
) -> Result<Event, Code> {
    scratch.fits(work)?;
    let spec = &prepared.spec;
    // Work groups may extend past the last cluster.
    let last = work.first + work.clusters * spec.cluster;
    let end = work.end.min(work.neurons).min(last);
    let numbers = [work.first, work.neurons, end, work.rows, work.clusters];
    let [first, neurons, end, rows, clusters] = numbers.map(|n| Arg::Int(n as i32));
    let (hidden, fired) = (scratch.hidden.arg(), scratch.fired.arg());
    let (sums, totals) = (scratch.sums.arg(), scratch.totals.arg());
    let (flags, cut) = (Arg::Int(flags(work)), Arg::Float(work.cut));
    let (mask, gate_bias) = (scratch.mask.arg(), scratch.gate_bias.arg());
    let up_bias = scratch.up_bias.arg();
    let hidden_args = [
        part, x, mask, gate_bias, up_bias, hidden, fired, first, neurons, end, rows, flags, cut,
    ];
    let how = Arg::Int(how(work));
    let counts = Arg::Int((work.sums == Sums::Each).into());
    let cluster_args = [part, hidden, sums, first, neurons, end, rows, fired, counts];
    let row_args = [
        part, hidden, totals, first, neurons, end, rows, clusters, fired, how,
    ];
    let added_args = [sums, totals, rows, clusters, fired, how];
    let kernels = prepared.kernels;
    let (order, form) = (kernels.order, kernels.form(work.rows));
    let hidden_values = made_as(&mut prepared.hidden, Variant { order, form })?;
    let items = [work.clusters * spec.cluster, work.rows];
    let pieces = Pieces {
        d: spec.d,
        enough: prepared.items,
    };
    // SAFETY: the arguments match hidden.cl and sums.cl in number, order and type. All indices are in bounds:
    // `fits` has compared inputs and clusters with the buffers, and the kernels compare neurons with the
    // buffer's number.
    unsafe {
        let begun = hidden_values.run(queue, &hidden_args, items)?;
        let args: [&[Arg<'_>]; 3] = [&cluster_args, &row_args, &added_args];
        prepared.sums.run(queue, args, work, &pieces)?;
        Ok(begun)
    }
}

/// Division of sums among work items.
#[derive(Clone, Copy)]
struct Pieces {
    d: usize,
    /// Work items that fill the device.
    enough: usize,
}

impl SumsMade {
    /// Starts the sums of `work`, with the arguments of `cluster_sums`, `row_totals` and `added_sums`.
    ///
    /// # Safety
    /// See [`Kernel::run`].
    unsafe fn run(
        &mut self,
        queue: &Queue,
        [cluster_args, row_args, added_args]: [&[Arg<'_>]; 3],
        work: &Work<'_>,
        pieces: &Pieces,
    ) -> Result<(), Code> {
        let (Pieces { d, enough }, clusters, group) = (*pieces, work.clusters, WORK_GROUP);
        let whole = d.next_multiple_of(group);
        // A work item of wide sums has more elements and rows, so fewer of them fill the device.
        let (width, tiles, enough) = match &self.wide {
            Some(_) => {
                let width = (d.div_ceil(GROUP) * WIDE).next_multiple_of(group);
                (width, work.rows.div_ceil(WIDE_ROWS), enough / WIDE_ROWS)
            }
            None => (whole, work.rows.div_ceil(TILE), enough),
        };
        let by_cluster = [&[width, tiles, clusters], &[group, 1, 1][..]];
        let by_row = [&[width, tiles], &[group, 1][..]];
        // One pass over all clusters, if its work items fill the device; otherwise sums per cluster, added later.
        let one_pass = width * tiles >= enough || clusters == 1;
        // SAFETY: the caller's promise.
        unsafe {
            match (work.sums, &mut self.wide) {
                (Sums::Each, _) => {
                    let items = [whole, work.rows.div_ceil(TILE), clusters];
                    self.sums
                        .run(queue, cluster_args, [&items, &[group, 1, 1]])?;
                }
                (Sums::Total { .. }, Some(wide)) if one_pass && work.rows > 1 => {
                    wide.totals.run(queue, row_args, by_row)?;
                }
                (Sums::Total { .. }, None) if one_pass => {
                    self.totals.run(queue, row_args, by_row)?;
                }
                (Sums::Total { .. }, wide) => {
                    match wide {
                        Some(wide) => wide.sums.run(queue, &cluster_args[..7], by_cluster)?,
                        None => self.sums.run(queue, cluster_args, by_cluster)?,
                    };
                    let items = [whole, work.rows];
                    self.added.run(queue, added_args, [&items, &[group, 1]])?;
                }
            }
        }
        Ok(())
    }
}
