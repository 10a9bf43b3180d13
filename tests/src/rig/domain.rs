//! An open device with one protection domain, and the port and address by which its queue pairs are reached.
//!
//! Uses rdma-sys and what sysfs says about GIDs.

use rdma_sys::{
    ibv_alloc_pd, ibv_close_device, ibv_context, ibv_dealloc_pd, ibv_device, ibv_device_attr, ibv_free_device_list,
    ibv_get_device_list, ibv_get_device_name, ibv_gid, ibv_mtu, ibv_open_device, ibv_pd, ibv_port_attr, ibv_port_state,
    ibv_query_device, ibv_query_gid, ibv_query_port,
};
use std::ffi::CStr;
use std::io::{Error, ErrorKind, Result};
use std::mem::MaybeUninit;
use std::sync::Arc;

/// An open device and a protection domain on it. A handle: clones share them, and the last one to go closes both.
#[derive(Clone)]
pub struct Domain(Arc<Inner>);

struct Inner {
    /// From `ibv_open_device`; closed in `drop`, after `pd`.
    context: *mut ibv_context,
    /// From `ibv_alloc_pd` on `context`, or null while `open` is under way.
    pd: *mut ibv_pd,
    name: String,
    port: Port,
}

/// The port that the queue pairs of a domain use.
#[derive(Clone, Copy)]
pub(super) struct Port {
    pub number: u8,
    /// 0 on Ethernet: peers are addressed by GID alone.
    pub lid: u16,
    pub mtu: ibv_mtu::Type,
    pub gid_index: u8,
    pub gid: [u8; 16],
    /// How many RDMA reads and atomics a queue pair may have under way.
    pub max_reads: u8,
}

// SAFETY: libibverbs is thread safe: contexts and protection domains may be used from, and freed by, any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Domain {
    /// Opens the device of that name, or the first that has an active port, and allocates a protection domain.
    ///
    /// # Errors
    ///
    /// `NotFound` where there is no such device (the error names those that exist) or none has an active port; otherwise
    /// the error of the verb that failed.
    pub fn open(name: Option<&str>) -> Result<Domain> {
        let devices = DeviceList::get();
        let mut seen = Vec::new();
        for &device in devices.as_slice() {
            // SAFETY: `device` is an entry of a list that is not freed yet; its name is a C string inside it.
            let found = unsafe { CStr::from_ptr(ibv_get_device_name(device)) }.to_string_lossy().into_owned();
            if name.is_none_or(|name| name == found) {
                // SAFETY: as above.
                match unsafe { Domain::open_device(device, found.clone()) } {
                    // Without a name, a device whose cable is out is passed over.
                    Err(error) if name.is_none() && error.kind() == ErrorKind::NotFound => {}
                    result => return result,
                }
            }
            seen.push(found);
        }
        let wanted =
            name.map_or("no verbs device with an active port".into(), |name| format!("no verbs device {name:?}"));
        let seen =
            if seen.is_empty() { "there is none at all".into() } else { format!("there are: {}", seen.join(", ")) };
        Err(Error::new(ErrorKind::NotFound, format!("{wanted}; {seen}")))
    }

    /// # Safety
    ///
    /// `device` is an entry of a device list that was not freed.
    unsafe fn open_device(device: *mut ibv_device, name: String) -> Result<Domain> {
        // SAFETY: promised by the caller.
        let context = unsafe { ibv_open_device(device) };
        if context.is_null() {
            return Err(Error::last_os_error());
        }
        let port = Port { number: 0, lid: 0, mtu: 0, gid_index: 0, gid: [0; 16], max_reads: 0 };
        // From here on, `drop` closes what is open whenever something fails.
        let mut inner = Inner { context, pd: std::ptr::null_mut(), name, port };
        // SAFETY: `context` is open.
        inner.port = unsafe { Port::find(context, &inner.name) }?;
        // SAFETY: `context` is open.
        inner.pd = unsafe { ibv_alloc_pd(context) };
        if inner.pd.is_null() {
            return Err(Error::last_os_error());
        }
        Ok(Domain(Arc::new(inner)))
    }

    /// The name of the device, such as `rxe0`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The protection domain: valid while this handle or a clone of it lives.
    pub fn pd(&self) -> *mut ibv_pd {
        self.0.pd
    }

    /// The context of the open device: valid while this handle or a clone of it lives.
    pub fn context(&self) -> *mut ibv_context {
        self.0.context
    }

    pub(super) fn port(&self) -> Port {
        self.0.port
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: both come from the verbs that made them, once, and no handle is left that could hand them out. A
        // protection domain that still has registrations stays (EBUSY) and goes with the context in the kernel, which
        // is right also then: closing ends the registrations before the memory is anyone else's.
        unsafe {
            if !self.pd.is_null() {
                ibv_dealloc_pd(self.pd);
            }
            ibv_close_device(self.context);
        }
    }
}

impl Port {
    /// The first active port of an open device, with the address by which peers shall reach it.
    ///
    /// # Safety
    ///
    /// `context` is open.
    unsafe fn find(context: *mut ibv_context, device: &str) -> Result<Port> {
        let mut limits = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: `context` is open and `limits` is writable.
        check(unsafe { ibv_query_device(context, limits.as_mut_ptr()) })?;
        // SAFETY: integers and byte arrays only, zeroed and then filled in.
        let limits = unsafe { limits.assume_init() };
        for number in 1..=limits.phys_port_cnt {
            let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
            // The symbol takes the shorter struct of an old ABI, which the current one begins with; what it does not
            // know stays zero. (The C header replaces the call by an inline function that rdma-sys has wrong.)
            // SAFETY: `context` is open; `attr` is writable and at least as long as what is written.
            check(unsafe { ibv_query_port(context, number, attr.as_mut_ptr().cast()) })?;
            // SAFETY: integers only, zeroed and then filled in.
            let attr = unsafe { attr.assume_init() };
            if attr.state != ibv_port_state::IBV_PORT_ACTIVE {
                continue;
            }
            // SAFETY: `context` is open.
            let (gid_index, gid) =
                unsafe { choose_gid(context, device, number, attr.gid_tbl_len.clamp(1, 255) as u8) }?;
            let max_reads = limits.max_qp_rd_atom.clamp(1, 16) as u8;
            return Ok(Port { number, lid: attr.lid, mtu: attr.active_mtu, gid_index, gid, max_reads });
        }
        Err(Error::new(ErrorKind::NotFound, format!("{device} has no active port")))
    }
}

/// The address that peers shall use: one of RoCE v2 before others, since only that is routed, and among those one of an
/// IPv4 address before link-local ones, which come and go with IPv6.
///
/// # Safety
///
/// `context` is open.
unsafe fn choose_gid(context: *mut ibv_context, device: &str, port: u8, len: u8) -> Result<(u8, [u8; 16])> {
    let mut best: Option<(u8, u8, [u8; 16])> = None;
    for index in 0..len {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: `context` is open and `gid` is writable.
        if unsafe { ibv_query_gid(context, port, index.into(), &mut gid) } != 0 {
            continue;
        }
        // SAFETY: every bit pattern is a byte array.
        let raw = unsafe { gid.raw };
        if raw == [0; 16] {
            continue;
        }
        let kind = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
        let routed = std::fs::read_to_string(kind).is_ok_and(|kind| kind.trim() == "RoCE v2");
        let v4 = raw[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
        let rank = u8::from(routed) * 2 + u8::from(v4);
        if best.is_none_or(|(best_rank, ..)| rank > best_rank) {
            best = Some((rank, index, raw));
        }
    }
    let (_, index, raw) = best.ok_or_else(|| Error::other(format!("port {port} of {device} has no address (GID)")))?;
    Ok((index, raw))
}

/// The list of devices, freed when dropped. Empty where the kernel has no verbs at all.
struct DeviceList(*mut *mut ibv_device, usize);

impl DeviceList {
    fn get() -> DeviceList {
        let mut len = 0;
        // SAFETY: `len` is writable.
        let list = unsafe { ibv_get_device_list(&mut len) };
        DeviceList(list, if list.is_null() { 0 } else { len.max(0) as usize })
    }

    fn as_slice(&self) -> &[*mut ibv_device] {
        // SAFETY: a list that is not null has that many entries, and lives until `drop`.
        if self.0.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(self.0, self.1) } }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: from `ibv_get_device_list`, and freed once.
            unsafe { ibv_free_device_list(self.0) }
        }
    }
}

/// Verbs return 0 or an errno (and some of them -1 with errno set).
pub(super) fn check(result: std::ffi::c_int) -> Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(Error::last_os_error()),
        errno => Err(Error::from_raw_os_error(errno)),
    }
}
