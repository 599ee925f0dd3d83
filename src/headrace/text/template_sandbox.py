"""Runs a chat template, which is a program out of a model file, within bounds.

The dialect is the one that templates are written for: Jinja with blocks trimmed, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that keeps Unicode, and the tag `generation` (which only marks text for training).
Bounds, per rendering: steps (turns of loops and calls), characters written, sizes of sums, products and repeated
texts. A template without attributes of Python objects, without files and without a clock remains.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sized
from datetime import datetime
from typing import Any, Final, TypeVar

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.errors import TemplateError

MAX_SOURCE_CHARACTERS: Final = 1 << 20
MAX_STEPS: Final = 250_000
MAX_VALUE_CHARACTERS: Final = 1 << 22  # of a text that a template builds
_MAX_NUMBER: Final = 1 << 40
_WIDE_FORMAT: Final = re.compile(r"%[^a-z%]*(?:\*|\d{4})")  # '%99999d'
_WIDE_FIELD: Final = re.compile(r":[^}]*(?:\{|\d{4})")  # '{:99999}'

_Result = TypeVar("_Result")


class _Refusal(jinja2.TemplateError):
    """Raised inside a template to end its rendering; the message is shown to the user."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Reads the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counted(NodeTransformer):
    """Sends what loops run over and what `~` joins through the environment's own filters, which count."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - jinja2 names visitors after nodes
        """A loop spends one step per element."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        """A concatenation has a bounded size."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None, lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Const:  # noqa: N802
        """A literal number is no width of a gigabyte."""
        if isinstance(node.value, int) and abs(node.value) > _MAX_NUMBER:
            raise _Refusal(f"the number {node.value:.3g} is too large")
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with its step counter; one rendering at a time uses it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.steps_left = MAX_STEPS
        for unbounded in ("center", "format", "wordwrap"):
            del self.filters[unbounded]
        self.filters.update(
            tojson=_to_json, indent=_indent, replace=_replace, join=_join, _counted=self._counted, _joined=self._joined
        )
        self.globals.update(raise_exception=_raise_exception)

    def spend(self, steps: int) -> None:
        """Counts steps.

        Raises:
            _Refusal: no step is left.
        """
        self.steps_left -= steps
        if self.steps_left < 0:
            raise _Refusal(f"it takes more than {MAX_STEPS} steps")

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template comes through here."""
        self.spend(1)
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            args = _checked_arguments(function.__name__, text, args)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Newer releases of jinja2 hand out `str.format` through here, and not to `call`."""
        text = getattr(value, "__self__", None)
        if isinstance(text, str):
            _checked_arguments(getattr(value, "__name__", ""), text, ())
        return super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators of `intercepted_binops` come through here."""
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_number(len(left) + len(right), MAX_VALUE_CHARACTERS)
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str):
                    _check_number(len(text) * times, MAX_VALUE_CHARACTERS)
                elif isinstance(text, Sized):
                    raise _Refusal("it repeats a list")
        elif operator == "**":
            _check_number(right, 64)
            _check_number(left, 1 << 16)
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise _Refusal(f"the format {left[:40]!r} is too wide")
        return _check_number(super().call_binop(context, operator, left, right), _MAX_NUMBER)

    @pass_context  # keeps the compiler from running it in advance, where a list is written out
    def _counted(self, _context: Context, iterable: Iterable[Any]) -> Iterable[Any]:
        if isinstance(iterable, Sized):
            self.spend(len(iterable))
            return iterable
        return self._count_each(iterable)

    def _count_each(self, iterable: Iterable[Any]) -> Iterable[Any]:
        for item in iterable:
            self.spend(1)
            yield item

    def _joined(self, values: Iterable[Any]) -> str:
        return _join(values)


class BoundedTemplate:
    """A compiled chat template.

    Raises:
        TemplateError: the source is no template, or too long for one.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError(
                f"the chat template has {len(source)} characters, more than {MAX_SOURCE_CHARACTERS}: use raw=True",
                arguments=("raw",),
            )
        self._environment = _Environment()
        self._lock = threading.Lock()

        def compiled() -> jinja2.Template:
            tree = _Counted().visit(self._environment.parse(source))
            return jinja2.Template.from_code(
                self._environment, self._environment.compile(tree), self._environment.make_globals(None)
            )

        self._template = _guarded(compiled)

    def render(self, variables: Mapping[str, Any], *, now: datetime | None, max_characters: int) -> str:
        """The text that the template writes.

        Args:
            variables: what it may read.
            now: the time that `strftime_now` tells; without it the template finds no such function.
            max_characters: bound of the text.

        Raises:
            TemplateError: the template refuses, fails or goes beyond a bound.
        """
        clock = {} if now is None else {"strftime_now": now.strftime}

        def rendered() -> str:
            self._environment.steps_left = MAX_STEPS
            parts, num_characters = [], 0
            for part in self._template.generate(**variables, **clock):
                num_characters += len(part)
                if num_characters > max_characters:
                    raise _Refusal(f"it writes more than {max_characters} characters")
                parts.append(part)
            return "".join(parts)

        with self._lock:
            return _guarded(rendered)


def _guarded(run: Callable[[], _Result]) -> _Result:
    """Whatever a foreign program raises is a fault of the template."""
    try:
        return run()
    except _Refusal as error:
        raise TemplateError(
            f"the chat template stops: {error}; change the messages or use raw=True", arguments=("raw",)
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"[:300]
        raise TemplateError(
            f"the chat template fails ({what}): use raw=True or another model file", arguments=("raw",)
        ) from error


def _check_number(value: Any, limit: int) -> Any:
    if isinstance(value, (int, float)) and abs(value) > limit:
        raise _Refusal(f"it makes a number or a text of {value:.3g}, which is too large")
    return value


def _checked_arguments(name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a method call on a text, which must not make a huge one."""
    if name == "replace" and len(args) > 1:
        _replace(text, *args[:2])
    elif name == "join" and args:
        texts = list(args[0])
        _join(texts, text)
        args = (texts, *args[1:])
    elif name in {"format", "format_map"} and _WIDE_FIELD.search(text):
        raise _Refusal(f"the format {text[:40]!r} is too wide")
    elif name in {"expandtabs", "translate"}:
        raise _Refusal(f"it calls {name}")
    for argument in args:
        _check_number(argument, MAX_VALUE_CHARACTERS)
    return args


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old)
    _check_number(len(text) + times * len(new), MAX_VALUE_CHARACTERS)
    return text.replace(old, new, -1 if count is None else count)


def _join(values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    texts = [str(value if attribute is None else _attribute(value, attribute)) for value in values]
    _check_number(sum(map(len, texts)) + len(texts) * len(d), MAX_VALUE_CHARACTERS)
    return d.join(texts)


def _attribute(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, Mapping) else ""


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _check_number(indent, 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_number(len(width) if isinstance(width, str) else width, 256)
    margin = width if isinstance(width, str) else " " * width
    lines = str(text).split("\n")
    moved = [margin + line if line or blank else line for line in lines[1:]]
    return "\n".join([margin + lines[0] if first else lines[0], *moved])
