//! Where the system lacks something, or allows little: the program works, or is refused with the reason, and goes on.

use rdmalloc::{Access, Heap, Memlock, Rdmalloc, TakeError};
use rdmalloc_tests::{Ledger, Setting, forbid, hide_proc, is_within, is_without_membarrier, set_limit, within};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const MIB: usize = 1 << 20;

/// What every program does: allocates on several threads, registers, takes buffers, gives all back.
fn works() {
    let ledgers = [(); 2].map(|()| Ledger::new());
    let device = HEAP.attach(ledgers[0].clone()).unwrap();
    let heap = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
    let own = heap.attach(ledgers[1].clone()).unwrap();
    let threads = [1, 2, 3].map(|mark: u8| {
        let heap = heap.clone();
        std::thread::spawn(move || {
            let blocks: Vec<Vec<u8>> = (0..22).map(|shift| vec![mark; 1 << shift]).collect();
            let buffers: Vec<_> = (0..22).map(|shift| heap.buffer(1 << shift).unwrap()).collect();
            assert!(blocks.iter().all(|block| device.sge(block).is_ok() && block.iter().all(|byte| *byte == mark)));
            assert!(buffers.iter().all(|buffer| own.key(buffer.as_ptr()).is_ok()));
            (blocks, buffers)
        })
    });
    let kept = threads.map(|thread| thread.join().unwrap());
    assert!(kept.iter().flat_map(|(blocks, _)| blocks).all(|block| device.sge(block).is_ok()));
    drop((kept, heap));
    assert_eq!(ledgers[1].live(), 0, "the heap has not ended");
    HEAP.detach(device).unwrap();
    HEAP.trim();
    assert_eq!(ledgers[0].live(), 0);
}

/// Takes blocks of 8 MiB, and writes all of them, until there are no more or `most` were had; gives them back, and takes some again.
fn goes_on_after_a_refusal(most: usize) {
    const BLOCK: usize = 8 * MIB;
    let take = |count: usize| {
        let mut all: Vec<Vec<u8>> = Vec::with_capacity(count);
        while all.len() < count {
            let mut block = Vec::new();
            if block.try_reserve_exact(BLOCK).is_err() {
                break;
            }
            block.resize(BLOCK, all.len() as u8);
            all.push(block);
        }
        assert!(all.iter().enumerate().all(|(mark, block)| block[BLOCK - 1] == mark as u8));
        all
    };
    let all = take(most);
    assert!(!all.is_empty() && all.len() < most, "{} blocks of 8 MiB", all.len());
    println!("{} blocks of 8 MiB of the global heap, then none", all.len());
    let count = all.len();
    // Small blocks are served from what is open, or not; in neither case does the program end.
    let small: Vec<_> = (0..100)
        .map_while(|_| {
            let mut block = Vec::<u8>::new();
            block.try_reserve_exact(100).is_ok().then_some(block)
        })
        .collect();
    drop((all, small));
    HEAP.trim();
    let again = take(count.div_ceil(2));
    assert_eq!(again.len(), count.div_ceil(2), "what was given back is not to be had again");
    drop(again);
    HEAP.trim();

    let heap = Heap::builder().build().unwrap();
    let mut buffers = Vec::with_capacity(most);
    let error = loop {
        match heap.buffer(BLOCK) {
            Ok(mut buffer) => {
                // SAFETY: zeros are written to all of the room.
                unsafe {
                    buffer.as_mut_ptr().write_bytes(0, BLOCK);
                    buffer.set_len(BLOCK);
                }
                buffers.push(buffer);
            }
            Err(error) => break error,
        }
        assert!(buffers.len() < most);
    };
    println!("{} buffers of 8 MiB of another, then: {error}", buffers.len());
    match error {
        TakeError::NoMemory { wanted, source } => {
            assert!(wanted >= BLOCK && source.raw_os_error() == Some(libc::ENOMEM), "{source}");
        }
        TakeError::AddressSpace { wanted, region } => assert!(wanted >= BLOCK && region > BLOCK),
        other => panic!("{other}"),
    }
    buffers.truncate(1);
    heap.trim();
    buffers.push(heap.buffer(BLOCK).unwrap());
}

#[test]
fn without_membarrier() {
    if within("a filter of system calls", || forbid(libc::SYS_membarrier)) {
        assert!(is_without_membarrier());
        works();
    }
}

#[test]
fn without_proc() {
    if within("a place without /proc", hide_proc) {
        assert!(!std::fs::exists("/proc/self/status").unwrap());
        // A limit that cannot be told from one that counts.
        assert_eq!(Memlock::now().pinned, 0);
        works();
        println!("{:?}", HEAP.stats().devices);
    }
}

#[test]
fn without_nodes() {
    if within("a filter of system calls", || forbid(libc::SYS_mbind).and_then(|()| forbid(libc::SYS_move_pages))) {
        HEAP.set_node(rdmalloc::Node::Fixed(0));
        works();
    }
}

/// Without a ring, and with one that takes no buffers.
#[cfg(feature = "uring")]
#[test]
fn without_io_uring() {
    use rdmalloc::registrar::uring::{Uring, UringError};
    if within("a filter of system calls", || forbid(libc::SYS_io_uring_register)) {
        match io_uring::IoUring::new(8) {
            Err(error) => println!("not seen: a ring that takes no buffers: {error}"),
            Ok(ring) => match Uring::new(&ring) {
                Err(UringError::Os { doing, source }) => {
                    assert_eq!(source.raw_os_error(), Some(libc::EPERM), "{doing}");
                }
                Err(other) => println!("{other}"),
                Ok(_) => panic!("the filter does not hold"),
            },
        }
        works();
        forbid(libc::SYS_io_uring_setup).unwrap();
        assert!(io_uring::IoUring::new(8).is_err());
        works();
    }
}

#[test]
fn with_two_gib_of_address_space() {
    if within("a limit of address space", || set_limit(libc::RLIMIT_AS, 2 << 30)) {
        works();
        goes_on_after_a_refusal(256);
        works();
    }
}

/// The program's start takes some of it.
#[test]
fn with_little_data() {
    if within("a limit of data", || set_limit(libc::RLIMIT_DATA, 200 << 20)) {
        works();
        goes_on_after_a_refusal(25);
        works();
    }
}

/// The kernel promises no more than it has. In a process that starts so: what was reserved before is never counted.
#[test]
fn verbs_guest_without_overcommit() {
    if !Setting::may_be_changed() {
        return;
    }
    let set = |name, value| if is_within() { None } else { Setting::set(name, value) };
    let settings = [set("/proc/sys/vm/overcommit_ratio", "50"), set("/proc/sys/vm/overcommit_memory", "2")];
    if (is_within() || settings.iter().all(Option::is_some)) && within("no overcommit", || Ok(())) {
        works();
        goes_on_after_a_refusal(2048);
        works();
    }
}
