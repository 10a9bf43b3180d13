//! Devices come and go, and get lost, on real verbs. In the guest, which has two soft-RoCE devices; those that are lost are
//! made for it.
#![cfg(feature = "verbs")]

use rdmalloc::registrar::verbs::{Verbs, devices};
use rdmalloc::{
    Access, AttachError, Buffer, DetachError, Device, Heap, HoldError, KeyError, Rdmalloc, Registered, Registrar,
};
use rdmalloc_tests::rig::{Depth, Domain, Memory, Queue, Remote, domain_or_skip};
use rdmalloc_tests::{Churn, Garden, pinned_bytes};
use std::io;
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const TIMEOUT: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// Every device that has an active port; or a line that says there is none.
fn domains() -> Vec<Domain> {
    if domain_or_skip().is_none() {
        return Vec::new();
    }
    devices().iter().filter_map(|name| Domain::open(Some(name)).ok()).collect()
}

/// The device reads `bytes` where they lie, by their lkey, and writes them into memory that is registered apart.
fn assert_reads(domain: &Domain, device: Device, bytes: &[u8]) {
    let (queue, _peer) = Queue::pair(domain, Depth::default()).unwrap();
    let to = Memory::new(domain, bytes.len()).unwrap();
    let (hold, sge) = (device.hold().unwrap(), device.sge(bytes).unwrap());
    // SAFETY: bytes and target live, untouched, until the completion below.
    unsafe { queue.post_write(1, sge.to_ibv(), to.remote(0)) }.unwrap();
    queue.wait(TIMEOUT).unwrap().ok().unwrap();
    drop(hold);
    assert!(to.to_vec(0, bytes.len()) == bytes, "{} has read other bytes", domain.name());
}

fn filled(heap: &Heap, byte: u8, len: usize) -> Buffer {
    let mut buffer = heap.buffer(len).unwrap();
    buffer.try_extend_from_slice(&vec![byte; len]).unwrap();
    buffer
}

#[test]
fn verbs_several_devices_on_a_heap_and_several_heaps_on_a_device_while_eight_threads_allocate() {
    let domains = domains();
    if domains.is_empty() {
        return;
    }
    let churn = Churn::start(8);
    let garden = Garden::plant(5, 3 << 20);
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let heaps = [(); 2].map(|()| Heap::builder().access(access).build().unwrap());
    let buffers = [7, 8].map(|byte| filled(&heaps[usize::from(byte) - 7], byte, 5000));
    let unpinned = pinned_bytes();
    for _ in 0..3 {
        let registrars = || domains.iter().map(|domain| Verbs::new(domain.clone()));
        let attached = HEAP.attach_all(registrars()).unwrap();
        for heap in &heaps {
            assert_eq!(heap.attach_all(registrars()).unwrap(), attached, "the same devices, on other heaps");
        }
        for (domain, device) in domains.iter().zip(&attached) {
            let (_, part) = garden.parts().last().unwrap();
            assert_reads(domain, *device, part);
            buffers.iter().for_each(|buffer| assert_reads(domain, *device, buffer));
        }
        // An arena that is opened while they are there, and closed.
        let opened = filled(&heaps[0], 9, 40 * MIB);
        domains
            .iter()
            .zip(&attached)
            .for_each(|(domain, device)| assert_reads(domain, *device, &opened[20 * MIB..][..5000]));
        drop(opened);
        heaps[0].trim();
        churn.wait_for(200);
        for device in attached {
            heaps[1].detach(device).unwrap();
            assert!(device.key(buffers[0].as_ptr()).is_ok() && device.key(buffers[1].as_ptr()).is_err());
            HEAP.detach(device).unwrap();
            heaps[0].detach(device).unwrap();
            assert_eq!(device.key(buffers[0].as_ptr()), Err(KeyError::Detached));
        }
        assert_eq!(pinned_bytes(), unpinned);
    }
    churn.stop();
    assert!(garden.is_whole());
}

#[test]
fn verbs_a_detach_is_refused_while_work_is_under_way_and_waits_for_its_completion() {
    let Some(domain) = domain_or_skip() else { return };
    let heap = Heap::builder().build().unwrap();
    let unpinned = pinned_bytes();
    let device = heap.attach(Verbs::new(domain.clone())).unwrap();
    let buffer = filled(&heap, 3, MIB);
    let (queue, _peer) = Queue::pair(&domain, Depth::default()).unwrap();
    let to = Memory::new(&domain, MIB).unwrap();
    let mut flights = Vec::new();
    for id in 0..16 {
        let hold = device.hold().unwrap();
        // SAFETY: both memories live, untouched, until all completions below.
        unsafe { queue.post_write(id, device.sge(&buffer).unwrap().to_ibv(), to.remote(0)) }.unwrap();
        flights.push(hold);
    }
    let refused = heap.detach(device).unwrap_err();
    assert!(matches!(refused, DetachError::InUse { holds: 16, .. }), "{refused}");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for flight in flights {
                queue.wait(TIMEOUT).unwrap().ok().unwrap();
                drop(flight);
            }
        });
        heap.detach_within(device, TIMEOUT).unwrap();
    });
    assert_eq!((device.hold(), device.hold_count()), (Err(HoldError::Detached), 0));
    assert_eq!(to.to_vec(0, MIB), vec![3; MIB]);
    drop(to);
    assert_eq!(pinned_bytes(), unpinned);
}

/// A real device that never lets go.
struct Clinging(Verbs);

// SAFETY: registering is that of `Verbs`; deregistering never succeeds.
unsafe impl Registrar for Clinging {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        // SAFETY: the caller's promise.
        unsafe { self.0.register(memory, access) }
    }

    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    fn name(&self) -> &str {
        self.0.name()
    }
}

#[test]
fn verbs_what_was_not_let_go_of_is_still_written_by_peers_and_by_nobody_else() {
    let Some(domain) = domain_or_skip() else { return };
    if std::env::var_os("RDMALLOC_TEST_LIMITED").is_none() {
        // It leaves pinned memory behind.
        let output = limited("verbs_what_was_not_let_go_of_is_still_written_by_peers_and_by_nobody_else");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let heap = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
    let device = heap.attach(Clinging(Verbs::new(domain.clone()))).unwrap();
    let (closed, open) = (heap.buffer(1000).unwrap(), heap.buffer(100).unwrap());
    let address = closed.as_ptr().addr();
    let remote = Remote { addr: address as u64, rkey: device.key(closed.as_ptr()).unwrap().rkey };
    let (peer, own) = Queue::pair(&domain, Depth::default()).unwrap();
    let word = Memory::new(&domain, 11).unwrap();
    word.fill(0, b"from a peer");
    let Err(DetachError::Kept { arenas: 1, .. }) = heap.detach(device) else { panic!("it let go") };
    drop((closed, open));
    assert_eq!(heap.trim().stuck_arenas, 1);
    // The arena is mapped still, as the device writes to it, and nothing new lies there.
    // SAFETY: the source lives until the completion; the target is nobody's any more, and is kept for ever.
    unsafe { peer.post_write(1, word.sge(0, 11), remote) }.unwrap();
    peer.wait(TIMEOUT).unwrap().ok().unwrap();
    // SAFETY: mapped for ever, and written before the completion.
    let written = unsafe { std::ptr::with_exposed_provenance::<[u8; 11]>(address).read_volatile() };
    assert_eq!(&written, b"from a peer");
    assert!(heap.buffer(1000).unwrap().as_ptr().addr().abs_diff(address) >= 2 * MIB);
    // The registrar's handle of the domain is the last, and is not dropped: closing the device would end the registration.
    drop((peer, own, word));
    let pinned = pinned_bytes();
    drop((heap, domain));
    assert!(pinned > 0 && pinned_bytes() == pinned, "{} of {pinned}", pinned_bytes());
}

/// Runs one of the tests here in a process of its own whose pinned memory is limited, even for root.
fn limited(test: &str) -> std::process::Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env("RDMALLOC_TEST_LIMITED", "1");
    // SAFETY: between fork and exec, only a system call is made.
    unsafe {
        command.pre_exec(|| {
            // Root gets on exec whatever its bounding set has: without IPC_LOCK (14) the limit counts for it too.
            match libc::prctl(libc::PR_CAPBSET_DROP, 14, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    command.output().unwrap()
}

fn limit_pinned(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
}

#[test]
fn verbs_an_attach_that_meets_the_memlock_limit_on_any_arena_undoes_what_it_did() {
    let domains = domains();
    let Some([first, others @ ..]) = domains.get(..2.min(domains.len())).filter(|some| !some.is_empty()) else {
        return;
    };
    if std::env::var_os("RDMALLOC_TEST_LIMITED").is_none() {
        let output = limited("verbs_an_attach_that_meets_the_memlock_limit_on_any_arena_undoes_what_it_did");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    // Another protection domain of the same device is another device, where there is but one.
    let second = others.first().cloned().unwrap_or_else(|| Domain::open(Some(first.name())).unwrap());
    limit_pinned(1 << 30);
    let heap = Heap::builder().build().unwrap();
    let buffers: Vec<_> = (0..3).map(|_| heap.buffer(40 * MIB).unwrap()).collect();
    let arenas: Vec<_> = heap.arenas().iter().map(|arena| arena.memory.len() as u64).collect();
    let all: u64 = arenas.iter().sum();
    let attached = heap.attach(Verbs::new(first.clone())).unwrap();
    assert_eq!(pinned_bytes(), all);
    for (fails_on, len) in arenas.iter().enumerate() {
        limit_pinned(all + arenas[..fails_on].iter().sum::<u64>() + len - 4096);
        let error = heap.attach(Verbs::new(second.clone())).unwrap_err();
        let AttachError::Register(error) = error else { panic!("{error}") };
        assert!(error.is_memlock(), "{error}");
        assert_eq!((pinned_bytes(), error.wanted as u64, error.devices), (all, *len, 2), "arena {fails_on}");
    }
    assert!(buffers.iter().all(|buffer| attached.key(buffer.as_ptr()).is_ok()));
    heap.detach(attached).unwrap();
    // Both at once, where there is room for one and a part of the other.
    limit_pinned(all + arenas[0]);
    let error = heap.attach_all([first, &second].map(|domain| Verbs::new(domain.clone()))).unwrap_err();
    assert!(matches!(error, AttachError::Register(_)), "{error}");
    assert_eq!(pinned_bytes(), 0);
    limit_pinned(2 * all);
    let both = heap.attach_all([first, &second].map(|domain| Verbs::new(domain.clone()))).unwrap();
    assert_eq!(pinned_bytes(), 2 * all);
    both.into_iter().for_each(|device| heap.detach(device).unwrap());
    assert_eq!(pinned_bytes(), 0);
}

/// A soft-RoCE device of a test's own, on a network device of its own.
struct Own {
    device: String,
    net: String,
}

fn run(command: &str) -> std::io::Result<ExitStatus> {
    let mut words = command.split(' ');
    Command::new(words.next().unwrap()).args(words).status()
}

impl Own {
    /// In the guest only, whose devices are nobody else's. Says on standard output why there is none.
    fn make(number: u8) -> Option<Own> {
        if std::env::var_os("RDMALLOC_GUEST").is_none() {
            println!("skipped: devices are only made, and removed, in the guest");
            return None;
        }
        let own = Own { device: format!("own{number}"), net: format!("net{number}") };
        let Own { device, net } = &own;
        for command in [
            format!("ip link add {net} mtu 9000 type dummy"),
            format!("ip addr add 10.9.{number}.1/24 dev {net}"),
            format!("ip link set {net} up"),
            format!("rdma link add {device} type rxe netdev {net}"),
        ] {
            assert!(run(&command).unwrap().success(), "{command}");
        }
        Some(own)
    }

    fn open(&self) -> Domain {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            // Its node appears a moment after the device.
            match Domain::open(Some(&self.device)) {
                Ok(domain) => return domain,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::yield_now();
        }
    }

    /// Begins to remove it.
    fn remove(&self) -> Child {
        Command::new("rdma").args(["link", "delete", &self.device]).spawn().unwrap()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // A device that is there still goes with it.
        let _ = run(&format!("ip link delete {}", self.net));
    }
}

/// Whether it ends within `patience`.
fn ends(child: &mut Child, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn verbs_a_port_that_is_down_is_no_loss() {
    let Some(own) = Own::make(8) else { return };
    let domain = own.open();
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(Verbs::new(domain.clone())).unwrap();
    let buffer = filled(&heap, 1, 5000);
    let unpinned = pinned_bytes();
    // What is under way when the port goes down ends some time, so it is waited for.
    let (queue, peer) = Queue::pair(&domain, Depth::default()).unwrap();
    let to = Memory::new(&domain, 4096).unwrap();
    assert!(run(&format!("ip link set {} down", own.net)).unwrap().success());
    let flight = device.hold().unwrap();
    // SAFETY: buffer and target live, untouched, until the completion below.
    unsafe { queue.post_write(1, device.sge(&buffer[..4096]).unwrap().to_ibv(), to.remote(0)) }.unwrap();
    assert!(matches!(heap.detach(device), Err(DetachError::InUse { holds: 1, .. })));

    let more = filled(&heap, 2, 70 * MIB);
    assert!(pinned_bytes() >= unpinned + 70 * MIB as u64);
    assert!(device.key(more.as_ptr()).is_ok() && device.key(buffer.as_ptr()).is_ok() && !device.is_lost());
    assert!(run(&format!("ip link set {} up", own.net)).unwrap().success());
    let ended = queue.wait(TIMEOUT).unwrap();
    println!("a write that was posted while the port was down: {:?}", ended.status);
    drop((flight, queue, peer, to, domain));
    // Its address may be another now, so its port is looked at anew; the memory is registered as it was.
    let same = own.open();
    let again = heap.attach(Verbs::new(same.clone())).unwrap();
    [&buffer[..], &more[..5000]].into_iter().for_each(|bytes| assert_reads(&same, again, bytes));
    [device, again].into_iter().for_each(|device| heap.detach(device).unwrap());
}

#[test]
fn verbs_a_device_that_is_removed_under_traffic_is_lost_or_waited_for_and_the_rest_goes_on() {
    // First the one that stays: the first that is found.
    let Some(other) = domain_or_skip() else { return };
    let Some(own) = Own::make(9) else { return };
    let domain = own.open();
    let heap = Heap::builder().build().unwrap();
    let [device, whole] = [&domain, &other].map(|domain| heap.attach(Verbs::new(domain.clone())).unwrap());
    let buffer = filled(&heap, 3, MIB);
    let pinned = pinned_bytes();
    let arena = heap.arenas()[0].memory.len() as u64;
    assert_eq!(pinned, 2 * arena);
    let (queue, peer) = Queue::pair(&domain, Depth::default()).unwrap();
    let to = Box::leak(Box::new(Memory::new(&domain, MIB).unwrap()));
    let sge = device.sge(&buffer).unwrap().to_ibv();

    let mut flights = Vec::new();
    let mut removing = own.remove();
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut id = 0;
    let ended = loop {
        if removing.try_wait().unwrap().is_some() {
            break true;
        }
        if Instant::now() > deadline {
            break false;
        }
        let Ok(hold) = device.hold() else { break ends(&mut removing, TIMEOUT) };
        // SAFETY: the buffer is only read, and the target is never freed.
        if flights.len() < 16 && unsafe { queue.post_write(id, sge, to.remote(0)) }.is_ok() {
            id += 1;
            flights.push(hold);
        }
        if let Ok(Some(_)) = queue.poll() {
            flights.pop();
        }
    };
    println!("the removal of a device that is used {}", if ended { "ends, and takes it away" } else { "waits" });
    if ended {
        // Nothing is known of it yet. The heap goes on, and finds out.
        assert_eq!(pinned_bytes(), arena, "what the device had pinned is not pinned any more");
        // SAFETY: as above.
        let refused = unsafe { queue.post_write(id, sge, to.remote(0)) };
        println!("posting gives {refused:?}");
        let opened = filled(&heap, 4, 70 * MIB);
        assert!(device.is_lost());
        assert_eq!(device.key(buffer.as_ptr()), Err(KeyError::Lost));
        assert_eq!((device.hold(), device.hold_count()), (Err(HoldError::Lost), flights.len()));
        [&buffer[..], &opened[..5000]].into_iter().for_each(|bytes| assert_reads(&other, whole, bytes));
        // Its flights are not waited for, and it lets go of everything.
        heap.detach(device).unwrap();
        assert_eq!(device.hold_count(), flights.len());
        drop(opened);
    } else {
        // It waits until nobody has the device open; until then nothing is lost.
        let opened = filled(&heap, 4, 70 * MIB);
        assert!(device.key(opened.as_ptr()).is_ok() && !device.is_lost());
        while !flights.is_empty() {
            queue.wait(TIMEOUT).unwrap();
            flights.pop();
        }
        heap.detach(device).unwrap();
        assert!(!ends(&mut removing, Duration::from_millis(100)), "something has it open still");
    }
    drop(flights);
    drop((queue, peer));
    // SAFETY: leaked above, and used no more.
    drop(unsafe { Box::from_raw(&raw mut *to) });
    drop(domain);
    assert!(ends(&mut removing, TIMEOUT), "the removal does not end");
    assert_reads(&other, whole, &buffer);
    heap.trim();
    assert_eq!(pinned_bytes(), arena);
    heap.detach(whole).unwrap();
    assert_eq!(pinned_bytes(), 0);
}
