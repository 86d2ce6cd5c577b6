//! `benches/README.md` and the measured part of `README.md`, from the CSV files of one machine.

pub mod csv;
mod judge;
mod page;
mod parts;
mod results;
mod tables;
mod text;

pub use page::{MARKS, Report, folder_of};
pub use results::{FILES, Results};
