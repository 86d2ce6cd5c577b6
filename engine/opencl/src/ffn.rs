//! The FFN of a part of a bank: its kernels, and a piece of work.

use crate::buffers::Scratch;
use crate::forms::{Form, Format, Kernels, Made, Maker, Order, Variant, WORK_GROUP, made_as};
use crate::handles::{Arg, Event, Kernel, Queue};
use crate::library::Code;
use crate::work::{HIDDEN, INVALID, Kind, SUMS, TILE, Underway, driver};
use crate::{Error, Spec, Sums, Work};

/// Flags of the kernel `hidden_values`.
const MASKED: i32 = 1;
const GATE_BIAS: i32 = 2;
const UP_BIAS: i32 = 4;

/// Elements of a group, items that share one in wide sums, and rows of an item there.
const GROUP: usize = 32;
const WIDE: usize = 4;
const WIDE_ROWS: usize = 8;

/// Flags of sums.
const GOES_ON: i32 = 1;

/// Items that fill a compute unit, so that some work while others wait for memory.
const UNIT: usize = 1024;

/// Kernels of sums.
struct SumsMade {
    sums: Kernel,
    totals: Kernel,
    added: Kernel,
    /// Of formats with groups in tiles.
    wide: Option<Wide>,
}

/// Kernels of sums of which an item has 8 elements.
struct Wide {
    sums: Kernel,
    /// For several rows.
    totals: Kernel,
}

/// The kernels for an FFN, and buffers for pieces of work.
pub(super) struct Prepared {
    pub spec: Spec,
    kernels: Kernels,
    hidden: Vec<Made>,
    sums: SumsMade,
    /// Items that the device computes at once.
    items: usize,
    pub scratch: Option<Scratch>,
}

impl Prepared {
    /// For an FFN on a device of so many units; without buffers yet.
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

/// What `hidden_values` is told of a piece of work.
fn flags(work: &Work<'_>) -> i32 {
    let flags = [
        (work.mask.is_some(), MASKED),
        (!work.gate_bias.is_empty(), GATE_BIAS),
        (!work.up_bias.is_empty(), UP_BIAS),
    ];
    flags.iter().filter(|f| f.0).map(|f| f.1).sum()
}

/// What kernels of sums are told.
fn how(work: &Work<'_>) -> i32 {
    match work.sums {
        Sums::Total { begins: false, .. } => GOES_ON,
        Sums::Total { begins: true, .. } | Sums::Each => 0,
    }
}

/// Copies inputs to the device and starts the kernels.
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
            of: Kind::Sums,
            results: sums,
            begun,
            done,
        })
    };
    let begun = begin();
    prepared.scratch = Some(scratch);
    begun
}

/// Starts the kernels for `work` with inputs that are on the device: a part and tokens. The first kernel.
fn enqueue(
    queue: &Queue,
    prepared: &mut Prepared,
    scratch: &Scratch,
    [part, x]: [Arg<'_>; 2],
    work: &Work<'_>,
) -> Result<Event, Code> {
    scratch.fits(work)?;
    let spec = &prepared.spec;
    // Work groups may reach beyond the last cluster.
    let behind = work.first + work.clusters * spec.cluster;
    let end = work.end.min(work.neurons).min(behind);
    let numbers = [work.first, work.neurons, end, work.rows, work.clusters];
    let [first, neurons, end, rows, clusters] = numbers.map(|n| Arg::Int(n as i32));
    let (hidden, fired) = (scratch.hidden.arg(), scratch.fired.arg());
    let (sums, totals) = (scratch.sums.arg(), scratch.totals.arg());
    let (flags, cut) = (Arg::Int(flags(work)), Arg::Float(work.cut));
    let (mask, gate_bias) = (scratch.mask.arg(), scratch.gate_bias.arg());
    let up_bias = scratch.up_bias.arg();
    let of_hidden = [
        part, x, mask, gate_bias, up_bias, hidden, fired, first, neurons, end, rows, flags, cut,
    ];
    let how = Arg::Int(how(work));
    let counts = Arg::Int((work.sums == Sums::Each).into());
    let of_clusters = [part, hidden, sums, first, neurons, end, rows, fired, counts];
    let of_rows = [
        part, hidden, totals, first, neurons, end, rows, clusters, fired, how,
    ];
    let of_added = [sums, totals, rows, clusters, fired, how];
    let kernels = prepared.kernels;
    let (order, form) = (kernels.order, kernels.form(work.rows));
    let of_form = made_as(&mut prepared.hidden, Variant { order, form })?;
    let items = [work.clusters * spec.cluster, work.rows];
    let pieces = Pieces {
        d: spec.d,
        enough: prepared.items,
    };
    // SAFETY: arguments in number, order and type as in hidden.cl and sums.cl. The buffers hold what its
    // indices reach: inputs and clusters beyond what they were made for were refused, and the
    // kernels compare neurons with the part's number.
    unsafe {
        let begun = of_form.run(queue, &of_hidden, items)?;
        (prepared.sums).run(queue, [&of_clusters, &of_rows, &of_added], work, &pieces)?;
        Ok(begun)
    }
}

/// How sums are divided among items.
#[derive(Clone, Copy)]
struct Pieces {
    d: usize,
    /// Items that are enough for the whole device.
    enough: usize,
}

impl SumsMade {
    /// Begins the sums of `work`, with the arguments of kernels of clusters, of rows and of added sums.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    unsafe fn run(
        &mut self,
        queue: &Queue,
        [of_clusters, of_rows, of_added]: [&[Arg<'_>]; 3],
        work: &Work<'_>,
        pieces: &Pieces,
    ) -> Result<(), Code> {
        let (Pieces { d, enough }, clusters, group) = (*pieces, work.clusters, WORK_GROUP);
        let whole = d.next_multiple_of(group);
        // Items of wide sums have more to do.
        let (width, tiles, enough) = match &self.wide {
            Some(_) => {
                let width = (d.div_ceil(GROUP) * WIDE).next_multiple_of(group);
                (width, work.rows.div_ceil(WIDE_ROWS), enough / WIDE_ROWS)
            }
            None => (whole, work.rows.div_ceil(TILE), enough),
        };
        let of_each = [&[width, tiles, clusters], &[group, 1, 1][..]];
        let of_all = [&[width, tiles], &[group, 1][..]];
        // Cluster after cluster only where items are enough.
        let at_once = width * tiles >= enough || clusters == 1;
        // SAFETY: the caller's promise.
        unsafe {
            match (work.sums, &mut self.wide) {
                (Sums::Each, _) => {
                    let items = [whole, work.rows.div_ceil(TILE), clusters];
                    self.sums
                        .run(queue, of_clusters, [&items, &[group, 1, 1]])?;
                }
                (Sums::Total { .. }, Some(wide)) if at_once && work.rows > 1 => {
                    wide.totals.run(queue, of_rows, of_all)?;
                }
                (Sums::Total { .. }, None) if at_once => {
                    self.totals.run(queue, of_rows, of_all)?;
                }
                (Sums::Total { .. }, wide) => {
                    match wide {
                        Some(wide) => wide.sums.run(queue, &of_clusters[..7], of_each)?,
                        None => self.sums.run(queue, of_clusters, of_each)?,
                    };
                    let items = [whole, work.rows];
                    self.added.run(queue, of_added, [&items, &[group, 1]])?;
                }
            }
        }
        Ok(())
    }
}
