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

/// On two devices; where there is only one, on two protection domains of it.
fn on_two(criterion: &mut Criterion) {
    let names = rdmalloc_arenas::registrar::verbs::devices();
    let Some(first) = names.first() else { return println!("skipped: no verbs device") };
    let domains = [first, names.get(1).unwrap_or(first)].map(|name| ProtectionDomain::open(Some(name)).map(Arc::new));
    match domains {
        [Ok(first), Ok(second)] => {
            let domains = [first, second];
            rdmalloc_benches::devices::bench(criterion, |index| Verbs::new(Arc::clone(&domains[index])));
        }
        [Err(error), _] | [_, Err(error)] => println!("skipped: {error}"),
    }
}

criterion_group!(name = benches; config = rdmalloc_benches::criterion(); targets = registration, on_two);
criterion_main!(benches);
