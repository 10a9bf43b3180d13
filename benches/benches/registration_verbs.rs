//! As `registration`, on the first verbs device; soft-RoCE in the guest (`cargo xtask vm`).

use criterion::{Criterion, criterion_group, criterion_main};
use rdmalloc_arenas::registrar::verbs::{ProtectionDomain, Verbs};
use std::sync::Arc;

fn registration(criterion: &mut Criterion) {
    match ProtectionDomain::open(None) {
        Ok(domain) => {
            let domain = Arc::new(domain);
            rdmalloc_benches::registration::bench(criterion, || Verbs::new(Arc::clone(&domain)));
        }
        Err(error) => println!("skipped: no verbs device: {error}"),
    }
}

criterion_group!(name = benches; config = rdmalloc_benches::criterion(); targets = registration);
criterion_main!(benches);
