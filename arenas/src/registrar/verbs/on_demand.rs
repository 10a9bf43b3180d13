//! On-demand paging: what a device says that it can, and which are known to do it right. Uses `fixes`.

use super::fixes::query_device_ex;
use crate::pinning::{OnDemand, Operations};
use core::ptr::NonNull;
use rdma_sys::{ibv_context, ibv_odp_general_caps};
use std::path::Path;

/// The drivers that are known to do it right. (Soft-RoCE's loses the offset within a page on 7.3.)
const PROVEN: &[&str] = &["mlx5_core"];

/// The longest registration of a device that is not proven: soft-RoCE says that it takes any, and refuses 2 GiB and more (7.3).
const UNPROVEN_MAX_LEN: u64 = 1 << 30;

/// What an open device says; `None` if it cannot, or does not say.
///
/// # Safety
///
/// `context` is open.
pub(super) unsafe fn of_device(context: NonNull<ibv_context>, name: &str) -> Option<OnDemand> {
    // SAFETY: the caller's promise.
    let caps = unsafe { query_device_ex(context) }.ok()?.odp_caps;
    if caps.general_caps & u64::from(ibv_odp_general_caps::IBV_ODP_SUPPORT.0) == 0 {
        return None;
    }
    let is_proven = driver("/sys".as_ref(), name).is_some_and(|driver| PROVEN.contains(&&*driver));
    let max_len = if is_proven { u64::MAX } else { UNPROVEN_MAX_LEN };
    Some(OnDemand { max_len, operations: Operations::from_bits(caps.per_transport_caps.rc_odp_caps), is_proven })
}

/// The driver of a device, as sysfs says: a link to its folder. A device of software has none.
fn driver(sysfs: &Path, name: &str) -> Option<String> {
    let link = std::fs::read_link(sysfs.join("class/infiniband").join(name).join("device/driver")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_proven_by_its_driver_and_not_by_its_name() {
        let root = std::env::temp_dir().join(format!("rdmalloc-driver-{}", std::process::id()));
        let device = root.join("class/infiniband/mlx5_0/device");
        std::fs::create_dir_all(&device).unwrap();
        assert_eq!(driver(&root, "mlx5_0"), None);
        std::os::unix::fs::symlink("../../../bus/pci/drivers/mlx5_core", device.join("driver")).unwrap();
        assert_eq!(driver(&root, "mlx5_0").as_deref(), Some("mlx5_core"));
        std::fs::remove_dir_all(root).unwrap();
    }
}
