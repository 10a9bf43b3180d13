//! Memory windows on a real verbs device: an rkey for one buffer, with its own rights, that is dead once revoked.
//!
//! What a device must refuse is tested as soft-RoCE refuses it: by rights, protection domain, queue pair, and after the end. That
//! it refuses what lies outside a window's bounds is not tested, since soft-RoCE does not (6.1, 7.3); adapters do.
#![cfg(feature = "verbs")]

use rdmalloc::registrar::verbs::Verbs;
use rdmalloc::{
    Access, Buffer, DetachError, Device, ExposeError, Exposed, Heap, OutOfRange, Rdmalloc, RemoteSlice, WindowKind,
    Windows, WindowsError,
};
use rdmalloc_tests::rig::{Completion, Depth, Domain, Memory, Queue, Remote, Status, domain_or_skip};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const TIMEOUT: Duration = Duration::from_secs(60);
const READ_WRITE: [Access; 2] = [Access::REMOTE_READ, Access::REMOTE_WRITE];
const KINDS: [WindowKind; 2] = [WindowKind::Type2, WindowKind::Type1];

/// A heap with a device, and a queue to a peer, which has a protection domain and memory of its own.
struct Scene {
    domain: Domain,
    elsewhere: Domain,
    heap: Heap,
    device: Device,
    own: Arc<Queue>,
    peer: Queue,
    windows: Windows,
    /// The peer's, filled with 0xee.
    memory: Memory,
}

impl Scene {
    fn of(kind: WindowKind) -> Option<Scene> {
        let domain = domain_or_skip()?;
        let elsewhere = Domain::open(Some(domain.name())).unwrap();
        let heap = Heap::builder().access(Access::WINDOWS).build().unwrap();
        let device = heap.attach(Verbs::new(domain.clone())).unwrap();
        let (own, peer) = connected(&domain, &elsewhere);
        let windows = Windows::with_kind(device, own.clone(), kind).unwrap();
        let memory = Memory::new(&elsewhere, 4096).unwrap();
        memory.fill(0, &[0xee; 4096]);
        Some(Scene { domain, elsewhere, heap, device, own, peer, windows, memory })
    }

    /// Another pair of queues, after one has failed.
    fn reconnect(&mut self) {
        let kind = self.windows.kind();
        (self.own, self.peer) = connected(&self.domain, &self.elsewhere);
        self.windows = Windows::with_kind(self.device, self.own.clone(), kind).unwrap();
    }

    fn expose(&self, buffer: Buffer, rights: Access) -> Exposed {
        let binding = self.windows.expose(buffer, rights, 77).unwrap();
        let completion = done(&self.own, 77);
        // SAFETY: that is the completion of the bind.
        unsafe { binding.bound(completion.status.0) }.unwrap()
    }

    fn revoke(&self, exposed: Exposed) -> Buffer {
        let revoking = exposed.revoke(78).unwrap();
        let completion = done(&self.own, 78);
        // SAFETY: that is the completion of the revocation.
        unsafe { revoking.revoked(completion.status.0) }.unwrap()
    }

    /// The peer writes 16 bytes of 0xee.
    fn write(&self, to: Remote) -> Status {
        write(&self.peer, &self.memory, to)
    }

    /// The peer reads 16 bytes.
    fn read(&self, from: Remote) -> Result<Vec<u8>, Status> {
        // SAFETY: the peer's memory lives, and is looked at after the completion.
        unsafe { self.peer.post_read(2, self.memory.sge(64, 16), from) }.unwrap();
        match self.peer.wait(TIMEOUT).unwrap().status {
            Status::SUCCESS => Ok(self.memory.to_vec(64, 16)),
            status => Err(status),
        }
    }
}

fn connected(domain: &Domain, elsewhere: &Domain) -> (Arc<Queue>, Queue) {
    let own = Queue::new(domain, Depth::default()).unwrap();
    let peer = Queue::new(elsewhere, Depth::default()).unwrap();
    own.connect(peer.endpoint()).unwrap();
    peer.connect(own.endpoint()).unwrap();
    (Arc::new(own), peer)
}

fn write(peer: &Queue, memory: &Memory, to: Remote) -> Status {
    // SAFETY: the peer's memory lives, and is not written before the completion.
    unsafe { peer.post_write(1, memory.sge(0, 16), to) }.unwrap();
    peer.wait(TIMEOUT).unwrap().status
}

fn done(queue: &Queue, id: u64) -> Completion {
    let completion = queue.wait(TIMEOUT).unwrap();
    assert_eq!(completion.id, id);
    completion
}

fn filled(heap: &Heap, byte: u8, len: usize) -> Buffer {
    let mut buffer = heap.buffer(len).unwrap();
    buffer.try_extend_from_slice(&vec![byte; len]).unwrap();
    buffer
}

fn reach(RemoteSlice { addr, rkey, .. }: RemoteSlice) -> Remote {
    Remote { addr, rkey }
}

fn remote(exposed: &Exposed) -> Remote {
    reach(exposed.remote())
}

#[test]
fn verbs_a_window_opens_its_buffer_until_it_is_revoked() {
    for kind in KINDS {
        let Some(scene) = Scene::of(kind) else { return };
        let mut exposed = scene.expose(filled(&scene.heap, 1, 4096), Access::REMOTE_READ | Access::REMOTE_WRITE);
        let key = remote(&exposed);
        assert_eq!(scene.write(key), Status::SUCCESS);
        let mut seen = [0; 17];
        exposed.copy_to_slice(0, &mut seen).unwrap();
        assert_eq!((&seen[..16], seen[16]), (&[0xee; 16][..], 1));
        exposed.copy_from_slice(3, b"an answer").unwrap();
        assert_eq!(scene.read(key).unwrap()[3..12], *b"an answer");
        exposed.store_u64(8, 0x0102_0304_0506_0708).unwrap();
        assert_eq!(scene.read(key).unwrap()[8..16], 0x0102_0304_0506_0708u64.to_ne_bytes());
        assert_eq!(exposed.load_u64(4096), Err(OutOfRange { offset: 4096, wanted: 8, len: 4096 }));

        let buffer = scene.revoke(exposed);
        assert_eq!((&buffer[3..8], buffer.len()), (&b"an an"[..], 4096));
        assert_eq!(scene.write(key), Status::REM_ACCESS_ERR, "{kind:?}");
        assert_eq!(buffer[0], 0xee);
        assert!(buffer[16..].iter().all(|byte| *byte == 1));
        assert_eq!((scene.windows.stats().exposed, scene.windows.stats().ready), (0, 1));
    }
}

#[test]
fn verbs_a_revoked_key_reads_nothing() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let exposed = scene.expose(filled(&scene.heap, 1, 64), Access::REMOTE_READ);
    let key = remote(&exposed);
    assert_eq!(scene.read(key).unwrap(), [1; 16]);
    let _buffer = scene.revoke(exposed);
    let refused = scene.read(key).unwrap_err();
    // Linux 6.1 answers a READ so that the requester gives up retrying.
    assert!([Status::REM_ACCESS_ERR, Status::RETRY_EXC_ERR].contains(&refused), "{refused:?}");
}

#[test]
fn verbs_a_window_that_is_dropped_or_ended_is_dead_and_the_next_one_is_not_its() {
    for kind in KINDS {
        let Some(mut scene) = Scene::of(kind) else { return };
        for dropped in [false, true] {
            let exposed = scene.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE);
            let key = remote(&exposed);
            assert_eq!(scene.write(key), Status::SUCCESS);
            if dropped {
                drop(exposed);
            } else {
                assert_eq!(exposed.end().unwrap()[..], [[0xee; 16], [1; 16], [1; 16], [1; 16]].concat()[..]);
            }
            // The same memory, probably, under another key.
            let next = scene.expose(filled(&scene.heap, 2, 64), Access::REMOTE_WRITE);
            assert_ne!(next.remote().rkey, key.rkey);
            assert_eq!(scene.write(key), Status::REM_ACCESS_ERR);
            assert_eq!(next.end().unwrap()[..], [2; 64]);
            assert_eq!(scene.windows.stats().leaked, 0);
            scene.reconnect();
        }
    }
}

#[test]
fn verbs_a_window_gives_its_rights_and_no_more() {
    let Some(mut scene) = Scene::of(WindowKind::Type2) else { return };
    for rights in READ_WRITE {
        let exposed = scene.expose(filled(&scene.heap, 1, 64), rights);
        let key = remote(&exposed);
        if rights == Access::REMOTE_READ {
            assert_eq!(scene.read(key).unwrap(), [1; 16]);
            assert_eq!(scene.write(key), Status::REM_ACCESS_ERR);
        } else {
            assert_eq!(scene.write(key), Status::SUCCESS);
            assert!(scene.read(key).is_err());
        }
        // The queues have failed; the window is ended all the same.
        let first = exposed.end().unwrap()[0];
        assert_eq!(first, if rights == Access::REMOTE_READ { 1 } else { 0xee });
        scene.reconnect();
    }
}

#[test]
fn verbs_atomics_reach_a_word_that_the_owner_watches() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let exposed = scene.expose(filled(&scene.heap, 0, 64), Access::REMOTE_ATOMIC);
    let word = reach(exposed.remote().slice(8..).unwrap());
    for n in 0..3 {
        // SAFETY: the peer's memory lives until the completion.
        unsafe { scene.peer.post_fetch_add(3, scene.memory.sge(0, 8), word, 5) }.unwrap();
        scene.peer.wait(TIMEOUT).unwrap().ok().unwrap();
        assert_eq!(exposed.load_u64(8).unwrap(), 5 * (n + 1));
    }
}

#[test]
fn verbs_a_key_of_type_2_is_the_peer_s_alone_to_whom_it_was_given() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let exposed = scene.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE);
    let (_other_own, other_peer) = connected(&scene.domain, &scene.elsewhere);
    assert_eq!(write(&other_peer, &scene.memory, remote(&exposed)), Status::REM_ACCESS_ERR);
    assert_eq!(scene.write(remote(&exposed)), Status::SUCCESS);
}

#[test]
fn verbs_guessed_keys_reach_neither_a_heap_of_windows_nor_the_global_heap() {
    let Some(mut scene) = Scene::of(WindowKind::Type2) else { return };
    let global = HEAP.attach(Verbs::new(scene.domain.clone())).unwrap();
    let (mine, hidden) = (vec![1u8; 4096], filled(&scene.heap, 1, 4096));
    let exposed = scene.expose(filled(&scene.heap, 1, 64), Access::REMOTE_READ | Access::REMOTE_WRITE);
    let told = exposed.remote().rkey;
    let keys = [global.key(mine.as_ptr()).unwrap(), scene.device.key(hidden.as_ptr()).unwrap()];
    let mut guesses = HashSet::from([0]);
    guesses.extend((0..8).flat_map(|n| [told.wrapping_add(n), told.wrapping_sub(n)]));
    // The next windows, and the same window with another tag.
    guesses.extend((1..4).flat_map(|n| [told.wrapping_add(n << 8), told.wrapping_sub(n << 8)]));
    for keys in keys {
        // That is more than a guess: the regions' own keys.
        guesses.extend([keys.rkey, keys.lkey, keys.lkey.wrapping_add(1), keys.lkey.wrapping_add(1 << 8)]);
    }
    // Soft-RoCE does not check a window's bounds, so the key itself would open the arena there.
    guesses.remove(&told);
    for rkey in guesses {
        for target in [mine.as_ptr(), hidden.as_ptr()] {
            let status = scene.write(Remote { addr: target.addr() as u64, rkey });
            assert_eq!(status, Status::REM_ACCESS_ERR, "{rkey:#x}, told {told:#x}, {keys:x?}");
            (scene.own, scene.peer) = connected(&scene.domain, &scene.elsewhere);
        }
    }
    assert!(mine.iter().chain(&hidden[..]).all(|byte| *byte == 1));
    drop(exposed);
    HEAP.detach(global).unwrap();
}

#[test]
fn verbs_while_a_window_lives_its_device_and_arena_stay() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let exposed = scene.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE);
    assert_eq!(scene.heap.trim().closed_arenas, 0);
    assert!(matches!(scene.heap.detach(scene.device), Err(DetachError::InUse { holds: 1, .. })));
    assert_eq!(scene.write(remote(&exposed)), Status::SUCCESS);
    drop(scene.revoke(exposed));
    assert_eq!(scene.heap.trim().closed_arenas, 1);
    scene.heap.detach(scene.device).unwrap();
    let refused = scene.windows.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE, 1).unwrap_err();
    assert!(matches!(refused.why, ExposeError::Hold(_)), "{refused}");
    assert_eq!(refused.buffer.len(), 64);
}

#[test]
fn verbs_what_could_fail_the_queue_is_refused_before() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let expose = |buffer, rights| scene.windows.expose(buffer, rights, 1).unwrap_err();
    for rights in [Access::LOCAL_WRITE, Access::LOCAL_READ, Access::REMOTE_READ | Access::WINDOWS] {
        let refused = expose(filled(&scene.heap, 1, 64), rights);
        assert!(matches!(refused.why, ExposeError::Rights { .. }), "{refused}");
    }
    let empty = expose(scene.heap.buffer(64).unwrap(), Access::REMOTE_READ);
    assert!(matches!(empty.why, ExposeError::Empty), "{empty}");
    let plain = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
    plain.attach(Verbs::new(scene.domain.clone())).unwrap();
    let refused = expose(filled(&plain, 1, 64), Access::REMOTE_WRITE);
    assert!(matches!(refused.why, ExposeError::Heap { .. }), "{refused}");
    let other = Heap::builder().access(Access::WINDOWS).build().unwrap();
    let refused = expose(filled(&other, 1, 64), Access::REMOTE_WRITE);
    assert!(matches!(refused.why, ExposeError::Key(_)), "{refused}");
    let wrong = Windows::new(scene.device, Arc::new(connected(&scene.elsewhere, &scene.domain).0)).unwrap_err();
    assert_eq!(wrong, WindowsError::OtherDomain { device: scene.device });

    let unconnected = Arc::new(Queue::new(&scene.domain, Depth::default()).unwrap());
    let windows = Windows::new(scene.device, unconnected).unwrap();
    let refused = windows.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE, 1).unwrap_err();
    assert!(matches!(refused.why, ExposeError::Post(_)), "{refused}");
    // The queue still works.
    let exposed = scene.expose(refused.buffer, Access::REMOTE_WRITE);
    assert_eq!(scene.write(remote(&exposed)), Status::SUCCESS);
}

#[test]
fn verbs_on_a_queue_that_has_failed_buffers_come_back() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let kept = scene.expose(filled(&scene.heap, 2, 64), Access::REMOTE_WRITE);
    scene.own.fail().unwrap();

    // A revocation that is flushed, and a bind.
    let revoking = kept.revoke(4).unwrap();
    let status = done(&scene.own, 4).status;
    assert_ne!(status, Status::SUCCESS);
    // SAFETY: that is the completion of the revocation.
    let buffer = unsafe { revoking.revoked(status.0) }.unwrap();
    assert_eq!(buffer[..], [2; 64]);
    let binding = scene.windows.expose(buffer, Access::REMOTE_WRITE, 5).unwrap();
    let status = done(&scene.own, 5).status;
    // SAFETY: that is the completion of the bind.
    let failed = unsafe { binding.bound(status.0) }.unwrap_err();
    assert_eq!(failed.status, status.0);
    assert_eq!(failed.buffer.unwrap()[..], [2; 64]);
    let binding = scene.windows.expose(filled(&scene.heap, 3, 64), Access::REMOTE_WRITE, 6).unwrap();
    done(&scene.own, 6);
    // SAFETY: nothing that was posted is under way.
    assert_eq!(unsafe { binding.reclaim() }.unwrap()[..], [3; 64]);
    assert_eq!((scene.windows.stats().leaked, scene.windows.stats().exposed), (0, 0));
    scene.heap.detach(scene.device).unwrap();
}

#[test]
fn verbs_what_is_under_way_and_forgotten_is_kept_and_counted() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let binding = scene.windows.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE, 1).unwrap();
    let key = reach(binding.remote());
    drop(binding);
    done(&scene.own, 1);
    drop(scene.expose(filled(&scene.heap, 2, 128), Access::REMOTE_WRITE).revoke(2).unwrap());
    done(&scene.own, 2);
    let stats = scene.windows.stats();
    assert_eq!((stats.leaked, stats.leaked_bytes, stats.exposed), (2, 64 + 128, 0));
    assert_eq!(scene.device.hold_count(), 2);
    // The peer may write there, and nobody else gets that memory.
    let others: Vec<_> = (0..64).map(|_| filled(&scene.heap, 3, 64)).collect();
    assert_eq!(scene.write(key), Status::SUCCESS);
    assert!(others.iter().all(|buffer| buffer[..] == [3; 64]));
}

#[test]
fn verbs_a_tag_never_comes_again_on_one_window() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let (mut buffer, mut seen) = (filled(&scene.heap, 1, 64), HashSet::new());
    for _ in 0..600 {
        let exposed = scene.expose(buffer, Access::REMOTE_READ);
        seen.insert(exposed.remote().rkey);
        buffer = scene.revoke(exposed);
    }
    assert_eq!((seen.len(), scene.windows.stats().made, scene.windows.stats().bound), (600, 3, 600));
}

#[test]
fn verbs_a_peer_ends_the_window_with_its_last_send() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let exposed = scene.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE);
    let (key, inbox) = (remote(&exposed), Memory::new(&scene.domain, 64).unwrap());
    assert_eq!(scene.write(key), Status::SUCCESS);
    // SAFETY: both memories live until the completions.
    unsafe {
        scene.own.post_recv(1, inbox.sge(0, 64)).unwrap();
        scene.peer.post_send_invalidate(2, scene.memory.sge(0, 8), key.rkey).unwrap();
    }
    let invalidated = done(&scene.own, 1).invalidated;
    assert!(invalidated.is_none_or(|rkey| rkey == key.rkey), "soft-RoCE does not say, adapters do");
    done(&scene.peer, 2).ok().unwrap();
    // SAFETY: the receive says so.
    let buffer = unsafe { exposed.invalidated_by_peer() };
    assert_eq!((buffer[0], scene.windows.stats().ready), (0xee, 1));
    assert_eq!(scene.write(key), Status::REM_ACCESS_ERR);
}

#[test]
fn verbs_windows_of_the_device_s_best_kind_and_their_cost() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let windows = Windows::new(scene.device, scene.own.clone()).unwrap();
    assert_eq!(windows.kind(), WindowKind::Type2, "soft-RoCE and current adapters have it");
    windows.reserve(3).unwrap();
    assert_eq!((windows.stats().ready, windows.stats().made), (3, 3));
    const TURNS: u32 = 200;
    let mut buffer = filled(&scene.heap, 1, 4096);
    let begin = Instant::now();
    for _ in 0..TURNS {
        let exposed = scene.expose(buffer, Access::REMOTE_READ);
        buffer = scene.revoke(exposed);
    }
    let posted = begin.elapsed() / TURNS;
    let begin = Instant::now();
    for _ in 0..TURNS {
        buffer = scene.expose(buffer, Access::REMOTE_READ).end().unwrap();
    }
    println!("bound and revoked by work requests {posted:?}, bound and let go {:?}", begin.elapsed() / TURNS);
}

#[test]
fn verbs_a_child_of_fork_ends_no_window_of_its_parent() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let exposed = scene.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE);
    let spare = filled(&scene.heap, 2, 64);
    // SAFETY: the child allocates and prints nothing, and ends at once.
    match unsafe { libc::fork() } {
        0 => {
            let refused = scene.windows.expose(spare, Access::REMOTE_WRITE, 1).is_err();
            let kept = exposed.end().is_err();
            // SAFETY: it ends the child, without what ends with its parent.
            unsafe { libc::_exit(i32::from(!refused || !kept)) }
        }
        child => {
            let mut status = -1;
            // SAFETY: the child is this process's.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "the child has exposed or ended something");
        }
    }
    assert_eq!(scene.write(remote(&exposed)), Status::SUCCESS);
    assert_eq!(scene.revoke(exposed)[0], 0xee);
}

#[test]
fn verbs_what_is_exposed_on_a_device_that_is_lost_comes_back_by_the_system_call() {
    let Some(scene) = Scene::of(WindowKind::Type2) else { return };
    let exposed = scene.expose(filled(&scene.heap, 1, 64), Access::REMOTE_WRITE);
    scene.device.mark_lost();
    let refused = exposed.revoke(1).unwrap_err();
    assert_eq!(refused.source.raw_os_error(), Some(libc::EIO), "its region may go at any time");
    let buffer = refused.exposed.end().unwrap();
    let refused = scene.windows.expose(buffer, Access::REMOTE_WRITE, 2).unwrap_err();
    assert!(matches!(refused.why, ExposeError::Hold(_)), "{refused}");
    assert_eq!(refused.buffer[..], [1; 64]);
    assert_eq!((scene.windows.stats().leaked, scene.device.hold_count()), (0, 0));
    scene.heap.detach(scene.device).unwrap();
}
