//! The calls of memory windows (`ibv_mw`): to make one, bind it to a part of a region, end the binding, and let it go.
//!
//! Uses rdma-sys, [`fixes`](super::fixes) and `origin` (a child of fork calls no device). The calls only: what must come before
//! what is the caller's, and `rdmalloc` has a pool that sees to it. The facts were seen on soft-RoCE (Linux 6.1 and 7.3) and
//! read in `ibv_bind_mw(3)`, `ibv_alloc_mw(3)`, `ibv_post_send(3)`.
//!
//! A window of type 2 is bound by a work request to one queue pair, and peers reach it by that queue pair only; its rkey is the
//! caller's choice in the low 8 bits, the tag, which count up here with each binding. So the rkey of the first binding is
//! alive again in the 257th: [`Window::binds`] counts, for who retires a window before. A window of type 1 is bound by a call of
//! its own, opens to every queue pair of the protection domain, and the library chooses its rkey.

use super::fixes::inc_rkey;
use super::from_verbs;
use super::origin::Origin;
use crate::Access;
use crate::sync::SharedLock;
use core::mem;
use core::ptr::{self, NonNull};
use rdma_sys::{
    bind_mw_t, ibv_access_flags, ibv_device_attr, ibv_device_cap_flags, ibv_mr, ibv_mw, ibv_mw_bind, ibv_mw_bind_info,
    ibv_mw_type, ibv_pd, ibv_qp, ibv_send_flags, ibv_send_wr, ibv_wr_opcode,
};
use std::io;

/// Taken for reading while a bind is posted, which follows a pointer to an `ibv_mr`, and for writing while one is deregistered. A
/// hold keeps a device from being detached, but not one that is lost.
static REGIONS: SharedLock<()> = SharedLock::new(());

/// Keeps every region of this process registered until the result is dropped. For the moment in which a bind is posted, from
/// looking for the region on: who holds it must not allocate, since whoever deregisters may have what that waits for. (Posting
/// does not allocate in any provider of rdma-core that knows windows.)
pub fn regions_stay() -> impl Drop {
    REGIONS.read()
}

/// Waits until nobody is posting a bind.
pub(super) fn regions_go() -> impl Drop {
    REGIONS.write()
}

/// In a child of fork: whoever posts a bind or deregisters does so in the parent.
///
/// # Safety
///
/// There is no other thread, and this one has called neither of the above.
pub(crate) unsafe fn renew() {
    // SAFETY: the caller's promise.
    unsafe { REGIONS.renew() }
}

/// How many bindings of one type 2 window have different rkeys: the tag has 8 bits.
pub const TAGS: u32 = 256;

/// The two kinds of memory windows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// Open to every queue pair of the protection domain while bound.
    Type1,
    /// Bound to one queue pair; peers reach it by that one only.
    Type2,
}

/// What a device has, by its capabilities: type 2 before type 1. `None`: no windows.
#[must_use]
pub fn kind(attr: &ibv_device_attr) -> Option<Kind> {
    let has = |flag: ibv_device_cap_flags| attr.device_cap_flags & flag.0 != 0;
    if has(ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A)
        || has(ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B)
    {
        return Some(Kind::Type2);
    }
    has(ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW).then_some(Kind::Type1)
}

/// The kind of windows that the device of a protection domain has; `None`: it has none, or does not say.
///
/// # Safety
///
/// `pd` is live.
#[must_use]
pub unsafe fn kind_of(pd: NonNull<ibv_pd>) -> Option<Kind> {
    // SAFETY: a live domain has an open context.
    unsafe { super::query_device((*pd.as_ptr()).context) }.as_ref().and_then(kind)
}

/// What a window is bound to.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The region that it lies in, registered with [`Access::WINDOWS`].
    pub mr: NonNull<ibv_mr>,
    /// Where it begins.
    pub addr: u64,
    /// Its bytes, at least 1.
    pub len: u64,
    /// What peers may do: of remote reading, writing and atomics. The rest is ignored.
    pub rights: Access,
}

impl Part {
    fn info(&self) -> ibv_mw_bind_info {
        let flags = [
            (Access::REMOTE_READ, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
            (Access::REMOTE_WRITE, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
            (Access::REMOTE_ATOMIC, ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC),
        ];
        let rights =
            flags.iter().filter(|(ours, _)| self.rights.contains(*ours)).fold(0, |all, (_, verbs)| all | verbs.0);
        ibv_mw_bind_info { mr: self.mr.as_ptr(), addr: self.addr, length: self.len, mw_access_flags: rights }
    }
}

/// A memory window. Dropping it without [`release`](Self::release) leaks it: peers that reach what it is bound to go on doing so.
#[derive(Debug)]
#[must_use = "a window that is dropped stays as it is, for ever"]
pub struct Window {
    mw: NonNull<ibv_mw>,
    kind: Kind,
    binds: u32,
    origin: Origin,
}

// SAFETY: an `ibv_mw` is a verbs object, which any thread may use (ibv_alloc_td(3): "By default all verbs objects are safe for
// multi-threaded access"). What changes its fields here takes `&mut self`.
unsafe impl Send for Window {}
// SAFETY: as above; `&self` only reads.
unsafe impl Sync for Window {}

impl Window {
    /// Makes a window, bound to nothing. A system call.
    ///
    /// # Errors
    ///
    /// Of the system: `EOPNOTSUPP` where there are none, `ENOMEM` or `EINVAL` when the device has no more (`max_mw`) or not of
    /// this kind.
    ///
    /// # Safety
    ///
    /// `pd` is live, and stays so until the window is released.
    pub unsafe fn new(pd: NonNull<ibv_pd>, kind: Kind) -> io::Result<Window> {
        let number = match kind {
            Kind::Type1 => ibv_mw_type::IBV_MW_TYPE_1,
            Kind::Type2 => ibv_mw_type::IBV_MW_TYPE_2,
        };
        // SAFETY: the domain is live, so its context may be read. Not `rdma_sys::ibv_alloc_mw`, which says `Some(null)`.
        let mw = unsafe {
            let alloc = (*(*pd.as_ptr()).context).ops.alloc_mw;
            let alloc = alloc.ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))?;
            NonNull::new(alloc(pd.as_ptr(), number)).ok_or_else(io::Error::last_os_error)?
        };
        Ok(Window { mw, kind, binds: 0, origin: Origin::here() })
    }

    /// The rkey of what was last posted. Alive once the bind is done, and until what ends it is.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        // SAFETY: the window lives until it is released, which takes `self`.
        unsafe { (*self.mw.as_ptr()).rkey }
    }

    /// How many bindings it has had, ended ones counted.
    #[must_use]
    pub fn binds(&self) -> u32 {
        self.binds
    }

    /// Posts the work request that binds the window to a part of a region, signalled, under `id`. Then [`rkey`](Self::rkey) is
    /// that of the part, for work requests that are posted to the same queue pair after this, and for everyone once it has
    /// completed. If it fails then (soft-RoCE: a region without [`Access::WINDOWS`], a window bound already), the queue pair has failed.
    ///
    /// # Errors
    ///
    /// Of the system, and nothing is posted: `ENOMEM` when the send queue is full, `EINVAL` for a queue pair that is not connected.
    ///
    /// # Safety
    ///
    /// `qp` is a live queue pair of the window's protection domain, and `part.mr` a live region of it that the part lies in. Until
    /// the binding has ended, peers may do to the part what its rights say. The window is not bound, and nothing that was posted
    /// for it is under way.
    pub unsafe fn post_bind(&mut self, qp: NonNull<ibv_qp>, id: u64, part: &Part) -> io::Result<()> {
        match self.kind {
            Kind::Type2 => {
                // SAFETY: of this struct all bit patterns that are used are valid as zeros: integers and null pointers.
                let mut wr: ibv_send_wr = unsafe { mem::zeroed() };
                wr.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
                let rkey = inc_rkey(self.rkey());
                wr.bind_mw_tso_union.bind_mw = bind_mw_t { mw: self.mw.as_ptr(), rkey, bind_info: part.info() };
                // SAFETY: the caller's promises.
                unsafe { post(qp, id, wr) }?;
                // SAFETY: as in `rkey`; `&mut self` makes this the only one who looks. The library leaves it to the poster.
                unsafe { (*self.mw.as_ptr()).rkey = rkey };
            }
            // SAFETY: the caller's promises.
            Kind::Type1 => unsafe { self.bind_type1(qp, id, part.info()) }?,
        }
        self.binds += 1;
        Ok(())
    }

    /// Posts the work request that ends the binding, signalled, under `id`: once it has completed well, the rkey is dead.
    /// If the peer has ended it already (a send with invalidate), it fails, and the queue pair with it.
    ///
    /// # Errors
    ///
    /// As [`post_bind`](Self::post_bind).
    ///
    /// # Safety
    ///
    /// `qp` is the live queue pair to which the bind was posted, and `mr` the region, still live.
    pub unsafe fn post_unbind(&mut self, qp: NonNull<ibv_qp>, id: u64, mr: NonNull<ibv_mr>) -> io::Result<()> {
        match self.kind {
            Kind::Type2 => {
                // SAFETY: as in `post_bind`.
                let mut wr: ibv_send_wr = unsafe { mem::zeroed() };
                wr.opcode = ibv_wr_opcode::IBV_WR_LOCAL_INV;
                wr.imm_data_invalidated_rkey_union.invalidated_rkey = self.rkey();
                // SAFETY: the caller's promise.
                unsafe { post(qp, id, wr) }
            }
            Kind::Type1 => {
                // Bound to nothing is not bound (ibv_bind_mw(3)). Nothing of a region: a null one crashes soft-RoCE's library
                // (rdma-core 44).
                let nothing = ibv_mw_bind_info { mr: mr.as_ptr(), addr: 0, length: 0, mw_access_flags: 0 };
                // SAFETY: the caller's promise.
                unsafe { self.bind_type1(qp, id, nothing) }
            }
        }
    }

    /// # Safety
    ///
    /// As `post_bind`.
    unsafe fn bind_type1(&mut self, qp: NonNull<ibv_qp>, id: u64, bind_info: ibv_mw_bind_info) -> io::Result<()> {
        let mut bind = ibv_mw_bind { wr_id: id, send_flags: ibv_send_flags::IBV_SEND_SIGNALED.0, bind_info };
        // SAFETY: the window and the queue pair are live, of one domain; `rkey` is set by the library. `rdma_sys::ibv_bind_mw`
        // would panic without the function.
        let errno = unsafe {
            let call = (*(*self.mw.as_ptr()).context).ops.bind_mw;
            let call = call.ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))?;
            call(qp.as_ptr(), self.mw.as_ptr(), &mut bind)
        };
        if errno == 0 { Ok(()) } else { Err(from_verbs(errno)) }
    }

    /// Lets the window go, bound or not; then its rkey is dead. A system call, and needs no queue pair in order.
    ///
    /// Before its queue pair is destroyed: the other order blocks for 51 s on soft-RoCE. Not while a bind is under way, which
    /// might then find another window in its place.
    ///
    /// # Errors
    ///
    /// Of the system; the window is given back, as it was. In a child of fork, whose it is not, always.
    pub fn release(self) -> Result<(), (Window, io::Error)> {
        if !self.origin.is_here() {
            let child = io::Error::new(io::ErrorKind::Unsupported, "a child of fork has no memory windows");
            return Err((self, child));
        }
        // SAFETY: made by `new`, released here only; what made it can release it.
        match unsafe { rdma_sys::ibv_dealloc_mw(self.mw.as_ptr()) } {
            0 => Ok(()),
            errno => Err((self, from_verbs(errno))),
        }
    }
}

/// Posts one signalled work request without memory of its own.
///
/// # Safety
///
/// `qp` is live, and what `wr` does is allowed.
unsafe fn post(qp: NonNull<ibv_qp>, id: u64, mut wr: ibv_send_wr) -> io::Result<()> {
    (wr.wr_id, wr.send_flags) = (id, ibv_send_flags::IBV_SEND_SIGNALED.0);
    let mut bad = ptr::null_mut();
    // SAFETY: a live queue pair and one complete work request, which the call copies.
    match unsafe { rdma_sys::ibv_post_send(qp.as_ptr(), &mut wr, &mut bad) } {
        0 => Ok(()),
        errno => Err(from_verbs(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::MaybeUninit;

    #[test]
    fn type_2_is_chosen_where_there_is_one() {
        // SAFETY: integers and arrays of bytes.
        let mut attr: ibv_device_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        let mut of = |flags: u32| {
            attr.device_cap_flags = flags;
            kind(&attr)
        };
        // The numbers are those of enum ibv_device_cap_flags in infiniband/verbs.h.
        assert_eq!([of(0), of(1 << 17)], [None, Some(Kind::Type1)]);
        assert_eq!([of(1 << 17 | 1 << 23), of(1 << 17 | 1 << 24)], [Some(Kind::Type2); 2]);
    }

    #[test]
    fn rights_of_a_window_are_remote_ones_only() {
        let rights = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::WINDOWS | Access::RELAXED_ORDERING;
        let part = Part { mr: NonNull::dangling(), addr: 1, len: 2, rights };
        // Soft-RoCE refuses a bind with local write: its access is the region's.
        assert_eq!(part.info().mw_access_flags, 2 | 4);
    }
}
