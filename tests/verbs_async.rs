//! The example of flights on tokio, in the guest.
#![cfg(feature = "verbs")]

#[allow(
    dead_code,
    missing_docs,
    reason = "the file is an example's: not all of it is used here, and its items are private there"
)]
#[path = "../alloc/examples/async_send/main.rs"]
mod example;

#[test]
fn verbs_a_receive_that_is_given_up_on_tokio_keeps_its_buffer_until_the_completion() {
    example::run().unwrap();
}
