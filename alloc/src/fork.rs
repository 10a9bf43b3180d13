//! Forks: the handlers that `pthread_atfork` calls. Uses all that has locks.
//!
//! A child of fork has this thread only, and a copy of everything as it was. Locks that are held for moments are taken before the
//! fork, so that what they guard is whole in the child; the order is the one in which they are taken elsewhere:
//!
//! ```text
//! forking;  making a heap;  by heap: drain passes, shards;  the caches' gates;  by heap: idle caches;  lists of all caches;
//! by heap: the list of arenas, their bitmaps, the listener;  then what is the process's: rdmalloc_arenas::fork
//! ```
//!
//! A heap's role, under which devices are called, is not waited for: a registrar may take long, and may be what forks. Nothing here
//! allocates, in the parent or in the child.
//!
//! `vfork` and `posix_spawn` call no handlers, and need none: their child runs on its parent's memory until it execs.

use crate::caches;
use crate::global::{GLOBAL, INTERNAL};
use crate::heap::Core;
use crate::{pool, thread};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use rdmalloc_arenas::fork;
use rdmalloc_arenas::sync::Lock;

/// Held by the thread that forks: one at a time.
static FORKING: Lock<()> = Lock::new(());

/// Has the handlers called from now on; cheap when they are. Called before anything is handed out, with no lock held: the
/// system may allocate for it.
pub(crate) fn install() {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if INSTALLED.load(Relaxed) || INSTALLED.swap(true, Relaxed) {
        return;
    }
    let install = || {
        // SAFETY: the functions have the signature, and are there as long as the program is. Each may be called where the system
        // calls it.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) }
    };
    if thread::inside(install) != 0 {
        // Out of memory; the next one tries again.
        INSTALLED.store(false, Relaxed);
    }
}

/// The core of each heap there is, or was.
fn each_core(mut action: impl FnMut(&'static Core)) {
    action(&GLOBAL);
    pool::each_core(&mut action);
    action(&INTERNAL);
}

unsafe extern "C" fn prepare() {
    FORKING.hold();
    pool::CHANGE.hold();
    each_core(Core::hold_shards);
    let mut end = 1;
    loop {
        end = caches::hold_from(end);
        each_core(Core::hold_idle);
        if caches::hold_lists(end) {
            break;
        }
        // SAFETY: held just before.
        each_core(|core| unsafe { core.release_idle() });
    }
    each_core(|core| core.arenas.before_fork());
    fork::before();
}

unsafe extern "C" fn parent() {
    // SAFETY: `prepare` was called by this thread just before, and took all of these, once. No heap was made since.
    unsafe {
        fork::after();
        each_core(|core| core.arenas.after_fork());
        caches::release();
        each_core(|core| core.release_idle());
        each_core(|core| core.release_shards());
        pool::CHANGE.release();
        FORKING.release();
    }
}

unsafe extern "C" fn child() {
    // SAFETY: this thread is a copy of one for which `prepare` was called just before, and the only one. The memory of a heap
    // that is left out of children is touched by nobody: no cache of it is used any more, and its buffers give nothing back.
    unsafe {
        fork::after();
        each_core(|core| core.arenas.after_fork());
        each_core(|core| core.release_idle());
        each_core(|core| core.release_shards());
        caches::release_in_child(is_gone, |orphan| {
            if let Some(core) = core_of_cache(orphan.tag()) {
                core.take_in(orphan);
            }
        });
        fork::in_child(is_gone, thread::is_inside());
        each_core(|core| core.in_child());
        pool::CHANGE.release();
        FORKING.release();
    }
}

/// The core whose caches that threads have bear this tag.
fn core_of_cache(tag: u32) -> Option<&'static Core> {
    if tag == 0 { Some(&GLOBAL) } else { pool::core_of_tag(tag) }
}

/// Whether the heap whose arenas have a tag is not in this process, a child.
fn is_gone(tag: u32) -> bool {
    let core = pool::core_of_tag(tag);
    core.is_some_and(|core| !core.arenas.config().serves_children)
}
