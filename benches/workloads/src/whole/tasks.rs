//! Clients and a server as tasks of tokio, on two threads: messages of `bytes::Bytes`, a task for each, its reply by a channel of
//! its own.

use crate::Scale;
use crate::random::Random;
use crate::reach::Reach;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};

const CLIENTS: u64 = 8;

/// A message, and where its reply goes.
struct Request {
    message: Bytes,
    reply: oneshot::Sender<Bytes>,
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().map(|byte| u64::from(*byte)).sum()
}

/// Two numbers of 8 bytes, then bytes.
fn message(random: &mut Random, number: u64) -> Bytes {
    let len = random.pareto(32, 4_096);
    let mut message = BytesMut::with_capacity(16 + len);
    message.put_u64(number);
    message.put_u64(len as u64);
    message.put_bytes(number as u8, len);
    message.freeze()
}

/// What the server answers: the number, the sum of the bytes, the first half of them.
fn answer(mut message: Bytes) -> Bytes {
    let (number, len) = (message.get_u64(), message.get_u64() as usize);
    assert_eq!(message.len(), len);
    let half = message.slice(..len / 2);
    let mut answer = BytesMut::new();
    answer.put_u64(number);
    answer.put_u64(sum(&message));
    answer.extend_from_slice(&half);
    answer.freeze()
}

async fn serve<R: Reach>(mut requests: mpsc::Receiver<Request>) -> u64 {
    let mut served = 0;
    while let Some(Request { message, reply }) = requests.recv().await {
        if served % 4_096 == 0 {
            R::check(message.as_ptr(), message.len());
        }
        served += 1;
        tokio::spawn(async move { reply.send(answer(message)) });
    }
    served
}

async fn ask(client: u64, count: u64, requests: mpsc::Sender<Request>) -> u64 {
    let mut random = Random::new(40 + client);
    let mut bytes = 0;
    for number in 0..count {
        // Two at a time.
        let mut waiting = Vec::new();
        for _ in 0..2 {
            let message = message(&mut random, number);
            let (reply, answer) = oneshot::channel();
            requests.send(Request { message: message.clone(), reply }).await.expect("the server lives");
            waiting.push((message, answer));
        }
        for (message, answer) in waiting {
            let mut answer = answer.await.expect("answered");
            assert_eq!(answer.get_u64(), number);
            assert_eq!(answer.get_u64(), sum(&message[16..]));
            assert_eq!(answer, message.slice(16..16 + (message.len() - 16) / 2));
            bytes += message.len() as u64;
        }
    }
    bytes
}

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let count = scale.of(100) as u64;
    let runtime = Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    runtime.block_on(async {
        let (send, requests) = mpsc::channel(64);
        let server = tokio::spawn(serve::<R>(requests));
        let clients: Vec<_> = (0..CLIENTS).map(|client| tokio::spawn(ask(client, count, send.clone()))).collect();
        drop(send);
        let mut bytes = 0;
        for client in clients {
            bytes += client.await.expect("no panic");
        }
        assert_eq!(server.await.expect("no panic"), 2 * count * CLIENTS);
        bytes
    })
}
