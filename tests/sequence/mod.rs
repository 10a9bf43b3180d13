//! Programs as sequences of steps, which are run against the allocator and a simple reference. What has to be true after each step:
//!
//! - no two blocks overlap, each is aligned and has its size, zeroed ones are zero, and what is written stays, also as they are
//!   resized, shared, or given to another thread;
//! - each block lies in a live registration of each device of its heap, from `attach` to `detach`, unless a limit or the device
//!   has refused it; where the heap requires that, without exception;
//! - no budget is exceeded, nor what a device or the memlock limit allows; books and figures agree;
//! - after a drain pass each open arena has a block, and the pass has counted all blocks; a heap ends with its last block, at once;
//! - a child of fork finds no keys, whole blocks and a heap that works, and changes nothing of its parent's;
//! - after the last free nothing is open and nothing registered.
//!
//! Bytes are read as steps, so proptest and the fuzzer share this. Steps run one at a time, each on the thread that it names, so a
//! sequence always does the same. What threads do to each other at once is for the loom models and the stress tests.
//!
//! ```text
//! operation   what a step is, and how it is read
//! collection  blocks of a heap, as collections have them
//! held        what memory is held, and its contents
//! device      devices that keep books
//! world       the reference
//! perform     does a step, and checks it
//! fork        what a child of fork finds
//! end         the end of a thread and of everything
//! ```

mod collection;
mod device;
mod end;
mod fork;
mod held;
mod operation;
mod perform;
mod world;

pub use operation::Step;

use operation::{Operation, THREADS};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use world::{Check, World};

/// A world goes to a thread with the steps that it shall do, and comes back with what came of them.
type Job = (Box<World>, Vec<Step>);
type Done = (Box<World>, Check);

struct Worker {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn start() -> Worker {
        let (jobs, to_do) = channel::<Job>();
        let (report, done) = channel();
        let work = move || {
            while let Ok((world, steps)) = to_do.recv() {
                let _ = report.send(work(world, &steps));
            }
        };
        Worker { jobs, done, thread: std::thread::spawn(work) }
    }

    fn run(&self, world: Box<World>, steps: &[Step]) -> Done {
        self.jobs.send((world, steps.to_vec())).expect("the thread works");
        self.done.recv().expect("the thread works")
    }

    /// Ends it, with all of its destructors.
    fn end(self) {
        drop(self.jobs);
        self.thread.join().expect("the thread caught its panics");
    }
}

fn work(mut world: Box<World>, steps: &[Step]) -> Done {
    let mut last = None;
    let result = catch_unwind(AssertUnwindSafe(|| {
        steps.iter().try_for_each(|step| {
            last = Some(*step);
            world.perform(step)
        })
    }));
    let result = result.unwrap_or_else(|_| Err("a panic".into()));
    (world, result.map_err(|error| format!("{error}; in {last:?}")))
}

/// Runs the sequence that bytes are; `Err` says what is not as it has to be.
///
/// One at a time in a process: it looks at the global heap.
///
/// # Errors
///
/// What does not hold.
pub fn run(bytes: &[u8]) -> Result<(), String> {
    let steps = Step::read_all(bytes);
    let mut workers = [const { None::<Worker> }; THREADS];
    let mut world = Box::new(World::new());
    let mut result = Ok(());
    let ends = |step: &Step| step.operation == Operation::EndThread;
    for run in steps.chunk_by(|a, b| a.thread == b.thread && !ends(a) && !ends(b)) {
        let thread = run[0].thread;
        (world, result) = if thread == 0 {
            work(world, run)
        } else if ends(&run[0]) {
            workers[thread].take().into_iter().for_each(Worker::end);
            let ended = world.thread_ended(thread);
            (world, ended)
        } else {
            workers[thread].get_or_insert_with(Worker::start).run(world, run)
        };
        if result.is_err() {
            break;
        }
    }
    for (thread, worker) in workers.into_iter().enumerate() {
        worker.into_iter().for_each(Worker::end);
        result = result.and_then(|()| world.thread_ended(thread));
    }
    let result = result.and_then(|()| {
        catch_unwind(AssertUnwindSafe(|| world.end()))
            .unwrap_or_else(|_| Err("a panic".into()))
            .map_err(|error| format!("{error}; at the end"))
    });
    if result.is_err() {
        world.give_up();
    }
    result
}
