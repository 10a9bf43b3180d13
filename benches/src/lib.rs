//! What the benches share: how long they measure, and the peers they measure against.

pub mod devices;
pub mod peers;
pub mod registration;

use criterion::Criterion;
use std::time::Duration;

/// Criterion with short measurements: a bench of this workspace takes about half a second, all of them under four minutes.
///
/// Honours the command line (a filter, `--baseline`, ...).
#[must_use]
pub fn criterion() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(350))
        .sample_size(20)
        .configure_from_args()
}
