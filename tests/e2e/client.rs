//! What a client sees.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::app::{ANSWER, App};
use crate::support::envoy::{NEWEST, OLDER, PATIENT, Setup};
use crate::support::http::{Body, Client, Message, Request};
use crate::support::http2::Http2;
use crate::support::server::{Kind, Server};
use crate::{forgetful, quota};

/// Ten tokens, and one more a minute.
fn ten(redis: &Server, app: &App) -> Setup {
    Setup::new(redis.port(), app).configuration(forgetful(json!({
        "redis": {"timeout": PATIENT},
        "rules": [{"name": "per-ip", "limits": [{"capacity": 10, "refill": "1/min"}]}],
    })))
}

/// Everything that the contract says of a denial, over HTTP/1.1 or HTTP/2, when `since` the bucket has missed its tokens.
fn check_denial(response: &Message, since: Instant) {
    let elapsed = since.elapsed().as_secs() + 1;
    assert_eq!(response.status(), 429);
    assert_eq!(quota(response), Some((10, 0)));
    let retry_after = response.number("retry-after").expect("retry-after");
    assert!(retry_after <= 60 && retry_after + elapsed >= 60, "retry-after {retry_after} after {elapsed} s");
    let reset = response.number("x-ratelimit-reset").unwrap();
    assert!(reset <= 600 && reset + elapsed >= 600, "reset {reset} after {elapsed} s");
    assert_eq!(response.header("x-envoy-ratelimited").as_deref(), Some("true"));
    assert_eq!(response.header("content-type").as_deref(), Some("text/plain"));
    assert_eq!(response.text(), "rate limit exceeded\n");
    let mut names = response.headers.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
    names.sort_unstable();
    let expected = [
        "content-length",
        "content-type",
        "date",
        "retry-after",
        "server",
        "x-envoy-ratelimited",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
    ];
    assert_eq!(names, expected);
}

#[test]
fn a_burst_of_exactly_the_capacity_is_admitted_and_then_denied_with_all_that_a_client_needs() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = ten(&redis, &app).start();
    let since = Instant::now();
    let mut client = envoy.client();
    for left in (0..10).rev() {
        let response = client.get("/");
        assert_eq!((response.status(), response.text().as_str()), (200, ANSWER));
        assert_eq!(quota(&response), Some((10, left)));
        let (reset, missing) = (response.number("x-ratelimit-reset").unwrap(), (10 - left) * 60);
        assert!(reset <= missing && reset + since.elapsed().as_secs() + 1 >= missing, "{reset} of {missing}");
        for name in ["retry-after", "x-envoy-ratelimited"] {
            assert_eq!(response.header(name), None, "{name}");
        }
    }
    // The connection survives a denial.
    for _ in 0..3 {
        check_denial(&client.get("/"), since);
    }
    assert_eq!(app.count(), 10);
    envoy.expect_counts(&[("per-ip allow", 10), ("per-ip deny", 3), ("calls ok", 13), ("calls noscript", 1)]);
    envoy.finish();
}

#[test]
fn a_denial_of_head_has_no_body_and_leaves_the_connection_usable() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = ten(&redis, &app).start();
    let since = Instant::now();
    let mut client = envoy.client();
    for _ in 0..10 {
        assert_eq!(client.exchange(&Request::new("HEAD", "/")).status(), 200);
    }
    let response = client.exchange(&Request::new("HEAD", "/"));
    assert_eq!((response.status(), quota(&response)), (429, Some((10, 0))));
    assert_eq!(response.header("content-type").as_deref(), Some("text/plain"));
    assert!(response.number("retry-after").is_some());
    // A body after HEAD would be read as the beginning of this response.
    check_denial(&client.get("/"), since);
    envoy.finish();
}

#[test]
fn a_client_of_http_1_0_is_denied_in_its_own_protocol() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = ten(&redis, &app)
        .tweak(|document| document.manager("ingress")["http_protocol_options"] = json!({"accept_http_10": true}))
        .start();
    let request = Request::get("/").version("HTTP/1.0");
    for _ in 0..10 {
        assert_eq!(envoy.client().exchange(&request).status(), 200);
    }
    let mut client = envoy.client();
    let response = client.exchange(&request);
    assert_eq!((response.status(), quota(&response)), (429, Some((10, 0))));
    assert_eq!(response.text(), "rate limit exceeded\n");
    assert!(response.number("retry-after").is_some());
    assert!(client.is_closed());
    envoy.finish();
}

#[test]
fn a_client_of_http_2_gets_the_same_answers_and_keeps_its_connection() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = ten(&redis, &app).start();
    let since = Instant::now();
    let mut client = Http2::connect(envoy.ingress());
    let request = || http::Request::get("http://app.test/").body(()).unwrap();
    for left in (0..10).rev() {
        let response = client.exchange(request(), b"", None);
        assert_eq!((response.status(), response.text().as_str()), (200, ANSWER));
        assert_eq!(quota(&response), Some((10, left)));
    }
    for _ in 0..3 {
        check_denial(&client.exchange(request(), b"", None), since);
    }
    assert_eq!(app.count(), 10);
    envoy.finish();
}

#[test]
fn a_grpc_client_over_its_quota_is_told_resource_exhausted() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::http2());
    let envoy = ten(&redis, &app)
        .tweak(|document| {
            document.cluster("app")["typed_extension_protocol_options"] = json!({
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                    "explicit_http_config": {"http2_protocol_options": {}},
                },
            });
        })
        .start();
    let mut client = Http2::connect(envoy.ingress());
    let call = || {
        http::Request::post("http://app.test/shop.Shop/Buy")
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap()
    };
    const EMPTY: &[u8] = &[0, 0, 0, 0, 0];
    for left in (0..10).rev() {
        let response = client.exchange(call(), EMPTY, None);
        assert_eq!((response.status(), quota(&response)), (200, Some((10, left))));
        assert_eq!(response.trailers, [("grpc-status".to_owned(), b"0".to_vec())]);
    }
    let response = client.exchange(call(), EMPTY, None);
    assert_eq!((response.status(), quota(&response)), (200, Some((10, 0))), "a status of gRPC is not one of HTTP");
    assert_eq!(response.header("grpc-status").as_deref(), Some("8"));
    assert_eq!(response.header("content-type").as_deref(), Some("application/grpc"));
    assert_eq!(response.header("x-envoy-ratelimited").as_deref(), Some("true"));
    let retry_after = response.number("retry-after").expect("retry-after");
    assert!((1..=60).contains(&retry_after), "{retry_after}");
    assert_eq!(response.text(), "", "a gRPC response has no body of text");
    envoy.expect_counts(&[("per-ip allow", 10), ("per-ip deny", 1), ("calls ok", 11), ("calls noscript", 1)]);
    envoy.finish();
}

#[test]
fn quota_headers_that_the_service_sets_are_replaced_and_not_doubled() {
    let redis = Server::start(Kind::Redis, &[]);
    let app = App::answering(&[
        ("x-ratelimit-limit", "999"),
        ("X-RateLimit-Limit", "998"),
        ("x-ratelimit-remaining", "997"),
        ("x-ratelimit-reset", "996"),
        ("x-other", "kept"),
    ]);
    let envoy = ten(&redis, &app).start();
    let response = envoy.get("/");
    assert_eq!(quota(&response), Some((10, 9)));
    assert!(response.number("x-ratelimit-reset").unwrap() <= 60);
    assert_eq!(response.header("x-other").as_deref(), Some("kept"));
    envoy.finish();
}

#[test]
fn a_request_that_envoy_redirects_itself_is_charged_once_by_each_rule() {
    for version in [NEWEST].into_iter().chain(OLDER) {
        let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
        let limits = json!([{"capacity": 10, "refill": "1/day"}]);
        let envoy = Setup::new(redis.port(), &app)
            .version(version)
            .configuration(json!({
                "redis": {"timeout": PATIENT},
                "rules": [
                    {"name": "all", "limits": limits},
                    {"name": "there", "match": {"path": "/there"}, "limits": [{"capacity": 4, "refill": "1/day"}]},
                    {"name": "on_the_way", "match": {"path": "/elsewhere"}, "limits": limits},
                ],
            }))
            .tweak(|document| {
                let route = &mut document.manager("ingress")["route_config"]["virtual_hosts"][0]["routes"][0]["route"];
                route["internal_redirect_policy"] =
                    json!({"allow_cross_scheme_redirect": true, "max_internal_redirects": 2});
            })
            .start();
        let left = |rule: &str| {
            let key = format!("quota:{{{rule}:127.0.0.1}}:0");
            redis::Commands::hget::<_, _, Option<f64>>(&mut redis.client(), key, "tokens").unwrap().map(f64::floor)
        };
        assert_eq!(envoy.get("/elsewhere").text(), ANSWER);
        assert_eq!((left("all"), left("there")), (Some(9.0), Some(3.0)), "{version}");
        assert_eq!(app.count(), 2, "{version}: Envoy followed the redirect");
        // Whoever sends the header that Envoy adds then is charged all the same.
        let forged = Request::get("/there").with("x-envoy-original-url", "http://app/elsewhere");
        assert_eq!(quota(&envoy.client().exchange(&forged)), Some((4, 2)));
        assert_eq!((left("all"), left("there")), (Some(8.0), Some(2.0)), "{version}");
        // What was met at first is not forgotten at the second redirect, on whose way another rule is met.
        assert_eq!(envoy.get("/far").text(), ANSWER);
        assert_eq!(app.count(), 6, "{version}");
        let left_now = ["all", "on_the_way", "there"].map(left);
        assert_eq!(left_now, [Some(7.0), Some(8.0), Some(1.0)], "{version}");
        // And nobody comes to where a rule is by way of a redirect that the rule is not for.
        assert_eq!(envoy.get("/elsewhere").status(), 200);
        assert_eq!(envoy.get("/elsewhere").status(), 429, "{version}");
        envoy.finish();
    }
}

#[test]
fn a_request_that_envoy_sends_again_is_charged_once() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = ten(&redis, &app)
        .tweak(|document| {
            let route = &mut document.manager("ingress")["route_config"]["virtual_hosts"][0]["routes"][0]["route"];
            // Whatever the service says is a reason to ask it again.
            route["retry_policy"] =
                json!({"retry_on": "retriable-status-codes", "retriable_status_codes": [200], "num_retries": 2});
        })
        .start();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    assert_eq!(app.count(), 3, "Envoy has sent it three times");
    assert_eq!(quota(&envoy.get("/")), Some((10, 8)));
    envoy.finish();
}

#[test]
fn a_caller_that_waits_as_long_as_it_is_told_is_always_admitted() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    // No whole number of seconds, and a good deal more than one: who is told too little comes too soon.
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "rules": [{"name": "per-ip", "limits": [{"capacity": 1, "refill": "1/1700ms"}]}],
        }))
        .start();
    let mut client = envoy.client();
    assert_eq!(client.get("/").status(), 200);
    for pause in [0, 300, 900] {
        std::thread::sleep(Duration::from_millis(pause));
        let response = client.get("/");
        // A busy machine may come later than it meant to.
        if response.status() == 429 {
            let told = response.number("retry-after").expect("retry-after");
            assert!((1..=2).contains(&told), "{told}");
            std::thread::sleep(Duration::from_secs(told));
            assert_eq!(client.get("/").status(), 200, "it has waited for {told} s");
        }
    }
    envoy.wait_for_count("per-ip deny", |times| times >= 1);
    envoy.finish();
}

#[test]
fn a_request_with_a_body_is_denied_before_its_body_has_come() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).capacity(1).start();
    assert_eq!(envoy.get("/").status(), 200);
    let request = Request::new("POST", "/").body(Body::Sized(vec![b'x'; 1000]));
    // Whole: the connection goes on.
    let mut client = envoy.client();
    assert_eq!(client.exchange(&request).status(), 429);
    assert_eq!(client.exchange(&request).status(), 429);
    // The head alone is answered; nobody waits for the rest.
    let mut client = envoy.client();
    client.write(&request.head());
    assert_eq!(client.receive_to("POST").status(), 429);
    assert_eq!(app.count(), 1);
    envoy.finish();
}

#[test]
fn a_request_that_comes_before_the_first_connection_waits_for_it() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).capacity(100).workers(2).unconnected().start();
    for left in (80..100).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((100, left)));
    }
    envoy.expect_counts(&[("per-ip allow", 20), ("calls ok", 20), ("calls noscript", 1)]);
    envoy.finish();
}

#[test]
fn the_shipped_configuration_works_as_it_is() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).start();
    // Its timeout is short, so a busy machine may let a request through; but some come to a decision.
    let mut client: Client = envoy.client();
    let decided = (0..50).find_map(|_| quota(&client.get("/")));
    assert_eq!(decided.map(|(limit, _)| limit), Some(10));
    envoy.finish();
}
