//! Which kernels a device is fastest with: each that it may have is made, compared with the CPU and timed. Wrong ones are
//! told and not taken. First the order of neurons, then who computes a row, then how integers are multiplied, then the sizes
//! of work groups: so not all of their products are tried.

use serde::{Deserialize, Serialize};

use super::compare::{Both, FASTER, Seconds, is_wrong};
use super::{Choices, DeviceError, Dots, Form, Kernels, Order, Ways};

/// What came of a form that was tried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It has the CPU's bits, or deviates by so much of the largest sum; seconds for one row, for several and for many.
    Right {
        /// See above.
        worst: f32,
        /// See above.
        same_bits: bool,
        /// See above.
        seconds: Seconds,
    },
    /// It computes something else: by how much of the largest sum.
    Wrong(f32),
    /// The driver makes or runs no such kernel: why.
    Refused(String),
}

/// A form that was tried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// How rows lay.
    pub order: Order,
    /// The form.
    pub form: Form,
    /// What came of it.
    pub outcome: Outcome,
}

impl Tried {
    /// Whether it was right, and has the CPU's bits.
    fn is_right(&self, bits: bool) -> bool {
        match self.outcome {
            Outcome::Right { same_bits, .. } => same_bits || !bits,
            Outcome::Wrong(_) | Outcome::Refused(_) => false,
        }
    }

    /// Whether such numbers can be.
    pub(super) fn is_sound(&self) -> bool {
        match &self.outcome {
            Outcome::Right { worst, seconds, .. } => {
                worst.is_finite() && seconds.iter().all(|s| s.is_finite() && *s >= 0.0)
            }
            Outcome::Wrong(_) | Outcome::Refused(_) => true,
        }
    }

    fn seconds(&self) -> Seconds {
        match self.outcome {
            Outcome::Right { seconds, .. } => seconds,
            Outcome::Wrong(_) | Outcome::Refused(_) => [f64::INFINITY; 3],
        }
    }

    /// Takes down what came out, and tells what is wrong.
    pub(super) fn told(self, device: &str, of: &str) -> Self {
        let (order, form) = (self.order, self.form);
        match &self.outcome {
            Outcome::Right { seconds, .. } => {
                tracing::debug!(device, of, %order, %form, ?seconds, "kernels tried");
            }
            Outcome::Wrong(by) => {
                tracing::warn!(device, of, %order, %form, by, "wrong kernels: not used");
            }
            Outcome::Refused(why) => {
                tracing::warn!(device, of, %order, %form, why, "kernels that the driver refuses");
            }
        }
        self
    }
}

/// Whether all that is right has bits of its own: these may depend on the form, and times must not decide on them.
fn has_own_bits(tried: &[Tried]) -> bool {
    !tried.iter().any(|t| t.is_right(true))
}

/// What times are of: one row, several, many; or the first two together, for what all have.
#[derive(Clone, Copy)]
enum Of {
    One,
    Several,
    Many,
    All,
}

impl Of {
    fn time(self, [one, several, many]: Seconds) -> f64 {
        match self {
            Self::One => one,
            Self::Several => several,
            Self::Many => many,
            Self::All => one + several,
        }
    }
}

/// The fastest right one. The first of nearly equal ones.
fn best(tried: &[Tried], of: Of) -> Option<&Tried> {
    let own = has_own_bits(tried);
    let time = |t: &Tried| of.time(t.seconds());
    let mut right = tried.iter().filter(|t| t.is_right(!own));
    let first = right.next()?;
    let faster = |best, next| match time(next) < time(best) * FASTER && !own {
        true => next,
        false => best,
    };
    Some(right.fold(first, faster))
}

/// The ways of the fastest right forms.
pub(super) fn best_ways(tried: &[Tried]) -> Option<Ways> {
    let way = |of| Some(best(tried, of)?.form.into());
    Some(Ways {
        one: way(Of::One)?,
        several: way(Of::Several)?,
        many: way(Of::Many)?,
    })
}

/// Tries forms, the simplest first: those with integer dot products only of teams that are fastest without.
pub(super) fn try_forms(
    forms: &[Form],
    tried: &mut Vec<Tried>,
    mut attempt: impl FnMut(Form) -> Tried,
) {
    for packs in [false, true] {
        let ways = best_ways(tried);
        for &form in forms {
            let fastest = |ways: Ways| {
                let teams = ways.each().map(|way| way.form.team);
                teams.contains(&form.team)
            };
            let fits = !packs || ways.is_none_or(fastest);
            let known = tried.iter().any(|t| t.form == form);
            if (form.dots == Dots::Packed) == packs && fits && !known {
                tried.push(attempt(form));
            }
        }
    }
}

/// The kernels with which a device is fastest, and what was tried; those of the first form if none was right.
pub(super) fn choose(
    both: &mut Both<'_>,
    choices: &Choices,
) -> Result<(Kernels, Vec<Tried>), DeviceError> {
    let first = choices.first();
    if choices.is_one() {
        return Ok((first, Vec::new()));
    }
    let mut tried = Vec::new();
    for &order in &choices.orders {
        tried.push(attempt(both, order, first.hidden.one.form));
    }
    let order = best(&tried, Of::All).map_or(first.order, |t| t.order);
    let mut others = tried.extract_if(.., |t| t.order != order).collect();
    try_forms(&choices.forms, &mut tried, |form| {
        attempt(both, order, form)
    });
    let ways = best_ways(&tried);
    tried.append(&mut others);
    let Some(hidden) = ways else {
        return Ok((first, tried));
    };
    let kernels = Kernels {
        order,
        hidden,
        sums: first.sums,
    };
    Ok((with_groups(both, kernels, &choices.groups)?, tried))
}

/// What comes of a form.
fn attempt(both: &mut Both<'_>, order: Order, form: Form) -> Tried {
    let mut outcome = || -> Result<Outcome, DeviceError> {
        both.set(&Kernels {
            order,
            hidden: form.into(),
            ..Kernels::default()
        })?;
        let apart = both.compare_all()?;
        Ok(match is_wrong(apart.worst) {
            true => Outcome::Wrong(apart.worst),
            false => Outcome::Right {
                worst: apart.worst,
                same_bits: apart.same_bits,
                seconds: both.alone()?,
            },
        })
    };
    let outcome = outcome().unwrap_or_else(|e| Outcome::Refused(e.what));
    let tried = Tried {
        order,
        form,
        outcome,
    };
    tried.told(&both.device.facts().name, "FFN")
}

/// The sizes of work groups with which kernels are fastest, one after the other; the device has them then. What its driver
/// refuses is none.
fn with_groups(
    both: &mut Both<'_>,
    mut best: Kernels,
    groups: &[usize],
) -> Result<Kernels, DeviceError> {
    both.set(&best)?;
    let mut least = both.alone()?;
    // Of the kernel for one row, for several, for many, and of sums, which all have.
    for (i, of) in [Of::One, Of::Several, Of::Many, Of::All]
        .into_iter()
        .enumerate()
    {
        for &group in groups {
            let mut kernels = best;
            match kernels.hidden.each_mut().into_iter().nth(i) {
                Some(way) => way.group = group,
                None => kernels.sums = group,
            }
            if kernels == best {
                continue;
            }
            match both.set(&kernels).and_then(|()| both.alone()) {
                Ok(took) if of.time(took) < of.time(least) * FASTER => {
                    (best, least) = (kernels, took);
                }
                _ => {}
            }
        }
    }
    both.set(&best)?;
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::super::Team;
    use super::*;

    fn tried(form: Form, outcome: Outcome) -> Tried {
        Tried {
            order: Order::Rows,
            form,
            outcome,
        }
    }

    fn right(same_bits: bool, [one, several]: [f64; 2]) -> Outcome {
        Outcome::Right {
            worst: 0.0,
            same_bits,
            seconds: [one, several, several],
        }
    }

    fn forms() -> Vec<Form> {
        let teams = [Team::Alone, Team::Local, Team::Subgroup, Team::Block];
        let of = |dots| teams.map(|team| Form { team, dots });
        [of(Dots::Widened), of(Dots::Packed)].concat()
    }

    #[test]
    fn the_fastest_right_forms_are_taken_for_one_row_several_and_many() {
        let forms = forms();
        let mut all = Vec::new();
        try_forms(&forms, &mut all, |form| {
            let outcome = match (form.team, form.dots) {
                (Team::Alone, Dots::Widened) => right(true, [3.0, 3.0]),
                (Team::Local, Dots::Widened) => right(true, [2.0, 5.0]),
                (Team::Subgroup, Dots::Widened) => Outcome::Wrong(0.5),
                (Team::Alone, Dots::Packed) => right(true, [2.5, 1.0]),
                (Team::Local, Dots::Packed) => Outcome::Refused("no".into()),
                (Team::Subgroup, Dots::Packed) => unreachable!("of a team that is wrong"),
                (Team::Block, dots) => Outcome::Right {
                    worst: 0.0,
                    same_bits: true,
                    seconds: [9.0, 9.0, if dots == Dots::Packed { 0.2 } else { 0.4 }],
                },
            };
            tried(form, outcome)
        });
        assert_eq!(all.len(), 7);
        let ways = best_ways(&all).unwrap();
        assert_eq!(ways.one.form, forms[1]);
        assert_eq!(ways.several.form, forms[4]);
        assert_eq!(ways.many.form, forms[7]);
        // Nothing is right.
        all.retain(|t| !t.is_right(false));
        assert_eq!(best_ways(&all), None);
    }

    #[test]
    fn times_do_not_decide_on_bits() {
        let forms = forms();
        let mut all = vec![
            tried(forms[0], right(false, [9.0, 9.0])),
            tried(forms[1], right(false, [1.0, 1.0])),
        ];
        assert_eq!(best_ways(&all).unwrap(), forms[0].into());
        // And the CPU's are taken however slow.
        all.push(tried(forms[2], right(true, [99.0, 99.0])));
        assert_eq!(best_ways(&all).unwrap(), forms[2].into());
    }
}
