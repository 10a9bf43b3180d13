//! What memory a heap's arenas have: settings of the global heap and of those that a program makes. Uses `global` and `pool`.

use crate::global::GLOBAL;
use crate::pool::Builder;
use crate::{Heap, Pages, Rdmalloc};
use rdmalloc_arenas::Arenas;

/// What is set before a heap is made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    pages: Pages,
}

impl Memory {
    /// Sets it for a new heap.
    pub(crate) fn apply(self, arenas: &Arenas) {
        arenas.set_pages(self.pages);
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
}

macro_rules! memory {
    ($heap:ty, $core:expr) => {
        impl $heap {
            /// Sets what pages arenas get that are opened from now on; those that are open keep what they have. See
            /// [`Builder::pages`](crate::Builder::pages).
            pub fn set_pages(&self, pages: Pages) {
                $core(self).arenas.set_pages(pages);
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
