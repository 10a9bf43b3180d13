//! Does what a step says, and checks what it gave. Uses `world`.

use super::device::{Attached, Books};
use super::held::{Block, Held, Root, byte, fill, first_not_zero, spots};
use super::operation::{BufferKind, DeviceKind, Operation, Step};
use super::world::{Check, GLOBAL, Place, World, check, on};
use rdmalloc::{Access, AttachError, Budget, Buffer, DetachError, Heap, KeyError, Policy, Rdmalloc, TakeError};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::RefCell;
use std::ptr::NonNull;

/// No more memory than this at once, so that a sequence fits any machine.
const MOST: usize = 256 << 20;
/// No more devices on a heap.
const DEVICES: usize = 5;
/// As much of a buffer is written as of a message.
const MESSAGE: usize = 16 << 10;

thread_local! {
    /// What is freed as the thread ends.
    static LEFT: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
}

impl World {
    /// One step, on the thread that calls.
    pub fn perform(&mut self, step: &Step) -> Check {
        let Step { thread, place, operation } = *step;
        match operation {
            Operation::Allocate { size, align, zeroed, count } => {
                (0..count).try_for_each(|_| self.allocate(place, size, align, zeroed))?;
            }
            Operation::Resize { which, size, parts } => self.resize(which, size, parts)?,
            Operation::Buffer { size, align, kind, count } => {
                (0..count).try_for_each(|_| self.buffer(place, size, align, kind))?;
            }
            Operation::Free { which } => {
                if let Some((start, held)) = self.take(which, |_| true) {
                    self.drop_held(start, held)?;
                }
            }
            Operation::Leave { which } => {
                if thread > 0
                    && let Some((start, held)) = self.take(which, |_| true)
                {
                    self.left.push((thread, start));
                    LEFT.with_borrow_mut(|left| left.push(held));
                }
            }
            Operation::Share { which, from } => self.share(which, from),
            Operation::IntoBytes { which } => {
                if let Some((start, Held::Shared(shared))) = self.take(which, |held| matches!(held, Held::Shared(_))) {
                    self.held.push((start, Held::Bytes(shared.into())));
                }
            }
            Operation::Unshare { which } => self.unshare(which)?,
            Operation::Build { remote, zero_on_free, prefer } if place > 0 => {
                self.end_name(place)?;
                self.build(place, remote, zero_on_free, prefer)?;
            }
            Operation::CloneHeap => {
                if let Some(place) = self.heap(place)
                    && let Some(heap) = place.handles.first().cloned()
                {
                    place.handles.push(heap);
                }
            }
            Operation::DropHeap => {
                if let Some(heap) = self.heap(place) {
                    heap.handles.pop();
                    if heap.handles.is_empty() {
                        self.end_name(place)?;
                    }
                }
            }
            Operation::Attach { kind, count } => self.attach(place, kind, count)?,
            Operation::Detach { which } => self.detach(place, which)?,
            Operation::Hold { which } => {
                if let Some(attached) = self.attached(place, which) {
                    attached.hold = match attached.hold.take() {
                        Some(_) => None,
                        None => Some(attached.device.hold().map_err(|error| error.to_string())?),
                    };
                }
            }
            Operation::Refuse { which, after } => {
                if let Some(attached) = self.attached(place, which) {
                    attached.refuses = !attached.refuses;
                    attached.ledger.refuse_after(attached.refuses.then_some(after));
                }
            }
            Operation::Budget { bytes } => {
                if let Some(heap) = self.names[place] {
                    self.set_budget(heap, bytes)?;
                }
            }
            Operation::Trim => {
                if let Some(heap) = self.names[place] {
                    let trimmed = on!(self.place(heap), heap => heap.trim());
                    self.check_trimmed(heap, &trimmed)?;
                }
            }
            Operation::Fork => self.fork()?,
            Operation::Build { .. } | Operation::EndThread => {}
        }
        self.names.into_iter().flatten().try_for_each(|heap| self.check_figures(heap))
    }

    /// Whether so many bytes more are too many.
    fn is_full(&self, size: usize) -> bool {
        self.roots.iter().map(|(start, root)| root.end - start).sum::<usize>() + size > MOST
    }

    pub(super) fn allocate(&mut self, place: usize, size: usize, align: usize, zeroed: bool) -> Check {
        if self.is_full(size) {
            return Ok(());
        }
        let layout = Layout::from_size_align(size, align).map_err(|error| error.to_string())?;
        if place > 1 {
            return self.allocate_in(place, layout, zeroed);
        }
        let heap = Rdmalloc::new();
        // SAFETY: the size is not 0.
        let start = unsafe { if zeroed { heap.alloc_zeroed(layout) } else { heap.alloc(layout) } };
        let start = NonNull::new(start).ok_or_else(|| format!("no memory for {layout:?}"))?;
        let (address, block, seed) = (start.addr().get(), Block { start, layout }, self.seed());
        check(address.is_multiple_of(align), || format!("{address:x} is not aligned to {align}"))?;
        // SAFETY: a new block of this size.
        let soiled = if zeroed { unsafe { first_not_zero(start.as_ptr(), size) } } else { None };
        check(soiled.is_none(), || format!("byte {soiled:?} of {size} zeroed ones is not"))?;
        let root = Root { end: address + size, len: size, seed, owners: 1, heap: GLOBAL };
        self.adopt(address, root, Held::Block(block))?;
        // SAFETY: a new block of this size, nobody else's.
        unsafe { fill(start.as_ptr(), seed, 0..size, size) };
        Ok(())
    }

    fn resize(&mut self, which: usize, size: usize, parts: Option<u8>) -> Check {
        let is_block = |held: &Held| matches!(held, Held::Block(_) | Held::Loose(_));
        let Some((address, held)) = self.take(which, is_block) else { return Ok(()) };
        let Root { end, len, .. } = self.roots[&address];
        let size = parts.map_or(size, |parts| (len * usize::from(parts) / 64).max(1));
        if self.is_full(size.saturating_sub(end - address)) {
            self.held.push((address, held));
            return Ok(());
        }
        let block = match held {
            Held::Block(block) => block,
            Held::Loose(loose) => return self.resize_in(address, loose, size, which & 1 == 0),
            _ => return Ok(()),
        };
        let (seed, layout, old) = (self.seed(), block.layout, self.roots[&address].clone());
        let held = Held::Block(block);
        held.check(address, &old)?;
        let Held::Block(block) = held else { return Ok(()) };
        // SAFETY: the block is ours, of this layout; the size is not 0.
        let start = unsafe { Rdmalloc::new().realloc(block.start.as_ptr(), layout, size) };
        let start = NonNull::new(start).ok_or_else(|| format!("no memory to make {layout:?} {size} bytes"))?;
        std::mem::forget(block);
        self.forget(address)?;
        let address = start.addr().get();
        let layout = Layout::from_size_align(size, layout.align()).map_err(|error| error.to_string())?;
        let block = Block { start, layout };
        check(address.is_multiple_of(layout.align()), || format!("{address:x} is resized to {layout:?}"))?;
        for at in spots(old.len).flatten().filter(|at| *at < size) {
            // SAFETY: within the block; what was written before was moved.
            let (found, kept) = (unsafe { start.add(at).read() }, byte(old.seed, at));
            check(found == kept, || format!("byte {at} of {old:x?} was not kept as it became {size} bytes"))?;
        }
        let root = Root { end: address + size, len: size, seed, owners: 1, heap: GLOBAL };
        self.adopt(address, root, Held::Block(block))?;
        // SAFETY: the block has this size, and is nobody else's.
        unsafe { fill(start.as_ptr(), seed, 0..size, size) };
        Ok(())
    }

    fn buffer(&mut self, place: usize, size: usize, align: usize, kind: BufferKind) -> Check {
        if place == 0 || self.is_full(size) {
            return Ok(());
        }
        let (heap, seed) = (self.named(place)?, self.seed());
        let place = self.place(heap);
        let Some(handle) = place.handles.last() else { return Ok(()) };
        let taken = match kind {
            BufferKind::Plain => handle.buffer(size),
            BufferKind::Zeroed => handle.buffer_zeroed(size),
            BufferKind::Aligned => handle.buffer_aligned(size, align),
        };
        let mut buffer = match taken {
            Ok(buffer) => buffer,
            Err(TakeError::Register(_)) if place.requires && place.is_limited() => return Ok(()),
            Err(error) => return Err(format!("no buffer of {size} bytes: {error}")),
        };
        let align = if kind == BufferKind::Aligned { align.max(64) } else { 64 };
        let (start, capacity, zero_on_free) = (buffer.as_mut_ptr(), buffer.capacity(), place.zero_on_free);
        check(start.addr().is_multiple_of(align), || format!("{start:p} is not aligned to {align}"))?;
        check_capacity(size, align, kind, &buffer)?;
        let zero = match kind {
            BufferKind::Zeroed => size,
            _ => 0,
        };
        let zero = if zero_on_free { capacity } else { zero };
        // SAFETY: the buffer is ours, with this capacity.
        let soiled = unsafe { first_not_zero(start, zero) };
        check(soiled.is_none(), || format!("byte {soiled:?} of {zero} zeros is not, in a buffer of {size}"))?;
        let len = if kind == BufferKind::Zeroed { size } else { size.min(MESSAGE) };
        // SAFETY: the capacity is not less; what is not written here was zero.
        unsafe {
            fill(start, seed, 0..len, len);
            buffer.set_len(len);
        }
        if let Some(last) = buffer.spare_capacity_mut().last_mut() {
            last.write(!0);
        }
        let root = Root { end: start.addr() + capacity, len, seed, owners: 1, heap };
        self.adopt(start.addr(), root, Held::Buffer(buffer))
    }

    fn share(&mut self, which: usize, from: usize) {
        match self.take(which, |held| matches!(held, Held::Buffer(_) | Held::Shared(_))) {
            Some((start, Held::Buffer(buffer))) => self.held.push((start, Held::Shared(buffer.freeze()))),
            Some((start, Held::Shared(shared))) => {
                let part = shared.slice(from % (shared.len() + 1)..);
                self.roots.get_mut(&start).expect("it is held").owners += 1;
                self.held.extend([(start, Held::Shared(shared)), (start, Held::Shared(part))]);
            }
            _ => {}
        }
    }

    fn unshare(&mut self, which: usize) -> Check {
        let Some((start, Held::Shared(shared))) = self.take(which, |held| matches!(held, Held::Shared(_))) else {
            return Ok(());
        };
        let Root { owners, len, .. } = self.roots[&start];
        match shared.try_into_buffer() {
            Ok(buffer) => {
                let whole = owners == 1 && buffer.len() == len && buffer.as_ptr().addr() == start;
                check(whole, || {
                    format!("a buffer of {} bytes came back, of {len} with {owners} owners", buffer.len())
                })?;
                self.held.push((start, Held::Buffer(buffer)));
            }
            Err(shared) => {
                check(owners > 1, || "the only owner did not get the buffer".into())?;
                self.held.push((start, Held::Shared(shared)));
            }
        }
        Ok(())
    }

    fn build(&mut self, name: usize, remote: bool, zero_on_free: bool, prefer: bool) -> Result<u32, String> {
        let access = if remote { Access::REMOTE_WRITE | Access::REMOTE_READ } else { Access::LOCAL_WRITE };
        let policy = if prefer { Policy::Prefer } else { Policy::Require };
        let heap = Heap::builder().access(access).zero_on_free(zero_on_free).policy(policy).build();
        let heap = heap.map_err(|error| error.to_string())?;
        Ok(self.name(name, Place::new(vec![heap], !prefer, zero_on_free)))
    }

    /// The heap of a name, which is made if there is none.
    pub(super) fn named(&mut self, name: usize) -> Result<u32, String> {
        if let Some(heap) = self.names[name] {
            return Ok(heap);
        }
        self.build(name, false, false, false)
    }

    fn attach(&mut self, place: usize, kind: DeviceKind, count: usize) -> Check {
        let heap = self.named(place)?;
        let place = self.place(heap);
        if place.attached.len() + count > DEVICES {
            return Ok(());
        }
        let books: Vec<Books> = (0..count).map(|_| Books::new(kind)).collect();
        let ledgers: Vec<_> = books.iter().map(|books| books.0.clone()).collect();
        let devices = on!(place, heap => if count == 1 {
            books.into_iter().map(|books| heap.attach(books)).collect()
        } else {
            heap.attach_all(books)
        });
        match devices {
            Ok(devices) => {
                place.attached.extend(devices.into_iter().zip(ledgers).map(|(device, ledger)| Attached {
                    device,
                    ledger,
                    kind,
                    refuses: false,
                    hold: None,
                }));
                self.look_all_up(heap)
            }
            Err(AttachError::Register(_))
                if place.is_limited() || matches!(kind, DeviceKind::Few | DeviceKind::Limited) =>
            {
                let left: usize = ledgers.iter().map(|ledger| ledger.live()).sum();
                check(left == 0, || format!("{left} registrations are left of an attach that failed"))
            }
            Err(error) => Err(format!("a device of the kind {kind:?} was not attached: {error}")),
        }
    }

    pub(super) fn detach(&mut self, place: usize, which: usize) -> Check {
        let Some(heap) = self.names[place] else { return Ok(()) };
        let place = self.place(heap);
        if place.attached.is_empty() {
            return Ok(());
        }
        let which = which % place.attached.len();
        let Attached { device, ref ledger, ref hold, .. } = place.attached[which];
        match on!(place, heap => heap.detach(device)) {
            Ok(()) => {
                check(hold.is_none(), || "a device was detached that is held".into())?;
                check(ledger.live() == 0, || format!("{} registrations of a detached device", ledger.live()))?;
                place.pending |= place.is_limited();
                place.attached.remove(which);
            }
            Err(DetachError::InUse { holds: 1, .. }) if hold.is_some() => return Ok(()),
            Err(error) => return Err(format!("not detached: {error}")),
        }
        let stale = self.roots.keys().find(|start| device.key_of_address(**start) != Err(KeyError::Detached));
        check(stale.is_none(), || format!("{stale:x?} has keys on a device that is detached"))?;
        self.look_all_up(heap)
    }

    pub(super) fn set_budget(&mut self, heap: u32, bytes: u64) -> Check {
        let budget = if bytes == 0 { Budget::NONE } else { Budget { bytes, ..Budget::NONE } };
        let place = self.place(heap);
        on!(place, heap => heap.set_budget(budget));
        place.set_budget(budget.bytes);
        place.pending &= place.is_limited();
        self.look_all_up(heap)
    }

    /// The `which`-th of those that are meant, if there is one.
    fn take(&mut self, which: usize, is: impl Fn(&Held) -> bool) -> Option<(usize, Held)> {
        let all: Vec<_> = (0..self.held.len()).filter(|index| is(&self.held[*index].1)).collect();
        let index = *all.get(which.checked_rem(all.len())?)?;
        Some(self.held.swap_remove(index))
    }

    pub(super) fn drop_held(&mut self, start: usize, held: Held) -> Check {
        held.check(start, &self.roots[&start])?;
        drop(held);
        self.forget(start)
    }

    fn heap(&mut self, name: usize) -> Option<&mut Place> {
        let heap = self.names[name].filter(|heap| *heap != GLOBAL)?;
        Some(self.place(heap))
    }

    fn attached(&mut self, name: usize, which: usize) -> Option<&mut Attached> {
        let attached = &mut self.place(self.names[name]?).attached;
        let count = attached.len();
        attached.get_mut(which.checked_rem(count)?)
    }

    /// Drops all handles of a heap.
    pub(super) fn end_name(&mut self, name: usize) -> Check {
        let Some(heap) = self.names[name].take() else { return Ok(()) };
        self.place(heap).handles.clear();
        self.end_if_empty(heap)
    }
}

/// "At least what was asked": and not much more, as the documentation has it.
fn check_capacity(size: usize, align: usize, kind: BufferKind, buffer: &Buffer) -> Check {
    let capacity = buffer.capacity();
    let asked = size.next_multiple_of(align);
    let most = (asked + asked / 8).max(asked + 64).max(asked.next_multiple_of(64 << 10));
    let whole = kind != BufferKind::Aligned || capacity.is_multiple_of(align);
    check(size <= capacity && capacity <= most && whole, || format!("{capacity} bytes for {size} aligned to {align}"))
}
