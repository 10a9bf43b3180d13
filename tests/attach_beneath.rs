//! Devices attached beneath a running program whose global allocator is rdmalloc, over a registrar that keeps books. The same
//! on real verbs is in `verbs_mission.rs`.

use rdmalloc::{Device, KeyError, NotRegistered, Rdmalloc, SgeError};
use rdmalloc_tests::{Churn, Garden, Ledger};
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// One test at a time: they count what the one global heap has.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn assert_reached(device: Device, ledger: &Ledger, garden: &Garden) {
    for block in &garden.blocks {
        let sge = device.sge(block).unwrap();
        let start = block.as_ptr().addr();
        assert!(ledger.covers(sge.lkey(), start..start + block.len()), "{} bytes", block.len());
    }
}

#[test]
fn blocks_of_every_kind_from_before_attach_are_registered_and_so_are_those_after() {
    let _alone = alone();
    let churn = Churn::start(8);
    let ended = std::thread::spawn(|| Garden::plant(1, 40 << 20)).join().unwrap();
    let (sender, receiver) = mpsc::channel();
    let (wake, sleep) = mpsc::channel::<()>();
    let sleeper = std::thread::spawn(move || {
        sender.send(Garden::plant(2, 40 << 20)).unwrap();
        let _ = sleep.recv();
    });
    let gardens = [ended, receiver.recv().unwrap(), Garden::plant(3, 40 << 20)];
    churn.wait_for(1000);

    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    gardens.iter().for_each(|garden| assert_reached(device, &ledger, garden));
    churn.wait_for(10_000);
    let after = Garden::plant(4, 70 << 20);
    assert_reached(device, &ledger, &after);
    assert!(gardens.iter().chain([&after]).all(Garden::is_whole));

    HEAP.detach(device).unwrap();
    assert_eq!(ledger.live(), 0);
    assert_eq!(device.key(after.blocks[0].as_ptr()), Err(KeyError::Detached));
    drop(wake);
    sleeper.join().unwrap();
    churn.stop();
    assert!(gardens.iter().all(Garden::is_whole));
}

#[test]
fn an_arena_is_deregistered_after_its_last_block_and_not_before() {
    let _alone = alone();
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    HEAP.trim();
    let before = ledger.live_bytes();
    let (mut one, two) = (vec![1u8; 100 << 20], vec![2u8; 100 << 20]);
    assert_eq!(ledger.live_bytes(), before + (200 << 20));
    // Half of a block's memory may go, but not its arena.
    one.truncate(1000);
    one.shrink_to_fit();
    HEAP.trim();
    drop(one);
    assert!(device.sge(&two).is_ok());
    let trimmed = HEAP.trim();
    assert_eq!(ledger.live_bytes(), before + (100 << 20), "{trimmed:?}");
    drop(two);
    assert_eq!(HEAP.trim().closed_bytes, 100 << 20);
    assert_eq!(ledger.live_bytes(), before);
    HEAP.detach(device).unwrap();
}

#[test]
fn what_has_no_entry_says_why() {
    let _alone = alone();
    let device = HEAP.attach(Ledger::new()).unwrap();
    let ours = vec![1u8; 100];
    let theirs = [1u8; 100];
    assert_eq!(device.sge(&ours).unwrap().length(), 100);
    assert_eq!(device.sge(&ours[..0]).unwrap_err(), SgeError::Empty);
    assert_eq!(device.sge(&[]).unwrap_err(), SgeError::Empty);
    assert_eq!(device.sge(&theirs).unwrap_err(), SgeError::Key(KeyError::Foreign));
    assert_eq!(device.key(std::ptr::null::<u8>()), Err(KeyError::Foreign));
    // 4 GiB of zeros that are never touched.
    let long = vec![0u8; 1 << 32];
    assert_eq!(device.sge(&long).unwrap_err(), SgeError::TooLong { len: 1 << 32 });
    assert!(device.sge(&long[1..]).is_ok());
    drop(long);
    HEAP.trim();
    HEAP.detach(device).unwrap();

    let pieces = Ledger::with_max_len(4 << 20);
    let device = HEAP.attach(pieces.clone()).unwrap();
    let long = vec![0u8; 9 << 20];
    assert_eq!(device.sge(&long).unwrap_err(), SgeError::Straddles { len: 9 << 20 });
    assert!(device.sge(&long[..64 << 10]).is_ok());
    HEAP.detach(device).unwrap();
}

#[test]
fn memory_that_was_refused_serves_and_says_so() {
    let _alone = alone();
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    ledger.refuse_after(Some(0));
    let block = vec![7u8; 200 << 20];
    let refused = KeyError::NotRegistered(NotRegistered::Refused { code: libc::ENOMEM });
    let error = device.sge(&block).unwrap_err();
    assert_eq!(error, SgeError::Key(refused));
    assert!(error.to_string().contains("Cannot allocate memory"), "{error}");
    drop(block);
    HEAP.trim();
    ledger.refuse_after(None);
    assert!(device.sge(&vec![7u8; 200 << 20]).is_ok());
    HEAP.trim();
    HEAP.detach(device).unwrap();
}

#[test]
fn devices_come_and_go_while_eight_threads_allocate() {
    let _alone = alone();
    let churn = Churn::start(8);
    let garden = Garden::plant(9, 33 << 20);
    for _ in 0..20 {
        let ledgers = [Ledger::new(), Ledger::with_max_len(2 << 20)];
        let devices = ledgers.clone().map(|ledger| HEAP.attach(ledger).unwrap());
        assert_reached(devices[0], &ledgers[0], &garden);
        churn.wait_for(2000);
        HEAP.trim();
        devices.into_iter().for_each(|device| HEAP.detach(device).unwrap());
        assert_eq!(ledgers.map(|ledger| ledger.live()), [0, 0]);
    }
    assert!(garden.is_whole());
    churn.stop();
}
