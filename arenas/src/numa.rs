//! On which memory node (NUMA) an arena lies: what a heap asks for ([`Node`]), what became of it ([`Placed`]), and where a device is.
//! Uses `os`.

use crate::os;
use core::fmt;
use std::io;

/// From which memory node a heap's memory is taken. It makes a difference only on machines with several.
///
/// A node is preferred, never forced: where it has no free page, others serve. (Forced, `MPOL_BIND`, the kernel would kill the program for
/// want of memory while other nodes have plenty, and hugetlb pages would be a signal when they are touched.)
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Node {
    /// As the kernel likes: mostly that of the processor that touches a page first, which is the one that opens an arena.
    #[default]
    Any,
    /// This one.
    Fixed(u32),
    /// That of the heap's devices, so that they reach the memory without a detour. What is open when the first is attached is
    /// moved, before it is registered.
    ///
    /// Where its devices lie on different nodes, that of the one that was attached first, as long as it is attached: one
    /// arena is registered with all of them, and lies on one node. Where each device shall have memory near it, make a heap for
    /// each.
    OfDevice,
}

impl Node {
    /// As a number.
    pub(crate) fn number(self) -> u64 {
        match self {
            Node::Any => 0,
            Node::OfDevice => 1,
            Node::Fixed(node) => 2 + u64::from(node),
        }
    }

    /// From the number.
    pub(crate) fn from_number(number: u64) -> Node {
        match number {
            0 => Node::Any,
            1 => Node::OfDevice,
            node => Node::Fixed((node - 2) as u32),
        }
    }
}

/// Where an arena was placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum Placed {
    /// No node was asked for.
    #[default]
    Anywhere,
    /// This node was asked for, and the kernel takes it as far as it has room. Where the pages are,
    /// [`ArenaInfo::nodes`](crate::ArenaInfo::nodes) tells.
    On(u32),
    /// The node of the devices was asked for, and no device of the heap says where it is (or none is attached).
    Unknown,
    /// The kernel does not place memory there, with this code: `EINVAL`, it has no such node (or it has no memory); `ENOSYS`, it
    /// knows no nodes; `EPERM`, a container forbids the call. The memory is somewhere.
    Refused {
        /// The node.
        node: u32,
        /// The system's code.
        code: i32,
    },
}

impl Placed {
    /// As a number.
    pub(crate) fn number(self) -> u64 {
        match self {
            Placed::Anywhere => 0,
            Placed::Unknown => 1 << 32,
            Placed::On(node) => 2 << 32 | u64::from(node),
            Placed::Refused { node, code } => 3 << 32 | u64::from(code.unsigned_abs()) << 34 | u64::from(node),
        }
    }

    /// From the number.
    pub(crate) fn from_number(number: u64) -> Placed {
        let node = number as u32;
        match number >> 32 & 3 {
            0 => Placed::Anywhere,
            1 => Placed::Unknown,
            2 => Placed::On(node),
            _ => Placed::Refused { node, code: (number >> 34) as i32 },
        }
    }
}

impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Placed::Anywhere => f.write_str("on any node"),
            Placed::On(node) => write!(f, "on node {node}"),
            Placed::Unknown => f.write_str("on any node: no device of the heap says on which it is"),
            Placed::Refused { node, code } => {
                let error = io::Error::from_raw_os_error(code);
                write!(f, "on any node: the kernel does not place it on node {node}: {error}")?;
                match code {
                    libc::EINVAL => f.write_str(" (see /sys/devices/system/node/has_memory)"),
                    libc::EPERM => f.write_str(" (the container forbids mbind: it needs the capability SYS_NICE)"),
                    _ => Ok(()),
                }
            }
        }
    }
}

/// Prefers a node for a range; with `moves`, moves there what nobody has pinned.
///
/// # Safety
///
/// As [`os::prefer_node`].
pub(crate) unsafe fn place(start: *mut u8, len: usize, node: u32, moves: bool) -> Placed {
    // SAFETY: the caller's promise.
    match unsafe { os::prefer_node(start, len, node, moves) } {
        Ok(()) => Placed::On(node),
        Err(error) => Placed::Refused { node, code: error.raw_os_error().unwrap_or(0) },
    }
}

/// Bytes of a range that are in memory, by node.
pub(crate) fn nodes_of(memory: &core::ops::Range<usize>) -> io::Result<Vec<(u32, usize)>> {
    let mut all: Vec<(u32, usize)> = Vec::new();
    let page = os::kernel_page_size();
    os::nodes_of(memory.start, memory.len(), |node| match all.iter_mut().find(|(other, _)| *other == node) {
        Some((_, bytes)) => *bytes += page,
        None => all.push((node, page)),
    })?;
    all.sort_unstable();
    Ok(all)
}

/// The node of a verbs device, as sysfs (`/sys`, or another root) says; `None` where it says none, as for devices of software.
#[cfg(any(feature = "verbs", test))]
pub(crate) fn node_of_device(sysfs: &std::path::Path, name: &str) -> Option<u32> {
    let text = std::fs::read_to_string(sysfs.join("class/infiniband").join(name).join("device/numa_node")).ok()?;
    // -1: the firmware does not tell.
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_and_places_survive_their_numbers() {
        for node in [Node::Any, Node::OfDevice, Node::Fixed(0), Node::Fixed(u32::MAX)] {
            assert_eq!(Node::from_number(node.number()), node);
        }
        let refused = Placed::Refused { node: u32::MAX, code: libc::ENOSYS };
        for placed in [Placed::Anywhere, Placed::Unknown, Placed::On(0), Placed::On(u32::MAX), refused] {
            assert_eq!(Placed::from_number(placed.number()), placed);
        }
    }

    #[test]
    fn a_device_is_where_sysfs_says_or_nowhere() {
        let root = std::env::temp_dir().join(format!("rdmalloc-sysfs-{}", std::process::id()));
        for (name, text, node) in [("mlx5_0", "1\n", Some(1)), ("mlx5_1", "-1\n", None)] {
            let folder = root.join("class/infiniband").join(name).join("device");
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("numa_node"), text).unwrap();
            assert_eq!(node_of_device(&root, name), node);
        }
        assert_eq!(node_of_device(&root, "rxe0"), None);
        std::fs::remove_dir_all(root).unwrap();
    }
}
