//! The end: what is left of the work, whether the process has let go of everything, and the last line.

use crate::client::Tally;
use crate::counted::{BY_HEAPS, BY_MESSAGES};
use crate::peer;
use crate::report::{mib, pinned_kib, rate};
use crate::{HEAP, Result, say};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::Duration;

/// What a process still has when its work is done. None of it is a block on the heap.
#[expect(clippy::large_enum_variant, reason = "a box would be a block on the heap")]
pub enum Outcome {
    Server { control: UnixStream, client: Child, figures: Figures },
    Client { control: UnixStream },
}

/// What the last line tells.
pub struct Figures {
    /// How many values were in the map at the end, and their bytes.
    pub values: u64,
    pub bytes: u64,
    pub with_rdmalloc: Loop,
    pub each_message: Loop,
    /// Registrations that the heaps of both processes have made since they were started.
    pub by_heaps: u64,
    /// How much longer a part of the second loop took than its like of the first: the median, since machines are noisy.
    pub ratio: f64,
}

/// A loop, or part of one, as both processes saw it.
#[derive(Clone, Copy, Default)]
pub struct Loop {
    pub tally: Tally,
    pub time: Duration,
    /// Made by the server, and by the client.
    pub registrations: [u64; 2],
    /// What the server's took it, with their end.
    pub registering: Duration,
}

impl Loop {
    pub fn add(&mut self, part: Loop) {
        self.tally += part.tally;
        self.time += part.time;
        self.registrations = std::array::from_fn(|side| self.registrations[side] + part.registrations[side]);
        self.registering += part.registering;
    }

    pub fn rate(&self) -> String {
        rate(&self.tally, self.time)
    }

    /// A line for people.
    pub fn show(&self, name: &str) {
        let Loop { tally, time, registrations: [server, client], registering } = self;
        let (operations, seconds, rate) = (tally.operations, time.as_secs_f64(), self.rate());
        say!("{name}: {operations} operations in {seconds:.2} s, {rate}");
        say!("  registrations meanwhile: server {server} (in {registering:.1?}, with their end), client {client}");
    }
}

/// The process from outside, when nothing of its work is left.
struct End {
    arenas: u64,
    registered: u64,
    deregistered: u64,
    pinned_kib: u64,
}

impl End {
    fn see() -> End {
        HEAP.trim();
        let arenas = HEAP.stats().arenas as u64;
        let registered = BY_HEAPS.registered() + BY_MESSAGES.registered();
        let deregistered = BY_HEAPS.ended() + BY_MESSAGES.ended();
        End { arenas, registered, deregistered, pinned_kib: pinned_kib() }
    }

    fn show(&self, who: &str) {
        let End { arenas, registered, deregistered, pinned_kib } = self;
        say!(
            "  {who}: {arenas} arenas open, {deregistered} of {registered} registrations ended, VmPin {pinned_kib} kB"
        );
    }

    fn is_clean(&self) -> bool {
        self.arenas == 0 && self.registered == self.deregistered && self.pinned_kib == 0
    }
}

impl Outcome {
    /// Looks, and tells. An error if anything is still open, registered or pinned in either process.
    pub fn conclude(self) -> Result<()> {
        let end = End::see();
        match self {
            Outcome::Client { mut control } => {
                peer::tell(&mut control, &[end.arenas, end.registered, end.deregistered, end.pinned_kib])?;
                if end.is_clean() { Ok(()) } else { Err("the client has not let go of everything".into()) }
            }
            Outcome::Server { mut control, mut client, figures } => {
                let [arenas, registered, deregistered, pinned_kib] = peer::hear(&mut control)?;
                let other = End { arenas, registered, deregistered, pinned_kib };
                say!("after everything was dropped and the devices were detached:");
                end.show("server");
                other.show("client");
                let status = client.wait()?;
                if !(status.success() && end.is_clean() && other.is_clean()) {
                    return Err(format!("something is still open, registered or pinned (the client: {status})").into());
                }
                let Figures { values, bytes, with_rdmalloc: with, each_message: without, by_heaps, ratio } = figures;
                say!(
                    "demo: ok: {values} values of {:.0} MiB; rdmalloc: {}, {} registrations in all; registering each message: {}, {} \
                     registrations; rdmalloc is {ratio:.2} times as fast (median of the parts); every arena closed, VmPin 0",
                    mib(bytes),
                    with.rate(),
                    by_heaps,
                    without.rate(),
                    without.registrations.iter().sum::<u64>(),
                );
                Ok(())
            }
        }
    }
}
