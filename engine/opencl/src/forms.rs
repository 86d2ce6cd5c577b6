//! Forms of kernels: all give the same bits. [`Kernels::of`] chooses them by what a driver tells of its device.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::handles::{Arg, Context, Event, Found, Kernel, Program, Queue};
use crate::library::Code;
use crate::tiles::TILE_ROWS;
use crate::work::{INVALID, TILE, driver};
use crate::{Error, Listed};

/// How rows lie in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// One after the other, each with its scales behind it, as the host reads them.
    #[default]
    Rows,
    /// In tiles, in which neighbouring rows have neighbouring bytes; see [`Tiles`](crate::Tiles).
    Tiles,
}

/// Who computes the product of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Team {
    /// An item.
    #[default]
    Alone,
    /// 16 items, which add their chains up in local memory.
    Local,
    /// A work group has a block of rows and tokens: 16 items have some of its rows times some tokens, and each a chain of
    /// all these. For many tokens.
    Block,
}

/// How products of integers are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dots {
    /// By numbers of 16 bits.
    #[default]
    Widened,
    /// Four bytes at once. A device without such an instruction computes them with plain arithmetic, which only tests do.
    Packed,
}

/// A form of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Form {
    /// Who computes a row.
    pub team: Team,
    /// How.
    pub dots: Dots,
}

/// The least number of tokens that are many.
pub const MANY: usize = 16;

/// The kernels for rows of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Kernels {
    /// How rows lie.
    pub order: Order,
    /// The form for fewer than [`MANY`] tokens.
    pub few: Form,
    /// That for more.
    pub many: Form,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rows => "rows",
            Self::Tiles => "tiles",
        })
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.team {
            Team::Alone => "an item a row",
            Team::Local => "16 items a row",
            Team::Block => "a block a group",
        })?;
        match self.dots {
            Dots::Widened => Ok(()),
            Dots::Packed => f.write_str(", integer dot products"),
        }
    }
}

impl fmt::Display for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { order, few, many } = self;
        write!(f, "{order}, {few}")?;
        match many == few {
            true => Ok(()),
            false => write!(f, ", for {MANY} tokens and more {many}"),
        }
    }
}

impl Kernels {
    /// Those of a device, by what its driver tells: for products of floats, and for those of integers.
    ///
    /// | the driver tells of | rows lie in | few tokens | many |
    /// |---|---|---|---|
    /// | a processor | rows | an item a row | an item a row |
    /// | a graphics processor, the machine's memory | rows, which the host reads too | 16 items a row | blocks |
    /// | a graphics processor, its own memory | tiles | 16 items a row | blocks |
    ///
    /// A graphics processor with integer dot products uses them.
    pub(super) fn of(device: &Listed, extensions: &Extensions) -> [Self; 2] {
        if !device.gpu {
            return [Self::default(); 2];
        }
        let integers = match extensions.dots {
            Some(_) => Dots::Packed,
            None => Dots::Widened,
        };
        [Dots::Widened, integers].map(|dots| Self {
            order: match device.unified {
                true => Order::Rows,
                false => Order::Tiles,
            },
            few: Form {
                team: Team::Local,
                dots,
            },
            many: Form {
                team: Team::Block,
                dots,
            },
        })
    }

    /// The form for so many tokens.
    pub fn form(&self, tokens: usize) -> Form {
        if tokens < MANY { self.few } else { self.many }
    }

    /// Both.
    pub(super) fn variants(&self) -> [Variant; 2] {
        let order = self.order;
        [self.few, self.many].map(|form| Variant { order, form })
    }
}

/// Most arguments of a kernel.
const MOST_ARGS: usize = 13;

/// Items of a team.
const ITEMS: usize = 16;

const PACKED: &str = "cl_khr_integer_dot_product";

/// Tokens of a block, which share the reading of its rows.
const BLOCK_TOKENS: usize = 8;

/// Bytes of local memory that an item of a block has: for the chains of some of its values at a time.
const FOR_BLOCKS: usize = 32;

/// Items of a work group where an item has a row: a cluster is a multiple of it.
pub(super) const WORK_GROUP: usize = 64;

/// The same where a block has them.
const BLOCK_GROUP: usize = 128;

/// Extensions that forms use.
pub(super) struct Extensions {
    dots: Option<ItsDots>,
}

/// Which function multiplies four bytes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ItsDots {
    Standard,
    /// The instruction of NVIDIA's devices, whose driver does not name the extension.
    Nvidia,
}

impl Extensions {
    /// By the names that a device has. `nvidia` where it is one of NVIDIA's with that instruction.
    pub fn of(names: &[String], nvidia: bool) -> Self {
        let standard = names.iter().any(|name| name == PACKED);
        Self {
            dots: match standard {
                true => Some(ItsDots::Standard),
                false => nvidia.then_some(ItsDots::Nvidia),
            },
        }
    }

    /// Build options of a form in an order, behind those of a format.
    fn options(&self, options: &str, variant: Variant) -> String {
        let Variant { order, form } = variant;
        let mut all = options.to_owned();
        let packs = form.dots == Dots::Packed;
        // Integer products are functions of newer versions.
        all.push_str(match packs && self.dots == Some(ItsDots::Standard) {
            true => " -cl-std=CL3.0",
            false => " -cl-std=CL1.2",
        });
        all.push_str(&format!(" -D TILE={TILE}"));
        if order == Order::Tiles {
            all.push_str(&format!(" -D TILES -D TILE_ROWS={TILE_ROWS}"));
        }
        for (set, more) in [
            (form.team == Team::Local, " -D LOCAL_TEAMS"),
            (packs, " -D PACKED_DOTS"),
            (packs && self.dots.is_none(), " -D PLAIN_DOTS"),
            (
                packs && self.dots == Some(ItsDots::Nvidia),
                " -D NVIDIA_DOTS",
            ),
        ] {
            if set {
                all.push_str(more);
            }
        }
        all
    }
}

/// A form for an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    pub order: Order,
    pub form: Form,
}

impl Variant {
    /// Items of a work group, if the kernel can have so many: in tiles a team's group has a whole tile.
    fn group(self, most: usize) -> usize {
        let wanted = match (self.form.team, self.order) {
            (Team::Local, Order::Tiles) => ITEMS * TILE_ROWS,
            (Team::Block, _) => BLOCK_GROUP,
            (Team::Local, Order::Rows) | (Team::Alone, _) => WORK_GROUP,
        };
        match most >= wanted {
            true => wanted,
            // A power of two, as those are, and a team at least.
            false => 1 << most.max(ITEMS).ilog2(),
        }
    }
}

/// What kernels are told of rows.
#[derive(Clone, Copy)]
pub(super) struct Format<'a> {
    /// Build options.
    pub options: &'a str,
    /// Products are those of integers.
    pub grouped: bool,
}

/// Where kernels are made.
pub(super) struct Maker<'a> {
    pub device: &'a Found,
    pub context: &'a Context,
    pub extensions: &'a Extensions,
}

impl Maker<'_> {
    /// A program in a form.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn program(&self, source: &str, options: &str, variant: Variant) -> Result<Program, Error> {
        let options = self.extensions.options(options, variant);
        let built = self.device.build(self.context, source, &options);
        built.map_err(|log| Error(format!("cannot build its kernels: {}", log.trim())))
    }

    /// A kernel of `source`, by name, in a form.
    ///
    /// # Errors
    /// As [`Maker::program`].
    pub fn kernel(
        &self,
        [source, name]: [&str; 2],
        of: Format<'_>,
        variant: Variant,
    ) -> Result<Made, Error> {
        // A chain is a float, or four lanes.
        let Format { options, grouped } = of;
        let (chain, its_rows) = if grouped { (4, 4) } else { (16, 2) };
        let at_a_time = FOR_BLOCKS / chain;
        let blocks = format!(
            "{options} -D BLOCKS -D BLOCK_TOKENS={BLOCK_TOKENS} -D ITS_ROWS={its_rows} -D AT_A_TIME={at_a_time}"
        );
        let options = match variant.form.team {
            Team::Block => &blocks,
            Team::Alone | Team::Local => options,
        };
        let program = self.program(source, options, variant)?;
        let kernel = driver("make kernels", program.kernel(name))?;
        let most = self.device.most_items(&kernel);
        Ok(Made {
            variant,
            group: variant.group(driver("ask for the size of work groups", most)?),
            kernel,
            its_rows,
        })
    }
}

/// A kernel with rows for an item or a team of the first dimension.
pub(super) struct Made {
    variant: Variant,
    kernel: Kernel,
    /// Rows that a lane of a block has.
    its_rows: usize,
    /// Items of a work group.
    group: usize,
}

/// The kernel of a form, which has been made.
pub(super) fn made_as(all: &mut [Made], variant: Variant) -> Result<&mut Made, Code> {
    all.iter_mut().find(|made| made.is(variant)).ok_or(INVALID)
}

impl Made {
    /// Whether it is that.
    pub fn is(&self, variant: Variant) -> bool {
        self.variant == variant
    }

    /// Begins to run it for so many rows and tokens.
    ///
    /// # Safety
    /// As [`Kernel::run`], of a kernel that does not read rows beyond the last one. `args` are those without local
    /// memory.
    pub unsafe fn run(
        &mut self,
        queue: &Queue,
        args: &[Arg<'_>],
        [rows, tokens]: [usize; 2],
    ) -> Result<Event, Code> {
        let (team, group) = (self.variant.form.team, self.group);
        // Items for each `per` rows, and tokens of an item.
        let (items, per, its) = match team {
            Team::Alone => (1, 1, TILE),
            Team::Local => (ITEMS, 1, TILE),
            Team::Block => (ITEMS, self.its_rows, BLOCK_TOKENS),
        };
        let global = [
            (rows.div_ceil(per) * items).next_multiple_of(group),
            tokens.div_ceil(its),
        ];
        // A chain is a float, or four lanes.
        let room = match team {
            Team::Alone => &[][..],
            Team::Local => &[
                Arg::Local(group * TILE * 4 * size_of::<f32>()),
                Arg::Local(group / ITEMS * TILE * size_of::<f32>()),
            ],
            Team::Block => &[Arg::Local(group * FOR_BLOCKS)],
        };
        let (mut all, len) = ([Arg::Int(0); MOST_ARGS + 2], args.len());
        let places = all.get_mut(..len + room.len()).ok_or(INVALID)?;
        places[..len].copy_from_slice(args);
        places[len..].copy_from_slice(room);
        // SAFETY: local memory has a chain for each item and token, and a sum for each row and token; or so many values of
        // all chains as a block adds up at a time. The rest is the caller's promise.
        unsafe { (self.kernel).run(queue, places, [&global, &[group, 1]]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_follow_what_a_driver_tells() {
        let extensions = |names: &[&str], nvidia| {
            let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
            Extensions::of(&names, nvidia)
        };
        let of = |gpu, unified, of: &Extensions, grouped| {
            let device = Listed {
                gpu,
                unified,
                ..Listed::default()
            };
            Kernels::of(&device, of)[usize::from(grouped)]
        };
        let (none, packs) = (extensions(&[], false), extensions(&[PACKED], false));
        // Processors have caches, and other cores to do this work.
        for unified in [true, false] {
            assert_eq!(of(false, unified, &packs, true), Kernels::default());
        }
        let form = |team, dots| Form { team, dots };
        let phone = of(true, true, &packs, true);
        assert_eq!(phone.order, Order::Rows);
        assert_eq!(phone.form(MANY - 1), form(Team::Local, Dots::Packed));
        assert_eq!(phone.form(MANY), form(Team::Block, Dots::Packed));
        let card = of(true, false, &extensions(&[], true), true);
        assert_eq!(card.order, Order::Tiles);
        assert_eq!(card.few, form(Team::Local, Dots::Packed));
        for (extensions, grouped) in [(&none, true), (&packs, false)] {
            let plain = of(true, false, extensions, grouped);
            assert_eq!(plain.many, form(Team::Block, Dots::Widened));
        }
        let variant = Variant {
            order: Order::Tiles,
            form: card.few,
        };
        let options = none.options("-w", variant);
        for told in ["-D LOCAL_TEAMS", "-D PLAIN_DOTS", "CL1.2", "-D TILES"] {
            assert!(options.contains(told), "{options}");
        }
        assert!(packs.options("-w", variant).contains("-cl-std=CL3.0"));
    }

    #[test]
    fn work_groups_have_as_many_items_as_a_kernel_can_have() {
        let variant = |order, team| Variant {
            order,
            form: Form {
                team,
                dots: Dots::Widened,
            },
        };
        let tile = variant(Order::Tiles, Team::Local);
        assert_eq!(
            [1024, 512, 511, 200, 3].map(|most| tile.group(most)),
            [512, 512, 256, 128, 16]
        );
        assert_eq!(variant(Order::Rows, Team::Local).group(1024), WORK_GROUP);
        assert_eq!(variant(Order::Rows, Team::Block).group(1024), BLOCK_GROUP);
    }
}
