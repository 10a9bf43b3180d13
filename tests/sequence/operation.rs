//! What a program may do with the allocator, one step at a time, and how bytes are read as steps: six bytes a step, any value
//! of which is one. So every string of bytes is a program, a shorter one does less, and neither proptest nor a fuzzer has to
//! know more.

/// How many threads there are; number 0 is the one that runs the sequence.
pub const THREADS: usize = 4;

/// How many heaps can be named at once; number 0 is the global one.
pub const PLACES: usize = 4;

/// A step: who does what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// Which thread.
    pub thread: usize,
    /// On which heap, where that matters.
    pub place: usize,
    /// What it does.
    pub operation: Operation,
}

/// What is done. `which` is a number of any size: it is taken modulo the number of things there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Operation {
    /// `alloc` or `alloc_zeroed` of the global heap, so many times; of others from number 2 on, as collections do it.
    Allocate { size: usize, align: usize, zeroed: bool, count: usize },
    /// `realloc` of a block, or `grow`, `grow_zeroed`, `shrink`: to a size, or to so many 64ths of what it has.
    Resize { which: usize, size: usize, parts: Option<u8> },
    /// Buffers of a heap that the program made.
    Buffer { size: usize, align: usize, kind: BufferKind, count: usize },
    /// Frees or drops anything.
    Free { which: usize },
    /// Moves anything into a thread-local value, whose destructor frees it as the thread ends.
    Leave { which: usize },
    /// `Buffer::freeze`; of what is shared already, `slice`.
    Share { which: usize, from: usize },
    /// `Bytes` of what is shared.
    IntoBytes { which: usize },
    /// `SharedBuffer::try_into_buffer`.
    Unshare { which: usize },
    /// A heap, in place of the one of this number, whose handles are dropped.
    Build { remote: bool, zero_on_free: bool, prefer: bool },
    /// Another handle of a heap.
    CloneHeap,
    /// Drops a handle of a heap.
    DropHeap,
    /// Attaches so many devices at once.
    Attach { kind: DeviceKind, count: usize },
    /// Detaches one.
    Detach { which: usize },
    /// Holds one, or lets go of it.
    Hold { which: usize },
    /// A device refuses what it is asked for after so many more registrations; or, again, nothing.
    Refuse { which: usize, after: u64 },
    /// A budget in bytes; 0 is none.
    Budget { bytes: u64 },
    /// A drain pass.
    Trim,
    /// A fork, whose child lives for a moment.
    Fork,
    /// The thread ends; the next step of its number is another's.
    EndThread,
}

/// How a buffer is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum BufferKind {
    Plain,
    Zeroed,
    Aligned,
}

/// What a device is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// It registers anything, and pins nothing: so nothing is faulted in.
    Easy,
    /// It pins what it registers.
    Pins,
    /// It registers at most 2 MiB at once.
    Short,
    /// It takes three registrations.
    Few,
    /// It may pin 24 MiB: so arenas are small, and some are refused.
    Limited,
}

impl Step {
    /// How many bytes a step has.
    pub const BYTES: usize = 6;

    /// The step that six bytes are.
    pub fn read(bytes: [u8; Step::BYTES]) -> Step {
        let [what, who, a, b, c, d] = bytes;
        let which = a as usize;
        // Enough to fill a slab of the larger classes, now and then.
        let count = if a >= 236 && size(b, c) <= 64 << 10 { 20 } else { 1 };
        let operation = match what % 64 {
            0..14 => Operation::Allocate { size: size(b, c), align: align(d), zeroed: a % 4 == 0, count },
            14..20 => Operation::Resize { which, size: size(b, c), parts: (d & 1 == 1).then_some(d >> 1) },
            20..32 => {
                let kind = [BufferKind::Plain, BufferKind::Zeroed, BufferKind::Aligned][which % 3];
                Operation::Buffer { size: size(b, c), align: align(d), kind, count }
            }
            // Dear, so seldom.
            45 if b < 48 => Operation::Fork,
            32..46 => Operation::Free { which },
            46 => Operation::Leave { which },
            47 | 48 => Operation::Share { which, from: usize::from(b) << 8 | usize::from(c) },
            49 => Operation::IntoBytes { which },
            50 => Operation::Unshare { which },
            51 => Operation::Build { remote: b & 1 == 1, zero_on_free: b & 2 == 2, prefer: b & 4 == 4 },
            52 => Operation::CloneHeap,
            53 => Operation::DropHeap,
            54 | 55 => {
                let kinds =
                    [DeviceKind::Easy, DeviceKind::Pins, DeviceKind::Short, DeviceKind::Few, DeviceKind::Limited];
                Operation::Attach { kind: kinds[which % kinds.len()], count: 1 + usize::from(b) % 8 / 6 }
            }
            56 | 57 => Operation::Detach { which },
            58 => Operation::Hold { which },
            59 => Operation::Refuse { which, after: u64::from(b) % 4 },
            60 => Operation::Budget { bytes: (u64::from(b) % 16) << 22 },
            61 | 62 => Operation::Trim,
            _ => Operation::EndThread,
        };
        // Half of it by the first thread: a step by another costs two switches.
        let thread = if who & 4 == 4 { 0 } else { usize::from(who) % THREADS };
        Step { thread, place: usize::from(who >> 3) % PLACES, operation }
    }

    /// The steps that bytes are; what is left of the last is none.
    pub fn read_all(bytes: &[u8]) -> Vec<Step> {
        bytes.as_chunks().0.iter().copied().map(Step::read).collect()
    }
}

/// Mostly small, some of each kind, few beyond the first arena; and those beside powers of two.
fn size(kind: u8, number: u8) -> usize {
    let number = usize::from(number);
    match kind % 64 {
        0..32 => 1 + number,
        32..46 => 1 + number * 17,
        46..54 => 1 + number * 300,
        54..58 => (1 + number) << 12,
        58..60 => (1 + number) << 15,
        60 => (1 + number % 40) << 20,
        _ => (1 << (number % 23)) + [0, 1, 2][number % 3] - usize::from(number % 23 > 0),
    }
}

/// Mostly what everything has, few beyond a slice (64 KiB) and a chunk (2 MiB).
fn align(number: u8) -> usize {
    match number % 64 {
        0..32 => 8,
        number @ 32..56 => 1 << ((number - 32) / 2),
        56..60 => 1 << 12,
        60 => 1 << 16,
        61 => 1 << 17,
        62 => 1 << 21,
        _ => 1 << 22,
    }
}
