//! A value that comes back from its flight though nobody has said that the device is done.

use rdmalloc::{Buffer, Device, Flight, Hold};

pub fn complete(id: u64, device: Device) {
    let Ok(flight) = Flight::<Buffer>::from_id(id) else { return };
    let again = || Flight::<Buffer>::from_id(id).unwrap();
    let _ = again().complete(100); //~ E0133
    let _ = again().complete_send(); //~ E0133
    let _ = again().reclaim(); //~ E0133
    let _ = device.reclaim_flights(); //~ E0133
    let _ = rdmalloc::drop_flight(id); //~ E0133
    let _ = Hold::from_raw(id); //~ E0133
    let _ = flight.into_id();
}
