//! Who keeps a queue pair, or a shared receive queue, that a program has made: [`AsQueuePair`], [`AsSharedReceiveQueue`].
//!
//! Uses rdma-sys. What works with a queue keeps its owner, so the queue lives as long as that needs it.

use core::ptr::NonNull;
use rdma_sys::{ibv_qp, ibv_srq};
use std::sync::Arc;

macro_rules! queue {
    ($trait:ident, $method:ident, $raw:ident, $target:ty, $what:literal, $destroy:literal) => {
        #[doc = concat!("Something that keeps ", $what, " alive: a program's own type around one, or [`", stringify!($raw), "`].")]
        ///
        /// # Safety
        ///
        #[doc = concat!("The pointer is that of ", $what, ", live and the same at every call. With the completion queues and the")]
        /// protection domain that it has, it stays until the value is dropped, however that is moved in between.
        ///
        /// # Examples
        ///
        /// ```
        /// use rdmalloc_arenas::registrar::verbs::ProtectionDomain;
        #[doc = concat!("use rdmalloc_arenas::registrar::verbs::{", stringify!($trait), ", rdma_sys};")]
        #[doc = concat!("use rdma_sys::{", stringify!($target), ", ", $destroy, "};")]
        /// use std::ptr::NonNull;
        /// use std::sync::Arc;
        ///
        /// struct Queue {
        #[doc = concat!("    raw: NonNull<", stringify!($target), ">,")]
        ///     // What the queue needs is dropped behind it, as fields are behind `drop`; completion queues as well.
        ///     domain: Arc<ProtectionDomain>,
        /// }
        ///
        /// // SAFETY: it is destroyed when the value is dropped, not before, and its domain later.
        #[doc = concat!("unsafe impl ", stringify!($trait), " for Queue {")]
        #[doc = concat!("    fn ", stringify!($method), "(&self) -> NonNull<", stringify!($target), "> {")]
        ///         self.raw
        ///     }
        /// }
        ///
        /// // SAFETY: verbs objects may be used from any thread, at once (ibv_alloc_td(3)).
        /// unsafe impl Send for Queue {}
        /// // SAFETY: as above.
        /// unsafe impl Sync for Queue {}
        ///
        /// impl Drop for Queue {
        ///     fn drop(&mut self) {
        ///         // SAFETY: nobody has it any more.
        #[doc = concat!("        unsafe { ", $destroy, "(self.raw.as_ptr()) };")]
        ///     }
        /// }
        /// ```
        ///
        /// An `Arc<Queue>` is one, too: what keeps the queue takes a clone, and the program posts with its own.
        pub unsafe trait $trait {
            /// The queue.
            fn $method(&self) -> NonNull<$target>;
        }

        // SAFETY: the value behind an Arc lives at least as long as the Arc, and answers the same.
        unsafe impl<T: $trait + ?Sized> $trait for Arc<T> {
            fn $method(&self) -> NonNull<$target> {
                (**self).$method()
            }
        }

        // SAFETY: the value behind a Box lives as long as the Box, and answers the same.
        unsafe impl<T: $trait + ?Sized> $trait for Box<T> {
            fn $method(&self) -> NonNull<$target> {
                (**self).$method()
            }
        }

        #[doc = concat!("The pointer to ", $what, " that someone else keeps, as whoever made this has promised.")]
        #[derive(Clone, Copy, Debug)]
        pub struct $raw(NonNull<$target>);

        impl $raw {
            /// A queue that someone else keeps.
            ///
            /// # Safety
            ///
            /// It is live, and stays so, with the completion queues and the protection domain that it has, until everything that
            /// was made from this value or its copies is dropped.
            #[must_use]
            pub const unsafe fn new(queue: NonNull<$target>) -> $raw {
                $raw(queue)
            }
        }

        // SAFETY: promised by who called `new`.
        unsafe impl $trait for $raw {
            fn $method(&self) -> NonNull<$target> {
                self.0
            }
        }

        // SAFETY: verbs objects may be used from any thread, at once (ibv_alloc_td(3): "By default all verbs objects are safe
        // for multi-threaded access").
        unsafe impl Send for $raw {}
        // SAFETY: as above.
        unsafe impl Sync for $raw {}
    };
}

queue!(AsQueuePair, as_queue_pair, RawQueuePair, ibv_qp, "a queue pair (`ibv_qp`)", "ibv_destroy_qp");
queue!(
    AsSharedReceiveQueue,
    as_shared_receive_queue,
    RawSharedReceiveQueue,
    ibv_srq,
    "a shared receive queue (`ibv_srq`)",
    "ibv_destroy_srq"
);
