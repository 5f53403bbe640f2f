//! A free port of 127.0.0.1 on which connections are accepted.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Accepts connections until it is dropped.
pub struct Listener {
    port: u16,
    ended: Arc<AtomicBool>,
}

impl Listener {
    /// One that hands over each connection, one after the other and in the order in which they come.
    pub fn start(accept: impl Fn(TcpStream) + Send + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let ended = Arc::new(AtomicBool::new(false));
        let shared = Arc::clone(&ended);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.load(Ordering::SeqCst) {
                    return;
                }
                accept(stream);
            }
        });
        Self { port, ended }
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}
