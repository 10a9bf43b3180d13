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
/// // Peers write through windows, but the heap's own rkey opens nothing.
/// assert!(Access::WINDOWS.is_remote_writable() && !Access::WINDOWS.is_remote());
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
    /// Memory windows may be bound to the memory (`IBV_ACCESS_MW_BIND`): each gives one buffer an rkey of its own, with rights
    /// of its own, until it is revoked. The heap's own rkey opens nothing by this. Brings [`LOCAL_WRITE`](Self::LOCAL_WRITE),
    /// which windows with write or atomic access demand of what lies beneath.
    pub const WINDOWS: Access = Access(1 << 4 | 1);
    /// The device may let its writes become visible in any order (`IBV_ACCESS_RELAXED_ORDERING`), which some adapters and buses
    /// need for their full speed. A hint: providers and kernels that do not know it leave it out, and it is never assumed.
    ///
    /// The trap: without it, adapters mostly write a message's bytes in ascending order, and programs have come to poll its
    /// last byte, or a flag behind it, in place of a completion. With it the flag may be seen before the bytes, even before
    /// bytes of earlier messages. Ask for it only where memory is looked at after a completion was polled, which orders all.
    pub const RELAXED_ORDERING: Access = Access(1 << 5);
    /// The device may write what RDMA READs bring, whatever its transport: on iWARP, where the answer to a READ arrives as a
    /// write of the peer's, that takes `IBV_ACCESS_REMOTE_WRITE`; elsewhere it is [`LOCAL_WRITE`](Self::LOCAL_WRITE), which
    /// comes with it, and nothing more.
    ///
    /// A flag of its own, since on iWARP whoever learns or guesses the rkey may then write into the heap. It counts as remotely
    /// writable on every transport: which one it will be is not known when the heap is made.
    pub const READ_TARGET: Access = Access(1 << 6 | 1);

    /// See [`is_on_demand`](Self::is_on_demand). Not for programs: what a heap may do with such memory differs.
    pub(crate) const ON_DEMAND: Access = Access(1 << 31);

    /// Whether the memory shall be registered without pinning it (`IBV_ACCESS_ON_DEMAND`). Registrars get it that have said they can,
    /// by [`Registrar::on_demand`](crate::Registrar::on_demand), on heaps that want it ([`Pinning`](crate::Pinning)).
    #[must_use]
    pub const fn is_on_demand(self) -> bool {
        self.contains(Access::ON_DEMAND)
    }

    /// Whether all of `other` is allowed.
    #[must_use]
    pub const fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether peers may reach all of the memory by its own rkey.
    #[must_use]
    pub const fn is_remote(self) -> bool {
        self.0 & (1 << 1 | 1 << 2 | 1 << 3) != 0
    }

    /// Whether peers may change the memory, by its own rkey or that of a window.
    #[must_use]
    pub const fn is_remote_writable(self) -> bool {
        self.0 & (1 << 2 | 1 << 3 | 1 << 4 | 1 << 6) != 0
    }

    /// Whether this makes sense only for a device that has peers: remote access, or windows.
    #[must_use]
    pub const fn needs_peers(self) -> bool {
        self.is_remote() || self.contains(Access::WINDOWS)
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
            (Access::WINDOWS, "WINDOWS"),
            (Access::RELAXED_ORDERING, "RELAXED_ORDERING"),
            (Access::READ_TARGET, "READ_TARGET"),
            (Access::ON_DEMAND, "ON_DEMAND"),
        ];
        // As one would write it: what comes with another flag is left out, and so is the empty set beside others.
        let has = |flag: Access| flag.0 != 0 && self.contains(flag);
        let implied =
            |flag: Access| names.iter().any(|(other, _)| *other != flag && has(*other) && other.contains(flag));
        let mut named = names.into_iter().filter(|(flag, _)| has(*flag) && !implied(*flag)).map(|(_, name)| name);
        f.write_str(named.next().unwrap_or("LOCAL_READ"))?;
        named.try_for_each(|name| write!(f, " | {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::Access;

    #[test]
    fn a_set_is_printed_as_it_is_asked_for() {
        for (access, text) in [
            (Access::LOCAL_READ, "LOCAL_READ"),
            (Access::LOCAL_WRITE, "LOCAL_WRITE"),
            (Access::REMOTE_READ, "REMOTE_READ"),
            (Access::REMOTE_WRITE, "REMOTE_WRITE"),
            (Access::REMOTE_READ | Access::LOCAL_WRITE, "LOCAL_WRITE | REMOTE_READ"),
            (Access::WINDOWS | Access::REMOTE_WRITE, "REMOTE_WRITE | WINDOWS"),
        ] {
            assert_eq!(format!("{access:?}"), text);
        }
    }
}
