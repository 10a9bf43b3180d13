//! What a heap may have registered, what becomes of memory that a device has not, and who is told: settings of the global heap
//! and of those that a program makes. Uses `heap`, `global` and `pool`.

use crate::global::GLOBAL;
use crate::pool::Builder;
use crate::thread;
use crate::{Budget, CaughtUp, Event, Heap, Policy, Rdmalloc};
use core::fmt;
use rdmalloc_arenas::{Arenas, Listener};
use std::sync::Arc;

/// What is set before a heap is made.
#[derive(Clone, Default)]
pub(crate) struct Limited {
    budget: Option<Budget>,
    soft_limit: Option<u64>,
    policy: Option<Policy>,
    listener: Option<Listener>,
}

impl Limited {
    /// Sets it for a new heap.
    pub(crate) fn apply(&self, arenas: &Arenas) {
        let Limited { budget, soft_limit, policy, listener } = self.clone();
        budget.into_iter().for_each(|budget| arenas.set_budget(budget));
        policy.into_iter().for_each(|policy| arenas.set_policy(policy));
        arenas.set_soft_limit(soft_limit);
        arenas.set_listener(listener);
    }
}

impl fmt::Debug for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Limited { budget, soft_limit, policy, .. } = self;
        f.debug_tuple("Limited").field(budget).field(soft_limit).field(policy).finish()
    }
}

impl Builder {
    /// What the heap may have registered, over all its devices; no limit unless said. See [`Heap::set_budget`].
    pub fn budget(mut self, budget: Budget) -> Builder {
        self.limited.budget = Some(budget);
        self
    }

    /// How many registered bytes, over all devices, are worth telling when they are exceeded. See [`Heap::set_soft_limit`].
    pub fn soft_limit(mut self, bytes: u64) -> Builder {
        self.limited.soft_limit = Some(bytes);
        self
    }

    /// What becomes of memory that a device does not register; [`Policy::Require`] unless said.
    pub fn policy(mut self, policy: Policy) -> Builder {
        self.limited.policy = Some(policy);
        self
    }

    /// Who is told of the heap's limits. See [`Heap::on_event`].
    pub fn on_event(mut self, listener: impl Fn(&Event) + Send + Sync + 'static) -> Builder {
        self.limited.listener = Some(keep(listener));
        self
    }
}

/// The listener, in a block of the internal heap: it shall not keep an arena of the global one open.
fn keep(listener: impl Fn(&Event) + Send + Sync + 'static) -> Listener {
    thread::inside(|| -> Listener { Arc::new(listener) })
}

macro_rules! limits {
    ($heap:ty, $core:expr) => {
        impl $heap {
            /// Sets what the heap may have registered, over all its devices, from now on. What is registered stays so; what was
            /// refused is registered now, as far as the new budget allows.
            ///
            /// An arena that would exceed it is not registered: see [`Policy`] for what becomes of it.
            pub fn set_budget(&self, budget: Budget) {
                $core(self).arenas.set_budget(budget);
                $core(self).catch_up();
            }

            /// What the heap may have registered.
            #[must_use]
            pub fn budget(&self) -> Budget {
                $core(self).arenas.budget()
            }

            /// Sets how many registered bytes, over all devices, are told ([`Event::AboveSoftLimit`]) when they are exceeded;
            /// nothing else happens. `None`: no such limit.
            pub fn set_soft_limit(&self, bytes: Option<u64>) {
                $core(self).arenas.set_soft_limit(bytes);
                $core(self).arenas.tell();
            }

            /// The soft limit.
            #[must_use]
            pub fn soft_limit(&self) -> Option<u64> {
                $core(self).arenas.soft_limit()
            }

            /// Sets what becomes, from now on, of memory that a device does not register. What is open stays as it is.
            pub fn set_policy(&self, policy: Policy) {
                $core(self).arenas.set_policy(policy);
            }

            /// What becomes of memory that a device does not register.
            #[must_use]
            pub fn policy(&self) -> Policy {
                $core(self).arenas.policy()
            }

            /// Says who is told of the heap's limits; replaces who was told before.
            ///
            /// Each [`Event`] is told once, and never from inside an allocation: the listener is called in `trim`, `attach`,
            /// `catch_up`, `set_budget`, `set_soft_limit` and this call, on the thread that makes the call, with no lock held;
            /// so it may allocate, log, and use the heap. It lives as long as the heap: a handle to a heap in its own listener
            /// keeps the heap for ever.
            ///
            /// ```
            #[doc = concat!("# use rdmalloc::", stringify!($heap), ";")]
            #[doc = concat!("# fn example(heap: ", stringify!($heap), ") {")]
            /// heap.set_soft_limit(Some(8 << 30));
            /// heap.on_event(|event| eprintln!("rdmalloc: {event}"));
            /// # }
            /// ```
            pub fn on_event(&self, listener: impl Fn(&Event) + Send + Sync + 'static) {
                $core(self).arenas.set_listener(Some(keep(listener)));
                $core(self).arenas.tell();
            }

            /// Registers what was refused before, as far as that can be done now, and tells the listener what there is to
            /// tell. Cheap when there is nothing; `trim` does the same, and so does a heap's maintainer.
            pub fn catch_up(&self) -> CaughtUp {
                $core(self).catch_up()
            }

            /// Bytes registered now, summed over the devices. An atomic load.
            #[must_use]
            pub fn registered_bytes(&self) -> u64 {
                $core(self).arenas.registered_bytes()
            }

            /// Bytes in arenas that are open now, registered or not. An atomic load.
            #[must_use]
            pub fn open_bytes(&self) -> u64 {
                $core(self).arenas.open_bytes()
            }
        }
    };
}

limits!(Rdmalloc, |_| &GLOBAL);
limits!(Heap, |heap: &Heap| heap.core);
