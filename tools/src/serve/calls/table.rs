//! Formats of families whose chat template does not write calls of its own, or not as the model writes them.
//!
//! An entry is a pattern of calls, from which a sample is made that is read as a rendered template is.

use super::derive::{IDS, KEYS, NAMES, NUMBERS, TEXTS, derive};
use super::frame::CallFrame;

/// A family's calls.
struct Family {
    /// Texts that the template's source contains.
    marks: &'static [&'static str],
    /// Before the first call.
    open: &'static str,
    /// A call, with `NAME`, `ARGUMENTS`, and perhaps `ID` or `INDEX`.
    call: &'static str,
    arguments: Written,
    /// Between two calls; `None` if there is only one.
    between: Option<&'static str>,
    /// After the last call.
    close: &'static str,
}

/// How `ARGUMENTS` are written.
#[derive(Debug, Clone, Copy)]
enum Written {
    /// As a JSON object.
    Json,
    /// As in a call in Python.
    Python,
    /// In braces, with keys without quotes, and strings in these quotes.
    Bare(&'static str),
    /// Each as `KEY` and `VALUE` between tags; `TEXT` says whether it is a string.
    Tags(&'static str),
}

const PARAMETER: &str =
    "<｜DSML｜parameter name=\"KEY\" string=\"TEXT\">VALUE</｜DSML｜parameter>\n";
const INVOKE: &str = "<｜DSML｜invoke name=\"NAME\">\nARGUMENTS</｜DSML｜invoke>\n";
const PAIR: &str = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n";
const OBJECT: &str = "{\"name\": \"NAME\", \"arguments\": ARGUMENTS}";

/// The first entry whose marks fit counts, together with others that have the same marks.
const FAMILIES: [Family; 30] = [
    // gpt-oss
    Family {
        marks: &["<|channel|>", "<|message|>"],
        open: "",
        call: "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        arguments: Written::Json,
        between: None,
        close: "",
    },
    // DeepSeek V3.2
    Family {
        marks: &["DSML｜", "function_calls"],
        open: "<｜DSML｜function_calls>\n",
        call: INVOKE,
        arguments: Written::Tags(PARAMETER),
        between: Some(""),
        close: "</｜DSML｜function_calls>",
    },
    // DeepSeek V4
    Family {
        marks: &["DSML｜"],
        open: "<｜DSML｜tool_calls>\n",
        call: INVOKE,
        arguments: Written::Tags(PARAMETER),
        between: Some(""),
        close: "</｜DSML｜tool_calls>",
    },
    // DeepSeek V3, R1
    Family {
        marks: &["<｜tool▁calls▁begin｜>"],
        open: "<｜tool▁calls▁begin｜>",
        call: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        arguments: Written::Json,
        between: Some("\n"),
        close: "<｜tool▁calls▁end｜>",
    },
    // DeepSeek V3.1
    Family {
        marks: &["<｜tool▁calls▁begin｜>"],
        open: "<｜tool▁calls▁begin｜>",
        call: "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        arguments: Written::Json,
        between: Some(""),
        close: "<｜tool▁calls▁end｜>",
    },
    // Kimi K2, whose template may write an id instead of the name
    Family {
        marks: &["<|tool_calls_section_begin|>"],
        open: "<|tool_calls_section_begin|>",
        call: "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        arguments: Written::Json,
        between: Some(""),
        close: "<|tool_calls_section_end|>",
    },
    // MiniMax-M2
    Family {
        marks: &["<minimax:tool_call>"],
        open: "<minimax:tool_call>\n",
        call: "<invoke name=\"NAME\">\nARGUMENTS</invoke>\n",
        arguments: Written::Tags("<parameter name=\"KEY\">VALUE</parameter>\n"),
        between: Some(""),
        close: "</minimax:tool_call>",
    },
    // Seed-OSS
    Family {
        marks: &["<seed:tool_call>"],
        open: "",
        call: "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
        arguments: Written::Tags("<parameter=KEY>VALUE</parameter>\n"),
        between: Some("\n"),
        close: "",
    },
    // Solar Open
    Family {
        marks: &["<|tool_calls|>"],
        open: "<|tool_calls|>",
        call: "<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>",
        arguments: Written::Json,
        between: Some(""),
        close: "<|calls|>",
    },
    // Hy3
    Family {
        marks: &["<tool_sep>", "<arg_key>"],
        open: "<tool_calls>\n",
        call: "<tool_call>NAME<tool_sep>\nARGUMENTS</tool_call>\n",
        arguments: Written::Tags(PAIR),
        between: Some(""),
        close: "</tool_calls>",
    },
    // GLM-4.5 to 5, Ling 3
    Family {
        marks: &["<arg_key>"],
        open: "",
        call: "<tool_call>NAME\nARGUMENTS</tool_call>",
        arguments: Written::Tags(PAIR),
        between: Some("\n"),
        close: "",
    },
    // Gemma 4
    Family {
        marks: &["<|tool_call>"],
        open: "",
        call: "<|tool_call>call:NAMEARGUMENTS<tool_call|>",
        arguments: Written::Bare("<|\"|>"),
        between: Some(""),
        close: "",
    },
    // LFM2
    Family {
        marks: &["<|tool_call_start|>"],
        open: "<|tool_call_start|>[",
        call: "NAMEARGUMENTS",
        arguments: Written::Python,
        between: Some(", "),
        close: "]<|tool_call_end|>",
    },
    // LFM2
    Family {
        marks: &["<|tool_list_start|>"],
        open: "<|tool_call_start|>[",
        call: "NAMEARGUMENTS",
        arguments: Written::Python,
        between: Some(", "),
        close: "]<|tool_call_end|>",
    },
    // LFM2.5
    Family {
        marks: &["List of tools: [", "keep_past_thinking"],
        open: "<|tool_call_start|>[",
        call: "NAMEARGUMENTS",
        arguments: Written::Python,
        between: Some(", "),
        close: "]<|tool_call_end|>",
    },
    // Granite 3.3
    Family {
        marks: &["<|tool_call|>", "<|start_of_role|>"],
        open: "<|tool_call|>[",
        call: OBJECT,
        arguments: Written::Json,
        between: Some(", "),
        close: "]",
    },
    // Phi-4-mini
    Family {
        marks: &["<|tool_call|>"],
        open: "<|tool_call|>[",
        call: OBJECT,
        arguments: Written::Json,
        between: Some(", "),
        close: "]<|/tool_call|>",
    },
    // Phi-4-mini
    Family {
        marks: &["<|tool|>", "<|/tool|>"],
        open: "<|tool_call|>[",
        call: OBJECT,
        arguments: Written::Json,
        between: Some(", "),
        close: "]<|/tool_call|>",
    },
    // Phi-4-mini, as it calls without being told how
    Family {
        marks: &["<|tool|>", "<|/tool|>"],
        open: "functools[",
        call: OBJECT,
        arguments: Written::Json,
        between: Some(", "),
        close: "]",
    },
    // Command R7B and A
    Family {
        marks: &["<|START_ACTION|>"],
        open: "<|START_ACTION|>[\n    ",
        call: "{\"tool_call_id\": \"INDEX\", \"tool_name\": \"NAME\", \"parameters\": ARGUMENTS}",
        arguments: Written::Json,
        between: Some(",\n    "),
        close: "\n]<|END_ACTION|>",
    },
    // Command R
    Family {
        marks: &["Action:", "\"tool_name\":"],
        open: "Action:\n```json\n[\n    ",
        call: "{\n        \"tool_name\": \"NAME\",\n        \"parameters\": ARGUMENTS\n    }",
        arguments: Written::Json,
        between: Some(",\n    "),
        close: "\n]```",
    },
    // Hunyuan
    Family {
        marks: &["<tool_calls>"],
        open: "<tool_calls>[",
        call: OBJECT,
        arguments: Written::Json,
        between: Some(", "),
        close: "]</tool_calls>",
    },
    // Nemotron Nano 2
    Family {
        marks: &["<TOOLCALL>"],
        open: "<TOOLCALL>[",
        call: OBJECT,
        arguments: Written::Json,
        between: Some(", "),
        close: "]</TOOLCALL>",
    },
    // Qwen3-Coder, Qwen3.5, Nemotron 3
    Family {
        marks: &["<tool_call>", "<function="],
        open: "",
        call: "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        arguments: Written::Tags("<parameter=KEY>\nVALUE\n</parameter>\n"),
        between: Some("\n"),
        close: "",
    },
    // Hermes, Qwen, Granite 4, SmolLM3
    Family {
        marks: &["<tool_call>"],
        open: "",
        call: "<tool_call>\n{\"name\": \"NAME\", \"arguments\": ARGUMENTS}\n</tool_call>",
        arguments: Written::Json,
        between: Some("\n"),
        close: "",
    },
    // SmolLM3 with a template that does not know calls
    Family {
        marks: &["named SmolLM", "/no_think"],
        open: "",
        call: "<tool_call>\n{\"name\": \"NAME\", \"arguments\": ARGUMENTS}\n</tool_call>",
        arguments: Written::Json,
        between: Some("\n"),
        close: "",
    },
    // Mistral since Small 3.2
    Family {
        marks: &["[TOOL_CALLS]", "[ARGS]"],
        open: "",
        call: "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        arguments: Written::Json,
        between: Some(""),
        close: "",
    },
    // Mistral
    Family {
        marks: &["[TOOL_CALLS]"],
        open: "[TOOL_CALLS][",
        call: OBJECT,
        arguments: Written::Json,
        between: Some(", "),
        close: "]",
    },
    // Llama 3
    Family {
        marks: &["<|python_tag|>"],
        open: "",
        call: "{\"name\": \"NAME\", \"parameters\": ARGUMENTS}",
        arguments: Written::Json,
        between: None,
        close: "",
    },
    // Llama 3
    Family {
        marks: &["\"parameters\":", "<|start_header_id|>"],
        open: "",
        call: "{\"name\": \"NAME\", \"parameters\": ARGUMENTS}",
        arguments: Written::Json,
        between: None,
        close: "",
    },
];

/// What Hermes and Qwen write: for forced calls of models whose template has no calls.
pub fn plain() -> Option<CallFrame> {
    of_source("<tool_call>").pop()
}

/// The formats of a template that contains the marks of one.
pub fn of_source(source: &str) -> Vec<CallFrame> {
    let fits = |family: &&Family| family.marks.iter().all(|mark| source.contains(mark));
    let Some(first) = FAMILIES.iter().find(fits) else {
        return Vec::new();
    };
    let same = FAMILIES.iter().filter(|family| family.marks == first.marks);
    same.filter_map(|family| derive(&family.sample())).collect()
}

impl Family {
    /// Two calls, or one.
    fn sample(&self) -> String {
        let call = |number: usize| {
            let call = self.call.replace("NAME", NAMES[number]);
            let call = call.replace("ID", IDS[number]);
            let call = call.replace("INDEX", &number.to_string());
            call.replace("ARGUMENTS", &self.arguments.sample(number))
        };
        match self.between {
            Some(between) => format!("{}{}{between}{}{}", self.open, call(0), call(1), self.close),
            None => format!("{}{}{}", self.open, call(0), self.close),
        }
    }
}

impl Written {
    /// The arguments of a sample's call.
    fn sample(self, number: usize) -> String {
        let ([one, two, three], [first, second], last) = (KEYS, TEXTS[number], NUMBERS[number]);
        match self {
            Self::Json => {
                format!(r#"{{"{one}": "{first}", "{two}": "{second}", "{three}": {last}}}"#)
            }
            Self::Python => format!("({one}='{first}', {two}='{second}', {three}={last})"),
            Self::Bare(q) => format!("{{{one}:{q}{first}{q},{two}:{q}{second}{q},{three}:{last}}}"),
            Self::Tags(tags) => {
                let all = [
                    [one, first, "true"],
                    [two, second, "true"],
                    [three, last, "false"],
                ];
                let all = all.map(|[key, value, text]| {
                    let tags = tags.replace("KEY", key).replace("VALUE", value);
                    tags.replace("TEXT", text)
                });
                all.concat()
            }
        }
    }
}
