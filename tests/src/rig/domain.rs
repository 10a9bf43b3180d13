//! An open device with one protection domain, and the port and address by which its queue pairs are reached.
//!
//! Uses the opener of rdmalloc-arenas, rdma-sys, and what sysfs says about GIDs.

use rdma_sys::{
    ibv_context, ibv_device_attr, ibv_gid, ibv_mtu, ibv_pd, ibv_port_state, ibv_query_device, ibv_query_gid,
};
use rdmalloc_arenas::registrar::verbs::{AsProtectionDomain, OpenError, ProtectionDomain, devices, fixes};
use std::io::{Error, ErrorKind, Result};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

/// An open device and a protection domain on it. A handle: clones share them, and the last one to go closes both.
#[derive(Clone)]
pub struct Domain(Arc<Inner>);

struct Inner {
    domain: ProtectionDomain,
    port: Port,
}

// SAFETY: a `ProtectionDomain` keeps the promise, and it lives as long as any clone of the handle.
unsafe impl AsProtectionDomain for Domain {
    fn as_protection_domain(&self) -> NonNull<ibv_pd> {
        self.0.domain.as_protection_domain()
    }
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

impl Domain {
    /// Opens the device of that name, or the first that has an active port, with a protection domain on it.
    ///
    /// # Errors
    ///
    /// `NotFound` where there is no such device, or none with an active port; otherwise the error of the verb that failed.
    pub fn open(name: Option<&str>) -> Result<Domain> {
        if name.is_none() {
            // A device whose cable is out is passed over.
            let ready = devices().into_iter().map(|device| Domain::open_one(Some(&device))).find(Result::is_ok);
            if let Some(domain) = ready {
                return domain;
            }
        }
        Domain::open_one(name)
    }

    fn open_one(name: Option<&str>) -> Result<Domain> {
        let domain = ProtectionDomain::open(name).map_err(|error| match error {
            OpenError::NoDevices { .. } | OpenError::NoDevice { .. } => Error::new(ErrorKind::NotFound, error),
            _ => Error::other(error),
        })?;
        // SAFETY: the context is open.
        let port = unsafe { Port::find(domain.context(), domain.device_name()) }?;
        Ok(Domain(Arc::new(Inner { domain, port })))
    }

    /// The name of the device, such as `rxe0`.
    pub fn name(&self) -> &str {
        self.0.domain.device_name()
    }

    /// The protection domain: valid while this handle or a clone of it lives.
    pub fn pd(&self) -> *mut ibv_pd {
        self.0.domain.as_ptr()
    }

    /// The context of the open device: valid while this handle or a clone of it lives.
    pub fn context(&self) -> *mut ibv_context {
        self.0.domain.context().as_ptr()
    }

    pub(super) fn port(&self) -> Port {
        self.0.port
    }
}

impl Port {
    /// The first active port of an open device, with the address by which peers shall reach it.
    ///
    /// # Safety
    ///
    /// `context` is open.
    unsafe fn find(context: NonNull<ibv_context>, device: &str) -> Result<Port> {
        let mut limits = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: `context` is open and `limits` is writable.
        check(unsafe { ibv_query_device(context.as_ptr(), limits.as_mut_ptr()) })?;
        // SAFETY: integers and byte arrays only, zeroed and then filled in.
        let limits = unsafe { limits.assume_init() };
        for number in 1..=limits.phys_port_cnt {
            // SAFETY: `context` is open.
            let attr = unsafe { fixes::query_port(context, number) }?;
            if attr.state != ibv_port_state::IBV_PORT_ACTIVE {
                continue;
            }
            // SAFETY: `context` is open.
            let (gid_index, gid) =
                unsafe { choose_gid(context.as_ptr(), device, number, attr.gid_tbl_len.clamp(1, 255) as u8) }?;
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

/// Verbs return 0 or an errno (and some of them -1 with errno set).
pub(super) fn check(result: std::ffi::c_int) -> Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(Error::last_os_error()),
        errno => Err(Error::from_raw_os_error(errno)),
    }
}
