//! `/openapi.json`: description of the API.

/// The description, with the version of this program.
pub fn description() -> String {
    DESCRIPTION.replace("\"VERSION\"", concat!('"', env!("CARGO_PKG_VERSION"), '"'))
}

/// The description without the version.
const DESCRIPTION: &str = include_str!("openapi.json");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::super::fields::{Does, TABLE, on};

    fn description() -> Value {
        serde_json::from_str(&super::description()).unwrap()
    }

    /// Routes in a source file, with its prefixes.
    fn routes(source: &str) -> BTreeSet<String> {
        let parts = source.split(".route(").skip(1);
        let paths = parts.filter_map(|part| part.trim_start().strip_prefix('"'));
        let names = paths.filter_map(|path| path.split('"').next());
        names.map(str::to_owned).collect()
    }

    #[test]
    fn every_route_is_described() {
        let mut wanted = routes(include_str!("http.rs"));
        assert!(wanted.len() > 12, "{wanted:?}");
        // These have aliases.
        for path in [
            "/chat/completions",
            "/completions",
            "/models",
            "/rerank",
            "/reranking",
        ] {
            wanted.insert(format!("/v1{path}"));
        }
        for more in [
            include_str!("ollama_api.rs"),
            include_str!("embeddings.rs"),
            include_str!("messages_api.rs"),
            include_str!("native_api.rs"),
            include_str!("responses_api.rs"),
            include_str!("input_items.rs"),
            include_str!("slots_api.rs"),
        ] {
            wanted.extend(routes(more));
        }
        // The files of the web page are not described, only the page.
        wanted.insert("/".to_owned());
        let described = description();
        let described: BTreeSet<String> = described["paths"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        assert_eq!(described, wanted);
    }

    /// Members that serde deserializes into a struct, from its source, without flattened ones.
    fn members(source: &str, name: &str) -> BTreeSet<String> {
        let (_, after) = source.split_once(&format!("struct {name} {{")).expect(name);
        let (body, _) = after.split_once("\n}").expect(name);
        let mut all = BTreeSet::new();
        let mut renamed = None;
        let mut flattened = false;
        for line in body.lines().map(str::trim) {
            let quoted = || line.split('"').nth(1).map(str::to_owned);
            if line.starts_with("#[serde(alias") {
                all.extend(quoted());
            } else if line.starts_with("#[serde(rename") {
                renamed = quoted();
            } else if line.starts_with("#[serde(flatten)]") {
                flattened = true;
            } else if let Some((field, _)) = line.split_once(": ").filter(|_| line.ends_with(',')) {
                let field = field.trim_start_matches("pub ").to_owned();
                let field = renamed.take().unwrap_or(field);
                if !std::mem::take(&mut flattened) {
                    all.insert(field);
                }
            }
        }
        all
    }

    /// Honoured fields of a kind of request; with `aliases`, all of their names.
    fn honoured(on: u16, aliases: bool) -> BTreeSet<String> {
        let fields = TABLE.iter().filter(|field| field.on & on != 0);
        let names = fields.filter(|field| match field.does {
            Does::Honoured => true,
            Does::As(_) => aliases,
            _ => false,
        });
        names.map(|field| field.name.to_owned()).collect()
    }

    fn described(name: &str) -> BTreeSet<String> {
        let properties = description()["components"]["schemas"][name]["properties"].take();
        let properties = properties.as_object().expect(name);
        properties.keys().cloned().collect()
    }

    /// The fields of the request structs are the honoured fields of the table, and are described.
    #[test]
    fn every_field_is_described_and_no_other() {
        let (api, ollama) = (include_str!("api.rs"), include_str!("ollama_api.rs"));
        let responses = include_str!("responses_api.rs");
        let common = &(&members(api, "Common")
            | &members(include_str!("rules/options.rs"), "ConstraintOptions"))
            | &members(include_str!("bounds.rs"), "TokenLimits");
        let common = &common | &members(include_str!("sampling.rs"), "SamplingOptions");
        let common = &common | &members(include_str!("lines.rs"), "LineOptions");
        let tools = members(include_str!("calls/options.rs"), "ToolOptions");
        let thoughts = members(include_str!("thoughts/options.rs"), "ReasoningOptions");
        let with_tools = &(&common | &tools) | &thoughts;
        let http = include_str!("http.rs");
        let embeddings = include_str!("embeddings.rs");
        for (name, on, source, shared) in [
            ("ChatRequest", on::CHAT, api, &with_tools),
            ("ResponsesRequest", on::RESPONSE, responses, &with_tools),
            ("CompletionRequest", on::TEXT, api, &common),
            (
                "OllamaChatRequest",
                on::OLLAMA_CHAT,
                ollama,
                &members(ollama, "OllamaCommon"),
            ),
            (
                "OllamaGenerateRequest",
                on::OLLAMA_GENERATE,
                ollama,
                &members(ollama, "OllamaCommon"),
            ),
        ] {
            let read = &members(source, name) | shared;
            let honoured_here = honoured(on, false);
            let lost: Vec<_> = honoured_here.difference(&read).collect();
            assert!(lost.is_empty(), "{name} does not read {lost:?}");
            // A struct that several kinds share may have more fields than one of them allows.
            let own = members(source, name);
            let lost: Vec<_> = own.difference(&honoured_here).collect();
            assert!(
                lost.is_empty(),
                "the table does not let {name} have {lost:?}"
            );
            if on & on::OPEN != 0 {
                assert_eq!(described(name), honoured(on, true), "{name}");
            }
        }
        for field in &with_tools {
            assert!(field_of(field), "no request may have {field}");
        }
        for (name, source) in [
            ("InMessage", api),
            ("InItem", include_str!("response_items.rs")),
            ("ContentPart", api),
            ("Tokenize", http),
            ("Detokenize", http),
            ("EmbeddingsRequest", embeddings),
        ] {
            assert_eq!(described(name), members(source, name), "{name}");
        }
    }

    /// Whether any OpenAI request honours the field.
    fn field_of(name: &str) -> bool {
        [on::CHAT, on::TEXT, on::RESPONSE]
            .iter()
            .any(|&on| honoured(on, false).contains(name))
    }
}
