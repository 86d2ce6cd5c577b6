//! Benches of Emberflow, one file per layer. `cargo bench -p emberflow-benches`
//! measures; `cargo test --release -p emberflow-benches --benches` runs each
//! once, to see that it works.
#![forbid(unsafe_code)]
