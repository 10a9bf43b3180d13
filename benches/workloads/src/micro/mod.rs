//! Workloads that do little but allocate, each in the shape that its field knows it by.

pub mod alloc_test;
pub mod batch;
pub mod cache_scratch;
pub mod churn;
pub mod large;
pub mod larson;
pub mod mstress;
pub mod pair;
pub mod realloc;
pub mod rptest;
pub mod xfree;
pub mod xmalloc;
