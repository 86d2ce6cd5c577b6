//! Variants of kernels. All compute the same bits; [`Kernels::of`] chooses by the properties of a device.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::handles::{Arg, Context, Event, Found, Kernel, Program, Queue};
use crate::library::Code;
use crate::tiles::TILE_ROWS;
use crate::work::{INVALID, TILE, driver};
use crate::{Error, Listed};

/// Layout of rows in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Row by row, each followed by its scales: the layout that the host reads.
    #[default]
    Rows,
    /// Interleaved in tiles, so that neighbouring work items read neighbouring bytes; see [`Tiles`](crate::Tiles).
    Tiles,
}

/// Work items that share a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Team {
    /// One work item per row.
    #[default]
    Alone,
    /// 16 work items per row, one for each chain; they sum the chains in local memory.
    Local,
    /// One work group per block of rows and tokens: 16 work items compute some rows times some tokens, and each has one
    /// chain of all of these products. For many tokens.
    Block,
}

/// Integer multiplication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dots {
    /// Bytes are widened to 16 bits.
    #[default]
    Widened,
    /// Dot products of four bytes, by an instruction; in tests also by plain arithmetic.
    Packed,
}

/// Variant of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Form {
    /// Work items that share a product.
    pub team: Team,
    /// Integer multiplication.
    pub dots: Dots,
}

/// From this number of tokens on [`Kernels::many`] is used.
pub const MANY: usize = 16;

/// The kernels for rows of one format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Kernels {
    /// Layout of rows.
    pub order: Order,
    /// Variant for fewer than [`MANY`] tokens.
    pub few: Form,
    /// Variant for [`MANY`] tokens or more.
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
    /// Kernels of a device for float products and for integer products:
    ///
    /// | device | layout | few tokens | many tokens |
    /// |---|---|---|---|
    /// | CPU | rows | [`Team::Alone`] | [`Team::Alone`] |
    /// | GPU that shares the machine's memory | rows, which the host reads too | [`Team::Local`] | [`Team::Block`] |
    /// | GPU with separate memory | tiles | [`Team::Local`] | [`Team::Block`] |
    ///
    /// GPUs use integer dot products if they have them.
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

    /// The variant for a number of tokens.
    pub fn form(&self, tokens: usize) -> Form {
        if tokens < MANY { self.few } else { self.many }
    }

    /// Both variants.
    pub(super) fn variants(&self) -> [Variant; 2] {
        let order = self.order;
        [self.few, self.many].map(|form| Variant { order, form })
    }
}

/// Maximum arguments of a kernel, without local memory.
const MOST_ARGS: usize = 13;

/// Work items per team.
const ITEMS: usize = 16;

const PACKED: &str = "cl_khr_integer_dot_product";

/// Tokens per block. They share each read of a row.
const BLOCK_TOKENS: usize = 8;

/// Local memory per work item of a block, in bytes: chains of a part of its values.
const FOR_BLOCKS: usize = 32;

/// Work items per group of [`Team::Alone`]; it divides a cluster.
pub(super) const WORK_GROUP: usize = 64;

/// Work items per group of [`Team::Block`].
const BLOCK_GROUP: usize = 128;

/// Extensions that kernels use.
pub(super) struct Extensions {
    dots: Option<DotFunction>,
}

/// Function for dot products of four bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DotFunction {
    Standard,
    /// NVIDIA's instruction `dp4a`. Their driver does not list the extension.
    Nvidia,
}

impl Extensions {
    /// Extensions by their names; `nvidia` if the device has `dp4a`.
    pub fn of(names: &[String], nvidia: bool) -> Self {
        let standard = names.iter().any(|name| name == PACKED);
        Self {
            dots: match standard {
                true => Some(DotFunction::Standard),
                false => nvidia.then_some(DotFunction::Nvidia),
            },
        }
    }

    /// Appends the build options of a variant to those of a format.
    fn options(&self, format: &str, variant: Variant) -> String {
        let Variant { order, form } = variant;
        let mut options = format.to_owned();
        let packs = form.dots == Dots::Packed;
        // Integer dot products are functions of OpenCL C 3.0.
        options.push_str(match packs && self.dots == Some(DotFunction::Standard) {
            true => " -cl-std=CL3.0",
            false => " -cl-std=CL1.2",
        });
        options.push_str(&format!(" -D TILE={TILE}"));
        if order == Order::Tiles {
            options.push_str(&format!(" -D TILES -D TILE_ROWS={TILE_ROWS}"));
        }
        for (set, option) in [
            (form.team == Team::Local, " -D LOCAL_TEAMS"),
            (packs, " -D PACKED_DOTS"),
            (packs && self.dots.is_none(), " -D PLAIN_DOTS"),
            (
                packs && self.dots == Some(DotFunction::Nvidia),
                " -D NVIDIA_DOTS",
            ),
        ] {
            if set {
                options.push_str(option);
            }
        }
        options
    }
}

/// A form for a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    pub order: Order,
    pub form: Form,
}

impl Variant {
    /// Work items per group of a kernel that allows `most`. With [`Team::Local`] in tiles a group computes a whole tile.
    fn group(self, most: usize) -> usize {
        let wanted = match (self.form.team, self.order) {
            (Team::Local, Order::Tiles) => ITEMS * TILE_ROWS,
            (Team::Block, _) => BLOCK_GROUP,
            (Team::Local, Order::Rows) | (Team::Alone, _) => WORK_GROUP,
        };
        match most >= wanted {
            true => wanted,
            // A power of two, and at least a team.
            false => 1 << most.max(ITEMS).ilog2(),
        }
    }
}

/// Format of rows.
#[derive(Clone, Copy)]
pub(super) struct Format<'a> {
    /// Build options.
    pub options: &'a str,
    /// Products are integer products of groups.
    pub grouped: bool,
}

/// Compiler of kernels for a device.
pub(super) struct Maker<'a> {
    pub device: &'a Found,
    pub context: &'a Context,
    pub extensions: &'a Extensions,
}

impl Maker<'_> {
    /// Compiles a program.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn program(&self, source: &str, options: &str, variant: Variant) -> Result<Program, Error> {
        let options = self.extensions.options(options, variant);
        let built = self.device.build(self.context, source, &options);
        built.map_err(|log| Error(format!("cannot build its kernels: {}", log.trim())))
    }

    /// Compiles the kernel `name` of `source`.
    ///
    /// # Errors
    /// See [`Maker::program`].
    pub fn kernel(
        &self,
        [source, name]: [&str; 2],
        format: Format<'_>,
        variant: Variant,
    ) -> Result<Made, Error> {
        let Format { options, grouped } = format;
        // Bytes of a chain, a float or a float4, and rows per lane.
        let (chain, lane_rows) = if grouped { (4, 4) } else { (16, 2) };
        let values = FOR_BLOCKS / chain;
        let blocks = format!(
            "{options} -D BLOCKS -D BLOCK_TOKENS={BLOCK_TOKENS} -D LANE_ROWS={lane_rows} -D VALUES_PER_ROUND={values}"
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
            lane_rows,
        })
    }
}

/// A compiled kernel over rows (first dimension) and tokens (second).
pub(super) struct Made {
    variant: Variant,
    kernel: Kernel,
    /// Rows per lane of a block.
    lane_rows: usize,
    /// Work items per group.
    group: usize,
}

/// The compiled kernel of a variant.
pub(super) fn made_as(kernels: &mut [Made], variant: Variant) -> Result<&mut Made, Code> {
    let kernel = kernels.iter_mut().find(|made| made.is(variant));
    kernel.ok_or(INVALID)
}

impl Made {
    /// Whether this is the kernel of `variant`.
    pub fn is(&self, variant: Variant) -> bool {
        self.variant == variant
    }

    /// Starts the kernel for `rows` rows and `tokens` tokens.
    ///
    /// # Safety
    /// See [`Kernel::run`]. The kernel does not read rows beyond the last one; `args` are its arguments without local
    /// memory.
    pub unsafe fn run(
        &mut self,
        queue: &Queue,
        args: &[Arg<'_>],
        [rows, tokens]: [usize; 2],
    ) -> Result<Event, Code> {
        let (team, group) = (self.variant.form.team, self.group);
        // A team of `items` work items computes `team_rows` rows and `team_tokens` tokens.
        let (items, team_rows, team_tokens) = match team {
            Team::Alone => (1, 1, TILE),
            Team::Local => (ITEMS, 1, TILE),
            Team::Block => (ITEMS, self.lane_rows, BLOCK_TOKENS),
        };
        let global = [
            (rows.div_ceil(team_rows) * items).next_multiple_of(group),
            tokens.div_ceil(team_tokens),
        ];
        // A chain is a float or a float4.
        let local_memory = match team {
            Team::Alone => &[][..],
            Team::Local => &[
                Arg::Local(group * TILE * 4 * size_of::<f32>()),
                Arg::Local(group / ITEMS * TILE * size_of::<f32>()),
            ],
            Team::Block => &[Arg::Local(group * FOR_BLOCKS)],
        };
        let (mut buffer, len) = ([Arg::Int(0); MOST_ARGS + 2], args.len());
        let whole = buffer.get_mut(..len + local_memory.len());
        let whole = whole.ok_or(INVALID)?;
        whole[..len].copy_from_slice(args);
        whole[len..].copy_from_slice(local_memory);
        // SAFETY: local memory holds a chain per work item and token, and a sum per row and token; for blocks, the chains
        // of `VALUES_PER_ROUND` values of each work item. The rest is the caller's promise.
        unsafe { (self.kernel).run(queue, whole, [&global, &[group, 1]]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_follow_the_properties_of_a_device() {
        let extensions = |names: &[&str], nvidia| {
            let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
            Extensions::of(&names, nvidia)
        };
        let kernels = |gpu, unified, extensions: &Extensions, grouped| {
            let device = Listed {
                gpu,
                unified,
                ..Listed::default()
            };
            Kernels::of(&device, extensions)[usize::from(grouped)]
        };
        let (none, packs) = (extensions(&[], false), extensions(&[PACKED], false));
        // Processors have caches, and other cores to do this work.
        for unified in [true, false] {
            assert_eq!(kernels(false, unified, &packs, true), Kernels::default());
        }
        let form = |team, dots| Form { team, dots };
        let phone = kernels(true, true, &packs, true);
        assert_eq!(phone.order, Order::Rows);
        assert_eq!(phone.form(MANY - 1), form(Team::Local, Dots::Packed));
        assert_eq!(phone.form(MANY), form(Team::Block, Dots::Packed));
        let card = kernels(true, false, &extensions(&[], true), true);
        assert_eq!(card.order, Order::Tiles);
        assert_eq!(card.few, form(Team::Local, Dots::Packed));
        for (extensions, grouped) in [(&none, true), (&packs, false)] {
            let plain = kernels(true, false, extensions, grouped);
            assert_eq!(plain.many, form(Team::Block, Dots::Widened));
        }
        let variant = Variant {
            order: Order::Tiles,
            form: card.few,
        };
        let options = none.options("-w", variant);
        for option in ["-D LOCAL_TEAMS", "-D PLAIN_DOTS", "CL1.2", "-D TILES"] {
            assert!(options.contains(option), "{options}");
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
