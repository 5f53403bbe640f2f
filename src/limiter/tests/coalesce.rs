//! Requests that want a bucket while it is being asked.

use super::*;

/// So many of those asked for were granted, and this is left; who was not waits 1.5 seconds.
fn granted(granted: u32, remaining: u32, all: bool) -> Vec<u8> {
    let wait = if all { 0 } else { 1500 };
    format!("*4\r\n:{granted}\r\n:{remaining}\r\n:{wait}\r\n:1000\r\n").into_bytes()
}

fn asks(count: u32) -> String {
    A.replace("count 1", &format!("count {count}"))
}

#[test]
fn who_comes_while_a_bucket_is_asked_goes_in_one_call_and_the_first_are_granted() {
    let mut table = Table::connected(ONE_RULE);
    for id in 1..=5 {
        table.request(id);
    }
    assert_eq!(table.told, [A]);
    table.told.clear();
    table.hear(ADMITTED);
    assert_eq!(table.told, ["1 allow 9/10 by rule 0", &asks(4)]);
    table.told.clear();
    table.hear(&granted(2, 0, false));
    let expected = [
        "2 allow 0/10 by rule 0",
        "3 allow 0/10 by rule 0",
        "4 deny Some(1.5s) by rule 0",
        "5 deny Some(1.5s) by rule 0",
    ];
    assert_eq!(table.told, expected);
    let counts = table.counts();
    for count in ["coalesced_ 3", "decisions.rule=a outcome=allow 3", "decisions.rule=a outcome=deny 2"] {
        assert!(counts.iter().any(|other| other == count), "{count}: {counts:?}");
    }
    // What was denied is known.
    table.told.clear();
    table.request(6);
    assert_eq!(table.told, ["6 at once deny Some(1.5s) by rule 0"]);
}

#[test]
fn a_denial_answers_those_who_waited_for_it_without_a_call() {
    let mut table = Table::connected(ONE_RULE);
    for id in 1..=3 {
        table.request(id);
    }
    table.told.clear();
    table.hear(DENIED);
    let mut told = table.told.clone();
    told.sort();
    assert_eq!(told, [1, 2, 3].map(|id| format!("{id} deny Some(1.5s) by rule 0")));
    assert!(table.counts().contains(&"deny_cache_hits_ 2".to_owned()));
    assert_eq!(table.limiter.queues.under_way(), 0);
}

#[test]
fn other_buckets_do_not_wait() {
    let mut table = Table::connected(TWO_RULES);
    table.request(1);
    table.told.clear();
    table.request_from(2, b"192.0.2.2:1");
    assert!(table.told[0].contains("a:192.0.2.2") && table.told[0].contains("b:192.0.2.2"), "{:?}", table.told);
}

#[test]
fn who_leaves_before_its_call_is_made_is_not_charged_and_who_leaves_later_costs_nobody_else() {
    let mut table = Table::connected(ONE_RULE);
    for id in 1..=4 {
        table.request(id);
    }
    table.limiter.gone(3);
    table.told.clear();
    table.hear(ADMITTED);
    assert_eq!(table.told[1], asks(2), "{:?}", table.told);
    // The call is under way: what is granted to the one who left is the other's.
    table.limiter.gone(2);
    table.told.clear();
    table.hear(&granted(1, 0, false));
    assert_eq!(table.told, ["4 allow 0/10 by rule 0"]);
    assert_eq!(table.limiter.queues.under_way(), 0);
}

#[test]
fn charges_that_differ_go_one_after_the_other_in_the_order_in_which_they_came() {
    let mut table = Table::connected(
        r#"{"rules": [{"name": "a", "cost": {"header": "x-cost"}, "limits": [{"capacity": 10, "refill": "1/s"}]}]}"#,
    );
    for (id, cost) in (1..).zip(["1", "2", "2", "3", "2"]) {
        let mut facts = Told::from(b"192.0.2.1:1");
        facts.headers = vec![("x-cost", cost.into())];
        let met = table.limiter.meets(&facts);
        assert_eq!(table.limiter.request(table.now, || 0, id, met), Admission::Waits);
    }
    table.drain();
    table.told.clear();
    table.hear(ADMITTED);
    assert_eq!(table.told, ["1 allow 9/10 by rule 0", &[asks(2), asks(1), asks(1)].join(", ")]);
    table.told.clear();
    table.hear(&[granted(2, 5, true), granted(0, 2, false), granted(1, 0, true)].concat());
    let expected =
        ["2 allow 5/10 by rule 0", "3 allow 5/10 by rule 0", "4 deny Some(1.5s) by rule 0", "5 allow 0/10 by rule 0"];
    assert_eq!(table.told, expected);
}

#[test]
fn nobody_waits_behind_another_for_more_than_a_quarter_of_the_timeout() {
    let mut table = Table::connected(ONE_RULE);
    let timeout = table.limiter.config().redis.timeout;
    table.request(1);
    table.request(2);
    table.told.clear();
    table.wait((timeout / 4).as_millis() as u64 + 10);
    assert_eq!(table.told, [A]);
    table.told.clear();
    // Redis is slow, so whoever comes now waits for the second call only.
    table.request(3);
    assert!(table.told.is_empty());
    table.wait(timeout.as_millis() as u64);
    let decided = |id: u32| format!("{id} fail_allow by rule 0");
    for id in 1..=3 {
        assert!(table.told.contains(&decided(id)), "{:?}", table.told);
    }
}

#[test]
fn who_waits_in_a_queue_has_the_deadline_of_its_own_arrival() {
    let mut table = Table::connected(ONE_RULE);
    let timeout = table.limiter.config().redis.timeout.as_millis() as u64;
    table.request(1);
    table.wait(timeout / 8);
    table.request(2);
    table.wait(timeout / 8);
    table.hear(ADMITTED);
    table.told.clear();
    // Since it came, its time is over; since its call was made, it is not.
    table.wait(timeout * 7 / 8);
    assert_eq!(table.told.last(), Some(&"2 fail_allow by rule 0".to_owned()));
}

#[test]
fn what_fails_fails_for_all_who_went_together_and_the_next_may_be_told_by_the_breaker() {
    let config = ONE_RULE.replacen('{', r#"{"redis": {"breaker": {"failures": 2, "cool_down": "10s"}},"#, 1);
    let mut table = Table::connected(&config);
    for id in 1..=3 {
        table.request(id);
    }
    table.hear(LOADING);
    table.request(4);
    table.told.clear();
    table.hear(LOADING);
    let decided = table.told.iter().filter(|told| told.contains("by rule")).collect::<Vec<_>>();
    assert_eq!(decided, ["2 fail_allow by rule 0", "3 fail_allow by rule 0", "4 fail_allow by rule 0"]);
    let counts = table.counts();
    assert!(counts.contains(&"redis_calls.result=breaker 1".to_owned()), "{counts:?}");
    assert_eq!(table.limiter.queues.under_way(), 0);
}

#[test]
fn those_who_wait_are_bounded_too() {
    let config = ONE_RULE.replacen('{', r#"{"redis": {"max_in_flight": 3},"#, 1);
    let mut table = Table::connected(&config);
    for id in 1..=5 {
        table.request(id);
    }
    let decided = |id: u32| format!("{id} fail_allow by rule 0");
    assert!(table.told.contains(&decided(4)) && table.told.contains(&decided(5)), "{:?}", table.told);
    table.hear(ADMITTED);
    table.hear(&granted(2, 7, true));
    assert_eq!(table.told.last(), Some(&"3 allow 7/10 by rule 0".to_owned()));
    assert!(table.counts().contains(&"redis_calls.result=overload 2".to_owned()));
}

#[test]
fn the_calls_of_a_group_are_made_at_the_latest_of_its_times() {
    let mut table = Table::connected(PROXY_CLOCK);
    let facts = Told::from(b"192.0.2.1:1");
    for (id, ms) in [(1, 10), (2, 20), (3, 15)] {
        let met = table.limiter.meets(&facts);
        table.limiter.request(table.now, || ms, id, met);
    }
    table.drain();
    table.told.clear();
    table.hear(&[ADMITTED, ADMITTED].concat());
    assert!(table.told.iter().any(|told| told.contains("{a:192.0.2.1}:0 now 20 count 2")), "{:?}", table.told);
}
