//! What the pages of a heap cost an io_uring: the same figures as `verbs_registering_64_mib_by_pages` prints for verbs.
#![cfg(feature = "uring")]

use io_uring::IoUring;
use rdmalloc_arenas::registrar::uring::Uring;
use rdmalloc_arenas::{Access, Arenas, Config, Pages, Policy, SLICE};
use std::time::Duration;

#[test]
fn uring_registering_64_mib_by_pages() {
    for pages in [Pages::Base, Pages::Transparent] {
        let Ok(ring) = IoUring::new(8) else { return println!("skipped: no io_uring here") };
        let uring = match Uring::new(&ring) {
            Ok(uring) => uring,
            Err(error) => return println!("skipped: {error}"),
        };
        let access = Access::LOCAL_WRITE;
        let heap = Arenas::new(Config { access, policy: Policy::Require, serves_children: false, tag: 78 });
        heap.set_pages(pages);
        let device = heap.attach(Box::new(uring)).unwrap();
        for _ in 0..16 {
            let span = match heap.take((64 << 20) / SLICE, 1) {
                Ok(span) => span,
                Err(error) => return println!("skipped: {error}"),
            };
            let arenas = heap.arenas();
            assert_eq!((arenas[0].pages, arenas[0].memory.len()), (pages, 64 << 20));
            let found = arenas[0].resident().unwrap();
            assert!(pages == Pages::Transparent || found.huge == 0, "{found:?}");
            heap.give(span.address, span.slices);
            assert_eq!(heap.close_all_empty().arenas, 1);
        }
        let stats = &heap.device_stats()[0];
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let (registering, deregistering) = (micros(stats.registering.mean()), micros(stats.deregistering.mean()));
        println!("64 MiB in {pages:?}: registered in {registering:.0} us, deregistered in {deregistering:.0} us");
        heap.detach(device).unwrap();
    }
}
