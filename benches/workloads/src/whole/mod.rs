//! Workloads in which allocating is a part, as in the programs that an allocator is chosen for.

pub mod json;
pub mod maps;
pub mod rpc;
pub mod tasks;
