//! One test for each way a file can lie.
