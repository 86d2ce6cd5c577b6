//! State of sequences on disk: what was computed comes back, bit for bit.
//!
//! `serve --state-dir` saves conversations in a [folder](StateFolder), piece by piece; `run --session` saves one in a
//! [file](SessionFile). A state is used for the tokens, model and arithmetic that it was computed with, and only then.

mod day;
mod file;
mod folder;
mod index;
mod session;
mod slot_file;

pub use self::day::DayCount;
pub use self::folder::{Restoring, SlotState, StateFolder, Step};
pub use self::session::SessionFile;
pub use self::slot_file::{SlotFileError, SlotName};
