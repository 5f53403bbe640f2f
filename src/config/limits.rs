//! What callers may take: the fields `limits` and `cost`.

use super::duration::{in_words, rate};
use super::reader::Node;
use super::scope::{a_header, header_name};
use super::shape::{Field, List, Shape, Words};
use crate::quota::{Capacity, Cost, Limit, MAX_UNITS};
use crate::rule::{Price, Rule};

const COUNT: Shape = Shape::Integer(1, MAX_UNITS);

/// Limits, at least one.
pub const LIMITS: Shape = Shape::List(List {
    of: "limits",
    element: &Shape::fields(&[
        Field::new("capacity", COUNT, "one second's refill, at least 1", "tokens in a full bucket: the largest burst"),
        Field::required(
            "refill",
            Shape::Text(Words::matching(in_words::A_RATE, r"^\s*\+?[0-9]+\s*/.*[A-Za-z]\s*$")),
            "tokens over time, added evenly: a whole number, a slash, and a unit or a duration from 1ms to 10 years: \
             `10/s`, `100/min`, `1000/h`, `5000/day`, `1/15s`",
        ),
    ]),
    count: (1, Rule::MOST_LIMITS),
    otherwise: "1 to 8 limits",
});

/// What a request costs.
pub const COST: Shape = Shape::Either(
    Words::new("an integer above zero, or an object with a header"),
    &[
        COUNT,
        Shape::fields(&[
            Field::required(
                "header",
                Shape::Text(a_header("the name of a header, such as \"x-cost\"")),
                "the header that says what the request costs. Whoever can write it decides",
            ),
            Field::new(
                "default",
                COUNT,
                "1",
                "what a request costs whose header is absent, or is no whole number above zero",
            ),
            Field::new("max", COUNT, "no bound", "what it costs at most"),
        ]),
    ],
);

/// Reads limits.
pub fn read(node: &Node<'_>) -> Option<Vec<Limit>> {
    let limits = node.list_of(read_limit)?;
    for (place, (limit, node)) in limits.iter().zip(node.elements()).enumerate() {
        // Of two that say the same, the second is one too many.
        let holds_first = |(other_place, other): &(usize, &Limit)| {
            other.implies(limit) && (*other_place < place || !limit.implies(other))
        };
        if let Some((other, _)) = limits.iter().enumerate().find(holds_first) {
            node.warn(format!(
                "never binds, since limits[{other}] beside it allows no larger burst and no more over time"
            ));
        }
    }
    Some(limits)
}

fn read_limit(node: Node<'_>) -> Option<Limit> {
    let object = node.object()?;
    let capacity = object.given("capacity", |node| node.integer().and_then(Capacity::new));
    let refill = object.get("refill").and_then(|node| rate(node.text()?).map_err(|fault| node.expected(fault)).ok());
    let (capacity, refill) = (capacity?, refill?);
    let limit = Limit::new(capacity.unwrap_or_else(|| refill.per_second()), refill);
    limit.map_err(|too_fine| object.fault(too_fine.to_string())).ok()
}

/// Reads what a request costs: a number, or what a header says.
pub fn read_price(node: Node<'_>) -> Option<Price> {
    let cost = |node: Node<'_>| node.integer().and_then(Cost::new);
    if !node.is_object() {
        return cost(node).map(Price::Fixed);
    }
    let object = node.object()?;
    let name = object.get("header").and_then(|node| node.parsed(header_name));
    let (default, max) = (object.or("default", Cost::ONE, cost), object.given("max", cost));
    let (default, max) = (default?, max?.or_else(|| Cost::new(MAX_UNITS))?);
    if default > max {
        object.fault(format!("a default of {} is above the max of {}", default.get(), max.get()));
    }
    Some(Price::Header { name: name?, default, max })
}
