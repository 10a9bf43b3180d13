//! Stands in for functions that rdma-sys 0.3 writes by hand and gets wrong, as far as this project needs them.
//!
//! Uses rdma-sys only, its generated types and the symbols of the C library, which are right. What is wrong there:
//!
//! - `verbs_get_ctx` compares with `u32::MAX` where the header has a pointer with all bits set, so on 64 bits it finds
//!   no context that is extended and every extended verb falls back or fails: use [`verbs_context()`];
//! - `ibv_query_port` is declared for the short struct of old programs, and `___ibv_query_port` always ends there, leaving
//!   the rest of the longer one as it was: use [`query_port`];
//! - `ibv_query_device_ex` goes by the first, and so reports no on-demand paging of any device: use [`query_device_ex`];
//! - `ibv_inc_rkey` overflows at `u32::MAX`: use [`inc_rkey`].

use super::from_verbs;
use core::mem::{MaybeUninit, offset_of};
use core::ptr::{self, NonNull};
use rdma_sys::{ibv_context, ibv_device_attr_ex, ibv_port_attr, verbs_context};
use std::io;

/// The extended context that holds an open context, with the newer verbs in it. `None` if the provider is too old to have
/// one.
///
/// A field may lie before the start of what the provider made, as the struct grows at its front: read one only if `sz` is
/// at least the struct's size less the field's offset, and call it only if it is `Some`.
///
/// # Safety
///
/// `context` is open. The result is valid as long as it is.
#[must_use]
pub unsafe fn verbs_context(context: NonNull<ibv_context>) -> Option<NonNull<verbs_context>> {
    // SAFETY: the context is open, so it may be read.
    let abi = unsafe { (*context.as_ptr()).abi_compat };
    // __VERBS_ABI_IS_EXTENDED in infiniband/verbs.h: a null pointer to bytes, less one.
    if abi.addr() != usize::MAX {
        return None;
    }
    // SAFETY: the mark says that the context is the field `context` of a verbs_context.
    Some(unsafe { context.byte_sub(offset_of!(verbs_context, context)).cast() })
}

/// What a device says of itself, at length: on-demand paging, timestamps and more. Where the provider or the kernel has only the short
/// form, the rest is zero.
///
/// # Errors
///
/// Of the system.
///
/// # Safety
///
/// `context` is open.
pub unsafe fn query_device_ex(context: NonNull<ibv_context>) -> io::Result<ibv_device_attr_ex> {
    let mut attr = MaybeUninit::<ibv_device_attr_ex>::zeroed();
    // SAFETY: the context is open. The field is read only if `sz` says that the provider has it, and the call is told how much room
    // there is; no input is allowed. The short form writes the first field.
    let errno = unsafe {
        let long = verbs_context(context).map(NonNull::as_ptr).and_then(|extended| {
            let has = (*extended).sz >= size_of::<verbs_context>() - offset_of!(verbs_context, query_device_ex);
            if has { (*extended).query_device_ex } else { None }
        });
        let size = size_of::<ibv_device_attr_ex>();
        let long = long.map(|query| query(context.as_ptr(), ptr::null(), attr.as_mut_ptr(), size));
        match long.filter(|errno| ![libc::EOPNOTSUPP, libc::ENOSYS].contains(errno)) {
            Some(errno) => errno,
            None => rdma_sys::ibv_query_device(context.as_ptr(), &raw mut (*attr.as_mut_ptr()).orig_attr),
        }
    };
    // SAFETY: all zeros is a valid ibv_device_attr_ex (integers only), and so is what the call wrote over it.
    if errno == 0 { Ok(unsafe { attr.assume_init() }) } else { Err(from_verbs(errno)) }
}

/// The state of a port: whether it is active, its lid, MTU, link layer, and how many gids it has. Ports count from 1.
///
/// # Errors
///
/// Of the system; `EINVAL` if there is no such port.
///
/// # Safety
///
/// `context` is open.
pub unsafe fn query_port(context: NonNull<ibv_context>, port: u8) -> io::Result<ibv_port_attr> {
    let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
    // SAFETY: the context is open. The field `query_port` is read through a pointer, and only if `sz` says that the provider
    // has it. The long form is told how much room there is; the short form writes the older, shorter struct, which is the
    // beginning of the new one.
    let errno = unsafe {
        let long = verbs_context(context).map(NonNull::as_ptr).and_then(|extended| {
            let has = (*extended).sz >= size_of::<verbs_context>() - offset_of!(verbs_context, query_port);
            if has { (*extended).query_port } else { None }
        });
        match long {
            Some(query) => query(context.as_ptr(), port, attr.as_mut_ptr(), size_of::<ibv_port_attr>()),
            None => rdma_sys::ibv_query_port(context.as_ptr(), port, attr.as_mut_ptr().cast()),
        }
    };
    // SAFETY: all zeros is a valid ibv_port_attr (integers only), and so is what the call wrote over it.
    if errno == 0 { Ok(unsafe { attr.assume_init() }) } else { Err(from_verbs(errno)) }
}

/// The rkey with the next tag, for binding a type 2 memory window again: the low 8 bits count, and start again at 0.
///
/// ```
/// use rdmalloc_arenas::registrar::verbs::fixes::inc_rkey;
/// assert_eq!(inc_rkey(0x1234_5678), 0x1234_5679);
/// assert_eq!(inc_rkey(u32::MAX), 0xffff_ff00);
/// ```
#[must_use]
pub const fn inc_rkey(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ffi::{c_int, c_void};
    use core::ptr;

    /// A provider's context without a device: `abi` is its mark, `sz` its size; port 1 has lid 7 and the last field 9.
    fn context(abi: usize, sz: usize) -> Box<verbs_context> {
        unsafe extern "C" fn query(_: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, len: usize) -> c_int {
            assert_eq!(len, size_of::<ibv_port_attr>());
            if port != 1 {
                return libc::EINVAL;
            }
            // SAFETY: the caller gave a struct of this length.
            unsafe { ((*attr).lid, (*attr).port_cap_flags2) = (7, 9) };
            0
        }
        // SAFETY: the struct has integers, pointers, optional functions and a mutex that is not used: zeros are valid.
        let mut extended: Box<verbs_context> = unsafe { Box::new(MaybeUninit::zeroed().assume_init()) };
        extended.sz = sz;
        extended.query_port = Some(query);
        extended.context.abi_compat = ptr::without_provenance_mut::<c_void>(abi);
        extended
    }

    /// Its field `context`, as a program gets it from `ibv_open_device`: reached from the whole, not from a reference to
    /// the field.
    fn inner(extended: &mut Box<verbs_context>) -> NonNull<ibv_context> {
        let whole: *mut verbs_context = &mut **extended;
        // SAFETY: `whole` is not null and valid.
        unsafe { NonNull::new_unchecked(&raw mut (*whole).context) }
    }

    #[test]
    fn extended_context_is_found_by_its_mark_of_all_bits() {
        let size = size_of::<verbs_context>();
        let mut extended = context(usize::MAX, size);
        let inside = inner(&mut extended);
        // SAFETY: the context stands for an open one: its fields are valid.
        assert_eq!(unsafe { verbs_context(inside) }.map(|found| found.as_ptr()), Some(&raw mut *extended));
        for abi in [0, u32::MAX as usize] {
            let mut extended = context(abi, size);
            // SAFETY: as above.
            assert!(unsafe { verbs_context(inner(&mut extended)) }.is_none());
        }
    }

    #[test]
    fn device_is_read_at_length_through_the_extended_context() {
        unsafe extern "C" fn query(
            _: *mut ibv_context,
            input: *const rdma_sys::ibv_query_device_ex_input,
            attr: *mut ibv_device_attr_ex,
            len: usize,
        ) -> c_int {
            assert_eq!((input.is_null(), len), (true, size_of::<ibv_device_attr_ex>()));
            // SAFETY: the caller gave a struct of this length.
            unsafe { ((*attr).orig_attr.max_mr, (*attr).odp_caps.general_caps) = (3, 1) };
            0
        }
        let mut extended = context(usize::MAX, size_of::<verbs_context>());
        extended.query_device_ex = Some(query);
        // SAFETY: the context stands for an open one: all that is called is the function above.
        let attr = unsafe { query_device_ex(inner(&mut extended)) }.unwrap();
        assert_eq!((attr.orig_attr.max_mr, attr.odp_caps.general_caps), (3, 1));
    }

    #[test]
    fn port_is_read_whole_through_the_extended_context() {
        let mut extended = context(usize::MAX, size_of::<verbs_context>());
        let inside = inner(&mut extended);
        // SAFETY: the context stands for an open one: all that is called is the function above.
        let attr = unsafe { query_port(inside, 1) }.unwrap();
        assert_eq!((attr.lid, attr.port_cap_flags2), (7, 9));
        // SAFETY: as above.
        assert_eq!(unsafe { query_port(inside, 2) }.err().and_then(|e| e.raw_os_error()), Some(libc::EINVAL));
    }

    #[test]
    fn rkey_tag_starts_again_without_overflow() {
        assert_eq!(inc_rkey(0), 1);
        assert_eq!(inc_rkey(0xab_fe), 0xab_ff);
        assert_eq!(inc_rkey(0xab_ff), 0xab_00);
        assert_eq!(inc_rkey(u32::MAX), 0xffff_ff00);
    }
}
