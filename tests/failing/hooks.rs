//! The system's calls, as this program makes them, counted, and made to fail or to stall.
//!
//! The functions below have the names of the C library's, so the linker takes them for all Rust code of this program: the
//! allocator's, and the standard library's. What the C library calls within itself is not touched. So the allocator is tested as it is,
//! with nothing built into it for that.

use core::ffi::{CStr, c_int, c_long, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};

/// What can fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Mmap,
    Mprotect,
    Madvise,
    Barrier,
    /// Making a key of thread-locals, and setting it for a thread.
    Key,
    /// Starting a thread.
    Thread,
    /// Whatever takes memory from the system: mappings that are writable, ranges that become so, pages faulted in.
    Memory,
    Register,
    Deregister,
}

impl Kind {
    pub const ALL: [Kind; 9] = [
        Kind::Mmap,
        Kind::Mprotect,
        Kind::Madvise,
        Kind::Barrier,
        Kind::Key,
        Kind::Thread,
        Kind::Memory,
        Kind::Register,
        Kind::Deregister,
    ];
}

/// What becomes of the call that is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It fails; the next one does not.
    Once,
    /// It fails, and so do all after it.
    FromThere,
    /// It is made after [`let_go`].
    Stall,
}

static COUNTS: [AtomicU64; Kind::ALL.len()] = [const { AtomicU64::new(0) }; Kind::ALL.len()];
/// Which call fails, counted from 1; 0: none. And of which kind, and how.
static CHOSEN: AtomicU64 = AtomicU64::new(0);
static KIND: AtomicUsize = AtomicUsize::new(0);
static FAULT: AtomicUsize = AtomicUsize::new(0);
/// How many calls were made to fail.
static FAILED: AtomicU64 = AtomicU64::new(0);
static STALL: Mutex<Stall> = Mutex::new(Stall { waits: false, may_go: false, ended: false });
static CHANGED: Condvar = Condvar::new();

struct Stall {
    waits: bool,
    may_go: bool,
    ended: bool,
}

/// From now on, counts anew; and the `at`-th call of the kind, from 1 on, has the fault.
pub fn arm(kind: Kind, at: u64, fault: Fault) {
    COUNTS.iter().for_each(|count| count.store(0, SeqCst));
    FAILED.store(0, SeqCst);
    *STALL.lock().unwrap_or_else(PoisonError::into_inner) = Stall { waits: false, may_go: false, ended: false };
    KIND.store(kind as usize, SeqCst);
    FAULT.store(fault as usize, SeqCst);
    CHOSEN.store(at, SeqCst);
}

/// No more faults. How many calls have failed.
pub fn disarm() -> u64 {
    CHOSEN.store(0, SeqCst);
    FAILED.load(SeqCst)
}

/// Whether calls of the kind were made to fail.
pub fn has_failed(kind: Kind) -> bool {
    KIND.load(SeqCst) == kind as usize && FAILED.load(SeqCst) > 0
}

/// How many calls of a kind there were since [`arm`].
pub fn count(kind: Kind) -> u64 {
    COUNTS[kind as usize].load(SeqCst)
}

/// Waits until the chosen call stalls, or all has ended without. Whether it stalls.
pub fn wait_for_stall() -> bool {
    let stall = STALL.lock().unwrap_or_else(PoisonError::into_inner);
    let over = |stall: &mut Stall| !stall.waits && !stall.ended;
    CHANGED.wait_while(stall, over).unwrap_or_else(PoisonError::into_inner).waits
}

/// All has ended that could have stalled.
pub fn end_stall() {
    STALL.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
    CHANGED.notify_all();
}

/// Lets the call that stalls be made; and the one that would stall later.
pub fn let_go() {
    STALL.lock().unwrap_or_else(PoisonError::into_inner).may_go = true;
    CHANGED.notify_all();
}

/// A call is about to be made: whether it shall fail.
pub fn fails(kind: Kind) -> bool {
    let number = COUNTS[kind as usize].fetch_add(1, SeqCst) + 1;
    let chosen = CHOSEN.load(SeqCst);
    if chosen == 0 || KIND.load(SeqCst) != kind as usize {
        return false;
    }
    let fault = FAULT.load(SeqCst);
    if fault == Fault::Stall as usize {
        if number == chosen {
            let mut stall = STALL.lock().unwrap_or_else(PoisonError::into_inner);
            stall.waits = true;
            CHANGED.notify_all();
            while !stall.may_go {
                stall = CHANGED.wait(stall).unwrap_or_else(PoisonError::into_inner);
            }
        }
        return false;
    }
    let fails = number == chosen || number > chosen && fault == Fault::FromThere as usize;
    if fails {
        FAILED.fetch_add(1, SeqCst);
    }
    fails
}

fn set_errno(code: c_int) {
    // SAFETY: the place is this thread's.
    unsafe { *libc::__errno_location() = code };
}

/// Whether this call fails, with the error set: one of `kind`, which may take memory as well.
fn refused(kind: Kind, takes_memory: bool) -> bool {
    let fails = fails(kind) | (takes_memory && self::fails(Kind::Memory));
    if fails {
        set_errno(libc::ENOMEM);
    }
    fails
}

/// The C library's function of that name.
fn real(place: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = place.load(SeqCst);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name ends in a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    assert!(!found.is_null(), "no {name:?} in the C library");
    place.store(found, SeqCst);
    found
}

macro_rules! real {
    ($name:literal, fn($($of:ty),*) -> $to:ty) => {{
        static PLACE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
        // SAFETY: the C library's function of this name has this signature.
        unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($of),*) -> $to>(real(&PLACE, $name)) }
    }};
}

fn takes_memory(access: c_int) -> bool {
    access & libc::PROT_WRITE != 0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    from: i64,
) -> *mut c_void {
    if refused(Kind::Mmap, takes_memory(access)) {
        return libc::MAP_FAILED;
    }
    let mmap = real!(c"mmap64", fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void);
    // SAFETY: the caller's promise.
    unsafe { mmap(at, len, access, flags, file, from) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    at: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    from: i64,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(at, len, access, flags, file, from) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mprotect(at: *mut c_void, len: usize, access: c_int) -> c_int {
    if refused(Kind::Mprotect, takes_memory(access)) {
        return -1;
    }
    let mprotect = real!(c"mprotect", fn(*mut c_void, usize, c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { mprotect(at, len, access) }
}

/// From `linux/mman.h`.
const MADV_POPULATE_WRITE: c_int = 23;

#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(at: *mut c_void, len: usize, advice: c_int) -> c_int {
    if refused(Kind::Madvise, advice == MADV_POPULATE_WRITE) {
        return -1;
    }
    let madvise = real!(c"madvise", fn(*mut c_void, usize, c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { madvise(at, len, advice) }
}

/// Whatever has no function of its own. On the machines that Linux runs on, the C function, which has a variable number of
/// arguments, finds integers where one with six would.
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    if number == libc::SYS_membarrier && refused(Kind::Barrier, false) {
        return -1;
    }
    let syscall = real!(c"syscall", fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long);
    // SAFETY: the caller's promise.
    unsafe { syscall(number, a, b, c, d, e, f) }
}

type Destructor = Option<unsafe extern "C" fn(*mut c_void)>;

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_key_create(key: *mut libc::pthread_key_t, end: Destructor) -> c_int {
    if fails(Kind::Key) {
        return libc::EAGAIN;
    }
    let create = real!(c"pthread_key_create", fn(*mut libc::pthread_key_t, Destructor) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { create(key, end) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_setspecific(key: libc::pthread_key_t, value: *const c_void) -> c_int {
    if fails(Kind::Key) {
        return libc::ENOMEM;
    }
    let set = real!(c"pthread_setspecific", fn(libc::pthread_key_t, *const c_void) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { set(key, value) }
}

type Routine = extern "C" fn(*mut c_void) -> *mut c_void;

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    if fails(Kind::Thread) {
        return libc::EAGAIN;
    }
    let create =
        real!(c"pthread_create", fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Routine, *mut c_void) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { create(thread, attributes, routine, argument) }
}
