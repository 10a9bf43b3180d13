//! Memory that a device can reach: large arenas, registered in advance, found by address.

pub mod access;
pub mod registrar;

pub use access::Access;
pub use registrar::{Keys, Limits, Registered, Registrar};
