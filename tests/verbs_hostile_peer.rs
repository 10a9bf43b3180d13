//! A peer, in another process, that has the rkey of a heap with remote access, and writes garbage wherever no live bytes are. The
//! owner must not notice: no wrong address, no crash, no other buffer changed.
#![cfg(feature = "verbs")]

use rdmalloc::registrar::verbs::Verbs;
use rdmalloc::{Access, Buffer, Device, Heap, RemoteSlice};
use rdmalloc_tests::rig::{Depth, Domain, Memory, Queue, Remote, domain_or_skip, exchange};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Where the owner listens: set for the process of the peer.
const OWNER: &str = "RDMALLOC_TEST_OWNER";
const ROUNDS: u32 = 4;
const SIZES: [usize; 11] = [1, 64, 100, 300, 1000, 4000, 9000, 20_000, 60_000, 200_000, 1 << 20];

/// Numbers that look random and are the same each time (xorshift).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Of a buffer: below one of the sizes but the largest.
    fn size(&mut self) -> usize {
        let most = SIZES[self.below(SIZES.len() - 1)];
        1 + self.below(most)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound as u64) as usize
    }
}

/// The process of the peer: told places by the owner, it writes all over them, over and over until it is told new ones.
#[test]
fn verbs_as_the_peer_of_another_process() {
    let Ok(owner) = std::env::var(OWNER) else { return };
    let mut stream = TcpStream::connect(owner).unwrap();
    let domain = Domain::open(None).unwrap();
    let queue = Queue::new(&domain, Depth::default()).unwrap();
    let mine = queue.endpoint();
    queue.connect(exchange(&mut stream, mine).unwrap()).unwrap();
    let (garbage, mut dice) = (Memory::new(&domain, 64 << 10).unwrap(), Dice(0x9e37_79b9_7f4a_7c15));
    let mut count = [0; 4];
    while stream.read_exact(&mut count).is_ok() {
        let mut told = vec![0; u32::from_le_bytes(count) as usize * RemoteSlice::BYTES];
        stream.read_exact(&mut told).unwrap();
        let mut written = 0;
        let mut under_way = 0;
        for slice in told.as_chunks().0.iter().map(|bytes| RemoteSlice::from_bytes(*bytes)) {
            let bytes: Vec<u8> = (0..8 << 10).flat_map(|_| dice.roll().to_ne_bytes()).collect();
            let mut rest = slice;
            while rest.len > 0 {
                let part = rest.slice(..rest.len.min(bytes.len() as u64)).unwrap();
                if under_way == 16 {
                    queue.wait(TIMEOUT).unwrap().ok().unwrap();
                    under_way -= 1;
                }
                // What is under way may send other garbage than was meant: that is as good.
                garbage.fill(0, &bytes);
                let to = Remote { addr: part.addr, rkey: part.rkey };
                // SAFETY: the garbage lives until the completions; that it is written meanwhile, by copies, harms nobody.
                unsafe { queue.post_write(1, garbage.sge(0, part.len as u32), to) }.unwrap();
                under_way += 1;
                written += part.len;
                rest = rest.slice(part.len..).unwrap();
            }
        }
        (0..under_way).for_each(|_| _ = queue.wait(TIMEOUT).unwrap().ok().unwrap());
        stream.write_all(&written.to_le_bytes()).unwrap();
    }
}

/// A buffer with bytes that tell where they belong.
fn filled(heap: &Heap, len: usize) -> Buffer {
    let mut buffer = heap.buffer(len).unwrap();
    let at = buffer.as_ptr().addr();
    buffer.extend((0..len).map(|n| byte_at(at + n)));
    buffer
}

fn byte_at(address: usize) -> u8 {
    (address ^ address >> 8 ^ address >> 16) as u8
}

fn is_whole(buffer: &Buffer) -> bool {
    let at = buffer.as_ptr().addr();
    buffer.iter().enumerate().all(|(n, byte)| *byte == byte_at(at + n))
}

fn block(buffer: &Buffer) -> Range<usize> {
    let at = buffer.as_ptr().addr();
    at..at + buffer.capacity()
}

fn told(device: Device, range: Range<usize>) -> RemoteSlice {
    let rkey = device.key_of_address(range.start).unwrap().rkey;
    RemoteSlice { addr: range.start as u64, len: range.len() as u64, rkey }
}

/// The owner goes on as if nothing was: takes, fills and frees buffers, here and on another thread.
fn churn(heap: &Heap, kept: &[Buffer], open: &[RemoteSlice], dice: &mut Dice) {
    for _ in 0..6 {
        let mut buffers: Vec<_> = (0..120).map(|_| filled(heap, dice.size())).collect();
        let mut all: Vec<_> = buffers.iter().chain(kept).map(block).collect();
        all.sort_unstable_by_key(|range| range.start);
        assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "two buffers share memory");
        let arenas = heap.arenas();
        let inside = |range: &Range<usize>| {
            arenas.iter().any(|arena| arena.memory.contains(&range.start) && range.end <= arena.memory.end)
        };
        assert!(all.iter().all(inside), "a buffer is not in the heap");
        // Those that lie where the peer writes are its to spoil.
        let spoilt = |range: &Range<usize>| {
            open.iter()
                .any(|slice| (slice.addr as usize) < range.end && range.start < (slice.addr + slice.len) as usize)
        };
        let whole = |buffer: &&Buffer| spoilt(&block(buffer)) || is_whole(buffer);
        assert!(buffers.iter().all(|buffer| whole(&buffer)), "a buffer has changed that was not told of");
        let there = buffers.split_off(60);
        drop(buffers);
        std::thread::spawn(move || drop(there)).join().unwrap();
    }
}

#[test]
fn verbs_a_peer_writes_over_all_that_is_free_while_the_owner_churns() {
    let Some(domain) = domain_or_skip() else { return };
    for access in [Access::REMOTE_WRITE, Access::REMOTE_WRITE | Access::REMOTE_READ | Access::RELAXED_ORDERING] {
        let heap = Heap::builder().access(access).build().unwrap();
        let device = heap.attach(Verbs::new(domain.clone())).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = Command::new(std::env::current_exe().unwrap());
        peer.args(["--exact", "verbs_as_the_peer_of_another_process", "--nocapture"]);
        let mut peer =
            peer.stdout(Stdio::null()).env(OWNER, listener.local_addr().unwrap().to_string()).spawn().unwrap();
        let mut stream = listener.accept().unwrap().0;
        let queue = Queue::new(&domain, Depth::default()).unwrap();
        let mine = queue.endpoint();
        queue.connect(exchange(&mut stream, mine).unwrap()).unwrap();

        let mut dice = Dice(42);
        // One and a few more of each size stay, each with slack behind its bytes.
        let kept: Vec<_> =
            SIZES.iter().flat_map(|size| [size * 3 / 4 + 1, *size]).map(|len| filled(&heap, len)).collect();
        let slack = |buffer: &Buffer| buffer.as_ptr().addr() + buffer.len()..block(buffer).end;
        let mut open: Vec<_> =
            kept.iter().map(slack).filter(|range| !range.is_empty()).map(|range| told(device, range)).collect();
        let slacks = open.len();
        assert!(slacks > SIZES.len() / 2);
        let mut written = 0;
        for _ in 0..ROUNDS {
            // Freed blocks of this round, half of them by another thread; those of the rounds before are closed to the peer.
            open.truncate(slacks);
            let mut freed: Vec<_> = (0..60).map(|n| filled(&heap, SIZES[n % SIZES.len()])).collect();
            open.extend(freed.iter().map(|buffer| told(device, block(buffer))));
            let there = freed.split_off(30);
            drop(freed);
            std::thread::spawn(move || drop(there)).join().unwrap();
            stream.write_all(&(open.len() as u32).to_le_bytes()).unwrap();
            open.iter().for_each(|slice| stream.write_all(&slice.to_bytes()).unwrap());
            churn(&heap, &kept, &open, &mut dice);
            let mut bytes = [0; 8];
            stream.read_exact(&mut bytes).unwrap();
            written += u64::from_le_bytes(bytes);
            churn(&heap, &kept, &open, &mut dice);
            assert!(kept.iter().all(is_whole), "a buffer that lives has changed");
        }
        println!("the peer has written {written} bytes over freed blocks and slack");
        assert!(written > 1 << 20);
        drop(stream);
        assert!(peer.wait().unwrap().success());
        drop(kept);
        heap.detach(device).unwrap();
        assert_eq!(heap.trim().open_arenas, 0);
    }
}

#[test]
fn verbs_a_peer_that_reads_a_heap_that_is_cleared_finds_nothing_of_what_was_freed() {
    const SECRET: u8 = 0x5e;
    let Some(domain) = domain_or_skip() else { return };
    let heap = Heap::builder().access(Access::REMOTE_READ).zero_on_free(true).build().unwrap();
    let device = heap.attach(Verbs::new(domain.clone())).unwrap();
    let secret = |len: usize| {
        let mut buffer = heap.buffer(len).unwrap();
        buffer.extend(std::iter::repeat_n(SECRET, len));
        buffer
    };
    // What lives is not secret, and keeps the arena open. Freed: at once, by another thread, over and over.
    let kept: Vec<_> = SIZES.iter().map(|size| heap.buffer_zeroed(*size).unwrap()).collect();
    for round in 0..4 {
        let mut here: Vec<_> =
            (0..60).map(|n| secret(SIZES[n % SIZES.len()] - round % SIZES[n % SIZES.len()])).collect();
        let there = here.split_off(30);
        std::thread::spawn(move || drop(there)).join().unwrap();
    }
    let lives = secret(100);
    let (own, peer) = Queue::pair(&domain, Depth::default()).unwrap();
    let (window, mut found) = (Memory::new(&domain, 64 << 10).unwrap(), 0);
    for memory in heap.arenas().into_iter().map(|arena| arena.memory) {
        // Only what was used can have anything; it is taken from the lowest address on.
        for at in memory.clone().step_by(64 << 10).take(1024) {
            let from = Remote { addr: at as u64, rkey: device.key_of_address(at).unwrap().rkey };
            // SAFETY: the target lives, and is looked at after the completion.
            unsafe { peer.post_read(1, window.sge(0, 64 << 10), from) }.unwrap();
            peer.wait(TIMEOUT).unwrap().ok().unwrap();
            found += window.to_vec(0, 64 << 10).iter().filter(|byte| **byte == SECRET).count();
        }
    }
    assert_eq!(found, lives.len(), "the peer sees what lives, so it looks in the right place, and nothing else");
    drop((kept, own));
}
