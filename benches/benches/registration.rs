//! A buffer made usable for io_uring: registered each time, found in a registration cache, copied through a bounce buffer,
//! or taken from rdmalloc.

use criterion::{Criterion, criterion_group, criterion_main};
use io_uring::IoUring;
use rdmalloc_arenas::registrar::uring::Uring;

fn registration(criterion: &mut Criterion) {
    let ring = match IoUring::new(8) {
        Ok(ring) => ring,
        Err(error) => return println!("skipped: no io_uring: {error}"),
    };
    match Uring::new(&ring) {
        Ok(uring) => rdmalloc_benches::registration::bench(criterion, || uring.clone()),
        Err(error) => println!("skipped: {error}"),
    }
}

criterion_group!(name = benches; config = rdmalloc_benches::criterion(); targets = registration);
criterion_main!(benches);
