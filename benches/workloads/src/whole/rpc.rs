//! Requests and replies as a server over verbs has them: a header and a body, each sent by a scatter-gather entry and received into a
//! buffer that was waiting for it; the header is parsed, a value put or got, a reply made.
//!
//! There is no network: the entry is looked up, and the bytes are copied to the receiver's buffer, as an adapter would.

use crate::Scale;
use crate::random::Random;
use crate::reach::{Entry, Reach};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::mpsc::{self, Receiver, SyncSender};

/// Objects of the server.
const OBJECTS: usize = 4_000;
/// Requests under way.
const WINDOW: usize = 32;

/// What goes over the wire: lives until the other side has it.
struct Message {
    header: Vec<u8>,
    body: Vec<u8>,
    entries: Vec<Entry>,
}

impl Message {
    fn new<R: Reach>(header: String, body: Vec<u8>) -> Message {
        let header = header.into_bytes();
        // Nothing has no entry.
        let parts = [&header, &body].into_iter().filter(|part| !part.is_empty());
        let entries = parts.map(|part| R::entry(part)).collect();
        Message { header, body, entries }
    }

    /// What arrives: copied to buffers of the receiver's, which need entries as well.
    fn receive<R: Reach>(self) -> (HashMap<String, String, BuildHasherDefault<DefaultHasher>>, Vec<u8>) {
        let sent: Vec<&[u8]> = [&*self.header, &*self.body].into_iter().filter(|part| !part.is_empty()).collect();
        assert_eq!(self.entries.len(), sent.len());
        let mut received = sent.iter().zip(&self.entries).map(|(part, entry)| {
            assert_eq!((entry.address, entry.length as usize), (part.as_ptr().addr() as u64, part.len()));
            let mut buffer = Vec::with_capacity(part.len());
            buffer.extend_from_slice(part);
            assert_eq!(R::entry(&buffer).length, entry.length);
            buffer
        });
        let (header, body) = (received.next().expect("a header"), received.next().unwrap_or_default());
        let header = std::str::from_utf8(&header).expect("text");
        let fields = header.lines().filter_map(|line| line.split_once(": "));
        (fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(), body)
    }
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        sum.rotate_left(5) ^ u64::from_le_bytes(word)
    })
}

fn header(fields: &[(&str, &dyn core::fmt::Display)]) -> String {
    let mut header = String::new();
    for (name, value) in fields {
        header += &format!("{name}: {value}\n");
    }
    header
}

fn serve<R: Reach>(requests: Receiver<Message>, replies: SyncSender<Message>) -> u64 {
    let mut objects: HashMap<u64, Vec<u8>, BuildHasherDefault<DefaultHasher>> = HashMap::default();
    let mut put = 0;
    for request in requests {
        let (fields, body) = request.receive::<R>();
        let number: u64 = fields["object"].parse().expect("a number");
        assert_eq!(fields["sum"], sum(&body).to_string());
        let reply = match &*fields["verb"] {
            "put" => {
                objects.insert(number, body);
                put += 1;
                Vec::new()
            }
            "get" => objects.get(&number).cloned().unwrap_or_default(),
            other => panic!("unknown verb {other}"),
        };
        let header =
            header(&[("id", &fields["id"]), ("status", &"ok"), ("server", &"workload"), ("sum", &sum(&reply))]);
        replies.send(Message::new::<R>(header, reply)).expect("the client lives");
    }
    put
}

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let (send, requests) = mpsc::sync_channel(WINDOW);
    let (replies, receive) = mpsc::sync_channel(WINDOW);
    std::thread::scope(|scope| {
        let server = scope.spawn(move || serve::<R>(requests, replies));
        let mut random = Random::new(50);
        // What each object is: its sum, once it was put.
        let mut expected = vec![sum(&[]); OBJECTS];
        let mut waiting = std::collections::VecDeque::new();
        let (mut puts, mut total) = (0, 0u64);
        let count = scale.of(200);
        for id in 0..count + WINDOW {
            if id >= WINDOW || waiting.len() == WINDOW {
                let Some((id, sum_of_body)) = waiting.pop_front() else { break };
                let (fields, body) = receive.recv().map(Message::receive::<R>).expect("a reply");
                assert_eq!((&*fields["id"], &*fields["status"]), (&*format!("{id}"), "ok"));
                assert_eq!(sum(&body), sum_of_body);
                total = total.wrapping_add(sum_of_body);
            }
            if id >= count {
                continue;
            }
            let object = random.below(OBJECTS);
            let is_put = random.below(3) == 0;
            // Mostly small, one in ten of some tens of KiB.
            let len = if random.below(10) == 0 { random.doubling(14, 17) } else { random.pareto(64, 8_192) };
            let body = if is_put { vec![id as u8; len] } else { Vec::new() };
            let reply = if is_put { sum(&[]) } else { expected[object] };
            let header = header(&[
                ("id", &id),
                ("verb", &if is_put { "put" } else { "get" }),
                ("object", &object),
                ("user", &"somebody@client.example"),
                ("trace", &format_args!("{:016x}", random.next())),
                ("sum", &sum(&body)),
            ]);
            if is_put {
                expected[object] = sum(&body);
                puts += 1;
            }
            waiting.push_back((id, reply));
            send.send(Message::new::<R>(header, body)).expect("the server lives");
        }
        assert!(waiting.is_empty());
        drop(send);
        assert_eq!(server.join().expect("no panic"), puts);
        total
    })
}
