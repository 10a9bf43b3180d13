//! Gathering: whatever the pieces are, the entries are the message.

use bytes::{Buf, Bytes};
use proptest::collection::vec;
use proptest::prelude::*;
use rdmalloc::{
    Device, GatherError, Gathered, Gathering, Heap, KeyError, Rdmalloc, Sge, SgeError, SgesError, StableBytes,
};
use rdmalloc_tests::Ledger;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::sync::LazyLock;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const MIB: usize = 1 << 20;
/// Long pieces; the device registers 2 MiB at once, so some lie in several registrations.
const OURS: usize = 9 * MIB;
static FOREIGN: [u8; 65536] = {
    let mut bytes = [0; 65536];
    let mut i = 0;
    while i < bytes.len() {
        bytes[i] = (i * 7 + (i >> 8)) as u8 | 1;
        i += 1;
    }
    bytes
};

struct World {
    ledger: Ledger,
    device: Device,
    ours: Bytes,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let ledger = Ledger::with_max_len(2 * MIB as u64);
    let device = HEAP.attach(ledger.clone()).unwrap();
    let ours: Vec<u8> = (0..OURS).map(|i| (i * 31 + (i >> 8)) as u8).collect();
    World { ledger, device, ours: ours.into() }
});

#[derive(Clone, Debug)]
enum Piece {
    Ours(usize, usize),
    Foreign(usize, usize),
}

impl Piece {
    fn bytes(&self) -> Bytes {
        match *self {
            Piece::Ours(begin, len) => WORLD.ours.slice(begin..begin + len),
            Piece::Foreign(begin, len) => Bytes::from_static(&FOREIGN[begin..begin + len]),
        }
    }
}

fn piece() -> impl Strategy<Value = Piece> {
    let len = || prop_oneof![Just(0usize), 1..64usize, 400..700usize, 1000..20_000usize];
    prop_oneof![
        4 => (0..OURS - 20_000, len()).prop_map(|(begin, len)| Piece::Ours(begin, len)),
        3 => (0..40_000usize, len()).prop_map(|(begin, len)| Piece::Foreign(begin, len)),
        // Around a border, or over several.
        1 => (0..3000usize, 1000..6000usize).prop_map(|(before, len)| Piece::Ours(border() - before, len)),
        1 => (2 * MIB..5 * MIB).prop_map(|len| Piece::Ours(1000, len)),
    ]
}

/// Where in `ours` a registration ends.
fn border() -> usize {
    (WORLD.ours.as_ptr().addr() + 4000).next_multiple_of(2 * MIB) - WORLD.ours.as_ptr().addr()
}

/// The bytes of the entries, as a device would read them; each has to lie in one registration.
fn read<'a>(sges: impl IntoIterator<Item = &'a Sge<'a>>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for sge in sges {
        let (address, len) = (sge.addr() as usize, sge.length() as usize);
        assert!(len > 0 && WORLD.ledger.covers(sge.lkey(), address..address + len), "{sge:?}");
        // SAFETY: the entry borrows these bytes. Their provenance was exposed by their owners (see `expose`).
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len) });
    }
    bytes
}

fn expose(bytes: &[u8]) {
    let _ = bytes.as_ptr().expose_provenance();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn entries_are_the_message_whatever_the_pieces_are(
        pieces in vec(piece(), 0..12), max_sge in 1..9usize, threshold in prop_oneof![Just(0usize), 1..3000usize],
    ) {
        let pieces: Vec<Bytes> = pieces.iter().map(Piece::bytes).collect();
        pieces.iter().for_each(|piece| expose(piece));
        let message = pieces.concat();
        let gathering = Gathering::new(max_sge).threshold(threshold);
        let mut header = Vec::<u8>::with_capacity(message.len().max(1));
        let _ = header.as_mut_ptr().expose_provenance();
        // It may lie in several registrations: then it says so, and is no wrong list.
        let begin = header.as_ptr().addr();
        let straddles = begin / (2 * MIB) != (begin + header.capacity() - 1) / (2 * MIB);

        match gathering.gather(WORLD.device, header.spare_capacity_mut(), pieces.iter().map(|piece| &piece[..])) {
            Ok(gather) => {
                prop_assert!(gather.entries().len() <= max_sge && gather.len() == message.len());
                prop_assert!(read(gather.entries()) == message);
                // Small and foreign ones are copied, and nothing twice.
                let must: usize = pieces.iter().filter(|p| p.len() < threshold || FOREIGN.as_ptr_range().contains(&p.as_ptr()))
                    .map(Bytes::len).sum();
                prop_assert!((must..=message.len()).contains(&gather.copied()));
            }
            Err(error) => prop_assert!(straddles && matches!(error, GatherError::Header(SgeError::Straddles { .. })), "{}", error),
        }
        let slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        if let Ok(gather) = gathering.gather_slices(WORLD.device, header.spare_capacity_mut(), &slices) {
            prop_assert!(read(gather.entries()) == message);
        }

        // The one that owns: its parts may be split further, as the entries of a flight are.
        let chain = pieces.iter().fold(Box::new(Bytes::new()) as Box<dyn Buf>, |all, piece| Box::new(all.chain(piece.clone())));
        header.extend_from_slice(b"begin");
        let _ = header.as_mut_ptr().expose_provenance();
        match gathering.own(WORLD.device, header, chain) {
            Ok(owned) => {
                prop_assert_eq!(owned.len(), 5 + message.len());
                let flight = WORLD.device.fly(owned).unwrap();
                let sges: Vec<_> = flight.sges().collect::<Result<_, _>>().unwrap();
                prop_assert!(sges.len() <= max_sge);
                prop_assert!(read(&sges) == [&b"begin"[..], &message].concat());
                drop(sges);
                // SAFETY: there is no device.
                drop(unsafe { flight.reclaim() });
            }
            Err(GatherError::Header(SgeError::Straddles { .. })) => prop_assert!(straddles),
            Err(error) => prop_assert!(matches!(error, GatherError::HeaderFull { .. }), "{}", error),
        }
    }

    #[test]
    fn exact_entries_are_the_slices(pieces in vec(piece(), 0..6), most in prop_oneof![Just(u32::MAX), 1000..100_000u32]) {
        let pieces: Vec<Bytes> = pieces.iter().map(Piece::bytes).filter(|p| !FOREIGN.as_ptr_range().contains(&p.as_ptr())).collect();
        pieces.iter().for_each(|piece| expose(piece));
        let sges = WORLD.device.sges(pieces.iter().map(|piece| &piece[..])).max_len(most);
        let list: Vec<_> = sges.clone().collect::<Result<_, _>>().unwrap();
        prop_assert!(list.iter().all(|sge| sge.length() <= most));
        prop_assert!(read(&list) == pieces.concat());
        let mut room = vec![MaybeUninit::uninit(); list.len()];
        prop_assert_eq!(sges.clone().fill(&mut room).unwrap().len(), list.len());
        if let Some(short) = list.len().checked_sub(1) {
            prop_assert_eq!(sges.fill(&mut room[..short]).unwrap_err(), SgesError::TooMany { room: short });
        }
    }
}

#[test]
fn what_is_not_ours_is_copied_and_neighbours_are_one_entry() {
    let World { device, ours, .. } = &*WORLD;
    let heap = Heap::builder().build().unwrap();
    let attached = heap.attach(Ledger::new()).unwrap();
    let mut header = heap.buffer(4096).unwrap();
    let body = {
        let mut body = heap.buffer(1000).unwrap();
        body.try_extend_from_slice(&[5; 1000]).unwrap();
        body
    };
    let stack = [3u8; 100];
    let pieces: [&[u8]; 7] = [&stack, b"static", &body, &FOREIGN[..2000], &[], b"more", &body[..10]];
    let gather = Gathering::new(4).gather(attached, header.spare_capacity_mut(), pieces).unwrap();
    let lengths: Vec<u32> = gather.entries().iter().map(Sge::length).collect();
    assert_eq!((lengths, gather.copied(), gather.len()), (vec![106, 1000, 2014], 2120, 3120));
    // With two entries there is none left for what follows the body.
    let gather = Gathering::new(2).gather(attached, header.spare_capacity_mut(), pieces).unwrap();
    assert_eq!((gather.entries().len(), gather.copied()), (1, 3120));
    // Another device's memory is not ours either.
    let gather = Gathering::new(4).gather(attached, header.spare_capacity_mut(), [&ours[..600]]).unwrap();
    assert_eq!((gather.entries().len(), gather.copied()), (1, 600));
    let gather = Gathering::new(4).gather(*device, &mut [], [&ours[..600], &[]]).unwrap();
    assert_eq!((gather.entries().len(), gather.copied()), (1, 0));
    assert!(Gathering::new(4).gather(*device, &mut [], []).unwrap().is_empty());
}

#[test]
fn what_cannot_be_gathered_says_why() {
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(Ledger::new()).unwrap();
    let mut header = heap.buffer(64).unwrap();
    let room = header.capacity();
    let gathering = Gathering::new(4);
    let long = vec![1; room];
    let gathered = gathering.gather(device, header.spare_capacity_mut(), [&b"12"[..], &long]);
    let full = gathered.unwrap_err();
    assert_eq!(full, GatherError::HeaderFull { wanted: room + 2, room });
    assert!(full.to_string().starts_with(&format!("at least {} bytes, so far,", room + 2)), "{full}");
    let limited = gathering.max_message(10);
    let gathered = limited.gather(device, header.spare_capacity_mut(), [&b"123456"[..], b"78901"]);
    assert_eq!(gathered.unwrap_err(), GatherError::TooLong { len: 11, limit: 10 });
    let owned = limited.own(device, heap.buffer(64).unwrap(), &b"12345678901"[..]);
    assert!(matches!(owned, Err(GatherError::TooLong { len: 11, .. })));
    // A header on the stack is no header.
    let gathered = gathering.gather(device, &mut [MaybeUninit::uninit(); 8], [&b"12"[..]]).map(|gather| gather.len());
    assert_eq!(gathered, Err(GatherError::Header(SgeError::Key(KeyError::Foreign))));
    assert!(gathered.unwrap_err().to_string().starts_with("the header: the memory is not"));
    let gathered = gathering.own(device, Vec::<u8>::with_capacity(8), &b"12"[..]).map(|gathered| gathered.len());
    assert!(matches!(gathered, Err(GatherError::Header(SgeError::Key(_)))));
    heap.detach(device).unwrap();
    let gathered = gathering.gather(device, header.spare_capacity_mut(), [&[1u8; 600][..]]).map(|gather| gather.len());
    assert_eq!(gathered, Err(GatherError::Sge(SgeError::Key(KeyError::Detached))));
}

/// A `Buf` that shows one byte at a time.
struct Trickle(Vec<u8>, usize);

impl Buf for Trickle {
    fn remaining(&self) -> usize {
        self.0.len() - self.1
    }
    fn chunk(&self) -> &[u8] {
        self.0.get(self.1..self.1 + 1).unwrap_or(&[])
    }
    fn advance(&mut self, count: usize) {
        self.1 += count;
    }
}

#[test]
fn a_buf_that_does_not_show_all_is_only_taken_by_value() {
    let World { device, ours, .. } = &*WORLD;
    let mut header = Vec::<u8>::with_capacity(100);
    let trickle = Trickle(vec![7; 50], 0);
    let gathered = Gathering::new(4).gather_buf(*device, header.spare_capacity_mut(), &trickle);
    assert_eq!(gathered.unwrap_err(), GatherError::NotAtOnce { shown: 1, remaining: 50 });
    let owned: Gathered<Vec<u8>> = Gathering::new(4).own(*device, header, trickle).unwrap();
    assert_eq!((owned.copied(), owned.into_parts().0), (50, vec![7; 50]));
    let mut header = Vec::<u8>::with_capacity(100);
    let chain = (&b"head"[..]).chain(ours.slice(..5000));
    let gather = Gathering::new(4).gather_buf(*device, header.spare_capacity_mut(), &chain).unwrap();
    assert_eq!((gather.entries().len(), gather.copied(), chain.remaining()), (2, 4, 5004));
}

/// Says after each chunk that it was the last, and goes on.
struct Endless(Bytes, usize);

impl Buf for Endless {
    fn remaining(&self) -> usize {
        self.0.len() * usize::from(self.1 > 0)
    }

    fn chunk(&self) -> &[u8] {
        &self.0[..self.remaining()]
    }

    fn advance(&mut self, _: usize) {
        self.1 -= 1;
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        self.advance(len);
        self.0.slice(..len)
    }
}

#[test]
fn a_buf_that_goes_on_after_its_end_gets_no_more_entries_than_there_are() {
    let World { device, ours, .. } = &*WORLD;
    for (piece, taken) in [(ours.slice(..1000), true), (Bytes::from_static(&FOREIGN[..1000]), false)] {
        for max_sge in [1, 2, 3] {
            let header = Vec::<u8>::with_capacity(64 << 10);
            let owned = Gathering::new(max_sge).own(*device, header, Endless(piece.clone(), 9));
            match owned {
                Err(GatherError::NotAtOnce { shown, remaining }) => assert!(taken && shown < remaining),
                // What is copied is one entry, however often there is more.
                other => assert_eq!((taken, other.unwrap().pieces()), (false, 1)),
            }
        }
    }
}
