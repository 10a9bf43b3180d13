//! What a device may do with a heap's memory. Uses nothing below it.

use core::ops::BitOr;

/// What a device, and through it a peer, may do with the memory of a heap.
///
/// The device itself may always read (send from, gather from) registered memory, so the empty set is a valid, source-only
/// access. The default is [`Access::LOCAL_WRITE`]: the device may also receive into it, and no peer reaches it.
///
/// ```
/// use rdmalloc_arenas::Access;
/// let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
/// assert!(access.contains(Access::LOCAL_WRITE)); // remote writes and atomics need local write, so it comes with them
/// assert!(access.is_remote());
/// assert!(!Access::default().is_remote());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access(u32);

impl Access {
    /// The device may only read: a source of sends and writes.
    pub const LOCAL_READ: Access = Access(0);
    /// The device may write: a target of receives and of RDMA reads.
    pub const LOCAL_WRITE: Access = Access(1);
    /// Peers that hold the rkey may read.
    pub const REMOTE_READ: Access = Access(1 << 1);
    /// Peers that hold the rkey may write. Brings [`LOCAL_WRITE`](Self::LOCAL_WRITE), which verbs demand with it.
    pub const REMOTE_WRITE: Access = Access(1 << 2 | 1);
    /// Peers that hold the rkey may use atomics. Brings [`LOCAL_WRITE`](Self::LOCAL_WRITE), which verbs demand with it.
    pub const REMOTE_ATOMIC: Access = Access(1 << 3 | 1);
    /// Memory windows may be bound to the memory.
    pub const WINDOW_BIND: Access = Access(1 << 4);
    /// The device may write in any order (`IBV_ACCESS_RELAXED_ORDERING`), where it knows how; a hint elsewhere.
    pub const RELAXED_ORDERING: Access = Access(1 << 5);

    /// Whether all of `other` is allowed.
    #[must_use]
    pub const fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether peers may reach the memory by an rkey.
    #[must_use]
    pub const fn is_remote(self) -> bool {
        self.0 & (1 << 1 | 1 << 2 | 1 << 3) != 0
    }

    /// Whether peers may change the memory by an rkey.
    #[must_use]
    pub const fn is_remote_writable(self) -> bool {
        self.0 & (1 << 2 | 1 << 3) != 0
    }

    /// Both sets together; the `const` form of `|`.
    #[must_use]
    pub const fn union(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

impl Default for Access {
    fn default() -> Self {
        Access::LOCAL_WRITE
    }
}

impl BitOr for Access {
    type Output = Access;
    fn bitor(self, other: Access) -> Access {
        self.union(other)
    }
}

impl core::fmt::Debug for Access {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let names = [
            (Access::LOCAL_WRITE, "LOCAL_WRITE"),
            (Access::REMOTE_READ, "REMOTE_READ"),
            (Access::REMOTE_WRITE, "REMOTE_WRITE"),
            (Access::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
            (Access::WINDOW_BIND, "WINDOW_BIND"),
            (Access::RELAXED_ORDERING, "RELAXED_ORDERING"),
        ];
        f.write_str("LOCAL_READ")?;
        names.iter().filter(|(flag, _)| self.contains(*flag)).try_for_each(|(_, name)| write!(f, " | {name}"))
    }
}
