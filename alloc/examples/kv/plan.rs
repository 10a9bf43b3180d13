//! The command line, and what a client asks for.

use crate::Result;
use crate::fabric::Fabric;
use crate::{rdma, sockets};
use std::ops::{Range, RangeFrom};

/// What a client does next, with the value of a seed.
pub enum Operation {
    Get(u64),
    Put(u64),
}

/// How many gets there are for each put.
const GETS_PER_PUT: u64 = 8;

/// How many operations there are in some turns of a loop: a get in each, and a put in every eighth.
pub fn operations(turns: &Range<u64>) -> u64 {
    turns.end - turns.start + turns.end / GETS_PER_PUT - turns.start / GETS_PER_PUT
}

/// Some turns of a loop, which gets the server's values in a scattered order, and puts new ones. Over as many turns as there
/// are values it gets each of them once.
pub fn steps(values: u64, turns: Range<u64>, new: &mut RangeFrom<u64>) -> impl Iterator<Item = Operation> {
    const STRIDE: u64 = 1_000_003; // a prime over the number of values, so it meets each of them
    turns.flat_map(move |turn| {
        let put = if (turn + 1).is_multiple_of(GETS_PER_PUT) { new.next().map(Operation::Put) } else { None };
        [Some(Operation::Get(turn * STRIDE % values)), put].into_iter().flatten()
    })
}

/// The command line.
pub struct Options {
    device: Option<String>,
    uring: bool,
    /// The machine is emulated, and may need a smaller volume.
    pub emulated: bool,
    /// How many values the server has at the start; their seeds are the numbers below this one.
    pub values: u64,
    /// Only the server gives this, to the client that it starts: where it listens.
    pub join: Option<String>,
}

impl Options {
    pub fn parse() -> Result<Options> {
        let (mut device, mut uring, mut emulated, mut values, mut join) = (None, false, false, None, None);
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut argument = || words.next().ok_or_else(|| format!("{word} needs an argument"));
            match word.as_str() {
                "--device" => device = Some(argument()?),
                "--uring" => uring = true,
                "--emulated" => emulated = true,
                "--values" => values = Some(argument()?.parse()?),
                "--join" => join = Some(argument()?),
                _ => return Err("usage: kv [--device NAME | --uring] [--emulated] [--values 64..1000000]".into()),
            }
        }
        if uring && device.is_some() {
            return Err("--device names a verbs device, and --uring uses none".into());
        }
        let values = values.unwrap_or(50_000u64);
        if !(64..=1_000_000).contains(&values) {
            return Err(format!("{values} values: 64 to 1000000 are possible").into());
        }
        Ok(Options { device, uring, emulated, values, join })
    }

    /// Opens what the bytes shall move over.
    pub fn open(&self) -> Result<Box<dyn Fabric>> {
        if self.uring {
            return Ok(Box::new(sockets::Sockets::open()?));
        }
        match rdma::Rdma::open(self.device.as_deref()) {
            Ok(rdma) => Ok(Box::new(rdma)),
            Err(error) => Err(format!("{error}; or use io_uring instead, with --uring").into()),
        }
    }
}
