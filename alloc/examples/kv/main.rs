//! A key-value server and its client: what a program over RDMA looks like with rdmalloc.
//!
//! ```text
//! cargo run --release --features verbs,uring --example kv               over the first verbs device
//! cargo run --release --features verbs,uring --example kv -- --uring    over io_uring, where there is none
//! ```
//!
//! The server keeps its values in a `HashMap<String, Vec<u8>>`, as any program would, and sends each from where it lies. The
//! client receives into vectors of its own, and uploads others by RDMA WRITE. Neither copies a value for the device, and
//! neither registers one: the allocator has done that already, an arena at a time. The same loop also runs without that, each
//! message registering its memory, and the two are compared. At last everything is dropped, and nothing may stay pinned.
//!
//! What it takes to adopt rdmalloc is in this file: the static [`HEAP`], and the numbered steps in [`run_server`] and
//! [`run_client`]. [`reach`] finds the key of a message, in either way. [`server`] and [`client`] are the two programs.
//! [`fabric`], with [`rdma`] and [`sockets`], moves the bytes and knows nothing of allocators; the rest is paperwork.

#![no_main]

mod client;
mod counted;
mod fabric;
mod message;
mod outcome;
mod peer;
mod plan;
mod rdma;
mod reach;
mod report;
mod server;
mod sockets;
mod values;

use client::Client;
use counted::{BY_HEAPS, BY_MESSAGES, Counted};
use fabric::{Fabric, Place, Remote};
use message::DEPTH;
use outcome::{Figures, Loop, Outcome};
use peer::Peer;
use plan::Options;
use rdmalloc::{ArenaInfo, Heap, Rdmalloc};
use reach::Reach;
use report::{Progress, mib, pinned_kib};
use server::{Server, Store, Upload};
use std::ffi::c_int;
use std::ops::Range;
use std::process::Command;
use std::time::{Duration, Instant};

/// Serves everything that `Vec`, `String`, `HashMap` and all others allocate, in both processes.
#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Does the work on a thread that ends, with everything it had: what is on the heap after that would be a leak.
fn run() -> Result<()> {
    let work = std::thread::spawn(|| {
        let options = Options::parse()?;
        match &options.join {
            None => run_server(&options),
            Some(name) => run_client(&options, name),
        }
    });
    work.join().unwrap_or_else(|_| Err("the work ended in a panic".into()))?.conclude()
}

/// In place of `fn main`, which no other program needs: before that one, std notes where the main thread's stack ends, in two
/// blocks (548 bytes) that stay until the process ends, and so does the arena in which they lie. Here every arena shall go.
#[unsafe(no_mangle)]
extern "C" fn main() -> c_int {
    // SAFETY: no other thread is there yet. It is what std does at its start: writing to a closed socket is an error then.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    match run() {
        Ok(()) => 0,
        Err(error) => {
            say!("demo: failed: {error}");
            1
        }
    }
}

fn run_server(options: &Options) -> Result<Outcome> {
    let fabric = options.open()?;
    let registrar = Counted { inner: fabric.registrar(), counter: &BY_HEAPS };

    // The client is started, and prepares itself while the map is filled here. Nothing is registered yet.
    let name = format!("rdmalloc-kv-{}", std::process::id());
    let mut client = Command::new(std::env::current_exe()?);
    client.args(std::env::args_os().skip(1)).args(["--join", &name]);
    let (mut peer, client) = Peer::serve(&name, &mut client)?;
    let (server, over) = (std::process::id(), fabric.describe());
    say!("server {server} and client {} over {over}, {DEPTH} messages in flight", client.id());
    let store: Store = (0..options.values).map(|seed| (values::key(seed), values::make(seed))).collect();
    let (count, shortest, longest) = (store.len(), values::SHORTEST, values::LONGEST >> 10);
    let volume = mib(server::bytes(&store));
    say!(
        "{count} values of {shortest} B to {longest} KiB, {volume:.0} MiB, in a HashMap<String, Vec<u8>> on the global heap"
    );

    // 1. The global heap is attached to the device, at any time, beneath whatever is there. What it holds is registered now,
    //    and what it will hold when its arena is opened: the device reaches every Vec and String of this process.
    //    Where it may not pin so much, it goes on with memory that the device does not reach, and says so.
    HEAP.on_event(|event| say!("the server's global heap: {event}"));
    let started = Instant::now();
    let device = HEAP.attach(registrar.clone())?;
    let (arenas, time, pinned) = (BY_HEAPS.registered(), started.elapsed(), pinned_kib());
    say!("attached beneath them: {arenas} arenas registered in {time:.1?}, VmPin {pinned} kB");

    // 2. What peers may write to is kept apart, in a heap that says so: no rkey opens anything of the global heap.
    let pool = Heap::builder().access(fabric.upload_access()).build()?;
    let pool_device = pool.attach(registrar.clone())?;
    let mut uploads = Vec::with_capacity(DEPTH);
    for _ in 0..DEPTH {
        let buffer = pool.buffer(values::LONGEST)?;
        let keys = pool_device.key(buffer.as_ptr())?;
        let place = Place { addr: buffer.as_ptr() as u64, len: values::LONGEST as u32, lkey: keys.lkey };
        peer.tell(&[place.addr, keys.rkey.into()])?;
        uploads.push(Upload { buffer, place });
    }

    // 3. From now on, a message from the heap is one look-up of a key: see `Reach`. Without that, each value registers the
    //    memory it lies in for the time of its message. (Requests and answers do so once, as do the buffers for uploads.)
    //    The two take turns, so that whatever else the machine does meets both.
    let ways = [Reach::Allocator(device), Reach::each_message(registrar)];
    let mut service = Service { fabric: &*fabric, peer, store, uploads, ways, by_client: [0; 2] };
    let turns = service.warm_up(options)?;
    let (mut loops, mut ratios) = ([Loop::default(); 2], Vec::new());
    for part in 0..PARTS {
        let turns = turns * part / PARTS..turns * (part + 1) / PARTS;
        let pair = [service.run(0, turns.clone())?, service.run(1, turns)?];
        let rates = [pair[0].rate(), pair[1].rate()];
        say!("  part {} of {PARTS}: rdmalloc {}; registering each message {}", part + 1, rates[0], rates[1]);
        ratios.push(pair[1].time.as_secs_f64() / pair[0].time.as_secs_f64());
        loops.iter_mut().zip(pair).for_each(|(sum, part)| sum.add(part));
    }
    ratios.sort_by(f64::total_cmp);
    service.peer.tell(&[0, 0, 0])?;
    for (way, sum) in service.ways.iter().zip(&loops) {
        sum.show(way.name());
    }
    show_arenas("the server's global heap", HEAP.arenas());
    say!("figures of the server's global heap:\n{}", HEAP.stats());
    show_arenas("the server's heap for uploads", pool.arenas());

    // 4. When values are dropped, the arenas in which they were the last are deregistered, and only then given back.
    let Service { peer, store, uploads, by_client, .. } = service;
    let (values, bytes, by_heaps) = (store.len() as u64, server::bytes(&store), BY_HEAPS.registered() + by_client[0]);
    let [with_rdmalloc, each_message] = loops;
    let figures = Figures { values, bytes, with_rdmalloc, each_message, by_heaps, ratio: ratios[ratios.len() / 2] };
    drop((store, uploads, pool));
    let trimmed = HEAP.trim();
    let (closed, open, pinned) = (trimmed.closed_arenas, trimmed.open_arenas, pinned_kib());
    say!("dropped the values: {closed} arenas deregistered and closed, {open} still in use, VmPin {pinned} kB");
    say!("what is still in use:\n{trimmed}");
    HEAP.detach(device)?;
    Ok(Outcome::Server { control: peer.control, client, figures })
}

fn run_client(options: &Options, name: &str) -> Result<Outcome> {
    let fabric = options.open()?;
    let registrar = Counted { inner: fabric.registrar(), counter: &BY_HEAPS };
    let mut peer = Peer::join(name)?;
    let device = HEAP.attach(registrar.clone())?;

    // What the server's values should be, made from the same seeds, and where it wants new ones.
    let hashes: Vec<u64> = (0..options.values).map(|seed| values::hash(&values::make(seed))).collect();
    let mut new_seeds = options.values..;
    let mut uploads = Vec::with_capacity(DEPTH);
    for _ in 0..DEPTH {
        let [addr, rkey] = peer.hear()?;
        uploads.push(Remote { addr, rkey: rkey.try_into()? });
    }

    let ways = [Reach::Allocator(device), Reach::each_message(registrar)];
    loop {
        let [way, from, to] = peer.hear()?;
        if from == to {
            break;
        }
        let client = Client::new(fabric.connect(&mut peer)?, &ways[way as usize], &hashes, &uploads)?;
        peer.meet()?;
        let tally = client.run(plan::steps(options.values, from..to, &mut new_seeds))?;
        peer.tell(&[tally.operations, tally.bytes, tally.wrong, BY_HEAPS.registered(), BY_MESSAGES.registered()])?;
    }
    HEAP.detach(device)?;
    Ok(Outcome::Client { control: peer.control })
}

/// Each of the two loops is run in so many parts, each after its like of the other.
const PARTS: u64 = 16;

/// All that a loop of the server works with.
struct Service<'a> {
    fabric: &'a dyn Fabric,
    peer: Peer,
    store: Store,
    uploads: Vec<Upload>,
    ways: [Reach; 2],
    /// How many registrations the client had made for each of the ways when the last loop ended.
    by_client: [u64; 2],
}

impl Service<'_> {
    /// Short loops ahead of those that are measured. How many turns those shall have: one for each value, or what an emulated
    /// machine can do while people watch.
    fn warm_up(&mut self, options: &Options) -> Result<u64> {
        const PATIENCE: Duration = Duration::from_secs(80);
        let trial = options.values / 25;
        let pair = [self.run(0, 0..trial)?, self.run(1, 0..trial)?];
        say!("  warm-up: rdmalloc {}; registering each message {}", pair[0].rate(), pair[1].rate());
        let time = pair[0].time + pair[1].time;
        let possible = (trial as f64 * PATIENCE.as_secs_f64() / time.as_secs_f64()) as u64;
        if options.emulated && possible < options.values {
            say!(
                "this machine is emulated, and slow: {possible} of the values are asked for, to be done in two minutes"
            );
        }
        Ok(if options.emulated { possible.min(options.values) } else { options.values })
    }

    /// Serves the gets of some turns, and the puts between them, in one of the ways, and compares what both sides saw.
    fn run(&mut self, way: usize, turns: Range<u64>) -> Result<Loop> {
        let (reach, operations) = (&self.ways[way], plan::operations(&turns));
        let counter = reach.counter();
        let before = (counter.registered(), counter.time(), self.by_client[way]);
        self.peer.tell(&[way as u64, turns.start, turns.end])?;
        let link = self.fabric.connect(&mut self.peer)?;
        let server = Server::new(link, reach, &mut self.store, &mut self.uploads, operations)?;
        self.peer.meet()?;
        let started = Instant::now();
        let tally = server.run(Progress::new(reach.name(), operations))?;
        let time = started.elapsed();
        let [client_operations, client_bytes, client_wrong, by_client @ ..] = self.peer.hear::<5>()?;
        let wrong = tally.wrong + client_wrong;
        if (client_operations, client_bytes) != (tally.operations, tally.bytes) || wrong > 0 {
            return Err(format!("{wrong} values arrived wrong, of {client_operations} that the client has seen").into());
        }
        self.by_client = by_client;
        let registrations = [counter.registered() - before.0, by_client[way] - before.2];
        Ok(Loop { tally, time, registrations, registering: counter.time() - before.1 })
    }
}

/// The arenas of a heap, as they are now.
fn show_arenas(whose: &str, arenas: Vec<ArenaInfo>) {
    say!("arenas of {whose}:");
    for ArenaInfo { memory, taken_bytes, keys, .. } in arenas {
        let (size, live) = (mib(memory.len() as u64), mib(taken_bytes as u64));
        let each: String =
            keys.iter().map(|(_, keys)| format!(" (lkey {:#x}, rkey {:#x})", keys.lkey, keys.rkey)).collect();
        say!("  {:#x}: {size:6.1} MiB, {live:6.1} MiB live, keys on {} device{each}", memory.start, keys.len());
    }
}
