//! Benches of Emberflow, one file per layer. `cargo bench -p emberflow-benches`
//! measures; `cargo test --release -p emberflow-benches --benches` runs each
//! once, to see that it works.
//!
//! [`report`] makes `benches/README.md` and the numbers of `README.md` from the CSV files below
//! `benches/results/`.
#![forbid(unsafe_code)]

pub mod report;
