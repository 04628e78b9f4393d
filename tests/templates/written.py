"""Small templates of our own, one of each family's way with calls and results, and what they make of one conversation.

They have the features that the real ones differ in, which may not be copied here: `make test-templates` renders those.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

__all__ = ["CONVERSATION", "FAMILIES", "TOOLS", "Family", "make_call"]


class Family(NamedTuple):
    """A template, its text of the conversation, and the parsers of tools and of reasoning that fit it."""

    template: str
    text: str
    tools: str | None
    reasoning: str | None = None


def _tool(name: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": f"Of {name}.", "parameters": parameters}}


def make_call(known: str, name: str, **arguments: Any) -> dict[str, Any]:
    """A call as clients send it: its arguments are text."""
    return {"id": known, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


TOOLS = [_tool("weather", "city"), _tool("time", "zone")]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": None, "tool_calls": [make_call("aaaaaaaa1", "weather", city="Paris", days=21)]},
    {"role": "tool", "tool_call_id": "aaaaaaaa1", "content": "sunny"},
    {"role": "assistant", "content": "Sun."},
    {"role": "user", "content": "Two?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [make_call("bbbbbbbb1", "weather", city="Oslo"), make_call("bbbbbbbb2", "time", zone="UTC")],
    },
    {"role": "tool", "tool_call_id": "bbbbbbbb1", "content": "snow"},
    {"role": "tool", "tool_call_id": "bbbbbbbb2", "content": "noon"},
    {"role": "assistant", "content": "Snow."},
    {"role": "user", "content": "Three?"},
]

# Hermes' and Qwen's: JSON between tags, results in a user's turn, and reasoning after a mark in the prompt.
HERMES = """
{%- if tools %}<|im_start|>system
{{ messages[0].content }} Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}.
Write <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

# Llama 3's: one call a message, which is all of it, under another key.
LLAMA = """
{%- for message in messages %}
{%- if 'tool_calls' in message and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>' + message.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>' + message.content + '<|eot_id|>' }}
{%- endif %}
{%- if loop.first and tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}{% endif %}
{%- endfor %}"""

# Mistral's third: a list after a mark, ids of nine characters, users and assistants in turn, tools before the last user's message.
MISTRAL = """
{%- set system = messages[0].content %}
{%- set turn = namespace(user=true) %}
{%- for message in messages[1:] %}
{%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}
{%- if (message.role == 'user') != turn.user %}{{ raise_exception('roles must take turns') }}{% endif %}
{%- set turn.user = not turn.user %}
{%- endif %}
{%- if message.role == 'user' %}
{%- if loop.last %}[AVAILABLE_TOOLS]{% for tool in tools %}{{ tool.function.name }};{% endfor %}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + (system + ' ' if loop.last else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
{{- '' if loop.last else ', ' }}
{%- endfor %}]</s>
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ message.content }}</s>
{%- endif %}
{%- endfor %}"""

# Mistral's eleventh and later: a mark before each call, contents of parts, reasoning between marks.
MISTRAL_NAMED = """
{%- macro show(content) %}
{%- if content is string %}{{ content }}
{%- else %}
{%- for block in content %}
{%- if block.type == 'thinking' %}[THINK]{{ block.thinking }}[/THINK]{% else %}{{ block.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{%- if message.role == 'tool' %}[TOOL_RESULTS]{{ show(message.content) }}[/TOOL_RESULTS]
{%- elif message.role == 'assistant' %}
{%- if message.content %}{{ show(message.content) }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (arguments if arguments is string else arguments | tojson) }}
{%- endfor %}</s>
{%- elif message.role == 'user' %}[INST]{{ show(message.content) }}[/INST]
{%- else %}[SYSTEM_PROMPT]{{ show(message.content) }}[/SYSTEM_PROMPT]
{%- endif %}
{%- endfor %}"""

# DeepSeek R1's: calls where the content is null alone, and arguments that are text.
R1 = """
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for call in message['tool_calls'] %}
{{- '<call>' + call['type'] + '<sep>' + call['function']['name'] + ' ' + call['function']['arguments'] + '</call>' }}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}{{ '<bot>' + message['content'].split('</think>')[-1] }}
{%- elif message['role'] == 'tool' %}{{ '<result>' + message['content'] + '</result>' }}
{%- else %}{{ '<' + message['role'] + '>' + message['content'] }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<bot><think>{% endif %}"""

# Of several calls the first, in a channel of its own.
CHANNELS = """
{%- for message in messages %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=' + call.name + '<|channel|>commentary<|message|>' + call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'tool' %}<|start|>tool<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}"""

# No name but the one in the call's id.
NUMBERED = """
{%- for message in messages %}
{{- '<' + (message.name or message.role) + '>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<begin>' + call.id + '<argument>' + call.function.arguments | tojson + '<end>' }}
{%- endfor %}
{%- if message.role == 'tool' %}{{ ' of ' + message.tool_call_id }}{% endif %}
{%- endfor %}"""

# Results that need the function's name, and arguments that are no JSON, with sorted keys.
NAMED = """
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if not message.name %}{{ raise_exception('a result needs a name') }}{% endif %}
{{- '<response:' + message.name + '>' + message.content }}
{%- else %}
{{- '<' + message.role + '>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<call:' + call.function.name + '{' }}
{%- for key, value in call.function.arguments | dictsort %}{{ key + ':`' + value | string + '`' }}{% endfor %}}>
{%- endfor %}
{%- endif %}
{%- endfor %}"""

# Tools that are functions, and arguments that are written as they are.
BARE = """
{%- for tool in tools %}{{ '// ' + tool.description + tool.name + ';' }}{% endfor %}
{%- for message in messages %}
{{- '<' + message.role + '>' + message.content }}
{%- for call in message.tool_calls or [] %}{"{{ call.function.name }}": {{ call.function.arguments }}}{% endfor %}
{%- endfor %}"""

# Parts alone: each content is gone through.
PARTS = """
{%- for message in messages %}<{{ message.role }}>
{%- for part in message.content %}{{ part.text }}{% endfor %}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments | tojson %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ arguments }}}
{%- endfor %}
{%- endfor %}"""

# No tools at all.
PLAIN = "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"
# Texts written out, in pieces of a message or two.
FAMILIES: dict[str, Family] = {
    "hermes": Family(
        HERMES,
        '<|im_start|>system\nBe kind. Tools: weather time.\nWrite <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n<tool_call>"
        '\n{"name": "weather", "arguments": {"city": "Paris", "days": 21}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
        "<tool_response>sunny"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nSun."
        "<|im_end|>\n<|im_start|>user\nTwo?"
        '<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
        "<tool_response>snow</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>noon</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nSnow."
        "<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "hermes",
        "think",
    ),
    "llama": Family(
        LLAMA,
        "<|start_header_id|>system<|end_header_id|>Be kind.<|eot_id|>weather,time<|start_header_id|>user<|end_header_id|>One?"
        '<|eot_id|><|start_header_id|>assistant<|end_header_id|>{"name": "weather", "parameters": {"city": "Paris", "days": 21}'
        '}<|eot_id|><|start_header_id|>ipython<|end_header_id|>"sunny'
        '"<|eot_id|><|start_header_id|>assistant<|end_header_id|>Sun.'
        "<|eot_id|><|start_header_id|>user<|end_header_id|>Two?"
        '<|eot_id|><|start_header_id|>assistant<|end_header_id|>{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>"snow"<|eot_id|><|start_header_id|>assistant'
        '<|end_header_id|>{"name": "time", "parameters": {"zone": "UTC"}}<|eot_id|><|start_header_id|>ipython'
        '<|end_header_id|>"noon"<|eot_id|><|start_header_id|>assistant<|end_header_id|>Snow.'
        "<|eot_id|><|start_header_id|>user<|end_header_id|>Three?<|eot_id|>",
        "llama3_json",
    ),
    "mistral": Family(
        MISTRAL,
        '[INST]One?[/INST][TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 21}, "id": "aaaaaaaa1"}]</s>'
        '[TOOL_RESULTS]{"content": sunny'
        ', "call_id": "aaaaaaaa1"}[/TOOL_RESULTS]Sun.'
        "</s>[INST]Two?"
        '[/INST][TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "bbbbbbbb1"}, {"name": "time", "arguments'
        '": {"zone": "UTC"}, "id": "bbbbbbbb2"}]</s>[TOOL_RESULTS]{"content": snow, "call_id": "bbbbbbbb1"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": noon, "call_id": "bbbbbbbb2"}[/TOOL_RESULTS]Snow.'
        "</s>[AVAILABLE_TOOLS]weather;time;[/AVAILABLE_TOOLS][INST]Be kind. Three?[/INST]",
        "mistral",
    ),
    "mistral_named": Family(
        MISTRAL_NAMED,
        '[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]One?[/INST][TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 21}</s>'
        "[TOOL_RESULTS]sunny"
        "[/TOOL_RESULTS]Sun."
        "</s>[INST]Two?"
        '[/INST][TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]time[ARGS]{"zone": "UTC"}</s>[TOOL_RESULTS]snow'
        "[/TOOL_RESULTS][TOOL_RESULTS]noon[/TOOL_RESULTS]Snow."
        "</s>[INST]Three?[/INST]",
        "mistral",
        "mistral",
    ),
    "r1": Family(
        R1,
        '<system>Be kind.<user>One?<call>function<sep>weather {"city": "Paris", "days": 21}</call><result>sunny'
        "</result><bot>Sun."
        "<user>Two?"
        '<call>function<sep>weather {"city": "Oslo"}</call><call>function<sep>time {"zone": "UTC"}</call><result>snow</result>'
        "<result>noon</result><bot>Snow."
        "<user>Three?<bot><think>",
        None,
        "think",
    ),
    "channels": Family(
        CHANNELS,
        "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>One?<|end|><|start|>assistant to=weather"
        '<|channel|>commentary<|message|>{"city": "Paris", "days": 21}<|call|><|start|>tool<|message|>sunny'
        "<|end|><|start|>assistant<|message|>Sun."
        "<|end|><|start|>user<|message|>Two?"
        '<|end|><|start|>assistant to=weather<|channel|>commentary<|message|>{"city": "Oslo"}<|call|><|start|>tool'
        '<|message|>snow<|end|><|start|>assistant to=time<|channel|>commentary<|message|>{"zone": "UTC"}<|call|><|start|>tool'
        "<|message|>noon<|end|><|start|>assistant<|message|>Snow."
        "<|end|><|start|>user<|message|>Three?<|end|>",
        None,
    ),
    "numbered": Family(
        NUMBERED,
        '<system>Be kind.<user>One?<assistant><begin>functions.weather:0<argument>{"city": "Paris", "days": 21}<end><tool>sunny'
        " of functions.weather:0<assistant>Sun."
        "<user>Two?"
        '<assistant><begin>functions.weather:1<argument>{"city": "Oslo"}<end><begin>functions.time:2<argument>{"zone": "UTC"}'
        "<end><tool>snow of functions.weather:1<tool>noon of functions.time:2<assistant>Snow."
        "<user>Three?",
        None,
    ),
    "named": Family(
        NAMED,
        "<system>Be kind.<user>One?<assistant><call:weather{city:`Paris`days:`21`}><response:weather>sunny"
        "<assistant>Sun."
        "<user>Two?"
        "<assistant><call:weather{city:`Oslo`}><call:time{zone:`UTC`}><response:weather>snow<response:time>noon<assistant>Snow."
        "<user>Three?",
        None,
    ),
    "bare": Family(
        BARE,
        '// Of weather.weather;// Of time.time;<system>Be kind.<user>One?<assistant>{"weather": {"city": "Paris", "days": 21}}'
        "<tool>sunny"
        "<assistant>Sun."
        "<user>Two?"
        '<assistant>{"weather": {"city": "Oslo"}}{"time": {"zone": "UTC"}}<tool>snow<tool>noon<assistant>Snow.'
        "<user>Three?",
        None,
    ),
    "parts": Family(
        PARTS,
        '<system>Be kind.<user>One?<assistant><tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 21}}'
        "<tool>sunny"
        "<assistant>Sun."
        "<user>Two?"
        '<assistant><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}'
        '<tool_call>{"name": "time", "arguments": {"zone": "UTC"}}<tool>snow<tool>noon<assistant>Snow.'
        "<user>Three?",
        "hermes",
    ),
    "plain": Family(
        PLAIN,
        "<system>Be kind.<user>One?<assistant><tool>sunny"
        "<assistant>Sun."
        "<user>Two?"
        "<assistant><tool>snow<tool>noon<assistant>Snow."
        "<user>Three?",
        None,
    ),
}
