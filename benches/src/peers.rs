//! What programs do today instead of registering per message, written for comparison in the shape that transports have it.

pub mod bounce;
pub mod cache;
