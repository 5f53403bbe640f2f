//! Other limits for some callers: the field `overrides` of a rule.

use std::rc::Rc;

use super::client_ip::{NETWORKS, networks};
use super::limits;
use super::reader::{Node, Object};
use super::shape::{Among, Field, List, Object as Fields, Shape, Words};
use crate::client_ip::ClientIp;
use crate::identity::Identity;
use crate::overrides::{Allowance, Overrides};

/// The field.
pub const SHAPE: Shape = Shape::List(List {
    of: "overrides",
    element: &Shape::Object(Fields {
        fields: &[
            Field::new(
                "values",
                Shape::List(List {
                    of: "values of the key",
                    element: &Shape::Either(
                        Words::new("a value of the key"),
                        &[
                            Shape::text("a value of the key's part"),
                            Shape::List(List {
                                of: "values, one for each part of the key",
                                element: &Shape::text("a text"),
                                count: (0, usize::MAX),
                                otherwise: "",
                            }),
                        ],
                    ),
                    count: (1, usize::MAX),
                    otherwise: "at least one value",
                }),
                NONE,
                "callers by the value of the rule's key; where the key has several parts, each by a list of their values",
            ),
            Field::new("cidrs", NETWORKS, NONE, "callers by the networks that their addresses are in"),
            Field::new("limits", limits::LIMITS, NONE, "what each of them may take in place of the rule's limits"),
            Field::new("unlimited", Shape::Flag, NONE, "`true`: the rule is not for them"),
        ],
        among: &[
            Among {
                names: &["values", "cidrs"],
                count: (1, 1),
                otherwise: "expected either values or cidrs, which say whom the override is for",
            },
            Among { names: &["limits", "unlimited"], count: (1, 1), otherwise: "expected either limits or unlimited" },
        ],
    }),
    count: (0, usize::MAX),
    otherwise: "",
});
const NONE: &str = "none";

/// Reads the field of a rule whose key is this.
pub fn read(rule: &Object<'_>, identity: &Identity, client_ip: &ClientIp) -> Option<Overrides> {
    let mut overrides = Overrides::default();
    let entries = rule.or("overrides", Vec::new(), |node| {
        node.list_of(|node| read_override(node, identity, client_ip, &mut overrides))
    });
    entries.map(|_| overrides)
}

/// Reads an override and adds it to those before it.
fn read_override(node: Node<'_>, identity: &Identity, client_ip: &ClientIp, overrides: &mut Overrides) -> Option<()> {
    let place = node.clone();
    let object = node.object()?;
    let values = object.or("values", Vec::new(), |node| node.list_of(|node| read_value(&node, identity, client_ip)));
    let networks = object.or("cidrs", Vec::new(), |node| networks(&node));
    let limits = object.given("limits", |node| limits::read(&node));
    let unlimited = object.given("unlimited", |node| {
        node.boolean()?.then_some(()).or_else(|| {
            node.expected("true, or limits in its place");
            None
        })
    });
    let (values, networks, limits) = (values?, networks?, limits?);
    unlimited?;
    let allowance = limits.map_or(Allowance::Unlimited, |limits| Allowance::Limits(Rc::from(limits)));
    let (count, added) = (values.len().saturating_add(networks.len()), overrides.add(values, networks, allowance));
    if added < count {
        let which = if added == 0 { "all" } else { "some" };
        place.warn(format!("{which} of its callers are those of overrides before it, which count; it is not for them"));
    }
    Some(())
}

/// One value of the key: a text where the key has one part, a list of texts where it has several.
fn read_value(node: &Node<'_>, identity: &Identity, client_ip: &ClientIp) -> Option<String> {
    let values = if node.is_list() { node.list_of(|node| node.text())? } else { vec![node.text()?] };
    let named = identity.of_values(&values, client_ip);
    if named.is_none() {
        let parts = identity.parts.len();
        match values.iter().position(|value| value.trim_ascii().is_empty()) {
            _ if parts == 0 => node.expected("cidrs; without a part the key has no value"),
            Some(_) if values.len() == parts => node.expected("values that are not blank"),
            _ if parts == 1 => node.expected("a value of the key's part"),
            _ => node.expected(&format!("a list of {parts} values, one for each part of the key")),
        }
    }
    named
}
