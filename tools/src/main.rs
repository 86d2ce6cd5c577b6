//! The `emberflow` program.
fn main() {}
