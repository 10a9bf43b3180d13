//! What memory a heap's arenas have: settings of the global heap and of those that a program makes. Uses `global` and `pool`.

use crate::global::GLOBAL;
use crate::pool::Builder;
use crate::{Heap, Node, Pages, Pinning, Rdmalloc};
use rdmalloc_arenas::Arenas;

/// What is set before a heap is made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    pages: Pages,
    node: Node,
    pinning: Pinning,
}

impl Memory {
    /// Sets it for a new heap.
    pub(crate) fn apply(self, arenas: &Arenas) {
        arenas.set_pages(self.pages);
        arenas.set_node(self.node);
        arenas.set_pinning(self.pinning);
    }
}

impl Builder {
    /// What pages the heap's arenas have; [`Pages::Transparent`] unless said.
    ///
    /// Where pages of the hugetlb pool are not to be had, arenas have others, and say why: [`ArenaInfo::fallback`].
    ///
    /// [`ArenaInfo::fallback`]: crate::ArenaInfo::fallback
    ///
    /// ```
    /// use rdmalloc::{Heap, Pages};
    ///
    /// let heap = Heap::builder().pages(Pages::Huge2M).build()?;
    /// let buffer = heap.buffer(64 << 10)?;
    /// let arena = &heap.arenas()[0];
    /// match arena.fallback {
    ///     None => assert_eq!(arena.pages, Pages::Huge2M),
    ///     Some(why) => println!("in {:?} pages: {why}", arena.pages),
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pages(mut self, pages: Pages) -> Builder {
        self.memory.pages = pages;
        self
    }

    /// From which memory node the heap's memory is taken; [`Node::Any`] unless said.
    ///
    /// ```
    /// use rdmalloc::{Heap, Node, Placed};
    ///
    /// let heap = Heap::builder().node(Node::Fixed(0)).build()?;
    /// let buffer = heap.buffer(64 << 10)?;
    /// match heap.arenas()[0].placed {
    ///     Placed::On(node) => assert_eq!(node, 0),
    ///     elsewhere => println!("{elsewhere}"),
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn node(mut self, node: Node) -> Builder {
        self.memory.node = node;
        self
    }

    /// Whether devices that are attached pin the heap's memory; [`Pinning::Pinned`] unless said.
    ///
    /// What no device has pinned is neither faulted in nor counted against the memlock limit, and what is free of it goes back to
    /// the kernel, as without a device. Where some devices of a heap pin and others do not, it is pinned.
    pub fn pinning(mut self, pinning: Pinning) -> Builder {
        self.memory.pinning = pinning;
        self
    }
}

macro_rules! memory {
    ($heap:ty, $core:expr) => {
        impl $heap {
            /// Sets what pages arenas get that are opened from now on; those that are open keep what they have. See
            /// [`Builder::pages`](crate::Builder::pages).
            pub fn set_pages(&self, pages: Pages) {
                $core(self).arenas.set_pages(pages);
            }

            /// Sets from which memory node arenas get their memory that are opened from now on. With [`Node::OfDevice`], those
            /// that are open are moved when the heap's first device is attached.
            pub fn set_node(&self, node: Node) {
                $core(self).arenas.set_node(node);
            }

            /// Sets whether devices pin the heap's memory that are attached from now on. See
            /// [`Builder::pinning`](crate::Builder::pinning).
            pub fn set_pinning(&self, pinning: Pinning) {
                $core(self).arenas.set_pinning(pinning);
            }

            /// Whether devices that are attached pin the heap's memory.
            #[must_use]
            pub fn pinning(&self) -> Pinning {
                $core(self).arenas.pinning()
            }

            /// From which memory node arenas get their memory.
            #[must_use]
            pub fn node(&self) -> Node {
                $core(self).arenas.node()
            }

            /// What pages arenas get.
            #[must_use]
            pub fn pages(&self) -> Pages {
                $core(self).arenas.pages()
            }
        }
    };
}

memory!(Rdmalloc, |_| &GLOBAL);
memory!(Heap, |heap: &Heap| heap.core);
