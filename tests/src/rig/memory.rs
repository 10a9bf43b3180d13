//! Plain registered memory: what a program has without rdmalloc, and what a test compares with. Uses [`Domain`].

use super::{Domain, Remote};
use rdma_sys::{ibv_access_flags as flags, ibv_dereg_mr, ibv_mr, ibv_reg_mr_iova2, ibv_sge};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Error, Result};

const PAGE: usize = 4096;

/// Zeroed, page-aligned memory of the system's allocator (never the global one), registered by itself for every access.
///
/// A device may change it at any time, so it is read and written by copies only.
pub struct Memory {
    start: *mut u8,
    layout: Layout,
    /// Null once [`deregister`](Self::deregister) was called.
    mr: *mut ibv_mr,
    keys: (u32, u32),
    /// Outlives `mr`, which lies in its protection domain.
    _domain: Domain,
}

// SAFETY: owned memory that is only copied from and to, and an MR, which any thread may free.
unsafe impl Send for Memory {}

impl Memory {
    /// Registers `len` bytes (more than 0) for local write and remote read, write and atomics.
    ///
    /// # Errors
    ///
    /// The error of `ibv_reg_mr`.
    ///
    /// # Panics
    ///
    /// If `len` is 0, too long for a layout, or the memory is not there.
    pub fn new(domain: &Domain, len: usize) -> Result<Memory> {
        assert!(len > 0, "a registration has a length");
        let layout = Layout::from_size_align(len, PAGE).expect("a length that memory can have");
        // SAFETY: the length is not 0.
        let start = unsafe { System.alloc_zeroed(layout) };
        assert!(!start.is_null(), "{len} bytes of memory");
        let access = flags::IBV_ACCESS_LOCAL_WRITE
            | flags::IBV_ACCESS_REMOTE_READ
            | flags::IBV_ACCESS_REMOTE_WRITE
            | flags::IBV_ACCESS_REMOTE_ATOMIC;
        // SAFETY: the domain's PD is live, and the memory is ours until `drop`, which ends the registration first.
        let mr = unsafe { ibv_reg_mr_iova2(domain.pd(), start.cast(), len, start as u64, access.0) };
        if mr.is_null() {
            let error = Error::last_os_error();
            // SAFETY: allocated above with the same layout, and no device knows of it.
            unsafe { System.dealloc(start, layout) };
            return Err(error);
        }
        // SAFETY: a live MR.
        let keys = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Memory { start, layout, mr, keys, _domain: domain.clone() })
    }

    /// The bytes from `offset`, as a scatter/gather element.
    ///
    /// # Panics
    ///
    /// If they reach outside.
    pub fn sge(&self, offset: usize, len: u32) -> ibv_sge {
        ibv_sge { addr: self.at(offset, len as usize) as u64, length: len, lkey: self.keys.0 }
    }

    /// What a peer needs to reach the bytes from `offset`.
    ///
    /// # Panics
    ///
    /// If it lies outside.
    pub fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.at(offset, 0) as u64, rkey: self.keys.1 }
    }

    /// Copies `bytes` in at `offset`.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    pub fn fill(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: `at` has checked the target; the source is other memory, since no slice of ours is ever handed out.
        unsafe { self.at(offset, bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    /// Copies `len` bytes out from `offset`.
    ///
    /// # Panics
    ///
    /// If they reach outside.
    pub fn to_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: `at` has checked the source, which was zeroed when allocated; the target was made here.
        unsafe { self.at(offset, len).copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
        bytes
    }

    /// Ends the registration and keeps the memory, so that a test can show that its keys are dead.
    ///
    /// # Panics
    ///
    /// If it was ended already, or does not end.
    pub fn deregister(&mut self) {
        assert!(!self.mr.is_null(), "registered");
        // SAFETY: a live MR, forgotten on the next line.
        let result = unsafe { ibv_dereg_mr(self.mr) };
        self.mr = std::ptr::null_mut();
        assert_eq!(result, 0, "{}", Error::from_raw_os_error(result));
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.layout.size()), "{offset} + {len} is outside");
        // SAFETY: inside the allocation, as was just checked.
        unsafe { self.start.add(offset) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.mr.is_null() {
            // SAFETY: a live MR that nobody uses after this.
            let result = unsafe { ibv_dereg_mr(self.mr) };
            if result != 0 {
                return; // The device may still write there: the memory is never given back.
            }
        }
        // SAFETY: allocated with this layout, and no device reaches it any more.
        unsafe { System.dealloc(self.start, self.layout) }
    }
}
