//! Who is meant on the command line: a caller under a rule, by the values of its key or by a key as Redis has it.

use std::net::IpAddr;

use ipnet::IpNet;
use meshquota::client_ip::{ClientIp, Trust};
use meshquota::config::Config;
use meshquota::identity::Part;
use meshquota::key::Keys;
use meshquota::rule::Rule;

/// A caller under a rule.
pub struct Meant<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// Who it is, as in its keys.
    pub identity: String,
    /// The address, where it is known.
    address: Option<IpAddr>,
    /// All addresses of this caller, where addresses tell callers apart.
    network: Option<IpNet>,
}

impl<'a> Meant<'a> {
    /// Whom these values name, one for each part of the rule's key. In place of an address there may be the network that
    /// counts as one caller, as keys have it.
    pub fn by_values(
        config: &'a Config,
        rule: &str,
        values: &[String],
        address: Option<IpAddr>,
    ) -> Result<Self, String> {
        let rule = find(config, rule)?;
        let mut values = values.to_vec();
        let value = place(rule).and_then(|place| values.get_mut(place));
        let (told, network) = match value {
            Some(value) if value.contains('/') => {
                let network = Trust::network(value);
                (None, network.map(|network| (std::mem::replace(value, network.addr().to_string()), network)))
            }
            value => (value.and_then(|value| read(value)), None),
        };
        let texts = values.iter().map(String::as_str).collect::<Vec<_>>();
        let identity = rule.policy().identity.of_values(&texts, &config.client_ip).ok_or_else(|| expected(rule))?;
        let mut meant = Self::new(rule, identity, address)?;
        if let (Some((value, network)), Some(whole)) = (network, meant.network)
            && network != whole
        {
            return Err(format!("{value} is not one caller of {}, and {whole} is", rule.name().as_str()));
        }
        meant.address = meant.address.or(told);
        Ok(meant)
    }

    /// Whom a key of Redis's belongs to, whichever limit's it is.
    pub fn by_key(config: &'a Config, rule: &str, key: &str, address: Option<IpAddr>) -> Result<Self, String> {
        let rule = find(config, rule)?;
        let identity = identity(config, rule, key).ok_or_else(|| {
            let form = Keys::new(&config.key_prefix, rule.namespace(), "IDENTITY", 1);
            format!("--key {key}: no key of {}; expected {}", rule.name().as_str(), form.first())
        })?;
        Self::new(rule, identity.to_owned(), address)
    }

    fn new(rule: &'a Rule, identity: String, address: Option<IpAddr>) -> Result<Self, String> {
        let network = place(rule).and_then(|place| identity.split('|').nth(place)).and_then(Trust::network);
        if let (Some(address), Some(network)) = (address, network)
            && !network.contains(&address)
        {
            return Err(format!("--client-ip {address}: the caller is {network}"));
        }
        Ok(Self { rule, identity, address, network })
    }

    /// The address by which an override may count for this caller; `None` where it does not matter.
    ///
    /// # Errors
    /// That it matters and is not known.
    pub fn address(&self) -> Result<Option<IpAddr>, String> {
        let mut networks = self.rule.policy().overrides.networks().peekable();
        match self.network {
            _ if self.address.is_some() || networks.peek().is_none() => Ok(self.address),
            // All its addresses are in the same of them.
            Some(network) if !networks.any(|one| network != *one && network.contains(one)) => Ok(Some(network.addr())),
            _ => Err(format!(
                "which limits {} has for this caller depends on its address: say it by --client-ip",
                self.rule.name().as_str()
            )),
        }
    }

    /// The keys of all buckets that it may have, by any limits that rules of this namespace have for anybody.
    pub fn all_keys(&self, config: &Config) -> Keys {
        let sharing = config.rules.iter().filter(|rule| rule.namespace() == self.rule.namespace());
        let most = sharing.map(|rule| rule.limits().len().max(rule.policy().overrides.most_limits())).max();
        Keys::new(&config.key_prefix, self.rule.namespace(), &self.identity, most.unwrap_or(1))
    }
}

/// Reads an address as the filter does, with a port or without.
pub fn read(text: &str) -> Option<IpAddr> {
    ClientIp::default().address(|| text.as_bytes().to_vec(), None)
}

fn find<'a>(config: &'a Config, name: &str) -> Result<&'a Rule, String> {
    let names = || config.rules.iter().map(|rule| rule.name().as_str()).collect::<Vec<_>>().join(", ");
    config
        .rules
        .iter()
        .find(|rule| rule.name().as_str() == name)
        .ok_or_else(|| format!("no rule is called {name}; there are: {}", names()))
}

/// Where the address stands among the parts of a key.
fn place(rule: &Rule) -> Option<usize> {
    rule.policy().identity.parts.iter().position(|part| *part == Part::ClientIp)
}

/// The identity in a key.
fn identity<'a>(config: &Config, rule: &Rule, key: &'a str) -> Option<&'a str> {
    // No identity has such a character.
    let form = Keys::new(&config.key_prefix, rule.namespace(), "\n", 1);
    let (before, after) = form.first().split_once('\n')?;
    let rest = key.strip_prefix(before)?;
    if after.is_empty() {
        return Some(rest).filter(|identity| !identity.is_empty());
    }
    let (identity, number) = rest.rsplit_once("}:")?;
    number.parse::<usize>().ok().map(|_| identity)
}

fn expected(rule: &Rule) -> String {
    let parts = &rule.policy().identity.parts;
    let expected = parts.iter().map(name).collect::<Vec<_>>().join(" ");
    let count = if parts.len() == 1 { "one value" } else { "of several values" };
    format!("the key of {} is {count}: expected {expected}", rule.name().as_str())
}

/// A part of a key, as a placeholder.
fn name(part: &Part) -> String {
    match part {
        Part::ClientIp => "ADDRESS".to_owned(),
        Part::Method => "METHOD".to_owned(),
        Part::Host => "HOST".to_owned(),
        Part::Path => "PATH".to_owned(),
        Part::Route => "ROUTE".to_owned(),
        Part::Header(name) => format!("HEADER({name})"),
        Part::Cookie(name) => format!("COOKIE({name})"),
        Part::Query(name) => format!("QUERY({name})"),
        Part::Property(path) => format!("PROPERTY({})", path.join(".")),
    }
}
