//! Opens a device and makes a protection domain on it, for programs that have none yet: [`ProtectionDomain`], and
//! [`devices`], the names there are.
//!
//! Uses `origin` (in a child of fork nothing is closed) and rdma-sys.

use super::origin::Origin;
use super::{AsProtectionDomain, device_name};
use core::ffi::CStr;
use core::fmt;
use core::ptr::{self, NonNull};
use rdma_sys::{ibv_context, ibv_device, ibv_pd};
use std::fs::File;
use std::io;

/// An open device with a protection domain of its own, both closed when the value is dropped.
///
/// What a program makes on [`as_ptr`](Self::as_ptr) and [`context`](Self::context) (queue pairs, completion queues, memory
/// regions) it destroys before the value is dropped. If something is left under the protection domain, both stay open
/// until the process ends, and so does what is left. In a child of fork, dropping does nothing.
///
/// ```no_run
/// use rdmalloc_arenas::registrar::verbs::ProtectionDomain;
///
/// let domain = ProtectionDomain::open(None)?; // the first device there is
/// println!("{}", domain.device_name());
/// # Ok::<(), rdmalloc_arenas::registrar::verbs::OpenError>(())
/// ```
pub struct ProtectionDomain {
    pd: NonNull<ibv_pd>,
    context: NonNull<ibv_context>,
    name: String,
    origin: Origin,
}

// SAFETY: verbs objects may be used from any thread, at once, and are not bound to the thread that made them
// (ibv_alloc_td(3): "By default all verbs objects are safe for multi-threaded access"). Only `drop` changes anything.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above; through `&self` only the pointers and the name are read.
unsafe impl Sync for ProtectionDomain {}

// SAFETY: the domain and its context are closed by `drop` only, and the fields never change.
unsafe impl AsProtectionDomain for ProtectionDomain {
    fn as_protection_domain(&self) -> NonNull<ibv_pd> {
        self.pd
    }
}

impl ProtectionDomain {
    /// Opens the device with this name, such as `mlx5_0`, or the first there is.
    ///
    /// # Errors
    ///
    /// If there is no device, none of that name, or it does not open. The error's text says what there is and what to do.
    pub fn open(name: Option<&str>) -> Result<ProtectionDomain, OpenError> {
        let list =
            DeviceList::get().map_err(|source| OpenError::NoDevices { source: Some(source), in_kernel: vec![] })?;
        let device = match name {
            Some(wanted) => list.find(wanted).ok_or_else(|| {
                let (wanted, found) = (wanted.to_owned(), list.names());
                if found.is_empty() { list.no_devices() } else { OpenError::NoDevice { wanted, found } }
            })?,
            None => list.first().ok_or_else(|| list.no_devices())?,
        };
        // SAFETY: the device is from a list that is not freed before the end of this function.
        let context = NonNull::new(unsafe { rdma_sys::ibv_open_device(device) }).ok_or_else(|| {
            let (said, node) = (io::Error::last_os_error(), list.node(device));
            // The library also looks for the node in other ways, and errno is that of the last (seen: ENOENT for a node
            // that is there and forbidden). So ask again.
            let source = File::options().read(true).write(true).open(&node).err().unwrap_or(said);
            OpenError::Open { device: list.name(device), node, source }
        })?;
        // SAFETY: the context was just opened.
        let (name, pd) = unsafe { (device_name(context.as_ptr()), rdma_sys::ibv_alloc_pd(context.as_ptr())) };
        let Some(pd) = NonNull::new(pd) else {
            let source = io::Error::last_os_error();
            // SAFETY: opened above, and nothing was made on it.
            unsafe { rdma_sys::ibv_close_device(context.as_ptr()) };
            return Err(OpenError::AllocPd { device: name, source });
        };
        Ok(ProtectionDomain { pd, context, name, origin: Origin::here() })
    }

    /// The protection domain. Valid while `self` lives.
    #[must_use]
    pub fn as_ptr(&self) -> *mut ibv_pd {
        self.pd.as_ptr()
    }

    /// The device's context, for completion queues, ports and the like. Valid while `self` lives.
    #[must_use]
    pub fn context(&self) -> NonNull<ibv_context> {
        self.context
    }

    /// The device's name.
    #[must_use]
    pub fn device_name(&self) -> &str {
        &self.name
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return; // the objects are the parent's: the calls would destroy them there
        }
        // SAFETY: both were made by `open` in this process, and only this destroys them. When the domain is still used it
        // refuses (EBUSY), and the context stays open too, since whoever made what is left will want to destroy it.
        unsafe {
            if rdma_sys::ibv_dealloc_pd(self.pd.as_ptr()) == 0 {
                rdma_sys::ibv_close_device(self.context.as_ptr());
            }
        }
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain").field("device", &self.name).field("pd", &self.pd).finish_non_exhaustive()
    }
}

/// The names of the verbs devices that can be opened here, in the library's order. Empty where there is no RDMA.
#[must_use]
pub fn devices() -> Vec<String> {
    DeviceList::get().map_or_else(|_| vec![], |list| list.names())
}

/// Why [`ProtectionDomain::open`] failed. The text says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no verbs device that the library can use.
    NoDevices {
        /// Why the devices could not be listed, where that failed (`ENOSYS`: the kernel's verbs module is not loaded).
        source: Option<io::Error>,
        /// Devices that the kernel has, but the library does not list: their nodes are missing, or its drivers.
        in_kernel: Vec<String>,
    },
    /// There are devices, but none of that name.
    NoDevice {
        /// The name that was asked for.
        wanted: String,
        /// The names there are.
        found: Vec<String>,
    },
    /// The device is there but cannot be opened (`ibv_open_device`).
    Open {
        /// The device's name.
        device: String,
        /// Its device file.
        node: String,
        /// What the system said.
        source: io::Error,
    },
    /// The device was opened, but gives no protection domain (`ibv_alloc_pd`).
    AllocPd {
        /// The device's name.
        device: String,
        /// What the system said.
        source: io::Error,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::NoDevices { in_kernel, .. } if !in_kernel.is_empty() => write!(
                f,
                "the kernel has RDMA devices ({}), but the verbs library can use none of them: their nodes \
                 /dev/infiniband/uverbs* may be missing (load the module ib_uverbs; in a container, pass /dev/infiniband \
                 in), or the library's drivers (install ibverbs-providers or rdma-core)",
                in_kernel.join(", ")
            ),
            OpenError::NoDevices { source, .. } => {
                f.write_str("there is no RDMA device")?;
                source.iter().try_for_each(|source| write!(f, " ({source})"))?;
                f.write_str(
                    ": `rdma link` lists them; load the adapter's module (such as mlx5_ib), or make a soft one: \
                     `modprobe rdma_rxe`, then `rdma link add rxe0 type rxe netdev eth0`",
                )
            }
            OpenError::NoDevice { wanted, found } => {
                write!(f, "there is no RDMA device named {wanted:?}; there are: {}", found.join(", "))
            }
            OpenError::Open { device, node, source } => {
                let hint = match source.raw_os_error() {
                    Some(libc::EACCES | libc::EPERM) => "this user must be able to read and write its node",
                    _ => "see the kernel's log, and the node",
                };
                write!(f, "cannot open {device}: {source}; {hint} {node}")
            }
            OpenError::AllocPd { device, source } => write!(
                f,
                "{device} gives no protection domain: {source}; see its limit max_pd in `ibv_devinfo -v`, and the \
                 container's limits if it has some (cgroup rdma.max)"
            ),
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            OpenError::NoDevices { source, .. } => source.as_ref().map(|source| source as _),
            OpenError::NoDevice { .. } => None,
            OpenError::Open { source, .. } | OpenError::AllocPd { source, .. } => Some(source),
        }
    }
}

/// The library's list of devices, freed when dropped: an array that ends with null.
struct DeviceList(NonNull<*mut ibv_device>);

impl DeviceList {
    fn get() -> io::Result<DeviceList> {
        // SAFETY: the number of devices is optional.
        let list = unsafe { rdma_sys::ibv_get_device_list(ptr::null_mut()) };
        NonNull::new(list).map(DeviceList).ok_or_else(io::Error::last_os_error)
    }

    fn iter(&self) -> impl Iterator<Item = *mut ibv_device> {
        // SAFETY: the array goes on up to a null, and `take_while` reads no further than that.
        (0..).map(|n| unsafe { *self.0.as_ptr().add(n) }).take_while(|device| !device.is_null())
    }

    fn first(&self) -> Option<*mut ibv_device> {
        self.iter().next()
    }

    fn find(&self, name: &str) -> Option<*mut ibv_device> {
        self.iter().find(|device| self.name(*device) == name)
    }

    fn names(&self) -> Vec<String> {
        self.iter().map(|device| self.name(device)).collect()
    }

    /// The name of a device of this list.
    fn name(&self, device: *mut ibv_device) -> String {
        // SAFETY: a device of the list lives as long as the list. Its name is a C string.
        unsafe { CStr::from_ptr(rdma_sys::ibv_get_device_name(device)) }.to_string_lossy().into_owned()
    }

    /// The device file of a device of this list, such as `/dev/infiniband/uverbs0`.
    fn node(&self, device: *mut ibv_device) -> String {
        // SAFETY: a device of the list lives as long as the list, and may be read. `dev_name` is a C string.
        let name = unsafe { CStr::from_ptr((&raw const (*device).dev_name).cast()) };
        format!("/dev/infiniband/{}", name.to_string_lossy())
    }

    /// The error when this list is empty, with the devices that only the kernel sees.
    fn no_devices(&self) -> OpenError {
        let entries = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
        let mut in_kernel: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        in_kernel.sort();
        OpenError::NoDevices { source: None, in_kernel }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: from ibv_get_device_list, freed once. Devices that were opened stay valid.
        unsafe { rdma_sys::ibv_free_device_list(self.0.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let os = io::Error::from_raw_os_error;
        let node = "/dev/infiniband/uverbs7";
        let open = |errno| OpenError::Open { device: "mlx5_0".into(), node: node.into(), source: os(errno) };
        let no_device = OpenError::NoDevice { wanted: "mlx5_9".into(), found: vec!["mlx5_0".into(), "rxe0".into()] };
        let cases = [
            (no_device, "named \"mlx5_9\"; there are: mlx5_0, rxe0"),
            (OpenError::NoDevices { source: None, in_kernel: vec![] }, "modprobe rdma_rxe"),
            (OpenError::NoDevices { source: Some(os(libc::ENOSYS)), in_kernel: vec![] }, "(Function not implemented"),
            (OpenError::NoDevices { source: None, in_kernel: vec!["mlx5_0".into()] }, "(mlx5_0), but"),
            (open(libc::EACCES), "read and write its node /dev/infiniband/uverbs7"),
            (open(libc::EIO), "kernel's log"),
            (OpenError::AllocPd { device: "rxe0".into(), source: os(libc::ENOMEM) }, "max_pd"),
        ];
        for (error, part) in cases {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
