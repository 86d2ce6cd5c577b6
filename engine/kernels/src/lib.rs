//! Emberflow.
