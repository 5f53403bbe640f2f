//! The shell: the only code that talks to the proxy. It turns the proxy's callbacks into facts for the
//! [limiter](crate::limiter), and the limiter's effects into calls of the proxy.
//!
//! * `host`: the calls of the proxy-wasm ABI that are used, each with its status.
//! * `callbacks`: the module's exports, which the proxy calls.
//! * `worker`: what the contexts of one worker share, and how effects are carried out.
//! * `root`: the root context, one a worker and configuration: it owns the stream and the clock.
//! * `http`: an HTTP context, one a request.
//!
//! There is no SDK between. The one for Rust exports every callback of the ABI, and each that is there is a call into the
//! module for each request, whether it does anything or not; and it panics where the proxy says what it does not expect.
//!
//! Invariant: nothing in here panics, whatever the proxy answers; a panic outside a request would leave every paused
//! request of the worker hanging. Shared state is not borrowed while the proxy does anything that may call back.

mod callbacks;
mod host;
mod http;
mod root;
mod worker;
