//! A process of its own, with little address space (`ulimit -v`).

use rdmalloc_arenas::{Access, Arenas, Config, Policy, SLICE, TakeError};
use std::sync::Once;

const MIB: usize = 1 << 20;
/// What is left of the address space when the region is reserved.
const LEFT: usize = 480 * MIB;

fn heap() -> &'static Arenas {
    static LIMITED: Once = Once::new();
    LIMITED.call_once(|| {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let used = pages.split(' ').next().unwrap().parse::<usize>().unwrap() * 4096;
        let limit = libc::rlimit { rlim_cur: (used + LEFT) as u64, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the pointer is to a local of the right type.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
    });
    let (access, serves_children) = (Access::LOCAL_WRITE, false);
    Box::leak(Box::new(Arenas::new(Config { access, policy: Policy::Require, serves_children, tag: 0 })))
}

#[test]
fn a_small_region_is_half_of_the_limit_and_serves_several_heaps_to_its_end() {
    let [a, b, c] = [heap(), heap(), heap()];
    let Err(TakeError::AddressSpace { region, .. }) = a.take(usize::MAX >> 16, 1) else { panic!("not refused") };
    assert!((LEFT / 2..=LEFT).contains(&region), "{} MiB", region / MIB);
    // The first arena of one heap leaves room for those of others.
    let spans = [a, b, c].map(|heap| (heap, heap.take(1, 1).unwrap()));
    assert!(spans.iter().all(|(heap, _)| heap.stats().open_bytes <= region / 8));

    // Empty arenas are kept for the next demand, but not when it is for more than the rest.
    let pieces: Vec<_> = (0..3).map(|_| a.take(region / 5 / SLICE, 1).unwrap()).collect();
    pieces.iter().for_each(|span| a.give(span.address, span.slices));
    let whole = a.take(region / 8 * 4 / SLICE, 1).unwrap();
    a.give(whole.address, whole.slices);
    for (heap, span) in spans {
        heap.give(span.address, span.slices);
        heap.close_all_empty();
        assert_eq!(heap.stats().arenas, 0);
    }
}
