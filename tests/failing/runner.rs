//! Runs the script with a fault in one call after the other, and without, and looks whether all is as it should be.

use crate::hooks::{self, Fault, Kind};
use crate::script::{self, Refused};
use rdmalloc::{Budget, Rdmalloc};
use rdmalloc_tests::{Ledger, is_alone};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

const HEAP: Rdmalloc = Rdmalloc::new();

/// What may be registered beside what is open: so little that arenas are small, and the script does not take long.
const ROOM: u64 = 48 << 20;
/// Fills the first arena, which is not small.
const FIRST: usize = 29 << 20;

fn ledgers() -> [Ledger; 3] {
    [(); 3].map(|()| Ledger::new())
}

fn registered(ledgers: &[Ledger; 3]) -> u64 {
    ledgers.iter().map(|ledger| ledger.live() as u64).sum()
}

fn make_room() {
    HEAP.set_budget(Budget { bytes: HEAP.registered_bytes() + 2 * HEAP.open_bytes() + ROOM, ..Budget::NONE });
}

/// Runs the script without a fault, and looks whether all is as it should be.
fn run_whole(after: &str) {
    make_room();
    let ledgers = ledgers();
    let refused = script::run(&ledgers);
    assert_eq!(refused, Refused::default(), "{after}");
    HEAP.trim();
    assert_eq!(registered(&ledgers), 0, "{after}");
}

/// Runs it with one, and then without. The number of calls, if the one that was chosen is not among them.
fn run_with(kind: Kind, at: u64, fault: Fault) -> Result<Refused, u64> {
    let ledgers = ledgers();
    make_room();
    hooks::arm(kind, at, fault);
    let refused = script::run(&ledgers);
    let (calls, failed) = (hooks::count(kind), hooks::disarm());
    HEAP.trim();
    let after = format!("after {kind:?} {at}, {fault:?}, {refused:?}");
    // What was not ended by its device stays; else nothing.
    let stuck = if kind == Kind::Deregister { failed } else { 0 };
    assert_eq!(registered(&ledgers), stuck, "{after}");
    hooks::arm(kind, 0, fault);
    run_whole(&after);
    assert!(kind != Kind::Key || hooks::count(kind) > 0, "{after}: new threads get no cache of their own any more");
    assert_eq!(registered(&ledgers), stuck, "{after}");
    if failed == 0 { Err(calls) } else { Ok(refused) }
}

/// In a child of fork, so that it is the first time for all that is made but once.
fn first_call(kind: Kind, at: u64, fault: Fault) -> bool {
    // SAFETY: this is the process's only thread that is in the middle of anything.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let result = std::panic::catch_unwind(|| run_with(kind, at, fault));
        let code = match result {
            Ok(Ok(_)) => 0,
            Ok(Err(_)) => 1,
            Err(_) => 2,
        };
        // SAFETY: ends the child, without the harness.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) < 2, "{kind:?} {at}, {fault:?}: status {status:#x}");
    libc::WEXITSTATUS(status) == 0
}

/// Every call of a kind, until there are no more; first when it is the first time, then when it is not.
pub fn every_call(kind: Kind, fault: Fault) {
    if !is_alone() {
        return;
    }
    let _first = vec![1u8; FIRST];
    let fresh = (1..).find(|at| !first_call(kind, *at, fault)).unwrap_or(0);
    run_whole("before all");
    let mut with_refusals = 0;
    for at in 1.. {
        match run_with(kind, at, fault) {
            Ok(refused) => with_refusals += usize::from(refused != Refused::default()),
            Err(calls) => {
                println!("{kind:?} {fault:?}: {} calls first, {calls} later, {with_refusals} refusals", fresh - 1);
                println!("{}", HEAP.stats());
                assert!(calls < at);
                break;
            }
        }
    }
}

/// Every call of a kind stalls, while another thread goes on with what it has.
pub fn every_stall(kind: Kind) {
    if !is_alone() {
        return;
    }
    let _first = vec![1u8; FIRST];
    run_whole("before all");
    let (work, others) = mpsc::channel::<()>();
    let (done, look) = mpsc::channel();
    let other = std::thread::spawn(move || {
        let mut kept: Vec<Box<u64>> = (0..100).map(Box::new).collect();
        for () in others {
            // No more than it frees.
            for _ in 0..kept.len() {
                let last = kept.pop().map_or(0, |number| *number);
                kept.insert(0, Box::new(last));
            }
            if done.send(()).is_err() {
                break;
            }
        }
        assert!((0..100).eq(kept.into_iter().map(|number| *number)));
    });
    let turn = || {
        work.send(()).expect("the thread is there");
        // Only a deadlock takes so long, on the busiest machine.
        assert_ne!(
            look.recv_timeout(Duration::from_secs(60)),
            Err(RecvTimeoutError::Timeout),
            "waits for the one that stalls"
        );
    };
    turn();
    for at in 1.. {
        make_room();
        let ledgers = ledgers();
        hooks::arm(kind, at, Fault::Stall);
        let (refused, stalled) = std::thread::scope(|scope| {
            let script = scope.spawn(|| {
                let refused = script::run(&ledgers);
                hooks::end_stall();
                refused
            });
            let stalled = hooks::wait_for_stall();
            if stalled {
                turn();
            }
            hooks::let_go();
            (script.join().expect("the script ends"), stalled)
        });
        hooks::disarm();
        HEAP.trim();
        assert_eq!((refused, registered(&ledgers)), (Refused::default(), 0), "{kind:?} {at}");
        if !stalled {
            println!("{kind:?} stalled in {} calls", at - 1);
            break;
        }
    }
    drop(work);
    other.join().expect("it ends");
}
