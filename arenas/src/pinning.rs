//! Whether registering memory pins it ([`Pinning`]), and what a device can do without ([`OnDemand`]). Uses [`Access`].
//!
//! A device that registers on demand (ODP, `IBV_ACCESS_ON_DEMAND`) fetches translations as it needs them, by a page fault of its
//! own; the kernel tells it when one goes. So nothing is pinned or counted against the memlock limit, memory may be swapped, moved and
//! purged beneath it, and the first access to a page costs a fault: microseconds to milliseconds.

use crate::Access;
use core::fmt;

/// Whether devices that are attached to a heap pin its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Pinning {
    /// They do: what is registered is in memory, whole, and stays there.
    #[default]
    Pinned,
    /// They do not: a device that cannot is not attached ([`AttachError::OnDemand`](crate::AttachError::OnDemand)).
    ///
    /// Soft-RoCE can from Linux 7 on, and loses the offset within a page (seen on 7.3): data is right there only at page-aligned
    /// addresses, with a path MTU of 4096 (netdev MTU 9000).
    OnDemand,
    /// Those that can, and are known to do it right ([`OnDemand::is_proven`]), do not; the others do.
    Auto,
}

impl Pinning {
    /// From the number that `as u8` gives.
    pub(crate) fn from_number(number: u8) -> Pinning {
        match number {
            1 => Pinning::OnDemand,
            2 => Pinning::Auto,
            _ => Pinning::Pinned,
        }
    }

    /// Whether a device that can do so much shall register on demand for a heap of this access.
    pub(crate) fn choose(
        self,
        access: Access,
        can: impl FnOnce() -> Option<OnDemand>,
    ) -> Result<Option<OnDemand>, NoOnDemand> {
        if self == Pinning::Pinned {
            return Ok(None);
        }
        let can = can().ok_or(NoOnDemand::Unsupported).and_then(|can| can.serves(access).map(|()| can));
        match self {
            Pinning::OnDemand => can.map(Some),
            _ => Ok(can.ok().filter(|can| can.is_proven)),
        }
    }
}

/// What a device can do with memory that is registered on demand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OnDemand {
    /// The longest such registration, in bytes.
    pub max_len: u64,
    /// What reliable connections can do with such memory.
    pub operations: Operations,
    /// Whether the provider is known to do it right.
    pub is_proven: bool,
}

impl OnDemand {
    /// Whether it does for such memory what a heap with this access is for.
    fn serves(&self, access: Access) -> Result<(), NoOnDemand> {
        if access.contains(Access::WINDOWS) {
            return Err(NoOnDemand::Windows);
        }
        let missing = Operations(Operations::needed_by(access).0 & !self.operations.0);
        if missing == Operations::NONE { Ok(()) } else { Err(NoOnDemand::Operations { missing }) }
    }
}

/// A set of operations of reliable connections.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operations(u32);

impl Operations {
    /// None.
    pub const NONE: Operations = Operations(0);
    /// Sends.
    pub const SEND: Operations = Operations(1);
    /// Receives.
    pub const RECV: Operations = Operations(1 << 1);
    /// RDMA writes, from and to such memory.
    pub const WRITE: Operations = Operations(1 << 2);
    /// RDMA reads, from and to such memory.
    pub const READ: Operations = Operations(1 << 3);
    /// Atomics.
    pub const ATOMIC: Operations = Operations(1 << 4);

    /// From the bits of `ibv_odp_transport_cap_bits`, which are these.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Operations {
        Operations(bits & 0b1_1111)
    }

    /// What a heap with this access is for.
    #[must_use]
    pub fn needed_by(access: Access) -> Operations {
        let mut needed = Operations::SEND.0 | Operations::WRITE.0;
        for (right, operations) in [
            (Access::LOCAL_WRITE, Operations::RECV.0 | Operations::READ.0),
            (Access::REMOTE_READ, Operations::READ.0),
            (Access::REMOTE_ATOMIC, Operations::ATOMIC.0),
        ] {
            needed |= if access.contains(right) { operations } else { 0 };
        }
        Operations(needed)
    }

    /// Whether all of `other` is in it.
    #[must_use]
    pub const fn contains(self, other: Operations) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Debug for Operations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["SEND", "RECV", "WRITE", "READ", "ATOMIC"];
        let has = |bit: &usize| self.0 >> bit & 1 != 0;
        let all: Vec<_> = (0..names.len()).filter(has).map(|bit| names[bit]).collect();
        f.write_str(if all.is_empty() { "NONE" } else { "" }).and_then(|()| f.write_str(&all.join(" | ")))
    }
}

/// Why a device does not register a heap's memory on demand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NoOnDemand {
    /// It cannot, or does not say that it can.
    Unsupported,
    /// It cannot do all that the heap is for: these it cannot.
    Operations {
        /// What is missing.
        missing: Operations,
    },
    /// The heap is for memory windows ([`Access::WINDOWS`]), which are not bound to such memory.
    Windows,
}

impl fmt::Display for NoOnDemand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoOnDemand::Unsupported => f.write_str("it has no on-demand paging (see odp_caps in `ibv_devinfo -v`)"),
            NoOnDemand::Operations { missing } => write!(
                f,
                "it has no on-demand paging for {missing:?} on reliable connections (see rc_odp_caps in `ibv_devinfo -v`)"
            ),
            NoOnDemand::Windows => f.write_str("memory windows are not bound to memory that is registered on demand"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_serves_a_heap_only_with_all_that_the_heap_is_for() {
        let can = |bits| Some(OnDemand { max_len: 1 << 30, operations: Operations::from_bits(bits), is_proven: true });
        let choose = |pinning: Pinning, access, bits| pinning.choose(access, || can(bits));
        assert_eq!(choose(Pinning::OnDemand, Access::LOCAL_WRITE, 0b1111), Ok(can(0b1111)));
        let missing = Err(NoOnDemand::Operations { missing: Operations::READ });
        assert_eq!(choose(Pinning::OnDemand, Access::LOCAL_WRITE, 0b0111), missing);
        assert_eq!(choose(Pinning::Auto, Access::LOCAL_WRITE, 0b0111), Ok(None));
        assert_eq!(choose(Pinning::OnDemand, Access::LOCAL_READ, 0b0101), Ok(can(0b0101)));
        let missing = Err(NoOnDemand::Operations { missing: Operations::ATOMIC });
        assert_eq!(choose(Pinning::OnDemand, Access::REMOTE_ATOMIC, 0b10_1111), missing);
        assert_eq!(choose(Pinning::OnDemand, Access::WINDOWS, 0b1_1111), Err(NoOnDemand::Windows));
        assert_eq!(choose(Pinning::Pinned, Access::LOCAL_WRITE, 0b1111), Ok(None));
        assert_eq!(format!("{:?}", Operations::from_bits(0b1001)), "SEND | READ");
    }

    #[test]
    fn auto_takes_only_what_is_proven() {
        let can = OnDemand { max_len: 1 << 30, operations: Operations::from_bits(u32::MAX), is_proven: false };
        assert_eq!(Pinning::Auto.choose(Access::LOCAL_WRITE, || Some(can)), Ok(None));
        assert_eq!(Pinning::Auto.choose(Access::LOCAL_WRITE, || None), Ok(None));
        assert_eq!(Pinning::OnDemand.choose(Access::LOCAL_WRITE, || Some(can)), Ok(Some(can)));
        assert_eq!(Pinning::OnDemand.choose(Access::LOCAL_WRITE, || None), Err(NoOnDemand::Unsupported));
        for pinning in [Pinning::Pinned, Pinning::OnDemand, Pinning::Auto] {
            assert_eq!(Pinning::from_number(pinning as u8), pinning);
        }
    }
}
