//! Requests that wait for their decision: what arrives meanwhile, and who leaves meanwhile.

use std::time::Duration;

use bytes::Bytes;
use redis::Commands;
use serde_json::json;

use crate::support::app::App;
use crate::support::envoy::{Document, Envoy, PATIENT, Setup};
use crate::support::http::{Body, Client, Request, address};
use crate::support::http2::Http2;
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{KEY, quota, slow};

const CAPACITY: u64 = 1000;

/// A server, a shim, and an Envoy with one worker, whose bucket is full and whose script is loaded.
fn scene(app: &App, tweak: fn(&mut Document)) -> (Server, Shim, Envoy) {
    let redis = Server::start(Kind::Redis, &[]);
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), app).capacity(CAPACITY).tweak(tweak).start();
    assert!(quota(&envoy.get("/")).is_some());
    app.take();
    let () = redis.client().del(KEY).unwrap();
    shim.forget();
    (redis, shim, envoy)
}

/// Charges there were since the bucket was full.
fn charges(redis: &Server) -> u64 {
    let tokens: Option<String> = redis.client().hget(KEY, "tokens").unwrap();
    tokens.map_or(0, |tokens| CAPACITY - tokens.split('.').next().unwrap().parse::<u64>().unwrap())
}

/// Five mebibytes in which no two places look alike.
fn five_mebibytes() -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..5 * 1024 * 1024).map(|_| next()).collect()
}

fn http2_upstream(document: &mut Document) {
    document.cluster("app")["typed_extension_protocol_options"] = json!({
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        },
    });
}

#[test]
fn a_body_of_5_mebibytes_that_comes_while_the_request_waits_arrives_whole_and_is_charged_once() {
    let app = App::start();
    let (redis, shim, envoy) = scene(&app, |_| {});
    let body = five_mebibytes();
    for (nth, how) in (1..).zip([
        Body::Sized(body.clone()),
        Body::Chunked(body.clone(), 10_000),
        Body::Chunked(body.clone(), 1 << 20),
    ]) {
        shim.set(Mode::Hold);
        let mut client = envoy.client();
        client.send(&Request::new("POST", "/upload").body(how));
        shim.wait_for("EVALSHA", nth);
        // The body is on its way now, as far as buffers let it.
        assert_eq!(app.count(), 0);
        shim.set(Mode::Pass);
        let response = client.receive();
        assert_eq!((response.status(), quota(&response)), (200, Some((CAPACITY, CAPACITY - nth as u64))));
        let seen = app.take();
        assert_eq!(seen.len(), 1);
        assert!(seen[0].body == body, "{} bytes of {} arrived, or others", seen[0].body.len(), body.len());
    }
    assert_eq!(charges(&redis), 3);
    envoy.finish();
}

#[test]
fn a_body_of_5_mebibytes_with_trailers_over_http_2_arrives_whole_and_is_charged_once() {
    let app = App::http2();
    let (redis, shim, envoy) = scene(&app, http2_upstream);
    let body = five_mebibytes();
    let to = envoy.ingress();
    for (nth, trailers) in [
        (1, None),
        (
            2,
            Some(http::HeaderMap::from_iter([(
                http::HeaderName::from_static("x-sum"),
                http::HeaderValue::from_static("7"),
            )])),
        ),
    ] {
        shim.set(Mode::Hold);
        let (sent, trailer) = (body.clone(), trailers.clone());
        let client = std::thread::spawn(move || {
            let request = http::Request::post("http://app.test/upload").body(()).unwrap();
            Http2::connect(to).exchange(request, &sent, trailer)
        });
        shim.wait_for("EVALSHA", nth);
        assert_eq!(app.count(), 0);
        shim.set(Mode::Pass);
        let response = client.join().unwrap();
        assert_eq!((response.status(), quota(&response)), (200, Some((CAPACITY, CAPACITY - nth as u64))));
        let seen = app.take();
        assert_eq!(seen.len(), 1);
        assert!(seen[0].body == body, "{} bytes of {} arrived, or others", seen[0].body.len(), body.len());
        assert_eq!(seen[0].trailers.len(), usize::from(trailers.is_some()));
    }
    assert_eq!(charges(&redis), 2);
    envoy.finish();
}

#[test]
fn a_body_of_5_mebibytes_of_a_denied_request_reaches_nobody() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).capacity(1).start();
    assert_eq!(envoy.get("/").status(), 200);
    app.take();
    shim.forget();
    shim.set(Mode::Hold);
    let mut client = envoy.client();
    client.send(&Request::new("POST", "/upload").body(Body::Chunked(five_mebibytes(), 10_000)));
    shim.wait_for("EVALSHA", 1);
    shim.set(Mode::Pass);
    let response = client.receive();
    assert_eq!((response.status(), quota(&response)), (429, Some((1, 0))));
    assert_eq!(app.count(), 0);
    envoy.finish();
}

#[test]
fn clients_that_leave_while_they_wait_are_charged_once_and_leave_nothing_behind() {
    let app = App::start();
    let (_redis, shim, envoy) = scene(&app, |_| {});
    shim.set(Mode::Hold);
    let clients = (0..100)
        .map(|nth| {
            let mut client = envoy.client_from(&address(nth).to_string());
            client.send(&Request::get("/"));
            client
        })
        .collect::<Vec<_>>();
    shim.wait_for("EVALSHA", 100);
    wait_until("the calls are seen in flight", || envoy.gauge("redis_in_flight") == 100);
    for (nth, client) in clients.into_iter().enumerate() {
        // Some say farewell, the others break off.
        if nth % 2 == 0 { client.abort() } else { drop(client) }
    }
    wait_until("Envoy has seen them leave", || envoy.statistic("http.ingress.downstream_rq_active") == 0);
    shim.set(Mode::Pass);
    wait_until("their calls are answered", || envoy.gauge("redis_in_flight") == 0);
    assert_eq!(app.count(), 0);
    // Whoever comes next is told of itself.
    for nth in 0..100 {
        let response = envoy.client_from(&address(nth).to_string()).get("/");
        assert_eq!(quota(&response), Some((CAPACITY, CAPACITY - 2)));
    }
    envoy.finish();
}

#[test]
fn clients_that_leave_before_a_deadline_passes_leave_nothing_behind_either() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).configuration(slow(CAPACITY, "200ms")).start();
    shim.set(Mode::Hold);
    for _ in 0..50 {
        let mut client = envoy.client();
        client.send(&Request::get("/"));
        client.abort();
    }
    // Stays, so that its timeout shows that those of the others have passed.
    assert_eq!(quota(&envoy.get("/")), None);
    shim.set(Mode::Pass);
    wait_until("a request is decided again", || quota(&envoy.get("/")).is_some());
    envoy.finish();
}

#[test]
fn a_stream_of_http_2_that_is_reset_while_it_waits_leaves_its_connection_usable() {
    let app = App::start();
    let (_redis, shim, envoy) = scene(&app, |_| {});
    shim.set(Mode::Hold);
    let mut client = Http2::connect(envoy.ingress());
    let request = || http::Request::get("http://app.test/").body(()).unwrap();
    client.talk(request(), |response, mut stream| async move {
        let answered = tokio::time::timeout(Duration::from_millis(300), response).await;
        assert!(answered.is_err(), "it was not to be answered yet");
        stream.send_reset(h2::Reason::CANCEL);
    });
    shim.wait_for("EVALSHA", 1);
    client.talk(request(), |response, mut stream| {
        stream.send_data(Bytes::new(), true).unwrap();
        shim.set(Mode::Pass);
        async move {
            let response = response.await.unwrap();
            assert_eq!(response.headers()["x-ratelimit-remaining"], (CAPACITY - 2).to_string().as_str());
        }
    });
    envoy.finish();
}

#[test]
fn a_websocket_is_decided_on_its_upgrade_and_talks_freely_after_it() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .capacity(1)
        .tweak(|document| document.manager("ingress")["upgrade_configs"] = json!([{"upgrade_type": "websocket"}]))
        .start();
    let upgrade = || {
        let request = Request::get("/socket").with("connection", "Upgrade").with("upgrade", "websocket");
        request.with("sec-websocket-version", "13").with("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
    };
    let mut client = envoy.client();
    let response = client.exchange(&upgrade());
    assert_eq!((response.status(), quota(&response)), (101, Some((1, 0))));
    for message in [&b"one"[..], b"two", &[b'x'; 10_000]] {
        client.write(message);
        assert_eq!(client.read_bytes(message.len()), message);
    }
    let response = envoy.client().exchange(&upgrade());
    assert_eq!((response.status(), quota(&response)), (429, Some((1, 0))));
    envoy.expect_counts(&[("per-ip allow", 1), ("per-ip deny", 1), ("calls ok", 2), ("calls noscript", 1)]);
    drop(client);
    envoy.finish();
}

#[test]
fn a_grpc_stream_in_both_directions_is_decided_on_its_headers() {
    let app = App::http2();
    let (redis, shim, envoy) = scene(&app, http2_upstream);
    let mut client = Http2::connect(envoy.ingress());
    let request = http::Request::post("http://app.test/echo").header("content-type", "application/grpc").body(());
    client.talk(request.unwrap(), |response, mut stream| async move {
        // The response begins before the request ends, or this would wait for ever.
        let response = response.await.unwrap();
        assert!(response.headers().contains_key("x-ratelimit-remaining"));
        let mut incoming = response.into_body();
        for message in [&b"\0\0\0\0\x03one"[..], b"\0\0\0\0\x03two"] {
            stream.send_data(Bytes::from_static(message), false).unwrap();
            let mut received = Vec::new();
            while received.len() < message.len() {
                received.extend_from_slice(&incoming.data().await.unwrap().unwrap());
            }
            assert_eq!(received, message);
        }
        stream.send_data(Bytes::new(), true).unwrap();
        assert!(incoming.data().await.is_none());
        assert_eq!(incoming.trailers().await.unwrap().unwrap()["grpc-status"], "0");
    });
    assert_eq!((charges(&redis), shim.count("EVALSHA")), (1, 1));
    envoy.finish();
}

#[test]
fn more_calls_than_may_be_in_flight_are_decided_at_once_and_the_others_wait_their_turn() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let mut configuration = slow(CAPACITY, PATIENT);
    configuration["redis"]["timeout"] = json!("10s");
    configuration["redis"]["max_in_flight"] = json!(5);
    let envoy = Setup::new(shim.port(), &app).configuration(configuration).start();
    assert!(quota(&envoy.get("/")).is_some());
    shim.forget();
    shim.set(Mode::Hold);
    let mut waiting = (1..=5)
        .map(|nth| {
            let mut client = envoy.client_from(&address(nth).to_string());
            client.send(&Request::get("/"));
            shim.wait_for("EVALSHA", nth);
            client
        })
        .collect::<Vec<Client>>();
    // Decided while nothing comes from Redis.
    for _ in 0..7 {
        let response = envoy.get("/");
        assert_eq!((response.status(), quota(&response)), (200, None));
    }
    assert_eq!(shim.count("EVALSHA"), 5);
    shim.set(Mode::Pass);
    for client in &mut waiting {
        assert_eq!(quota(&client.receive()), Some((CAPACITY, CAPACITY - 1)));
    }
    envoy.expect_counts(&[
        ("per-ip allow", 6),
        ("per-ip fail_allow", 7),
        ("calls ok", 6),
        ("calls noscript", 1),
        ("calls overload", 7),
    ]);
    assert!(quota(&envoy.get("/")).is_some());
    envoy.finish();
}
