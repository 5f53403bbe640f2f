//! Requests that want a bucket while it is being asked go in one call after that.

use serde_json::json;

use crate::support::app::App;
use crate::support::envoy::{Envoy, PATIENT, Setup};
use crate::support::http::{Client, Request, with_status};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{KEY, quota, slow};

/// Clients of one address that all wait, of which the first has its call under way and the others wait for that.
fn waiting(envoy: &Envoy, shim: &Shim, number: usize) -> Vec<Client> {
    assert!(quota(&envoy.get("/")).is_some());
    shim.forget();
    shim.set(Mode::Hold);
    let clients = (0..number)
        .map(|nth| {
            let mut client = envoy.client();
            client.send(&Request::get("/"));
            if nth == 0 {
                shim.wait_for("EVALSHA", 1);
            }
            client
        })
        .collect::<Vec<_>>();
    let active = || envoy.statistic("http.ingress.downstream_rq_active");
    wait_until("all of them wait", || active() == number as i64);
    clients
}

#[test]
fn many_requests_for_one_bucket_are_two_calls_and_their_total_is_exact() {
    for kind in Kind::ALL {
        let (redis, app) = (Server::start(kind, &[]), App::start());
        let shim = Shim::before(redis.port());
        let envoy = Setup::new(shim.port(), &app).configuration(slow(100, PATIENT)).start();
        let mut clients = waiting(&envoy, &shim, 150);
        assert_eq!(shim.count("EVALSHA"), 1);
        shim.set(Mode::Pass);
        let responses = clients.iter_mut().map(Client::receive).collect::<Vec<_>>();
        assert_eq!((with_status(&responses, 200), with_status(&responses, 429)), (99, 51));
        for response in &responses {
            let retry_after = response.number("retry-after");
            assert_eq!(retry_after.is_some(), response.status() == 429, "{:?}", response.headers);
            assert!(retry_after.is_none_or(|wait| (86_000..=86_401).contains(&wait)), "{retry_after:?}");
        }
        assert_eq!((shim.count("EVALSHA"), shim.charges(KEY)), (2, 150));
        envoy.expect_counts(&[
            ("per-ip allow", 100),
            ("per-ip deny", 51),
            ("calls ok", 3),
            ("calls noscript", 1),
            ("coalesced", 148),
        ]);
        assert_eq!(app.count(), 100);
        envoy.finish();
    }
}

#[test]
fn clients_that_leave_before_their_call_is_made_are_not_charged() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).configuration(slow(100, PATIENT)).start();
    let mut clients = waiting(&envoy, &shim, 21);
    for client in clients.drain(11..) {
        client.abort();
    }
    wait_until("Envoy has seen them leave", || envoy.statistic("http.ingress.downstream_rq_active") == 11);
    shim.set(Mode::Pass);
    let told = clients.iter_mut().map(|client| quota(&client.receive())).collect::<Vec<_>>();
    assert_eq!(told[0], Some((100, 98)));
    assert_eq!(told[1..], [Some((100, 88)); 10], "the bucket as it is after all of them");
    assert_eq!(shim.charges(KEY), 11);
    assert_eq!(quota(&envoy.get("/")), Some((100, 87)));
    envoy.finish();
}

#[test]
fn requests_that_envoy_answers_itself_while_they_wait_are_not_charged_either() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let mut envoy = Setup::new(shim.port(), &app)
        .configuration(slow(100, "10s"))
        .tweak(|document| document.manager("ingress")["stream_idle_timeout"] = json!("0.5s"))
        .start();
    let mut clients = waiting(&envoy, &shim, 3);
    envoy.expect_5xx(3);
    for client in &mut clients {
        assert!(matches!(client.receive().status(), 408 | 504));
    }
    wait_until("their requests have ended", || envoy.statistic("http.ingress.downstream_rq_active") == 0);
    shim.set(Mode::Pass);
    wait_until("the call is answered", || envoy.gauge("redis_in_flight") == 0);
    // The one whose call was under way, and this one.
    assert_eq!(quota(&envoy.get("/")), Some((100, 97)));
    assert_eq!(shim.charges(KEY), 2);
    envoy.finish();
}

#[test]
fn nobody_waits_for_another_for_more_than_a_quarter_of_the_timeout() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).configuration(slow(100, "4s")).start();
    let mut clients = waiting(&envoy, &shim, 5);
    // Nothing has been answered yet.
    shim.wait_for("EVALSHA", 2);
    assert_eq!(shim.charges(KEY), 5);
    shim.set(Mode::Pass);
    assert!(clients.iter_mut().all(|client| quota(&client.receive()).is_some()));
    envoy.finish();
}
