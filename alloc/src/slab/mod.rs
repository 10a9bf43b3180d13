//! A slab: a span cut into blocks of one class, and its header. Uses `remote` and the slices' metadata of the crate below.
//!
//! The header lies in the metadata of the slab's first slice, outside the arena, so nothing that a device may write decides
//! where the header is; it stays mapped for ever. Its first cache line belongs to the owner (a cache), who alone touches it;
//! the second is for everyone.
//!
//! Invariants, at any moment between two operations of the owner:
//!
//! ```text
//! used + |free| + (capacity - carved) == capacity
//! |remote| <= used                        blocks that others freed count as used until the owner has taken them
//! state == Full  =>  used == capacity
//! alarm == { Current: -1 (never), Partial: 0, Full: capacity - 1 }
//! until_alarm == used - alarm                         kept in place of `used`
//! ```
//!
//! The alarm goes off when `used` has come down to it: when a Partial slab has become empty, and when a Full one has its
//! first free block. So the owner's free counts down one number, and whether its books change is whether that is zero: one
//! instruction on memory and a branch.
//!
//! Links of free blocks lie in the blocks, except in a heap whose memory peers can write: there they lie outside
//! (`rdmalloc_arenas::link_of`), so that whatever a peer writes over free memory, nothing that is trusted changes; and except in one
//! whose free memory shall be all zeros. Which it is
//! stands in the header ([`Slab::next_of`], [`Slab::link`]); the global heap's fast path knows that its own are inside.

mod remote;

use crate::cache::Cache;
use crate::{class, misuse};
use core::cell::Cell;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicUsize, Ordering::Relaxed};
use rdmalloc_arenas::{LINK_UNIT, SLICE, SLICE_META, Span, link_of, meta_of, slice_of};
pub(crate) use remote::{Freed, Remote, Taken};

/// A free block: where the next one is.
struct Free {
    next: *mut Free,
}

/// Never equal to `used`.
const NEVER: u32 = u32::MAX;
/// Blocks are carved in runs of about a page, so that a slab touches its memory as it is used.
const CARVE: usize = 4096;
/// Where the memory was touched before, there is less to save: at least so many blocks, so that blocks of a page and more do
/// not go the slow way one by one.
const CARVE_BLOCKS: usize = 16;

/// Where a slab is in its owner's books.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// The one from which its class is served now.
    Current,
    /// In the list of its class: has free blocks, and blocks in use.
    Partial,
    /// In no list: has no free block.
    Full,
}

/// The header of a slab.
#[repr(C, align(128))]
pub(crate) struct Slab {
    /// Free blocks, linked through themselves.
    free: Cell<*mut Free>,
    /// Frees until the alarm; with it, how many blocks are out: handed out, and not yet back in the owner's hands.
    until_alarm: Cell<u32>,
    alarm: Cell<u32>,
    /// Which cache is the owner, by a number that this layer only compares. Beside what a free changes, so that the owner's
    /// free reads one cache line of the header, and others' compare-and-swaps do not take that line away.
    owner: AtomicUsize,
    /// Of a large span: the tag of its heap. Only its holder asks; here, since freeing it changes `next`.
    tag: Cell<u32>,
    /// Blocks that were ever in `free`, or handed out straight.
    carved: Cell<u32>,
    capacity: Cell<u32>,
    /// Bytes in a block.
    block: Cell<u32>,
    class: Cell<u8>,
    slices: Cell<u8>,
    /// Whether blocks that are not carved yet are zero.
    zero: Cell<bool>,
    /// Whether links lie outside the blocks.
    outside: Cell<bool>,
    /// Of a large block that a heap's user has ([`set_large`](Slab::set_large)): its slices. 0: of a slab.
    span: Cell<u32>,
    /// Neighbours in the list of the class; `next` also links spare spans.
    pub(crate) next: Cell<Option<&'static Slab>>,
    pub(crate) prev: Cell<Option<&'static Slab>>,
    others: Others,
}

/// What others than the owner touch.
#[repr(C, align(64))]
struct Others {
    remote: Remote,
    next_told: AtomicPtr<Slab>,
    /// In every slice of a slab: how many slices before it the slab begins.
    lead: AtomicU8,
    /// Whether blocks are cleared by who gives them back. Changes as the slab is made.
    zero_on_free: AtomicBool,
}

const _: () = assert!(size_of::<Slab>() == SLICE_META && align_of::<Slab>() <= SLICE_META);

/// The header of no slab: full for ever, and never written. What a class has before it has its first.
pub(crate) static NO_SLAB: NoSlab = NoSlab(Slab {
    free: Cell::new(ptr::null_mut()),
    until_alarm: Cell::new(0u32.wrapping_sub(NEVER)),
    alarm: Cell::new(NEVER),
    owner: AtomicUsize::new(0),
    tag: Cell::new(0),
    carved: Cell::new(0),
    capacity: Cell::new(0),
    block: Cell::new(0),
    class: Cell::new(0),
    slices: Cell::new(0),
    zero: Cell::new(false),
    outside: Cell::new(false),
    span: Cell::new(0),
    next: Cell::new(None),
    prev: Cell::new(None),
    others: Others {
        remote: Remote::none(),
        next_told: AtomicPtr::new(ptr::null_mut()),
        lead: AtomicU8::new(0),
        zero_on_free: AtomicBool::new(false),
    },
});

/// See [`NO_SLAB`].
pub(crate) struct NoSlab(pub(crate) Slab);

// SAFETY: its `free` is null and its capacity 0, so `pop` and `carve` return before they write; it is in no list, owned by
// nobody, and no block lies in it. So it is only ever read.
unsafe impl Sync for NoSlab {}

/// The header for the slice in which `address` lies.
///
/// # Safety
///
/// The address lies in an arena that is or was open.
#[inline(always)]
pub(crate) unsafe fn header(address: usize) -> &'static Slab {
    // SAFETY: the metadata of such a slice is mapped, writable and stays so; zero bytes, and whatever a header left there, are
    // a valid `Slab` (integers, null-or-valid pointers that only this crate wrote, a bool); the sizes are checked above.
    unsafe { &*meta_of(address).cast::<Slab>() }
}

/// The slab of a small block.
///
/// # Safety
///
/// `block` is a block of a slab of one slice.
#[inline(always)]
pub(crate) unsafe fn of_small(block: NonNull<u8>) -> &'static Slab {
    // SAFETY: a block lies in an open arena.
    unsafe { header(block.addr().get()) }
}

/// The slab of a block of any slab.
///
/// # Safety
///
/// `block` is a block of a slab.
#[inline(always)]
pub(crate) unsafe fn of_block(block: NonNull<u8>) -> &'static Slab {
    let slice = meta_of(block.addr().get()).cast::<Slab>();
    // SAFETY: a block lies in an open arena, so `slice` is a header, as `header` has it. `create` wrote its lead: the slab's
    // header is so many before it, in the same table.
    unsafe { &*slice.sub(usize::from((*slice).others.lead.load(Relaxed))) }
}

/// The bytes of a block, which are at least what its layout asked for; found by its address alone. A layout of this size
/// is of the block's kind.
///
/// # Safety
///
/// `block` is a block of a slab, or a large one that was marked by [`Slab::set_large`] when it was taken, and has not been
/// resized; and the caller's.
#[inline]
pub(crate) unsafe fn size_of_block(block: NonNull<u8>) -> usize {
    // SAFETY: a block of a slab; or a marked one, of which the lead is 0: so this is the header of its first slice.
    let header = unsafe { of_block(block) };
    match header.span.get() {
        0 => header.block_size(),
        slices => slices as usize * SLICE,
    }
}

impl Slab {
    /// The slices of the large block that begins here, of a heap that a program made; 0: a slab begins here.
    #[inline(always)]
    pub(crate) fn large(&self) -> usize {
        self.span.get() as usize
    }

    /// Says that the span which begins with this header's slice, and is the caller's, is one large block of so many slices.
    pub(crate) fn set_large(&self, slices: usize) {
        // The region has less than 2^32 slices.
        self.span.set(slices as u32);
        // Perhaps it was in the middle of a slab before.
        self.others.lead.store(0, Relaxed);
    }

    /// Cuts a span into blocks of `class`, for `owner`, whose number for those who have to tell it is `id`. No block is carved
    /// yet.
    ///
    /// # Safety
    ///
    /// The span is the caller's, and has the slices of a slab of that class.
    pub(crate) unsafe fn create(span: Span, class: usize, owner: usize, id: u32, outside: bool) -> &'static Slab {
        let block = class::size_of_class(class);
        for slice in 0..span.slices {
            // SAFETY: the slices are the caller's.
            let header = unsafe { header(span.address + slice * SLICE) };
            header.others.lead.store(slice as u8, Relaxed);
        }
        // SAFETY: as above.
        let slab = unsafe { header(span.address) };
        #[cfg(feature = "hardened")]
        // SAFETY: as above.
        unsafe {
            crate::hardened::clear_marks(span.address, span.slices * SLICE)
        };
        slab.free.set(ptr::null_mut());
        slab.owner.store(owner, Relaxed);
        slab.carved.set(0);
        slab.capacity.set((span.slices * SLICE / block) as u32);
        slab.block.set(block as u32);
        slab.class.set(class as u8);
        slab.slices.set(span.slices as u8);
        slab.zero.set(span.zero);
        slab.outside.set(outside);
        slab.span.set(0);
        slab.others.remote.own(id);
        slab.alarm.set(0);
        slab.until_alarm.set(0);
        slab.set_state(State::Current);
        slab
    }

    /// Whether who gives a block back clears it first. Anyone who has a block of the slab may ask.
    #[inline(always)]
    pub(crate) fn zero_on_free(&self) -> bool {
        self.others.zero_on_free.load(Relaxed)
    }

    /// Says so, or not; by who has just made the slab.
    pub(crate) fn set_zero_on_free(&self, zero: bool) {
        self.others.zero_on_free.store(zero, Relaxed);
    }

    /// Notes in the header of a large span whose it is. The caller holds the span.
    pub(crate) fn set_tag(&self, tag: u32) {
        self.tag.set(tag);
    }

    /// The tag of the heap of a large span, which the caller holds.
    pub(crate) fn tag(&self) -> u32 {
        self.tag.get()
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> usize {
        slice_of(ptr::from_ref(self).cast())
    }

    /// How many slices it has.
    pub(crate) fn slices(&self) -> usize {
        self.slices.get().into()
    }

    /// Its class.
    pub(crate) fn class(&self) -> usize {
        self.class.get().into()
    }

    /// Bytes in a block. Anyone who has a block of the slab may ask.
    pub(crate) fn block_size(&self) -> usize {
        self.block.get() as usize
    }

    /// Its owner. Anyone who has a block of the slab may ask.
    #[inline(always)]
    pub(crate) fn owner(&self) -> usize {
        self.owner.load(Relaxed)
    }

    /// The same, of a slab of a heap that a program made, and that has a block out.
    #[inline(always)]
    pub(crate) fn cache(&self) -> &'static Cache {
        // SAFETY: such a slab has an owner, and its name is a cache's.
        unsafe { Cache::of_name(self.owner()) }
    }

    /// Blocks that are out.
    pub(crate) fn used(&self) -> u32 {
        self.until_alarm.get().wrapping_add(self.alarm.get())
    }

    fn set_used(&self, used: u32) {
        self.until_alarm.set(used.wrapping_sub(self.alarm.get()));
    }

    /// Ends it as a slab: the span is about to be another's.
    pub(crate) fn disown(&self) {
        self.owner.store(0, Relaxed);
    }

    /// Whether no block is out.
    pub(crate) fn is_unused(&self) -> bool {
        self.used() == 0
    }

    /// Whether every block was carved.
    pub(crate) fn is_carved(&self) -> bool {
        self.carved.get() == self.capacity.get()
    }

    /// Whether every block is out.
    pub(crate) fn is_full(&self) -> bool {
        self.used() == self.capacity.get()
    }

    /// Whether the slab waits in its owner's list of slabs to look at.
    pub(crate) fn is_told(&self) -> bool {
        self.others.remote.is_told()
    }

    /// Where it is in its owner's books.
    pub(crate) fn state(&self) -> State {
        match self.alarm.get() {
            NEVER => State::Current,
            0 => State::Partial,
            _ => State::Full,
        }
    }

    /// Moves it there; lists are the caller's business.
    pub(crate) fn set_state(&self, state: State) {
        let used = self.used();
        self.alarm.set(match state {
            State::Current => NEVER,
            State::Partial => 0,
            // Not 0, since a slab has at least eight blocks.
            State::Full => self.capacity.get() - 1,
        });
        self.set_used(used);
    }

    /// The owner takes a free block.
    #[inline(always)]
    pub(crate) fn pop(&self) -> Option<NonNull<u8>> {
        let block = NonNull::new(self.free.get())?;
        // SAFETY: what `free` links are free blocks of this slab, which only its owner touches: the caller.
        self.free.set(unsafe { block.as_ref().next });
        self.until_alarm.set(self.until_alarm.get().wrapping_add(1));
        Some(block.cast())
    }

    /// As [`pop`](Self::pop), wherever the links are.
    pub(crate) fn pop_any(&self) -> Option<NonNull<u8>> {
        if !self.outside.get() {
            return self.pop();
        }
        let block = NonNull::new(self.free.get())?;
        self.free.set(self.next_of(block));
        self.until_alarm.set(self.until_alarm.get() + 1);
        Some(block.cast())
    }

    /// The same, and where the memory was touched before, of new blocks too.
    pub(crate) fn pop_touched(&self) -> Option<NonNull<u8>> {
        let block = self.pop_any();
        if block.is_some() || self.zero.get() || !self.carve() {
            return block;
        }
        self.pop_any()
    }

    /// As [`push`](Self::push), wherever the links are.
    ///
    /// # Safety
    ///
    /// As [`push`](Self::push).
    pub(crate) unsafe fn push_any(&self, block: NonNull<u8>) -> bool {
        if !self.outside.get() {
            // SAFETY: the caller's promise.
            return unsafe { self.push(block) };
        }
        self.link(block.cast(), self.free.get());
        self.free.set(block.as_ptr().cast());
        let until_alarm = self.until_alarm.get() - 1;
        self.until_alarm.set(until_alarm);
        until_alarm == 0
    }

    /// The free block after this one, which is the caller's.
    fn next_of(&self, block: NonNull<Free>) -> *mut Free {
        if self.outside.get() {
            // SAFETY: where links are outside, blocks are as `link_of` asks.
            let place = unsafe { link_of(block.addr().get()) }.load(Relaxed);
            return match usize::from(place).checked_sub(1) {
                Some(unit) => block_at(self.address() + unit * LINK_UNIT),
                None => ptr::null_mut(),
            };
        }
        // SAFETY: the block is free and the caller's; it was linked before.
        unsafe { block.as_ref().next }
    }

    /// Links a free block, which is the caller's, to the next.
    fn link(&self, block: NonNull<Free>, next: *mut Free) {
        if self.outside.get() {
            let place = if next.is_null() { 0 } else { 1 + (next.addr() - self.address()) / LINK_UNIT };
            // SAFETY: where links are outside, blocks are as `link_of` asks.
            unsafe { link_of(block.addr().get()) }.store(place as u16, Relaxed);
        } else {
            // SAFETY: the block is free and the caller's.
            unsafe { link(block, next) }
        }
    }

    /// The owner takes a block back. Whether its books must change now, by `alarm`.
    ///
    /// # Safety
    ///
    /// `block` is a block of this slab that is out, and the caller's.
    #[inline(always)]
    pub(crate) unsafe fn push(&self, block: NonNull<u8>) -> bool {
        let block = block.cast::<Free>();
        // SAFETY: the block is the caller's, large enough and aligned for a link (16 bytes).
        unsafe { link(block, self.free.get()) };
        self.free.set(block.as_ptr());
        let until_alarm = self.until_alarm.get().wrapping_sub(1);
        self.until_alarm.set(until_alarm);
        until_alarm == 0
    }

    /// Anyone gives a block back. Which owner has to be told.
    ///
    /// # Safety
    ///
    /// As [`push`](Self::push). After `Freed::Done` the slab may be gone.
    #[inline]
    pub(crate) unsafe fn push_remote(&self, block: NonNull<u8>) -> Freed {
        let base = self.address();
        let place = 1 + (block.addr().get() - base) / 16;
        // SAFETY: the block is the caller's until the word holds it.
        self.others.remote.push(place as u16, |next| self.link(block.cast(), place_to_block(base, next)))
    }

    /// The same with a run of `count` blocks, linked from the first to the last.
    ///
    /// # Safety
    ///
    /// As [`push`](Self::push), for each of them.
    pub(crate) unsafe fn push_remote_run(&self, first: NonNull<u8>, last: NonNull<u8>, count: u32) -> Freed {
        let base = self.address();
        let place = 1 + (first.addr().get() - base) / 16;
        let link = |next| self.link(last.cast(), place_to_block(base, next));
        self.others.remote.push_run(place as u16, count, link)
    }

    /// Links a free block to the next, where links lie in blocks.
    ///
    /// # Safety
    ///
    /// The block is free and the caller's.
    #[inline]
    pub(crate) unsafe fn chain(block: NonNull<u8>, next: Option<NonNull<u8>>) {
        // SAFETY: the caller's promise.
        unsafe { link(block.cast(), next.map_or(ptr::null_mut(), |next| next.as_ptr().cast())) }
    }

    /// The owner, having taken the slab from its list of slabs to look at, takes what others have freed.
    pub(crate) fn look(&self) {
        self.absorb(self.others.remote.take_told());
    }

    /// The owner takes what others have freed, and leaves `told`.
    pub(crate) fn collect(&self) {
        if !self.others.remote.is_empty() {
            self.absorb(self.others.remote.take());
        }
    }

    fn absorb(&self, taken: Taken) {
        let first = place_to_block(self.address(), taken.head);
        let Some(mut last) = NonNull::new(first) else { return };
        if taken.count > self.used() {
            self.freed_too_often();
        }
        let rest = self.free.replace(first);
        if !rest.is_null() {
            for _ in 1..taken.count {
                // SAFETY: the list was taken, so its blocks are the owner's, and it has `count` of them.
                last = unsafe { NonNull::new_unchecked(self.next_of(last)) };
            }
            self.link(last, rest);
        }
        self.set_used(self.used() - taken.count);
    }

    /// More blocks came back than were out: one came twice.
    #[cold]
    pub(crate) fn freed_too_often(&self) -> ! {
        misuse::end(self.address(), None, format_args!("or one of the next, of the same slab, is freed a second time"))
    }

    /// Puts a run of new blocks into the list; `false`: there is none left.
    pub(crate) fn carve(&self) -> bool {
        let (block, carved) = (self.block_size(), self.carved.get());
        let left = self.capacity.get() - carved;
        if left == 0 {
            return false;
        }
        let least = if self.zero.get() { 1 } else { CARVE_BLOCKS };
        let count = left.min((CARVE / block).max(least) as u32);
        let first = self.block_at(carved);
        if self.outside.get() {
            self.link_new(first, count, |block, next| self.link(block, next));
        } else {
            // SAFETY: within the slab, since carved + count <= capacity; never handed out, so the owner's.
            self.link_new(first, count, |block, next| unsafe { link(block, next) });
        }
        self.carved.set(carved + count);
        true
    }

    /// The address of a block, by its number in the slab.
    fn block_at(&self, index: u32) -> usize {
        self.address() + class::bytes_before(self.class(), self.address()) + index as usize * self.block_size()
    }

    /// Puts `count` blocks, 1 or more, from the address `first` on, into the list, in their order.
    #[inline(always)]
    fn link_new(&self, first: usize, count: u32, link: impl Fn(NonNull<Free>, *mut Free)) {
        // SAFETY: a block is not at address 0.
        let at = |address| unsafe { NonNull::new_unchecked(block_at(address)) };
        let block = self.block_size();
        let last = first + (count as usize - 1) * block;
        let mut address = first;
        while address != last {
            link(at(address), block_at(address + block));
            address += block;
        }
        link(at(last), self.free.get());
        self.free.set(block_at(first));
    }

    /// Takes one block that was never handed out, past the list; and whether it is zero.
    pub(crate) fn carve_one(&self) -> Option<(NonNull<u8>, bool)> {
        let carved = self.carved.get();
        if carved == self.capacity.get() {
            return None;
        }
        self.carved.set(carved + 1);
        self.set_used(self.used() + 1);
        NonNull::new(block_at(self.block_at(carved)).cast()).map(|block| (block, self.zero.get()))
    }

    /// Puts the slab before `head` in a list of slabs to look at.
    pub(crate) fn tell(&'static self, list: &AtomicPtr<Slab>) {
        use core::sync::atomic::Ordering::Release;
        let mut head = list.load(Relaxed);
        loop {
            self.others.next_told.store(head, Relaxed);
            // Release: with the acquire of who takes the list. It is only ever taken whole, so there is no ABA.
            match list.compare_exchange_weak(head, ptr::from_ref(self).cast_mut(), Release, Relaxed) {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }

    /// The next slab in a list of slabs to look at, which the caller has taken. Asked before [`look`](Self::look).
    pub(crate) fn next_told(&self) -> Option<&'static Slab> {
        // SAFETY: what is in the list are headers, which are never unmapped.
        unsafe { self.others.next_told.load(Relaxed).as_ref() }
    }
}

/// Writes the link of a free block.
///
/// # Safety
///
/// The block is free and the caller's.
#[inline(always)]
unsafe fn link(block: NonNull<Free>, next: *mut Free) {
    // SAFETY: a block has at least 16 bytes at a multiple of 16.
    unsafe { block.write(Free { next }) }
}

fn block_at(address: usize) -> *mut Free {
    ptr::with_exposed_provenance_mut(address)
}

/// The block at a place as [`Remote`] counts them; null for 0.
fn place_to_block(base: usize, place: u16) -> *mut Free {
    match usize::from(place).checked_sub(1) {
        Some(unit) => block_at(base + unit * 16),
        None => ptr::null_mut(),
    }
}
