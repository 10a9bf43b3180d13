//! What the tests that cross the crates share, and nothing that a program would depend on.
//!
//! [`rig`] (feature `verbs`) is a small face of RC queue pairs: the tests on real verbs and the example `kv` move bytes
//! through it.

#[cfg(feature = "verbs")]
pub mod rig;
