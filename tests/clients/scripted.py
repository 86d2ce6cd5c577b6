"""A model that says what a script says: scripted.py FOLDER [FORMAT]

Writes a model in Hugging Face's format whose calls have this format: hermes, coder (Qwen3-Coder), glm (GLM-4.5) or lfm2. A user message names a script ("script agents"); after each number of results
of tools the model says the text of that step, if the last result is the one that the script expects. A token depends on
the one before it only: the chat template ends a prompt with a token for the step.
"""

import json
import pathlib
import struct
import sys

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


def call(name, **arguments):
    return name, arguments


def hermes(name, arguments):
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)}\n</tool_call>'


def plain(value):
    """A value between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def coder(name, arguments):
    pairs = (f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


def glm(name, arguments):
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def lfm2(name, arguments):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def lines(write):
    """Calls that stand on lines of their own."""
    return lambda calls: "\n".join(write(*call) for call in calls)


# How calls are said, and the same in the chat template.
FORMATS = {
    "hermes": (
        lines(hermes),
        """\
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
""",
    ),
    "coder": (
        lines(coder),
        """\
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() -%}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor -%}
</function>
</tool_call>
{%- endfor -%}
""",
    ),
    "glm": (
        lines(glm),
        """\
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor -%}
</tool_call>
{%- endfor -%}
""",
    ),
    "lfm2": (
        lambda calls: f"<|tool_call_start|>[{', '.join(lfm2(*call) for call in calls)}]<|tool_call_end|>",
        """\
{%- if message.tool_calls %}<|tool_call_start|>[
{%- for call in message.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor -%}
]<|tool_call_end|>{% endif -%}
""",
    ),
}


PATCH = """*** Begin Patch
*** Update File: src/größe.rs
@@ fn size()
-    let tag = "</tool_call>";
+    let tag = "<a href=\\"x\\">\\t</a>";
*** End Patch
"""
OLD, NEW = "def f():\n    return '</parameter>'\n", 'def f():\n    return "größer \\\\ {\\"a\\": 1}"\n'

# By script and number of results: the part of the last message that leads there, what is said, and the calls.
SCRIPTS = {
    "agents": {
        0: ("", OPEN + "I need the weather." + CLOSE, call("get_weather", city="Zürich", days=2)),
        1: ("21 °C", "", call("convert", celsius=21.5), call("list_cities")),
        3: ("Genève", "It is 21.5 °C (70.7 °F) in Zürich."),
    },
    "handoff": {
        0: ("", "", call("transfer_to_poet")),
        1: ("Poet", "Roses are rot."),
    },
    "codex": {
        0: ("", OPEN + "I list the files first." + CLOSE, call("shell", command=["ls", "-la", "src"])),
        1: ("größe.rs", "I change the tag.\n", call("apply_patch", input=PATCH)),
        2: ("Success", OPEN + "Done?" + CLOSE + "The tag is changed."),
    },
    "claude": {
        0: (
            "",
            OPEN + "Two looks at once." + CLOSE + "I look at the file.\n",
            call("Read", file_path="/tmp/a b.py"),
            call("Grep", pattern="f\\(\\)", path="/tmp"),
        ),
        2: ("a b.py:1", "", call("Edit", file_path="/tmp/a b.py", old_string=OLD, new_string=NEW)),
        3: ("updated", "`f` returns the other text."),
    },
}
WRONG = "The result did not arrive."

TEMPLATE = """\
{%- set ns = namespace(script='', step=0) -%}
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content or '' }}
CALLS<|im_end|>
{% for script in SCRIPTS if message.role == 'user' and 'script ' ~ script in message.content and not ns.script -%}
{%- set ns.script = script -%}
{%- endfor -%}
{%- if message.role == 'tool' %}{% set ns.step = ns.step + 1 %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% set key = ns.script ~ '.' ~ ns.step -%}
{%- set wanted = WANTED -%}
{%- if key in wanted and wanted[key] in (messages[-1].content or '') %}<|{{ key }}|>{% else %}<|wrong|>{% endif -%}
{%- endif -%}
"""


def said(script, say=FORMATS["hermes"][0]):
    """The text of each step; `say` writes calls."""
    steps = SCRIPTS[script].items()
    return {step: text + (say(calls) if calls else "") for step, (_, text, *calls) in steps}


def bytes_to_unicode():
    """The characters with which a byte-level tokenizer writes bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(other)}


def pieces(text, taken):
    """The text in pieces that no other text has."""
    found = []
    while text:
        length = min(3, len(text))
        while text[:length] in taken and length < len(text):
            length += 1
        piece = text[:length]
        while piece in taken or len(piece) == 1:  # at the end of a text: join it with the piece before
            piece = found.pop() + piece
        taken.add(piece)
        found.append(piece)
        text = text[length:]
    return found


def tensors(following, size):
    """The weights: the head has a large value where a token follows another."""
    def zeros(*shape):
        return shape, bytes(4 * shape[0] * (shape[1] if len(shape) > 1 else 1))

    def ones(*shape):
        return shape, struct.pack("<f", 1.0) * shape[0]

    def table(entries, value):
        data = bytearray(4 * size * size)
        for row, column in entries:
            struct.pack_into("<f", data, 4 * (row * size + column), value)
        return (size, size), bytes(data)

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": table([(at, at) for at in range(size)], 1.0),
        "lm_head.weight": table([(after, before) for before, after in following.items()], 40.0),
        "model.norm.weight": ones(size),
        layer + "input_layernorm.weight": ones(size),
        layer + "post_attention_layernorm.weight": ones(size),
        **{layer + f"self_attn.{name}_proj.weight": zeros(64, size) for name in "qkv"},
        layer + "self_attn.o_proj.weight": zeros(size, 64),
        layer + "mlp.gate_proj.weight": zeros(64, size),
        layer + "mlp.up_proj.weight": zeros(64, size),
        layer + "mlp.down_proj.weight": zeros(size, 64),
    }


def write(folder, form="hermes"):
    say, calls = FORMATS[form]
    folder.mkdir(parents=True, exist_ok=True)
    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    added = []

    def add(text, special=False):
        added.append(
            {"id": 256 + len(added), "content": text, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": special}
        )
        return added[-1]["id"]

    end = add("<|im_end|>", True)
    add("<|im_start|>", True)
    chains = {f"<|{script}.{step}|>": text for script in SCRIPTS for step, text in said(script, say).items()}
    taken, following = set(), {}
    for key, text in (chains | {"<|wrong|>": WRONG}).items():
        before = add(key, True)
        for piece in pieces(text, taken):
            following[before] = before = add("".join(letters[byte] for byte in piece.encode()))
        following[before] = end
    size = (256 + len(added) + 63) // 64 * 64
    header, data = {}, b""
    for name, (shape, values) in tensors(following, size).items():
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += values
    header = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "fuse_unk": False, "byte_fallback": False}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    wanted = {f"{script}.{step}": want for script, steps in SCRIPTS.items() for step, (want, *_) in steps.items()}
    template = TEMPLATE.replace("CALLS", calls).replace("WANTED", json.dumps(wanted, ensure_ascii=False))
    template = template.replace("SCRIPTS", json.dumps(list(SCRIPTS)))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *sys.argv[2:])
