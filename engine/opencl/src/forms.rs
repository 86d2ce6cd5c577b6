//! Forms of kernels that compute the same, and which of them a device can have. The bits do not depend on the form; the
//! time does.

use std::fmt;

use opencl_sys::CL_DEVICE_MAX_WORK_GROUP_SIZE;
use serde::{Deserialize, Serialize};

use crate::handles::{Arg, Context, Event, Found, Kernel, Program, Queue};
use crate::library::Code;
use crate::tiles::TILE_ROWS;
use crate::work::{INVALID, TILE, driver};
use crate::{Error, GROUP_SIZES, MOST_ALONE, USUAL_GROUP};

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
    /// 16 items of a subgroup, which shuffle them.
    Subgroup,
    /// A work group has a block of rows and tokens: 16 items have some of its rows times some tokens, and each a chain of
    /// all these. Only for many tokens.
    Block,
}

/// How products are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dots {
    /// Those of integers by numbers of 16 bits, others by floats.
    #[default]
    Widened,
    /// Of four bytes at once. A device without such an instruction computes them with plain arithmetic; that is no
    /// form to choose.
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

/// A kernel, and how it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    /// Its form.
    pub form: Form,
    /// Items of its work groups.
    pub group: usize,
}

/// Those for one token, for several, and for many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Ways {
    /// For one.
    pub one: Way,
    /// For several.
    pub several: Way,
    /// For [`MANY`] and more.
    pub many: Way,
}

/// The least number of tokens that are many.
pub const MANY: usize = 16;

/// The kernels of an FFN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernels {
    /// How neurons lie.
    pub order: Order,
    /// Hidden values.
    pub hidden: Ways,
    /// Items of the work groups of sums.
    pub sums: usize,
}

impl Default for Way {
    fn default() -> Self {
        Form::default().into()
    }
}

impl Default for Kernels {
    fn default() -> Self {
        Self {
            order: Order::default(),
            hidden: Ways::default(),
            sums: USUAL_GROUP,
        }
    }
}

impl From<Form> for Way {
    fn from(form: Form) -> Self {
        Self {
            form,
            group: USUAL_GROUP,
        }
    }
}

impl From<Form> for Ways {
    fn from(form: Form) -> Self {
        let [one, several, many] = [form.into(); 3];
        Self { one, several, many }
    }
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
            Team::Local => "teams by local memory",
            Team::Subgroup => "teams by subgroups",
            Team::Block => "a block a group",
        })?;
        match self.dots {
            Dots::Widened => Ok(()),
            Dots::Packed => f.write_str(", integer dot products"),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in groups of {}", self.form, self.group)
    }
}

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { one, several, many } = self;
        one.fmt(f)?;
        if several != one {
            write!(f, ", for several rows {several}")?;
        }
        match many == several {
            true => Ok(()),
            false => write!(f, ", for many {many}"),
        }
    }
}

impl fmt::Display for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            order,
            hidden,
            sums,
        } = self;
        write!(f, "{order}, {hidden}, sums in groups of {sums}")
    }
}

impl Ways {
    /// That for so many tokens.
    pub fn of(&self, tokens: usize) -> Way {
        match tokens {
            0 | 1 => self.one,
            MANY.. => self.many,
            _ => self.several,
        }
    }

    /// All.
    pub fn each(&self) -> [Way; 3] {
        [self.one, self.several, self.many]
    }

    /// All.
    pub fn each_mut(&mut self) -> [&mut Way; 3] {
        [&mut self.one, &mut self.several, &mut self.many]
    }

    /// Whether the work groups are such as there are.
    pub fn is_sound(&self) -> bool {
        self.each().iter().all(|way| {
            let fits = way.form.team != Team::Alone || way.group <= MOST_ALONE;
            fits && GROUP_SIZES.contains(&way.group)
        })
    }
}

impl Kernels {
    /// Whether the work groups are such as there are.
    pub fn is_sound(&self) -> bool {
        self.hidden.is_sound() && GROUP_SIZES.contains(&self.sums)
    }
}

/// Most arguments of a kernel.
const MOST_ARGS: usize = 13;

/// Items of a team.
const ITEMS: usize = 16;

const SHUFFLE: &str = "cl_khr_subgroup_shuffle";
const INTEL_SHUFFLE: &str = "cl_intel_subgroups";
const INTEL_SIZE: &str = "cl_intel_required_subgroup_size";
const QUALCOMM_SIZE: &str = "cl_qcom_reqd_sub_group_size";
const PACKED: &str = "cl_khr_integer_dot_product";

/// Tokens of a block, which share the reading of its rows.
const BLOCK_TOKENS: usize = 8;

/// Bytes of local memory that an item of a block has: for the chains of some of its values at a time.
const FOR_BLOCKS: usize = 32;

/// Extensions that forms use.
pub(super) struct Extensions {
    shuffles: bool,
    /// By the vendor's functions.
    its_own: bool,
    /// The attribute that fixes the size of subgroups.
    size: Option<&'static str>,
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
        let has = |name: &str| names.iter().any(|found| found == name);
        Self {
            shuffles: has(SHUFFLE) || has(INTEL_SHUFFLE),
            its_own: !has(SHUFFLE),
            size: match () {
                () if has(INTEL_SIZE) => Some("intel_reqd_sub_group_size(16)"),
                () if has(QUALCOMM_SIZE) => Some("qcom_reqd_sub_group_size(\"half\")"),
                () => None,
            },
            dots: match () {
                () if has(PACKED) => Some(ItsDots::Standard),
                () if nvidia => Some(ItsDots::Nvidia),
                () => None,
            },
        }
    }

    /// Forms that may be chosen, the simplest first; `grouped` where products are those of integers.
    pub fn forms(&self, grouped: bool) -> Vec<Form> {
        let teams = [Team::Alone, Team::Local, Team::Subgroup, Team::Block];
        let teams = teams.into_iter().filter(|&team| self.has(team));
        let dots = match grouped && self.dots.is_some() {
            true => &[Dots::Widened, Dots::Packed][..],
            false => &[Dots::Widened],
        };
        let of = |team| dots.iter().map(move |&dots| Form { team, dots });
        let mut forms: Vec<Form> = teams.flat_map(of).collect();
        forms.sort_by_key(|form| form.dots == Dots::Packed);
        forms
    }

    fn has(&self, team: Team) -> bool {
        team != Team::Subgroup || self.shuffles
    }

    /// Build options of a form in an order, behind those of a format.
    fn options(&self, options: &str, variant: Variant) -> String {
        let Variant { order, form } = variant;
        let mut all = options.to_owned();
        // Shuffles and integer products are functions of newer versions.
        let plain = form.dots != Dots::Packed && form.team != Team::Subgroup;
        all.push_str(
            match !plain && (self.dots == Some(ItsDots::Standard) || self.shuffles) {
                true => " -cl-std=CL3.0",
                false => " -cl-std=CL1.2",
            },
        );
        all.push_str(&format!(" -D TILE={TILE}"));
        if order == Order::Tiles {
            all.push_str(&format!(" -D TILES -D TILE_ROWS={TILE_ROWS}"));
        }
        let size = self
            .size
            .map_or(String::new(), |size| format!(" -D ITS_SIZE={size}"));
        for (set, more) in [
            (form.team == Team::Local, " -D LOCAL_TEAMS"),
            (form.team == Team::Subgroup, " -D SUBGROUP_TEAMS"),
            (form.team == Team::Subgroup, &size[..]),
            (
                form.team == Team::Subgroup && self.its_own,
                " -D ITS_SHUFFLE",
            ),
            (form.dots == Dots::Packed, " -D PACKED_DOTS"),
            (
                form.dots == Dots::Packed && self.dots.is_none(),
                " -D PLAIN_DOTS",
            ),
            (
                form.dots == Dots::Packed && self.dots == Some(ItsDots::Nvidia),
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
    /// The compiler's log, or a form that this device cannot have.
    pub fn program(&self, source: &str, options: &str, variant: Variant) -> Result<Program, Error> {
        if !self.extensions.has(variant.form.team) {
            return Err(Error("has no shuffles within subgroups".into()));
        }
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
            Team::Alone | Team::Local | Team::Subgroup => options,
        };
        let program = self.program(source, options, variant)?;
        let kernel = driver("make kernels", program.kernel(name))?;
        let made = Made {
            variant,
            kernel,
            its_rows,
            most: self.device.number(CL_DEVICE_MAX_WORK_GROUP_SIZE) as usize,
        };
        if variant.form.team == Team::Subgroup {
            let size = self.device.subgroup(&made.kernel, USUAL_GROUP);
            if size.is_none_or(|size| size == 0 || size % ITEMS != 0) {
                let size = size.map_or("unknown size".into(), |size| format!("{size} items"));
                return Err(Error(format!(
                    "has subgroups of {size}, and a team of {ITEMS} is to lie in one"
                )));
            }
        }
        Ok(made)
    }
}

/// A kernel with rows for an item or a team of the first dimension.
pub(super) struct Made {
    variant: Variant,
    kernel: Kernel,
    /// Rows that a lane of a block has.
    its_rows: usize,
    most: usize,
}

/// The kernel of a form, which has been made.
pub(super) fn made_as(all: &mut [Made], order: Order, form: Form) -> Result<&mut Made, Code> {
    let variant = Variant { order, form };
    let found = all.iter_mut().find(|made| made.is(variant));
    found.ok_or(INVALID)
}

impl Made {
    /// Whether it is that.
    pub fn is(&self, variant: Variant) -> bool {
        self.variant == variant
    }

    /// Begins to run it for so many rows and tokens, in work groups of `group` items.
    ///
    /// # Safety
    /// As [`Kernel::run`], of a kernel that does not read rows beyond the last one. `args` are those without local
    /// memory.
    pub unsafe fn run(
        &mut self,
        queue: &Queue,
        args: &[Arg<'_>],
        [rows, tokens, group]: [usize; 3],
    ) -> Result<Event, Code> {
        let team = self.variant.form.team;
        // Items for each `per` rows, and tokens of an item.
        let (items, per, its) = match team {
            Team::Alone => (1, 1, TILE),
            Team::Local | Team::Subgroup => (ITEMS, 1, TILE),
            Team::Block => (ITEMS, self.its_rows, BLOCK_TOKENS),
        };
        if group > self.most || !group.is_multiple_of(items) {
            return Err(INVALID);
        }
        let global = [
            (rows.div_ceil(per) * items).next_multiple_of(group),
            tokens.div_ceil(its),
        ];
        // A chain is a float, or four lanes.
        let room = match team {
            Team::Alone | Team::Subgroup => &[][..],
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
    fn forms_follow_extensions() {
        let variant = |order, form| Variant { order, form };
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
            Extensions::of(&names, false)
        };
        assert_eq!(of(&[]).forms(true).len(), 3);
        assert_eq!(of(&[PACKED]).forms(true).len(), 6);
        assert_eq!(of(&[PACKED]).forms(false).len(), 3);
        assert_eq!(Extensions::of(&[], true).forms(true).len(), 6);
        let all = of(&[PACKED, SHUFFLE, INTEL_SIZE]).forms(true);
        assert_eq!(all.len(), 8);
        assert_eq!(all[0], Form::default());
        assert!(all[4..].iter().all(|form| form.dots == Dots::Packed));
        let form = Form {
            team: Team::Subgroup,
            dots: Dots::Packed,
        };
        let options = of(&[INTEL_SHUFFLE]).options("-w", variant(Order::Tiles, form));
        for told in [
            "-D ITS_SHUFFLE",
            "-D PLAIN_DOTS",
            "-cl-std=CL3.0",
            "-D TILES",
        ] {
            assert!(options.contains(told), "{options}");
        }
        assert!(!options.contains("ITS_SIZE"), "{options}");
        // Forms that any device has are of the version that any device has.
        let options = of(&[PACKED]).options("-w", variant(Order::Rows, Form::default()));
        assert!(options.contains("-cl-std=CL1.2"), "{options}");
    }
}
