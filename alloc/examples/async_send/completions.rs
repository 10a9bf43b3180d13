//! Flights as futures. A future that is dropped leaves its flight here, with whoever polls the completion queue: when the
//! completion comes, nobody waits for it, and the bytes are freed then, and not before.

use rdmalloc::{Flight, IdError, StableBytes, StableBytesMut};
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// What the completion queue says of a work request: how many bytes arrived, or how it failed.
pub type Outcome = io::Result<u32>;

/// The work requests of a completion queue that are under way.
#[derive(Default)]
pub struct Completions(Mutex<HashMap<u64, State>>);

enum State {
    /// Somebody may wait for it.
    UnderWay(Option<Waker>),
    Done(Outcome),
    /// Nobody will; how to end it when it is done.
    Abandoned(fn(u64)),
}

/// A work request that was posted. Gives its value back, and how it went.
#[must_use = "dropping it gives the value up"]
pub struct Posted<B: StableBytes> {
    of: Arc<Completions>,
    id: u64,
    /// How the value comes back; `None` when it has.
    end: Option<fn(Flight<B>, &Outcome) -> B>,
}

impl Completions {
    fn states(&self) -> MutexGuard<'_, HashMap<u64, State>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a send or an RDMA write: `post` gets the `wr_id`.
    ///
    /// # Safety
    ///
    /// If `post` succeeds, it has posted one signalled work request with this id, which only reads the bytes of the flight, and
    /// whose completion is told to [`arrived`](Self::arrived); else none.
    pub unsafe fn send<B: StableBytes>(
        self: &Arc<Self>,
        flight: Flight<B>,
        post: impl FnOnce(u64) -> io::Result<()>,
    ) -> Result<Posted<B>, (io::Error, B)> {
        // SAFETY: the future asks when the completion has come.
        self.post(flight, post, |flight, _| unsafe { flight.complete_send() })
    }

    /// Posts a receive or an RDMA read.
    ///
    /// # Safety
    ///
    /// As [`send`](Self::send), but that the work request writes to the room of the first piece from its begin.
    pub unsafe fn receive<B: StableBytesMut>(
        self: &Arc<Self>,
        flight: Flight<B>,
        post: impl FnOnce(u64) -> io::Result<()>,
    ) -> Result<Posted<B>, (io::Error, B)> {
        self.post(flight, post, |flight, outcome| {
            let len = *outcome.as_ref().unwrap_or(&0);
            // SAFETY: the future asks when the completion has come, and so much was written if it went well.
            unsafe { flight.complete(len) }.unwrap_or_else(|overrun| overrun.value)
        })
    }

    fn post<B: StableBytes>(
        self: &Arc<Self>,
        flight: Flight<B>,
        post: impl FnOnce(u64) -> io::Result<()>,
        end: fn(Flight<B>, &Outcome) -> B,
    ) -> Result<Posted<B>, (io::Error, B)> {
        let id = flight.into_id();
        // Before it is posted, since it may be done before this thread goes on.
        self.states().insert(id, State::UnderWay(None));
        match post(id) {
            Ok(()) => Ok(Posted { of: self.clone(), id, end: Some(end) }),
            Err(error) => {
                self.states().remove(&id);
                // SAFETY: nothing was posted.
                Err((error, unsafe { landed::<B>(id).reclaim() }))
            }
        }
    }

    /// Tells of a completion. Whether its work request is one of these.
    ///
    /// # Safety
    ///
    /// The completion queue has given a completion with this id.
    pub unsafe fn arrived(&self, id: u64, outcome: Outcome) -> bool {
        let mut states = self.states();
        match states.remove(&id) {
            Some(State::UnderWay(waker)) => {
                states.insert(id, State::Done(outcome));
                drop(states);
                waker.into_iter().for_each(Waker::wake);
                true
            }
            Some(State::Abandoned(end)) => {
                drop(states);
                end(id);
                true
            }
            Some(done) => {
                states.insert(id, done);
                false
            }
            None => false,
        }
    }
}

/// The flight of an id that is in the table, and so is under way.
fn landed<B: StableBytes>(id: u64) -> Flight<B> {
    Flight::from_id(id).unwrap_or_else(|error: IdError| unreachable!("{error}"))
}

impl<B: StableBytes> Future for Posted<B> {
    type Output = (Outcome, B);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let id = self.id;
        let outcome = {
            let mut states = self.of.states();
            match states.remove(&id) {
                Some(State::Done(outcome)) => outcome,
                _ => {
                    states.insert(id, State::UnderWay(Some(context.waker().clone())));
                    return Poll::Pending;
                }
            }
        };
        let end = self.end.take().expect("polled after it was ready");
        let value = end(landed(id), &outcome);
        Poll::Ready((outcome, value))
    }
}

impl<B: StableBytes> Drop for Posted<B> {
    fn drop(&mut self) {
        if self.end.is_none() {
            return;
        }
        // SAFETY: called when the completion has come.
        let end: fn(u64) = |id| drop(unsafe { landed::<B>(id).reclaim() });
        let mut states = self.of.states();
        match states.remove(&self.id) {
            Some(State::Done(_)) => {
                drop(states);
                end(self.id);
            }
            _ => drop(states.insert(self.id, State::Abandoned(end))),
        }
    }
}
