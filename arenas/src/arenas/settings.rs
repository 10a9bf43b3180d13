//! What a program sets for a heap, at any time. Uses nothing below it.
//!
//! Atomics that are read where they are needed: nobody waits, and each holds by itself.

use super::Arenas;
use super::limits::Policy;
use super::retain::Clock;
use crate::pages::Pages;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::OnceLock;

/// See the module.
#[derive(Debug)]
pub(super) struct Settings {
    /// Bytes of empty arenas that are kept; `usize::MAX`: as the rule for those who set nothing says.
    pub(super) retain_bytes: AtomicUsize,
    /// For how many nanoseconds they are kept.
    pub(super) retain_time: AtomicU64,
    /// Where the time comes from, if not from the system.
    pub(super) clock: OnceLock<Clock>,
    /// Bytes that may be registered, over all devices.
    pub(super) budget_bytes: AtomicU64,
    /// Registrations that may be made, over all devices.
    pub(super) budget_registrations: AtomicU64,
    /// Registered bytes that are worth telling when they are exceeded; `u64::MAX`: none are.
    pub(super) soft_limit: AtomicU64,
    /// A [`Policy`], as a number.
    pub(super) policy: AtomicU8,
    /// [`Pages`], as a number.
    pub(super) pages: AtomicU8,
    /// A [`Pinning`](crate::Pinning), as a number.
    pub(super) pinning: AtomicU8,
    /// A [`Node`](crate::Node), as a number.
    pub(super) node: AtomicU64,
    /// Whether who gives memory back clears it first.
    zero_on_free: AtomicBool,
}

impl Settings {
    /// As they are for those who set nothing.
    pub(super) const fn new(policy: Policy) -> Settings {
        Settings {
            retain_bytes: AtomicUsize::new(usize::MAX),
            retain_time: AtomicU64::new(super::retain::DEFAULT_TIME.as_nanos() as u64),
            clock: OnceLock::new(),
            budget_bytes: AtomicU64::new(u64::MAX),
            budget_registrations: AtomicU64::new(u64::MAX),
            soft_limit: AtomicU64::new(u64::MAX),
            policy: AtomicU8::new(policy as u8),
            pages: AtomicU8::new(Pages::Transparent as u8),
            pinning: AtomicU8::new(0),
            node: AtomicU64::new(0),
            zero_on_free: AtomicBool::new(false),
        }
    }
}

impl Arenas {
    /// Says that all free memory of these arenas is zero: whoever gives some back clears it first. Before the first arena is
    /// opened.
    pub fn set_free_memory_zero(&self, zero: bool) {
        self.settings.zero_on_free.store(zero, Relaxed);
    }

    /// Whether all free memory is zero, or what a peer has written there since.
    #[inline]
    #[must_use]
    pub fn is_free_memory_zero(&self) -> bool {
        self.settings.zero_on_free.load(Relaxed)
    }

    /// Whether links of free blocks lie outside the blocks ([`link_of`](crate::link_of)): where peers can write, lest anything that
    /// they write is trusted; and where free memory is zero, lest the links are read there.
    #[inline]
    #[must_use]
    pub fn has_links_outside(&self) -> bool {
        self.config.access.is_remote_writable() || self.is_free_memory_zero()
    }
}
