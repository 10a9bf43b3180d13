//! The verbs backend on a real device: what it registers, what it gives back, and what it says when it cannot.
//!
//! The witness is VmPin in /proc/self/status, the bytes that are pinned in this process, so the tests take turns.

#![cfg(feature = "verbs")]

use core::ops::Range;
use core::ptr::{self, NonNull};
use rdmalloc_arenas::registrar::verbs::rdma_sys::{self, ibv_access_flags, ibv_pd};
use rdmalloc_arenas::registrar::verbs::{
    AsProtectionDomain, ForkSupport, OpenError, ProtectionDomain, Verbs, devices, fixes,
};
use rdmalloc_arenas::{Access, Registrar};
use rdmalloc_tests::register;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io, thread};

const MIB: usize = 1 << 20;

static TURN: Mutex<()> = Mutex::new(());

/// Waits for this test's turn, and finds the first device; `None`, and a line that says so, where there is none.
fn device() -> Option<(MutexGuard<'static, ()>, String)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let first = devices().into_iter().next();
    if first.is_none() {
        println!("skipped: no verbs device");
    }
    Some((turn, first?))
}

/// Anonymous memory that begins at a multiple of 2 MiB.
struct Memory {
    mapping: *mut libc::c_void,
    len: usize,
}

impl Memory {
    fn map(len: usize) -> Memory {
        Memory::map_as(libc::PROT_READ | libc::PROT_WRITE, len)
    }

    fn map_as(prot: i32, len: usize) -> Memory {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, where the kernel likes.
        let mapping = unsafe { libc::mmap(ptr::null_mut(), len + 2 * MIB, prot, flags, -1, 0) };
        assert_ne!(mapping, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Memory { mapping, len }
    }

    fn range(&self) -> Range<usize> {
        let start = self.mapping.expose_provenance().next_multiple_of(2 * MIB);
        start..start + self.len
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map_as` with this length, and nothing borrows from it.
        assert_eq!(unsafe { libc::munmap(self.mapping, self.len + 2 * MIB) }, 0);
    }
}

/// Bytes that are pinned in this process.
fn pinned() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn register_and_end(verbs: &Verbs) -> io::Result<()> {
    let memory = Memory::map(2 * MIB);
    let registered = register(verbs, memory.range(), Access::LOCAL_WRITE)?;
    verbs.deregister(registered, memory.range())
}

/// Makes the calling thread another user, without capabilities: the bare system call changes no other thread.
fn become_nobody() -> io::Result<()> {
    // SAFETY: changes credentials, no memory.
    match unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[test]
fn verbs_registration_pins_exactly_its_memory_until_it_ends() {
    let Some((_turn, name)) = device() else { return };
    let verbs = Verbs::open(None).unwrap();
    assert_eq!(verbs.name(), name);
    assert_eq!(verbs.identity().unwrap().get(), verbs.as_ptr().addr());
    assert!(verbs.limits().max_len >= 2 << 20 && verbs.limits().max_registrations > 1);
    println!("{verbs:?}");

    let (memory, before) = (Memory::map(4 * MIB), pinned());
    let first = register(&verbs, memory.range(), Access::LOCAL_WRITE).unwrap();
    assert_eq!(pinned(), before + 4 * MIB);
    assert_ne!(first.keys.lkey, 0);
    let half = memory.range().start..memory.range().start + 2 * MIB;
    let second = register(&verbs, half.clone(), Access::REMOTE_READ | Access::REMOTE_WRITE).unwrap();
    assert_eq!(pinned(), before + 6 * MIB, "each registration counts");
    assert_ne!(second.keys.rkey, 0);
    assert_ne!(first.keys, second.keys);

    // The handle is the region, with what was asked for.
    let region = ptr::with_exposed_provenance::<rdma_sys::ibv_mr>(first.handle as usize);
    // SAFETY: the registration lives, so its ibv_mr does.
    let (addr, len, pd, lkey) = unsafe { ((*region).addr, (*region).length, (*region).pd, (*region).lkey) };
    assert_eq!((addr.addr(), len, pd, lkey), (memory.range().start, 4 * MIB, verbs.as_ptr(), first.keys.lkey));

    verbs.deregister(first, memory.range()).unwrap();
    assert_eq!(pinned(), before + 2 * MIB);
    verbs.deregister(second, half).unwrap();
    assert_eq!(pinned(), before);
}

#[test]
fn verbs_second_deregistration_is_an_error() {
    let Some((_turn, _)) = device() else { return };
    let verbs = Verbs::open(None).unwrap();
    let memory = Memory::map(2 * MIB);
    let registered = register(&verbs, memory.range(), Access::LOCAL_WRITE).unwrap();
    let shifted = memory.range().start + 4096..memory.range().end;
    assert_eq!(verbs.deregister(registered, shifted).unwrap_err().kind(), io::ErrorKind::NotFound);
    verbs.deregister(registered, memory.range()).unwrap();
    assert_eq!(verbs.deregister(registered, memory.range()).unwrap_err().kind(), io::ErrorKind::NotFound);
    // Another domain does not know it either.
    let (other, again) = (Verbs::open(None).unwrap(), register(&verbs, memory.range(), Access::LOCAL_WRITE).unwrap());
    assert_eq!(other.deregister(again, memory.range()).unwrap_err().kind(), io::ErrorKind::NotFound);
    verbs.deregister(again, memory.range()).unwrap();
}

#[test]
fn verbs_every_access_registers() {
    let Some((_turn, _)) = device() else { return };
    let verbs = Verbs::open(None).unwrap();
    let (memory, before) = (Memory::map(2 * MIB), pinned());
    let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    for access in [
        Access::LOCAL_READ,
        Access::LOCAL_WRITE,
        Access::REMOTE_READ,
        Access::REMOTE_WRITE,
        Access::REMOTE_ATOMIC,
        Access::LOCAL_WRITE | Access::WINDOWS,
        Access::LOCAL_WRITE | Access::RELAXED_ORDERING,
        remote | Access::WINDOWS | Access::RELAXED_ORDERING,
    ] {
        let registered = register(&verbs, memory.range(), access).unwrap_or_else(|error| panic!("{access:?}: {error}"));
        verbs.deregister(registered, memory.range()).unwrap();
    }
    assert_eq!(pinned(), before);
}

#[test]
fn verbs_failed_registration_says_why_and_pins_nothing() {
    let Some((_turn, _)) = device() else { return };
    let verbs = Verbs::open(None).unwrap();
    let before = pinned();

    let closed = Memory::map_as(libc::PROT_NONE, 4 * MIB);
    let error = register(&verbs, closed.range(), Access::LOCAL_WRITE).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");

    match verbs.limits().max_len {
        limit if limit < isize::MAX as u64 => {
            let over = limit as usize + 1;
            let error = register(&verbs, 0..over, Access::LOCAL_WRITE).unwrap_err();
            assert!(error.to_string().contains(&format!("{over} bytes is over the {limit} bytes")), "{error}");
        }
        limit => {
            let error = register(&verbs, 2 * MIB..1 << 60, Access::LOCAL_WRITE).unwrap_err();
            println!("max_mr_size is {limit}, over any address space; 2^60 bytes give: {error}");
        }
    }
    assert_eq!(pinned(), before);
    register_and_end(&verbs).unwrap();
}

#[test]
fn verbs_memlock_limit_is_enomem() {
    let Some((_turn, _)) = device() else { return };
    let verbs = Verbs::open(None).unwrap();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) }, 0);
    if !(4 << 20..64 << 20).contains(&limit.rlim_cur) {
        println!("skipped: the memlock limit is not between 4 and 64 MiB: {}", limit.rlim_cur);
        return;
    }
    let (memory, before) = (Memory::map((limit.rlim_cur as usize + 2 * MIB).next_multiple_of(2 * MIB)), pinned());
    let range = memory.range();
    thread::scope(|scope| {
        scope.spawn(|| {
            if let Err(error) = become_nobody() {
                println!("skipped: cannot become another user: {error}");
                return;
            }
            let error = register(&verbs, range.clone(), Access::LOCAL_WRITE).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOMEM), "{error}");
            register_and_end(&verbs).unwrap();
        });
    });
    assert_eq!(pinned(), before);
}

#[test]
fn verbs_wrong_device_name_lists_those_there_are() {
    let Some((_turn, first)) = device() else { return };
    let error = ProtectionDomain::open(Some("nonesuch0")).unwrap_err();
    println!("{error}");
    assert!(error.to_string().contains(&first), "{error}");
    match error {
        OpenError::NoDevice { wanted, found } => assert_eq!((wanted.as_str(), found), ("nonesuch0", devices())),
        other => panic!("{other}"),
    }
    for name in devices() {
        assert_eq!(ProtectionDomain::open(Some(&name)).unwrap().device_name(), name);
    }
}

#[test]
fn verbs_no_device_is_an_error_with_a_hint() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if !devices().is_empty() {
        println!("skipped: there is a verbs device");
        return;
    }
    for name in [None, Some("mlx5_0")] {
        let error = ProtectionDomain::open(name).unwrap_err();
        println!("{error}");
        assert!(matches!(error, OpenError::NoDevices { .. }), "{error:?}");
    }
}

/// Runs `then` in a thread whose /dev/infiniband is an empty directory of its own. Needs root.
fn with_empty_dev(then: impl FnOnce() + Send) {
    let separate = || {
        let (none, dev) = (c"none".as_ptr(), c"/dev/infiniband".as_ptr());
        // SAFETY: `unshare` gives this thread a mount namespace of its own, which is made private before the mount, so that
        // nobody else sees it. The pointers are C strings.
        unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, ptr::null()) == 0
                && libc::mount(none, dev, c"tmpfs".as_ptr(), 0, ptr::null()) == 0
        }
    };
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            if separate() { then() } else { println!("skipped: cannot mount: {}", io::Error::last_os_error()) }
        });
        worker.join().unwrap();
    });
}

#[test]
fn verbs_missing_and_forbidden_nodes_are_told_apart() {
    let Some((_turn, _)) = device() else { return };
    let nodes = fs::read_dir("/dev/infiniband").unwrap().map(|entry| entry.unwrap().path());
    let nodes = nodes.filter(|path| path.to_str().unwrap().contains("uverbs"));
    let nodes: Vec<_> = nodes.map(|path| (format!("{}\0", path.display()), path.metadata().unwrap().rdev())).collect();
    with_empty_dev(move || {
        let error = ProtectionDomain::open(None).unwrap_err();
        println!("{error}");
        assert!(matches!(&error, OpenError::NoDevices { in_kernel, .. } if !in_kernel.is_empty()), "{error:?}");

        for (path, number) in &nodes {
            // SAFETY: a C string; makes a file in this thread's own directory.
            assert_eq!(unsafe { libc::mknod(path.as_ptr().cast(), libc::S_IFCHR | 0o600, *number) }, 0);
        }
        become_nobody().unwrap();
        let error = ProtectionDomain::open(None).unwrap_err();
        println!("{error}");
        assert!(error.to_string().contains("must be able to read and write"), "{error:?}");
    });
}

#[test]
fn verbs_opener_closes_what_it_opened() {
    let Some((_turn, _)) = device() else { return };
    drop(ProtectionDomain::open(None).unwrap()); // whatever the library opens once and keeps
    let before = open_files();
    let domain = ProtectionDomain::open(None).unwrap();
    assert!(open_files() > before);
    drop(domain);
    assert_eq!(open_files(), before);
    let verbs = Verbs::open(None).unwrap();
    register_and_end(&verbs).unwrap();
    drop(verbs);
    assert_eq!(open_files(), before);
}

/// Says whether it was dropped.
struct Witness(ProtectionDomain, Arc<AtomicBool>);

// SAFETY: the domain lives and stays the same inside.
unsafe impl AsProtectionDomain for Witness {
    fn as_protection_domain(&self) -> NonNull<ibv_pd> {
        self.0.as_protection_domain()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

#[test]
fn verbs_owner_outlives_the_last_region() {
    let Some((_turn, _)) = device() else { return };
    let dropped = Arc::new(AtomicBool::new(false));
    let owner = Arc::new(Witness(ProtectionDomain::open(None).unwrap(), Arc::clone(&dropped)));
    let verbs = Verbs::new(Arc::clone(&owner));
    drop(owner);
    register_and_end(&verbs).unwrap();
    assert!(!dropped.load(Ordering::Relaxed));
    drop(verbs);
    assert!(dropped.load(Ordering::Relaxed), "nothing is registered, so the domain is closed");

    let dropped = Arc::new(AtomicBool::new(false));
    let verbs = Verbs::new(Box::new(Witness(ProtectionDomain::open(None).unwrap(), Arc::clone(&dropped))));
    let (memory, before) = (Memory::map(2 * MIB), pinned());
    let registered = register(&verbs, memory.range(), Access::LOCAL_WRITE).unwrap();
    drop(verbs);
    assert!(!dropped.load(Ordering::Relaxed), "something is registered, so the domain is kept");
    assert_eq!(pinned(), before + 2 * MIB);

    let region = ptr::with_exposed_provenance_mut::<rdma_sys::ibv_mr>(registered.handle as usize);
    // SAFETY: the region still lives, as its domain does, and nobody else will end it.
    assert_eq!(unsafe { rdma_sys::ibv_dereg_mr(region) }, 0);
    assert_eq!(pinned(), before);
}

#[test]
fn verbs_domain_with_a_foreign_region_stays_open() {
    let Some((_turn, _)) = device() else { return };
    let (memory, before) = (Memory::map(2 * MIB), pinned());
    let domain = ProtectionDomain::open(None).unwrap();
    let (start, access) = (memory.range().start, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0);
    let addr = ptr::with_exposed_provenance_mut(start);
    // SAFETY: the domain is open, the memory is mapped.
    let region = unsafe { rdma_sys::ibv_reg_mr_iova2(domain.as_ptr(), addr, 2 * MIB, start as u64, access) };
    assert!(!region.is_null());
    drop(domain); // EBUSY inside
    assert_eq!(pinned(), before + 2 * MIB);
    // SAFETY: registered above; the context stayed open for it.
    assert_eq!(unsafe { rdma_sys::ibv_dereg_mr(region) }, 0);
    assert_eq!(pinned(), before);
}

#[test]
fn verbs_raw_domain_registers() {
    let Some((_turn, _)) = device() else { return };
    let domain = ProtectionDomain::open(None).unwrap();
    // SAFETY: the domain is dropped after `verbs`, which ends what it registers.
    let verbs = unsafe { Verbs::from_raw(domain.as_ptr()) };
    register_and_end(&verbs).unwrap();
    drop(verbs);
    register_and_end(&Verbs::new(domain)).unwrap();
}

#[test]
fn verbs_child_of_fork_ends_nothing_of_its_parent() {
    let Some((_turn, _)) = device() else { return };
    let support = Verbs::fork_support();
    println!("fork: {support:?}");
    let (memory, before) = (Memory::map(4 * MIB), pinned());
    let (verbs, unused) = (Verbs::open(None).unwrap(), ProtectionDomain::open(None).unwrap());
    let empty = Verbs::open(None).unwrap();
    let beside = empty.as_ptr();
    assert_eq!(verbs.hides_memory_from_children(), support == ForkSupport::Enabled);
    let registered = register(&verbs, memory.range(), Access::LOCAL_WRITE).unwrap();

    // SAFETY: the child drops copies, and ends without running anything else of the parent's.
    match unsafe { libc::fork() } {
        -1 => panic!("fork: {}", io::Error::last_os_error()),
        0 => {
            let refused = verbs.deregister(registered, memory.range()).is_err()
                && register(&verbs, memory.range(), Access::LOCAL_WRITE).is_err();
            drop((verbs, unused, empty));
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!refused)) }
        }
        child => {
            let mut status = -1;
            // SAFETY: a child of ours, and our variable.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "registering and deregistering in the child must be refused");
        }
    }
    assert_eq!(pinned(), before + 4 * MIB, "the child ended the parent's registration");
    verbs.deregister(registered, memory.range()).unwrap();
    assert_eq!(pinned(), before);
    register_and_end(&Verbs::new(unused)).expect("the child closed the parent's protection domain");
    assert_eq!(empty.as_ptr(), beside);
    register_and_end(&empty).expect("the child closed the protection domain of an idle registrar");
}

#[test]
fn verbs_threads_register_at_once() {
    let Some((_turn, _)) = device() else { return };
    let (verbs, before) = (Verbs::open(None).unwrap(), pinned());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..16).for_each(|_| register_and_end(&verbs).unwrap()));
        }
    });
    assert_eq!(pinned(), before);
}

#[test]
fn verbs_port_is_read_through_the_extended_context() {
    let Some((_turn, _)) = device() else { return };
    let domain = ProtectionDomain::open(None).unwrap();
    let context = domain.context();
    // SAFETY: the context is open while `domain` lives.
    let (extended, port, none) =
        unsafe { (fixes::verbs_context(context), fixes::query_port(context, 1), fixes::query_port(context, 200)) };
    let (extended, port) = (extended.expect("current providers are extended"), port.unwrap());
    // SAFETY: as above.
    let inside = unsafe { &raw mut (*extended.as_ptr()).context };
    assert_eq!(inside, context.as_ptr());
    assert!(none.is_err());
    println!("state {} mtu {} lid {} link {}", port.state, port.active_mtu, port.lid, port.link_layer);
    assert!((1..=5).contains(&port.state) && (1..=5).contains(&port.active_mtu) && port.gid_tbl_len > 0);
    assert!((1..=2).contains(&port.link_layer), "InfiniBand or Ethernet");

    // An extended verb, called through what was found, agrees with the plain one.
    // SAFETY: zeros are valid for both structs (integers only), the calls are told their size, and the context is open.
    let (plain, long) = unsafe {
        let (mut plain, mut long): (rdma_sys::ibv_device_attr, rdma_sys::ibv_device_attr_ex) = core::mem::zeroed();
        assert_eq!(rdma_sys::ibv_query_device(context.as_ptr(), &mut plain), 0);
        let query = (*extended.as_ptr()).query_device_ex.expect("query_device_ex");
        assert_eq!(query(context.as_ptr(), ptr::null(), &mut long, size_of_val(&long)), 0);
        (plain, long.orig_attr)
    };
    assert_eq!((plain.max_mr_size, plain.max_mr), (long.max_mr_size, long.max_mr));
    assert_eq!((plain.node_guid, plain.max_qp), (long.node_guid, long.max_qp));
}
