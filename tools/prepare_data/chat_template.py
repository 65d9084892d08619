"""Chat templates as Hugging Face models bring them: Jinja in a sandbox, and where the assistant's text lies.

The environment is the one that https://huggingface.co/docs/transformers/chat_templating describes.
"""

from __future__ import annotations

import datetime
import json
import re

from .errors import PrepareError, RecordError, needs_package

# Noncharacters of Unicode around what {% generation %} renders; text has no use for them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Span = tuple  # (begin, end) in characters


class ChatTemplate:
    """Throws PrepareError for a template that Jinja cannot compile.

    `variables` are what templates may read beside the messages: special tokens, and the user's own."""

    def __init__(self, source: str, variables: dict, place: str):
        jinja2 = _import_jinja2()
        self.source = source
        self.has_generation_marks = bool(_GENERATION.search(source))
        self.variables = variables
        self._template_error = jinja2.exceptions.TemplateError
        try:
            self._template = _make_environment().from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise PrepareError(f"{place}: chat template, line {error.lineno}: {error.message}") from None

    def render(self, messages: list, tools: list | None, add_generation_prompt: bool = False) -> str:
        return self._render(messages, tools, add_generation_prompt).replace(_BEGIN, "").replace(_END, "")

    def targets(self, messages: list, tools: list | None, last_only: bool) -> tuple[str, list[Span]]:
        """The rendered messages, and the spans of what the assistant says in them; only its last turn if
        last_only. Throws RecordError."""
        if not any(message["role"] == "assistant" for message in messages):
            return self.render(messages, tools), []
        if self.has_generation_marks:
            text, spans = _take_out_marks(self._render(messages, tools, False))
            return text, spans[-1:] if last_only else spans
        return self._targets_by_prefixes(messages, tools, last_only)

    def _targets_by_prefixes(self, messages: list, tools: list | None, last_only: bool):
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        whole = self.render(messages, tools)
        spans = []
        for i in turns[-1:] if last_only else turns:
            before = self._render_prefix(messages[:i], tools, True, i)
            after = self._render_prefix(messages[: i + 1], tools, False, i)
            if not after.startswith(before):
                raise RecordError(
                    f"turn {i + 1}: what the template renders before the assistant's turn is no prefix of what it "
                    f"renders with it: {_difference(before, after)}; {_REMEDY}"
                )
            if not whole.startswith(after):
                raise RecordError(
                    f"turn {i + 1}: what the template renders up to the assistant's turn is no prefix of the whole "
                    f"conversation: {_difference(after, whole)}; {_REMEDY} or mask_history"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _render_prefix(self, messages: list, tools: list | None, add_generation_prompt: bool, turn: int) -> str:
        try:
            return self.render(messages, tools, add_generation_prompt)
        except RecordError as error:
            part = f"the {len(messages)} messages up to there"
            raise RecordError(f"turn {turn + 1}: of {part}: {error}; {_REMEDY}") from None

    def _render(self, messages: list, tools: list | None, add_generation_prompt: bool) -> str:
        try:
            text = self._template.render(
                **{
                    **self.variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except self._template_error as error:
            raise RecordError(f"chat template: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RecordError(f"chat template: {type(error).__name__}: {error}") from None
        return text


_REMEDY = "use a template with {% generation %} marks"


def _difference(prefix: str, text: str) -> str:
    """Where the two part, with some of what follows in both."""
    at = next((i for i, (a, b) in enumerate(zip(prefix, text)) if a != b), min(len(prefix), len(text)))
    return f"{prefix[at : at + 20]!r} against {text[at : at + 20]!r} at character {at}"


def _take_out_marks(marked: str) -> tuple[str, list[Span]]:
    parts, spans, length, begin = [], [], 0, None
    for part in re.split(f"([{_BEGIN}{_END}])", marked):
        if part not in (_BEGIN, _END):
            parts.append(part)
            length += len(part)
        elif (part == _BEGIN) != (begin is None):
            raise RecordError("chat template: generation marks within each other, or U+FDD0 or U+FDD1 in the text")
        elif part == _BEGIN:
            begin = length
        else:
            if length > begin:
                spans.append((begin, length))
            begin = None
    if begin is not None:
        raise RecordError("chat template: a generation mark without its end, or U+FDD0 in the text")
    return "".join(parts), spans


def _import_jinja2():
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError:
        raise needs_package("jinja2", "a chat template") from None
    return jinja2


def _make_environment():
    jinja2 = _import_jinja2()
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}"""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        @staticmethod
        def _mark(caller):
            return _BEGIN + caller() + _END

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=str
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes characters of HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment
