//! Each workload once, small, with rdmalloc as the allocator and every block checked whole (debug assertions), without a device
//! and with one.

use rdmalloc::Rdmalloc;
use rdmalloc_workloads::reach::{Local, Reach};
use rdmalloc_workloads::{Scale, all};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

fn results<R: Reach>(units: u32) -> Vec<(&'static str, u64)> {
    all::<R>().iter().map(|workload| (workload.name, (workload.run)(Scale(units)))).collect()
}

#[test]
fn each_workload_gives_the_same_result_whether_a_device_is_attached_or_not() {
    let local = results::<Local>(1);
    assert!(results::<Local>(3).iter().zip(&local).all(|(more, less)| more != less), "not more work for more units");
    attached(&local);
}

#[cfg(not(feature = "attached"))]
fn attached(_: &[(&'static str, u64)]) {
    println!("skipped: built without the feature `attached`");
}

#[cfg(feature = "attached")]
fn attached(local: &[(&'static str, u64)]) {
    use rdmalloc_workloads::reach::{Attached, attach};
    match attach(HEAP) {
        Ok(()) => assert_eq!(results::<Attached>(1), local),
        Err(reason) => println!("skipped: {reason}"),
    }
}
