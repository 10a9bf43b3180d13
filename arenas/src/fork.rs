//! A fork, as far as it concerns what all heaps of the process share: the region, the tables, the devices. Uses `arenas`, and all
//! below.
//!
//! Whoever has the heaps installs handlers by `pthread_atfork` (this crate does not know all heaps), and calls, in this order:
//!
//! ```text
//! before    each heap's before_fork;  fork::before
//! parent    fork::after;  each heap's after_fork
//! child     fork::after;  each heap's after_fork;  fork::in_child;  each heap's in_child
//! ```
//!
//! Locks that are held for moments are taken before the fork, in the order in which they are taken elsewhere, so that in the
//! child what they guard is whole and they are this thread's to open. What is held while devices are called is not waited for, and
//! is made anew in the child: what it guards can be in any state there, and is replaced or put right.
//!
//! A child is a process of its own: it has no devices, and may attach some. Whatever was registered is its parent's, and neither
//! called nor dropped; keys and handles lie in memory that the kernel wipes. A child that was made without the handlers (`clone`)
//! finds no keys either, calls no device, and may attach none.

use crate::arena::{self, Arena, State};
use crate::region::{self, CHUNK, Region, SLICES_PER_CHUNK};
use crate::{device, flight, links, os};
use core::ops::Range;

/// Before a fork, after all heaps' `before_fork`: waits for the process's locks that are held for moments, and keeps them.
pub fn before() {
    crate::sync::asymmetric::settle();
    links::MAKING.hold();
    arena::MAKING.hold();
    region::MAKING.hold();
    if let Some(region) = Region::existing() {
        region.free.hold();
    }
    device::SLOTS.hold();
    flight::slots::hold();
}

/// After a fork, in parent and child: opens them again.
///
/// # Safety
///
/// This thread has called [`before`], and not this since; or is the child's copy of such a thread.
pub unsafe fn after() {
    // SAFETY: `before` took them; the region is there now if it was there then, since it was not made meanwhile.
    unsafe {
        flight::slots::release();
        device::SLOTS.release();
        if let Some(region) = Region::existing() {
            region.free.release();
        }
        region::MAKING.release();
        arena::MAKING.release();
        links::MAKING.release();
    }
}

/// In a child of fork, after [`after`] and all heaps' `after_fork`: it has no devices, and gives up what was half done.
///
/// `is_gone`: whether the heap with a tag is not in children. Its addresses stay reserved, since what points to them does.
/// `is_inside`: this thread may be about to open or close arenas, since it was forked inside a registrar. Then what is half done stays
/// so, whoever did it.
///
/// # Safety
///
/// This is a child of fork, with no other thread yet. The memory of a heap that is gone is never touched.
pub unsafe fn in_child(is_gone: impl Fn(u32) -> bool, is_inside: bool) {
    os::own_process();
    device::forget_all();
    // SAFETY: there is no other thread, and this one is not posting a bind.
    #[cfg(feature = "verbs")]
    unsafe {
        crate::registrar::verbs::window::renew();
    }
    let Some(region) = Region::existing() else { return };
    for run in region.runs() {
        let arena = Arena::existing(run.start);
        match arena.map(|arena| (arena, arena.word.state())) {
            // By a thread that is not in this process; but taken and not described yet, or closed and not given back yet.
            None | Some((_, State::Vacant)) if !is_inside => give_up(region, run),
            Some((arena, State::Opening | State::Closing)) if !is_inside => {
                // SAFETY: the caller's promise.
                unsafe { arena.abandon() };
                links::forget(&run);
                give_up(region, run);
            }
            Some((arena, _)) if is_gone(arena.tag()) => {
                // Whatever is mapped there already is somebody else's. (Or it had just been opened, and was not left out of
                // children yet: then it is a copy that nobody uses.)
                let _ = os::reserve_again(address(region, &run), run.len() * CHUNK);
            }
            Some((arena, State::Live)) if !is_inside => {
                let grown = arena.run().end..run.end;
                // SAFETY: taken by who was about to make the arena longer, and is not in this process.
                let close = |grown: &Range<usize>| unsafe { os::close(address(region, grown), grown.len() * CHUNK) };
                if !grown.is_empty() && close(&grown).is_ok() {
                    region.shorten_run(arena.run(), grown);
                }
            }
            _ => {}
        }
    }
}

fn address(region: &Region, run: &Range<usize>) -> *mut u8 {
    region.slice_address(run.start * SLICES_PER_CHUNK)
}

/// Gives chunks back that nobody has any more.
fn give_up(region: &Region, run: Range<usize>) {
    // SAFETY: the chunks are of no arena, and who was about to make one of them is not in this process. Where the kernel does
    // not close them, they stay taken.
    if unsafe { os::close(address(region, &run), run.len() * CHUNK) }.is_ok() {
        region.give_run(run);
    }
}
