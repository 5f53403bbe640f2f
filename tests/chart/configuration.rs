//! The filter's configuration on its way through Helm: nothing is lost, changed or evaluated, and `meshquota check` reads it there.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::{Map, Value, json};

use crate::EXAMPLES;
use crate::helm::{CHART, Helm, example};
use crate::mesh::with_doubles;
use crate::support::manifests::{documents, snippets};
use crate::support::pinned::kubectl;
use crate::support::program::{Said, file, path, run_with};
use crate::support::project::read;

/// Values for everything but the configuration, in Istio and in Envoy Gateway.
const RESTS: [&str; 2] = [
    r#"{"image": {"url": "oci://registry.example.com/meshquota:0.1.0"}, "redis": {"host": "redis"}}"#,
    r#"{"image": {"url": "oci://registry.example.com/meshquota:0.1.0"}, "redis": {"host": "redis"}, "istio": {"enabled": false},
        "envoyGateway": {"enabled": true, "gateway": "public"}}"#,
];

/// Whether YAML does not have a character bare, which JSON has: it is refused, or ends a line.
fn is_escaped(one: char) -> bool {
    matches!(one, '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

/// Texts that YAML, Go's templates or a careless reader take for something else.
fn texts() -> Vec<String> {
    let words = "~ null true True yes no on off y N 0 012 0o7 0x1f 0b1 1_000 1e3 +1 -0 .5 .inf .nan 12:30:45 2026-12-03 << = - ? \
                 &a *a !a %a @a `a` [ { --- ... 'q' \"q\" \\ \\n \\u0041 <&> }} {{ ${HOME} $(HOME) é 日本 😀 e\u{301} \u{202e}";
    let mut all = words.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let spaced = [
        "",
        " ",
        "- a",
        ": ",
        "a: b",
        "a #b",
        "# c",
        "!!binary x",
        "--- a",
        " lead",
        "trail ",
        "line\n  two\n",
        "\n x",
        "a\n---\nb\n",
        "a\r\nb",
        "tab\t",
        "{{ .Values.image.url }}",
        "{{ fail \"x\" }}",
        "{{- end }}",
    ];
    all.extend(spaced.map(str::to_owned));
    let others = [0x2028, 0x2029, 0xe000, 0xfeff, 0xfffd, 0xfffe, 0xffff, 0x1f600, 0x10ffff];
    for one in (1..0x180).chain(others).filter_map(char::from_u32) {
        all.extend([one.to_string(), format!("a{one}b"), format!(" {one} b\nc{one}")]);
    }
    all.push("long ".repeat(1000));
    all
}

/// A configuration that has every field, further ones that no filter knows, and these texts.
fn with_texts(texts: &[String]) -> Value {
    let mut configuration: Value = serde_json::from_str(&read("src/config/everything.json")).unwrap();
    let short = texts.iter().filter(|text| text.len() < 100);
    configuration["unknown"] = json!({
        "texts": texts,
        "names": short.map(|text| (text.clone(), json!(1))).collect::<Map<_, _>>(),
        "numbers": [
            0, -1, 1, 999_999, 1_000_000, 10_000_000, 2_147_483_648_u64, 1_000_000_000_000_000_u64, 9_007_199_254_740_991_u64,
            0.5, -0.25, 1e-7, 0.1, 123_456.789, 1e15, 1e21, 1.5e300, 5e-324,
        ],
        "nested": [[], [[]], [[1, [2, {}]], {"a": [{"b": {"c": []}}]}], {}],
        "others": [true, false, {"null": null}],
    });
    configuration
}

/// Everything that may go wrong on the way.
fn nasty() -> Value {
    with_texts(&texts())
}

/// The same without the characters that YAML does not have bare.
fn nasty_and_bare() -> Value {
    // Helm 3 cannot write the name << for itself.
    let is_bare = |text: &String| !text.contains(is_escaped) && text != "<<";
    with_texts(&texts().into_iter().filter(is_bare).collect::<Vec<_>>())
}

/// JSON that is YAML as well.
fn escaped(value: &Value) -> String {
    let escape = |one: char| if is_escaped(one) { format!("\\u{:04x}", u32::from(one)) } else { one.to_string() };
    value.to_string().chars().map(escape).collect()
}

/// The configuration inside what was rendered.
fn arrived(text: &str) -> Value {
    let objects = documents(text);
    let places = [("WasmPlugin", "/spec/pluginConfig"), ("EnvoyExtensionPolicy", "/spec/wasm/0/config")];
    let mut found = places.iter().flat_map(|(kind, at)| {
        objects.iter().filter(move |object| object["kind"] == *kind).map(move |object| object.pointer(at).unwrap())
    });
    let one = with_doubles(found.next().expect("a configuration"));
    assert!(found.next().is_none());
    one
}

/// Checks that two documents are the same, and names the first place where they are not.
fn check_same(arrived: &Value, given: &Value, what: &str) {
    match (arrived, given) {
        (Value::Object(left), Value::Object(right)) => {
            assert!(
                left.keys().collect::<BTreeSet<_>>() == right.keys().collect::<BTreeSet<_>>(),
                "{what}: other names"
            );
            left.iter().for_each(|(name, value)| check_same(value, &right[name], &format!("{what}, {name:?}")));
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            left.iter().zip(right).for_each(|(left, right)| check_same(left, right, what));
        }
        _ => assert_eq!(arrived, given, "{what}"),
    }
}

#[test]
fn a_configuration_arrives_as_it_is_however_it_is_given() {
    let rests = RESTS.map(file);
    let (all, bare) = (nasty(), nasty_and_bare());
    let pretty = serde_json::to_string_pretty(&bare).unwrap();
    // As some write JSON: a character beyond the first plane as two escapes, which YAML does not know.
    let in_pairs = pretty.replace('😀', "\\ud83d\\ude00");
    let ways = [
        ("--set-file", escaped(&all), &all),
        ("--set-file", in_pairs, &bare),
        ("--set-file", format!("# This is YAML.\n{bare}\n"), &bare),
        ("--values", format!("config: {bare}\n"), &bare),
    ];
    for (option, text, given) in ways {
        let (text, given) = (file(&text), with_doubles(given));
        let argument = if option == "--values" { path(&text).to_owned() } else { format!("config={}", path(&text)) };
        for (helm, rest) in Helm::each().iter().flat_map(|helm| rests.iter().map(move |rest| (helm, rest))) {
            let said = helm.template("shop", &["--values", path(rest), option, &argument]);
            assert!(said.fine, "Helm {}, {option}: {}", helm.version, said.err);
            check_same(&arrived(&said.out), &given, &format!("Helm {}, {option}", helm.version));
        }
    }
}

#[test]
fn kubernetes_reads_the_same_of_it_as_this_test() {
    let Some(kubectl) = kubectl() else { return };
    // kubectl cannot write the other characters itself.
    let (rests, text) = (RESTS.map(file), file(nasty_and_bare().to_string()));
    for (helm, rest) in Helm::each().iter().flat_map(|helm| rests.iter().map(move |rest| (helm, rest))) {
        let config = format!("config={}", path(&text));
        let said = helm.template("shop", &["--values", path(rest), "--set-file", &config]);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rendered.yaml"), &said.out).unwrap();
        std::fs::write(folder.path().join("kustomization.yaml"), "resources: [rendered.yaml]\n").unwrap();
        let output = Command::new(&kubectl).arg("kustomize").arg(folder.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let arrived = arrived(&String::from_utf8(output.stdout).unwrap());
        check_same(&arrived, &with_doubles(&nasty_and_bare()), helm.version);
    }
}

/// What `meshquota check` says of a text, and its exit code.
fn check(text: &str) -> (String, i32) {
    let Said { out, code, .. } = run_with(&["check", "-"], &[], text);
    (out, code)
}

#[test]
fn the_values_on_the_page_are_fine() {
    let shown = snippets(&format!("{CHART}/README.md"));
    assert_eq!(shown.len(), 1);
    let values = file(shown[0].to_string());
    for helm in Helm::each() {
        let said = helm.template("shop", &["--values", path(&values)]);
        assert_eq!(check(&said.out).1, 0, "{}", said.err);
        let example = helm.template("shop", &["--values", &example("namespace")]);
        assert_eq!(said.out, example.out);
    }
}

#[test]
fn meshquota_check_reads_the_configuration_in_what_is_rendered() {
    let everything = file(read("src/config/everything.json"));
    let misspelt =
        r#"{"rules": [{"name": "a", "limit": [{"refill": "10/s"}]}, {"name": "b", "limits": [{"refill": 10}]}]}"#;
    let misspelt = file(misspelt);
    let places = ["-, document 2, WasmPlugin meshquota: spec.pluginConfig", "-, document 1: config of meshquota"];
    for helm in Helm::each() {
        for (name, namespace, folder) in EXAMPLES {
            let said = helm.template(namespace, &["--values", &example(name)]);
            let place = places[usize::from(folder.contains("/gateway/overlays/") && !folder.contains("istio"))];
            assert_eq!(check(&said.out), (format!("{place}: fine, 1 rule\n"), 0), "Helm {}, {name}", helm.version);
        }
        for (rest, place) in RESTS.map(file).iter().zip(places) {
            let render = |config: &str| {
                let config = format!("config={config}");
                helm.template("shop", &["--values", path(rest), "--set-file", &config]).out
            };
            let (said, code) = check(&render(path(&everything)));
            assert_eq!(code, 0, "{said}");
            assert!(said.ends_with(&format!("{place}: fine, 2 rules\n")), "{said}");
            let (said, code) = check(&render(path(&misspelt)));
            assert_eq!(code, 1);
            for fault in [
                "rules[0]: unknown field \"limit\", did you mean \"limits\"?",
                "rules[0].limits: missing, expected a list of limits",
                "rules[1].limits[0].refill: ",
            ] {
                let line = format!("{place}: {fault}");
                assert!(said.lines().any(|said| said.starts_with(&line)), "{line}\n{said}");
            }
        }
    }
}
